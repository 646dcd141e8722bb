"""The loop: nothing off by one, a resumed run equals an uninterrupted one, and bad losses stop it."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hla_jax.data.streams import Indexed, Mixture
from hla_jax.training.checkpoints import CheckpointError
from hla_jax.training.loop import Interrupted, LoopConfig, TrainingError, run
from hla_jax.training.optimizer import OptimizerConfig, adamw, learning_rate
from hla_jax.training.step import init, make_step

OPTIMIZER = OptimizerConfig(peak_learning_rate=0.05, total_steps=24, warmup_steps=4)


def quadratic(params, batch, rng, constants):
    """Weighted squared distance of params to the batch's rows, with noise: data, rng and optimizer all matter."""
    x = params["w"] + 0.1 * jax.random.normal(rng, params["w"].shape)
    weight = jnp.sum(batch["mask"])
    errors = jnp.sum((x - batch["x"]) ** 2, axis=-1)
    loss = jnp.sum(batch["mask"] * errors) / jnp.maximum(weight, 1)
    return loss, (weight, {"distance": jnp.sum(batch["mask"] * jnp.sqrt(errors)) / jnp.maximum(weight, 1)})


def make_batches():
    def batch(number):
        rng = np.random.default_rng([3, number])
        return {"x": rng.normal(size=(4, 3)).astype(np.float32), "mask": (rng.random(4) < 0.7).astype(np.float32)}

    return Mixture([Indexed(batch), Indexed(lambda i: batch(i + 1000))], (2, 1), seed=0)


def make_state():
    return init({"w": jnp.full(3, 2.0)}, adamw(OPTIMIZER), seed=5)


STEP = make_step(quadratic, adamw(OPTIMIZER))


def config(**changes) -> LoopConfig:
    return LoopConfig(**({"steps": 24, "log_every": 4, "evaluate_every": 6, "save_every": 5} | changes))


def evaluate(state):
    return {"held_out": jnp.sum(state.params["w"] ** 2)}


def lines(workdir: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def without_speed(workdir: pathlib.Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "steps_per_second"} for line in lines(workdir)]


def assert_same(actual, expected):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("uninterrupted")
    batches = make_batches()
    state = run(make_state(), STEP, batches, config(), workdir, evaluate)
    return state, batches.get_state(), workdir


def test_happens_at_the_right_steps(uninterrupted):
    state, position, workdir = uninterrupted
    assert int(state.step) == position["drawn"] == 24
    assert [line["step"] for line in lines(workdir)] == [0, 4, 6, 8, 12, 16, 18, 20, 24]
    assert [line["step"] for line in lines(workdir) if "held_out" in line] == [0, 6, 12, 18, 24]
    assert [line["step"] for line in lines(workdir) if "loss" in line] == [4, 8, 12, 16, 20, 24]
    assert {int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit()} == {20, 24}
    assert list((workdir / "tensorboard").glob("events*"))


def test_equals_a_bare_loop(uninterrupted):
    state, batches, losses = make_state(), make_batches(), []
    for _ in range(24):
        state, metrics = STEP(state, next(batches))
        losses.append(float(metrics["loss"]))
    assert_same(state, uninterrupted[0])
    # The line of step n has the loss of update number n.
    assert {line["step"]: line["loss"] for line in lines(uninterrupted[2]) if "loss" in line} == {
        n: losses[n - 1] for n in (4, 8, 12, 16, 20, 24)
    }


@pytest.mark.parametrize("stop_at", [1, 7, 10, 23, 24])
def test_sigterm_saves_and_the_resumed_run_is_the_same(tmp_path, uninterrupted, stop_at):
    expected, position, reference = uninterrupted

    def interrupted_step(state, batch):
        if int(state.step) == stop_at - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return STEP(state, batch)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match=f"stopped by SIGTERM after step {stop_at}; saved") as stopped:
        run(make_state(), interrupted_step, make_batches(), config(), tmp_path, evaluate)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before

    batches = make_batches()
    assert_same(run(make_state(), STEP, batches, config(), tmp_path, evaluate), expected)
    assert batches.get_state() == position
    assert without_speed(tmp_path) == without_speed(reference)


def test_sigkill_loses_only_what_was_not_saved(tmp_path, uninterrupted):
    script = f"""
        import os, pathlib, signal, sys
        sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
        import test_loop as t

        def step(state, batch):
            if int(state.step) == 18:
                os.kill(os.getpid(), signal.SIGKILL)
            return t.STEP(state, batch)

        t.run(t.make_state(), step, t.make_batches(), t.config(), pathlib.Path(sys.argv[1]), t.evaluate)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    killed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 18, "lo')  # as a killed process may leave it
    seen = []

    def step(state, batch):
        seen.append(int(state.step))
        return STEP(state, batch)

    assert_same(run(make_state(), step, make_batches(), config(), tmp_path, evaluate), uninterrupted[0])
    assert seen[0] in (10, 15)  # the checkpoint of step 15 may have been under way
    assert without_speed(tmp_path) == without_speed(uninterrupted[2])


def test_a_finished_run_does_nothing_more(tmp_path):
    expected = run(make_state(), STEP, make_batches(), config(steps=3), tmp_path)

    def no_step(state, batch):
        raise AssertionError("a step after the last")

    assert_same(run(make_state(), no_step, make_batches(), config(steps=3), tmp_path), expected)


def test_a_run_can_be_made_longer(tmp_path, uninterrupted):
    run(make_state(), STEP, make_batches(), config(steps=9), tmp_path)
    assert_same(run(make_state(), STEP, make_batches(), config(), tmp_path), uninterrupted[0])


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda n: float("nan") if n >= 12 else 1.0, r"loss is nan at step 12; the last good checkpoint is .*/10"),
        (lambda n: float("inf") if n >= 4 else 1.0, r"loss is inf at step 4; there is no checkpoint yet"),
        (lambda n: 5.0 if n >= 31 else 1.0, r"diverges: more than 4 x 1 since step 31; .*/30"),
    ],
)
def test_a_bad_loss_stops_with_the_last_good_checkpoint(tmp_path, loss, message):
    def step(state, batch):
        state, metrics = STEP(state, batch)
        return state, metrics | {"loss": loss(int(state.step))}

    with pytest.raises(TrainingError, match=message):
        run(make_state(), step, make_batches(), config(steps=100), tmp_path)


def test_a_single_spike_does_not_stop(tmp_path):
    def step(state, batch):
        state, metrics = STEP(state, batch)
        return state, metrics | {"loss": 100.0 if int(state.step) % 10 == 0 else 1.0}

    run(make_state(), step, make_batches(), config(steps=60, save_every=100), tmp_path)


def test_unusable_work_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match=re.escape(f"{tmp_path}/file/run: cannot be used as the work directory")):
        run(make_state(), STEP, make_batches(), config(), tmp_path / "file" / "run")


def test_the_best_checkpoint_stays(tmp_path):
    scores = iter([5.0, 3.0, 1.0, 2.0, 4.0])

    def evaluate(state):
        return {"kl": next(scores)}

    when = {"steps": 16, "evaluate_every": 4, "save_every": 4, "keep": 1, "best_metric": "kl"}
    run(make_state(), STEP, make_batches(), config(**when), tmp_path, evaluate)
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"8", "16"}


def test_an_unknown_best_metric_is_named_before_training(tmp_path):
    with pytest.raises(TrainingError, match=r"'kl' is not among \['held_out'\]"):
        run(make_state(), STEP, make_batches(), config(best_metric="kl"), tmp_path, evaluate)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    run(make_state(), STEP, make_batches(), config(steps=1), tmp_path)
    other = init({"w": jnp.zeros(4)}, adamw(OPTIMIZER), seed=0)
    with pytest.raises(CheckpointError, match=r"params.w: expected float32\[4\], found float32\[3\]"):
        run(other, STEP, make_batches(), config(), tmp_path)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_accumulation_equals_one_large_batch(micro_batches):
    def loss(params, batch, rng, constants):
        value, (weight, metrics) = quadratic(params, batch, jax.random.key(0), constants)
        return value * constants, (weight, metrics)

    batch = {
        "x": np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32),
        "mask": np.array([1, 0, 1, 1, 0, 0, 1, 0], np.float32),  # unequal weights; one part of four has none at all
    }
    sgd = optax.sgd(0.1)

    def update(parts):
        return make_step(loss, sgd, parts)(init({"w": jnp.arange(3.0)}, sgd, seed=0), batch, jnp.float32(2))

    whole, parts = update(1), update(micro_batches)
    assert whole[1].keys() == parts[1].keys() == {"loss", "distance", "grad_norm"}
    for x, y in zip(jax.tree.leaves((whole[0].params, whole[1])), jax.tree.leaves((parts[0].params, parts[1]))):
        np.testing.assert_allclose(x, y, rtol=1e-5)


def test_a_batch_that_does_not_split_is_refused():
    with pytest.raises(ValueError, match="4 rows does not split into 3"):
        make_step(quadratic, optax.sgd(0.1), 3)(make_state(), next(make_batches()))


def test_schedule():
    rate = learning_rate(OptimizerConfig(peak_learning_rate=1e-3, total_steps=1000, warmup_steps=50))
    steps = np.array([0, 25, 50, 525, 1000])
    # At half of the cosine: the mean of the peak and a tenth of it.
    np.testing.assert_allclose([float(rate(s)) for s in steps], [0, 5e-4, 1e-3, 5.5e-4, 1e-4], rtol=1e-5)
    assert float(learning_rate(OptimizerConfig(2e-3, 10))(0)) == pytest.approx(2e-3)
    with pytest.raises(ValueError, match="10 of 10"):
        OptimizerConfig(1e-3, total_steps=10, warmup_steps=10)


def test_adamw_as_written_in_numpy():
    settings = OptimizerConfig(peak_learning_rate=0.1, total_steps=10)
    optimizer = adamw(settings)
    params = jnp.array([1.0, -2.0])
    state = optimizer.init(params)
    expected, m, v = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
    for n, gradient in enumerate(np.array([[3.0, 4.0], [0.3, -0.4], [0.0, 0.5]]), start=1):
        updates, state = optimizer.update(jnp.asarray(gradient, jnp.float32), state, params)
        params = optax.apply_updates(params, updates)
        clipped = gradient / max(1.0, np.linalg.norm(gradient))
        m, v = 0.9 * m + 0.1 * clipped, 0.95 * v + 0.05 * clipped**2
        direction = (m / (1 - 0.9**n)) / (np.sqrt(v / (1 - 0.95**n)) + 1e-8)
        rate = 0.01 + 0.09 * (1 + np.cos(np.pi * (n - 1) / 10)) / 2
        expected = expected - rate * (direction + 0.01 * expected)
        np.testing.assert_allclose(params, expected, rtol=1e-5)

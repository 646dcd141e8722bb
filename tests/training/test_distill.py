"""Distillation and on-policy refinement: the loss against its formula, what is kept, and what is sampled."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hla_jax.attention.baselines import LayerLatent
from hla_jax.attention.full import exact_stages
from hla_jax.attention.lla import LLA
from hla_jax.attention.scheme import Attention
from hla_jax.data.packing import BatchConfig
from hla_jax.data.pipeline import Source
from hla_jax.generation.generate import generate
from hla_jax.generation.sampling import Sampling
from hla_jax.model import Model, forward, forward_swapped
from hla_jax.models import looped
from hla_jax.training import distill, on_policy
from hla_jax.training.loop import LoopConfig
from hla_jax.training.optimizer import OptimizerConfig
from tiny import random_maps, tiny_config, tiny_params, tiny_tokens

CONFIG = tiny_config()
SCHEMES = (LLA(9, 14, rank_rope=4, query_adapter=True), LayerLatent(5, 9))


@pytest.fixture
def model(x64, quick_compile):
    return Model(CONFIG, tiny_params(CONFIG, "float64"))


def batch(lengths: list[int], length: int = 10) -> dict[str, jax.Array]:
    return {
        "tokens": tiny_tokens(CONFIG, len(lengths), length),
        "segments": (jnp.arange(length) < jnp.asarray(lengths)[:, None]).astype(jnp.int32),
    }


def kl(teacher: jax.Array, student: jax.Array) -> jax.Array:
    p, q = jax.nn.log_softmax(teacher), jax.nn.log_softmax(student)
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1)


@pytest.mark.long
@pytest.mark.parametrize("scheme", SCHEMES)
def test_kl_and_its_gradient_are_those_of_the_two_passes(model, scheme, monkeypatch):
    """Of the public exact and swapped passes, block by block of tokens, without the padding."""
    monkeypatch.setattr(distill, "_LOGITS_BLOCK", 4)
    data, attention = batch([10, 7]), random_maps(scheme, CONFIG, "float64")
    counted = data["segments"] > 0
    teacher = forward(model, data["tokens"])

    def direct(maps):
        student = forward_swapped(model, data["tokens"], Attention(scheme, maps))
        return jnp.sum(kl(teacher, student) * counted) / jnp.sum(counted)

    loss = distill.make_loss(scheme, CONFIG, output_weight=0.0)
    found = jax.value_and_grad(loss, has_aux=True)(attention.params, data, jax.random.key(0), model.params)
    expected = jax.value_and_grad(direct)(attention.params)
    np.testing.assert_allclose(found[0][0], expected[0], rtol=1e-10)
    assert found[0][1][0] == 17
    for name in attention.params:
        np.testing.assert_allclose(found[1][name], expected[1][name], atol=1e-10, err_msg=name)


@pytest.mark.long
def test_output_error_is_that_of_the_heads_after_their_projection(model):
    """Written out: both passes' outputs of every loop and layer, kept and compared."""
    data, attention = batch([10, 7]), random_maps(LLA(9, 14), CONFIG, "float64")

    def outputs(stages, state) -> jax.Array:
        """The heads' outputs [loops, layers, 2, 10, H dh] of a pass."""

        def noting(attend):
            def attend_and_note(carried, inputs):
                state, seen = carried
                out, state = attend(state, inputs)
                return out, (state, seen.at[inputs.loop, inputs.layer].set(out.reshape(2, 10, -1)))

            return attend_and_note

        seen = jnp.zeros((CONFIG.num_loops, CONFIG.num_layers, 2, 10, CONFIG.num_heads * CONFIG.head_dim))
        wrapped = [stage._replace(attend=noting(stage.attend)) for stage in stages]
        return looped.run(model.params, CONFIG, data["tokens"], wrapped, (state, seen))[1][1]

    swapped = attention.scheme.swapped(CONFIG, attention.params, 2, 10, jnp.float64)
    filled = looped.run(model.params, CONFIG, data["tokens"], swapped.stages, swapped.state)[1]
    student_pass = swapped.finish(filled)
    teacher = outputs(exact_stages(CONFIG, jnp.arange(10)[None]), None)
    student = outputs(student_pass.stages, student_pass.state)
    counted = data["segments"] > 0
    projections = model.params["layers"]["o_proj"].swapaxes(1, 2)[None, :, None]
    exact, other = teacher @ projections, student @ projections
    errors = jnp.sum((other - exact) ** 2, axis=-1) / jnp.sum(exact**2, axis=-1)
    expected = jnp.mean(errors[:, :, counted], axis=(1, 2))
    _, found = distill.divergence(attention.scheme, CONFIG, attention.params, model.params, data["tokens"], counted)
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    total = distill.make_loss(attention.scheme, CONFIG, 0.5)(attention.params, data, jax.random.key(0), model.params)
    metrics = total[1][1]
    np.testing.assert_allclose(total[0], metrics["kl"] + 0.5 * np.mean(expected), rtol=1e-10)
    assert {f"error/loop{loop + 1}" for loop in range(CONFIG.num_loops)} <= metrics.keys()


class Letters:
    """A tokenizer of the tiny model: a token a letter."""

    eos_token_id = None

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) % CONFIG.vocab_size for letter in text]}


@pytest.fixture
def documents(tmp_path):
    rng = np.random.default_rng(0)
    lines = ["".join(rng.choice(list("abcdefgh"), 30)) for _ in range(24)]
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
    return str(path)


def recipe(path: str, steps: int = 30, learning_rate: float = 1e-2, save_every: int = 10) -> distill.DistillConfig:
    return distill.DistillConfig(
        sources=(Source(path, held_out=8),),
        batches=BatchConfig(4, 16, min_tokens=6, pack=False),
        optimizer=OptimizerConfig(learning_rate, steps),
        loop=LoopConfig(steps, 10, 10, save_every, best_metric="held_out/kl"),
        held_out_batches=2,
    )


def followed(workdir) -> list[float]:
    """The held-out KL, from before the first step on."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [line["held_out/kl"] for line in lines if "held_out/kl" in line]


@pytest.mark.long
def test_distilled_maps_are_closer_and_the_best_ones_are_kept(documents, tmp_path, quick_compile):
    model = Model(CONFIG, tiny_params(CONFIG))
    start = random_maps(LLA(9, 14), CONFIG)
    good = distill.distill(model, start, Letters(), recipe(documents), tmp_path / "good")
    curve = followed(tmp_path / "good")
    assert min(curve) < 0.75 * curve[0]
    # A learning rate that only does harm: the maps that it started from are returned.
    harmful = recipe(documents, learning_rate=100.0)
    kept = distill.distill(model, good, Letters(), harmful, tmp_path / "bad")
    np.testing.assert_allclose(followed(tmp_path / "bad")[0], min(curve), rtol=1e-5)
    for name, value in good.params.items():
        np.testing.assert_array_equal(kept.params[name], value)


def test_packed_rows_and_another_metric_are_refused(documents):
    config = recipe(documents)
    with pytest.raises(ValueError, match=r"batches\.pack must be false"):
        dataclasses.replace(config, batches=BatchConfig(4, 16))
    with pytest.raises(ValueError, match="best_metric must be 'held_out/kl', found None"):
        dataclasses.replace(config, loop=LoopConfig(1))


@pytest.mark.long
def test_roll_outs_are_what_generate_samples(quick_compile):
    """The same tokens from the same seeds, cut at a stop token; only they count."""
    model, attention = Model(CONFIG, tiny_params(CONFIG)), random_maps(LLA(9, 14), CONFIG)
    rows, prompt, step = tiny_tokens(CONFIG, 3, 12), 5, 7
    seeds = [3 * step + row for row in range(3)]
    sample = lambda stop: generate(
        model, rows[:, :prompt].tolist(), 7, attention, temperature=1.0, seed=seeds, stop_tokens=stop
    )
    stop = sample([])[0].tokens[3]
    expected = sample([stop])
    assert expected[0].finish_reason == "stop"
    found = on_policy.roll_out(
        model.params,
        CONFIG,
        attention,
        {"tokens": rows, "segments": jnp.ones_like(rows)},
        jnp.asarray(step),
        prompt,
        Sampling(1.0),
        jnp.asarray([stop]),
    )
    np.testing.assert_array_equal(found["tokens"][:, :prompt], rows[:, :prompt])
    for row, one in enumerate(expected):
        whole = [*one.tokens, stop] if one.finish_reason == "stop" else one.tokens
        assert found["tokens"][row, prompt : prompt + len(whole)].tolist() == whole
        # The distributions that sampled them: after the prompt's last token, to the one before the last.
        assert np.flatnonzero(found["segments"][row]).tolist() == list(range(prompt - 1, prompt - 1 + len(whole)))


@pytest.mark.long
def test_refinement_trains_on_its_own_continuations(documents, tmp_path, quick_compile):
    model = Model(CONFIG, tiny_params(CONFIG))
    config = on_policy.OnPolicyConfig(recipe(documents), prompt=6)
    refined = on_policy.refine(model, random_maps(LLA(9, 14), CONFIG), Letters(), config, tmp_path / "refined")
    curve = followed(tmp_path / "refined")
    assert min(curve) < 0.75 * curve[0]
    assert refined.params.keys() == random_maps(LLA(9, 14), CONFIG).params.keys()
    with pytest.raises(ValueError, match=r"prompt must be in 1 \.\. 15"):
        on_policy.OnPolicyConfig(recipe(documents), prompt=16)
    with pytest.raises(ValueError, match="min_tokens must be at least the prompt's 7"):
        on_policy.OnPolicyConfig(recipe(documents), prompt=7)

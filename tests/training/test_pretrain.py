"""Pretraining: batches of the curriculum, the loss, and the optimizer."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hla_jax.attention.full import exact_pass, exact_stages
from hla_jax.data.curriculum import Curriculum, Stage
from hla_jax.models import layers, looped, ouro
from hla_jax.training import loop, pretrain, step
from tiny import tiny_config, tiny_huginn, tiny_params

END = 1
CONFIG = tiny_config(vocab_size=130)
STAGES = (
    Stage(2, 3, 64, {"copy": 0.3, "recall": 0.7}, filler=0.0),
    Stage(3, 2, 96, {"chain": 0.5, "text": 0.5}, filler=1.0, learning_rate=(1.0, 0.1)),
)
RECIPE = pretrain.Recipe(CONFIG, STAGES, warmup_steps=1)


def tokenize(text: str) -> list[int]:
    return [ord(character) for character in text]


@pytest.fixture(scope="module")
def curriculum() -> Curriculum:
    return Curriculum(STAGES, ["x = 1\n" * 60, "return x\n" * 60], tokenize, END, seed=0)


def test_batches_have_the_shape_of_their_stage_and_depend_on_seed_and_number_only(curriculum):
    assert curriculum.steps == 5
    forward = [curriculum.batch(index) for index in range(6)]
    assert [batch["tokens"].shape for batch in forward] == [(3, 64)] * 2 + [(2, 96)] * 4
    stream = curriculum.batches()
    stream.set_state({"index": 3})
    for batch in (next(stream), curriculum.batch(3)):
        jax.tree.map(np.testing.assert_array_equal, batch, forward[3])
    assert not np.array_equal(forward[0]["tokens"], forward[1]["tokens"])


def test_labels_are_the_next_tokens_of_the_same_document(curriculum):
    for index in range(5):
        batch = curriculum.batch(index)
        counted = batch["weights"] > 0
        np.testing.assert_array_equal(batch["labels"][:, :-1], batch["tokens"][:, 1:])
        starts = batch["positions"] == 0
        assert not counted[:, :-1][starts[:, 1:]].any()
        assert counted.any(axis=1).all()
        assert not counted[batch["segments"] == 0].any()


def test_only_answers_have_full_weight():
    """Of a recall, the values behind questions and their line ends; the end of the document too."""
    stages = (Stage(1, 4, 96, {"recall": 1.0}, filler=0.0),)
    batch = Curriculum(stages, ["x = 1\n" * 60], tokenize, END, seed=0).batch(0)
    for labels, weights in zip(batch["labels"], batch["weights"]):
        text = "".join(map(chr, labels))
        expected = [
            span for match in re.finditer(r"\?[a-z]+(\d+\n)\x01?", text) for span in range(match.start(1), match.end())
        ]
        assert set(np.flatnonzero(weights == 1)) >= set(expected)
        assert all(text[index] in "0123456789\n\x01" for index in np.flatnonzero(weights == 1))
        assert set(np.unique(weights)) <= set(np.float32([0.0, 0.05, 1.0]))


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="found sums"):
        Stage(1, 1, 64, {"sums": 1.0}, filler=0.0)


def test_loss_is_the_weighted_cross_entropy_of_every_document_on_its_own(curriculum):
    params = tiny_params(CONFIG)
    batch = curriculum.batch(0)
    rows, length = batch["tokens"].shape

    @jax.jit
    def alone(tokens):
        hidden, _ = looped.run(
            params, CONFIG, tokens, exact_stages(CONFIG, jnp.arange(length)[None]), None, every_loop=True
        )
        return jax.nn.softmax(layers.logits(params, hidden)), ouro.exit_probabilities(ouro.gate_logits(params, hidden))

    errors, weights, stops = [], [], []
    for row in range(rows):
        for segment in range(1, batch["segments"][row].max() + 1):
            mine = np.flatnonzero(batch["segments"][row] == segment)
            tokens = np.zeros((1, length), np.int32)
            tokens[0, : len(mine)] = batch["tokens"][row, mine]
            probabilities, stop = jax.device_get(alone(tokens))
            errors.append(-np.log(probabilities[:, 0, np.arange(len(mine)), batch["labels"][row, mine]]))
            weights.append(batch["weights"][row, mine])
            stops.append(stop[:, 0, : len(mine)])
    errors, weights, stops = np.concatenate(errors, -1), np.concatenate(weights), np.concatenate(stops, -1)
    per_loop = (errors * weights).sum(-1) / weights.sum()
    gate = (((stops * errors).sum(0) + 0.1 * (stops * np.log(stops)).sum(0)) * weights).sum() / weights.sum()
    loss = jax.jit(pretrain.make_loss(RECIPE))
    value, (weight, metrics) = loss(params, batch, jax.random.key(0), None)
    np.testing.assert_allclose(value, per_loop[-1] + 0.1 * per_loop[:-1].sum() + gate, rtol=1e-4)
    np.testing.assert_allclose(weight, weights.sum(), rtol=1e-6)
    np.testing.assert_allclose(metrics["cross_entropy/loop1"], per_loop[0], rtol=1e-4)


@pytest.mark.long
def test_the_gate_learns_alone(curriculum):
    params = tiny_params(CONFIG)
    batch = jax.tree.map(jnp.asarray, curriculum.batch(0))

    def gradient(entropy: float):
        loss = pretrain.make_loss(dataclasses.replace(RECIPE, exit_entropy=entropy))
        return jax.jit(jax.grad(lambda p: loss(p, batch, jax.random.key(0), None)[0]))(params)

    without, with_entropy = gradient(0.0), gradient(5.0)
    gates = [tree.pop("early_exit_gate")["weight"] for tree in (without, with_entropy)]
    assert not np.allclose(*gates)
    jax.tree.map(np.testing.assert_array_equal, without, with_entropy)


def test_learning_rate_follows_the_stages():
    factor = pretrain.schedule(dataclasses.replace(RECIPE, warmup_steps=2))
    np.testing.assert_allclose([factor(count) for count in range(6)], [0.5, 1, 1, 0.7, 0.4, 0.1], rtol=1e-5)


@pytest.mark.long
def test_matrices_move_orthogonally():
    """Muon's update of a matrix has singular values near one; Adam's of the same gradient does not."""
    params = pretrain.init(RECIPE).params
    optimizer = pretrain.optimizer(RECIPE)
    key = jax.random.key(0)
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.fold_in(key, x.size), x.shape), params)
    grads["layers"]["q_proj"] = grads["layers"]["q_proj"].at[:, :, 0].multiply(100.0)
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    values = np.linalg.svd(np.asarray(updates["layers"]["q_proj"]), compute_uv=False)
    assert values.max() / values.min() < 3
    # Adam's first step has the same size for every number.
    size = np.abs(updates["lm_head"])
    assert np.quantile(size, 0.05) > 0.95 * np.quantile(size, 0.95)


@pytest.mark.long
def test_a_short_run_learns(curriculum, tmp_path):
    recipe = dataclasses.replace(RECIPE, stages=(Stage(25, 8, 48, {"copy": 1.0}, filler=0.0),))
    batches = Curriculum(recipe.stages, ["x = 1\n" * 60], tokenize, END, seed=0).batches()
    update = step.make_step(pretrain.make_loss(recipe), pretrain.optimizer(recipe))
    losses: list[float] = []

    def watch(state, batch):
        state, metrics = update(state, batch)
        losses.append(float(metrics["cross_entropy/loop3"]))
        return state, metrics

    loop.run(pretrain.init(recipe), watch, batches, loop.LoopConfig(25), tmp_path)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.long
def test_huginn_pays_for_the_cross_entropy_after_the_steps_that_were_drawn(curriculum):
    config = tiny_huginn(vocab_size=130, initial_state="zeros")
    params, batch = tiny_params(config), curriculum.batch(0)
    loss = jax.jit(pretrain.make_loss(pretrain.Recipe(config, STAGES, num_steps=(1, 3))))
    seen = set()
    for seed in range(6):
        value, (total, metrics) = loss(params, batch, jax.random.key(seed), None)
        seen.add(steps := int(metrics["num_steps"]))
        read = (jnp.asarray(batch[name]) for name in ("tokens", "positions", "segments"))
        hidden = exact_pass(params, config.with_steps(steps), *read)
        each = -jax.nn.log_softmax(hidden @ params["embed_tokens"].T)
        picked = np.take_along_axis(np.asarray(each), batch["labels"][..., None], axis=-1)[..., 0]
        np.testing.assert_allclose(value, np.average(picked, weights=batch["weights"]), rtol=1e-5)
        np.testing.assert_allclose(total, batch["weights"].sum(), rtol=1e-6)
    assert seen == {1, 3}

"""Fine-tuning: masters keep what 16 bits lose, groups have their own rates, only answers teach, and a resumed run is an
uninterrupted one.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hla_jax
from eight_devices import on_eight_devices
from hla_jax.attention.full import FullCache
from hla_jax.attention.scheme import Attention
from hla_jax.config import ConfigError
from hla_jax.data.supervised import ChatBatches, ChatSource
from hla_jax.tokenizer import load_tokenizer
from hla_jax.training import finetune, step, two_pass
from hla_jax.training.finetune import FinetuneConfig
from hla_jax.training.loop import LoopConfig
from hla_jax.training.lora import ALL_WEIGHTS, Lora
from hla_jax.training.optimizer import OptimizerConfig
from tests.tiny import random_hla, tiny_config, tiny_params

CONFIG = tiny_config(vocab_size=1024, num_loops=2, num_layers=1)
OPTIMIZER = OptimizerConfig(peak_learning_rate=1e-2, total_steps=10, weight_decay=0.0)
LOW_RANK = Lora(rank=2, alpha=2.0)

pytestmark = pytest.mark.usefixtures("quick_compile")


def job(**changes) -> FinetuneConfig:
    sizes = dict(
        sources=(ChatSource("synthetic", tasks=("reverse",), tokens=(8, 16)),),
        batches=ChatBatches(tokens=128, lengths=(64,), block=8),
        optimizer=OPTIMIZER,
        loop=LoopConfig(steps=4, log_every=1, evaluate_every=4, save_every=2),
        held_out_batches=1,
    )
    return FinetuneConfig(**(sizes | changes))


@pytest.fixture
def model() -> hla_jax.Model:
    attention = random_hla(CONFIG, 4)
    return hla_jax.Model(CONFIG, tiny_params(CONFIG), attention, hla_jax.NANO)


def stand_in(params, batch, rng, constants):
    """Pulls every weight of {"base", "maps"} upwards by the same gradient, whatever it is."""
    value = -sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(params))
    return value, (jnp.ones(()), {"seen": params["base"]["norm"][0].astype(jnp.float32)})


def updates(trained, steps, peak, maps_rate=1.0):
    """State after `steps` updates on `stand_in`, at a constant learning rate, and the last weight that the loss saw."""
    config = OptimizerConfig(peak, total_steps=1000, final_fraction=1.0, weight_decay=0.0)
    optimizer = finetune.make_optimizer(config, maps_rate)
    update = step.make_step(finetune.make_loss(stand_in, ALL_WEIGHTS, jnp.bfloat16), optimizer)
    state = step.init(trained, optimizer, 0)
    for _ in range(steps):
        state, metrics = update(state, {}, None)
    return state, float(metrics["seen"])


def test_an_update_below_the_last_bit_of_16_bits_accumulates():
    """Adam moves by the learning rate, a tenth of the spacing of 16-bit numbers above 1: 15 steps cross it, and each of
    them alone is lost on a 16-bit weight.
    """
    spacing = float(jnp.finfo(jnp.bfloat16).eps)
    trained = {"base": {"norm": jnp.ones(1, jnp.float32)}, "maps": {}}
    state, seen = updates(trained, 15, spacing / 10)
    np.testing.assert_allclose(state.params["base"]["norm"], 1 + 1.5 * spacing, rtol=1e-4)
    assert seen > 1
    lost = jax.tree.map(lambda x: x.astype(jnp.bfloat16), trained)
    state, seen = updates(lost, 15, spacing / 10)
    assert seen == state.params["base"]["norm"] == 1


def test_base_and_maps_have_rates_of_their_own():
    trained = {"base": {"norm": jnp.ones(1)}, "maps": {"write_k": jnp.ones(1)}}
    state, _ = updates(trained, 1, 1e-3, 50.0)
    moved = jax.tree.map(lambda x: float(x[0]) - 1, state.params)
    assert moved["base"]["norm"] == pytest.approx(1e-3, rel=1e-2)
    assert moved["maps"]["write_k"] == pytest.approx(5e-2, rel=1e-2)
    state, _ = updates(trained, 1, 1e-3)
    assert float(state.params["maps"]["write_k"][0]) - 1 == pytest.approx(1e-3, rel=1e-2)


def test_clipping_is_by_the_norm_of_all_groups_together():
    optimizer = finetune.make_optimizer(dataclasses.replace(OPTIMIZER, clip_norm=1.0))
    grads = {"base": {"w": jnp.asarray([3.0])}, "maps": {"m": jnp.asarray([4.0])}}
    _, state = optimizer.update(grads, optimizer.init(grads), grads)
    first_moments = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (1,)]
    np.testing.assert_allclose(sorted(float(leaf[0]) for leaf in first_moments)[-2:], [0.06, 0.08], rtol=1e-5)


def first_batch(model, config):
    return next(finetune.batches(model, config, (0, 1)))


def test_only_the_assistants_tokens_teach(model):
    """The loss is the mean error of what the assistant wrote, found again in the tokens; a mask that is one token late,
    and one that lets prompts count, give another.
    """
    batch = first_batch(model, job())
    config, attention = model.config, Attention(FullCache())
    loss = jax.jit(two_pass.make_loss(attention.scheme, config))
    value = lambda response: loss({"base": model.params, "maps": {}}, batch | {"response": response}, None, None)[0]

    errors, texts = [], []
    tokenizer = load_tokenizer(hla_jax.NANO)
    header = tokenizer.encode("<|im_start|>assistant\n")
    for tokens, segments in zip(batch["tokens"], batch["segments"]):
        for segment in range(1, segments.max() + 1):
            ids = tokens[segments == segment].tolist()
            log_p = jax.nn.log_softmax(hla_jax.forward(model, [ids])[0])
            (start,) = (i + len(header) for i in range(len(ids)) if ids[i : i + len(header)] == header)
            stop = ids.index(2, start) + 1
            errors += [-float(log_p[at - 1, ids[at]]) for at in range(start, stop)]
            texts.append(tokenizer.decode(ids[start:stop]))
    assert all(text.endswith("<|im_end|>") for text in texts)
    np.testing.assert_allclose(value(batch["response"]), np.mean(errors), rtol=1e-4)
    for fault in (np.roll(batch["response"], 1, axis=1), np.ones_like(batch["response"])):
        assert abs(value(fault) - np.mean(errors)) > 1e-3


@pytest.mark.long
def test_a_resumed_run_is_an_uninterrupted_one(model, tmp_path):
    config, full = job(), Attention(FullCache())
    whole = finetune.finetune(model, full, config, tmp_path / "whole")
    halved = dataclasses.replace(config, loop=dataclasses.replace(config.loop, steps=2))
    finetune.finetune(model, full, halved, tmp_path / "parts")
    resumed = finetune.finetune(model, full, config, tmp_path / "parts")
    jax.tree.map(np.testing.assert_array_equal, resumed.model.params, whole.model.params)
    assert resumed.counts == whole.counts
    changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), whole.model.params, model.params)
    gate = changed.pop("early_exit_gate")
    assert all(jax.tree.leaves(changed)), "all weights train, but the gate, which no loss sees"
    assert not any(jax.tree.leaves(gate))
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert {"held_out/loss", "held_out/accuracy"} <= lines[-1].keys()


@pytest.mark.long
def test_low_rank_updates_leave_the_rest_of_the_base_as_it_is(model, tmp_path):
    config = job(lora=LOW_RANK, loop=LoopConfig(steps=2))
    tuned = finetune.finetune(model, model.attention, config, tmp_path).model
    changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), tuned.params, model.params)
    names = {name for name, value in changed["layers"].items() if value}
    assert names == set(LOW_RANK.targets)
    assert not any(jax.tree.leaves(changed | {"layers": {}}))
    for name, value in model.attention.params.items():
        assert jnp.any(tuned.attention.params[name] != value), "the maps train beside the updates"


def test_micro_batches_must_divide_the_rows_of_every_length():
    with pytest.raises(ValueError, match="micro_batches must divide the 2 rows of 64 tokens: 3"):
        job(micro_batches=3)


@pytest.mark.long
def test_a_mesh_computes_what_one_device_computes(tmp_path):
    """Two steps; weights, masters, moments and rows are really spread, and low-rank updates are too."""
    on_eight_devices(
        """
        import dataclasses, json, pathlib
        import jax, numpy as np
        from jax.sharding import PartitionSpec as P
        import hla_jax
        from hla_jax import sharding
        from hla_jax.models import weights
        from hla_jax.training import finetune, step
        from hla_jax.training.lora import Lora
        from tests.tiny import random_hla, tiny_config, tiny_params
        from tests.training.test_finetune import job

        config = tiny_config(vocab_size=1024, num_loops=2, num_layers=1, num_heads=4, num_kv_heads=2)
        attention, folder = random_hla(config, 4), pathlib.Path(sys.argv[1])
        weights.save_params(tiny_params(config), config, folder / "model")
        mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
        one = hla_jax.load(folder / "model", "float32")
        many = hla_jax.load(folder / "model", "float32", mesh)
        placed = sharding.maps(attention.scheme.map_shapes(config), attention.scheme.map_axes(), 1, mesh)
        spread = dataclasses.replace(attention, params=sharding.put(attention.params, placed))
        batches = finetune.ChatBatches(tokens=1024, lengths=(64,), block=32)
        base = job(batches=batches, micro_batches=2)
        base = dataclasses.replace(base, loop=dataclasses.replace(base.loop, steps=2, evaluate_every=2))

        def specs(lora, name):
            start = finetune.start(many, spread, lora, 0)
            optimizer = finetune.make_optimizer(base.optimizer)
            with sharding.use(mesh):
                state, _ = step.init_on(mesh, start, finetune.placed(start, many, spread, mesh), optimizer, 0)
            leaves = jax.tree.leaves_with_path((state.params, state.opt_state))
            return [x.sharding.spec for path, x in leaves if name in jax.tree_util.keystr(path)]

        assert specs(base.lora, "embed_tokens") == [P("tensor", "fsdp")] * 3, "the master and both moments"
        assert set(specs(Lora(2, 2.0), "q_proj")) == {P()}

        runs = {}
        for kind, model, maps, on in (("one", one, attention, None), ("many", many, spread, mesh)):
            model = dataclasses.replace(model, path=hla_jax.NANO)
            tuned = finetune.finetune(model, maps, base, folder / kind, on).model
            lines = map(json.loads, (folder / kind / "metrics.jsonl").read_text().splitlines())
            numbers = [value for line in lines for key, value in sorted(line.items()) if "second" not in key]
            runs[kind] = sharding.to_host((tuned.params, tuned.attention.params)), numbers
        same = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=5e-4)
        jax.tree.map(same, runs["many"], runs["one"])
        """,
        tmp_path,
    )


def test_rows_that_do_not_split_over_the_mesh_are_named(model, tmp_path, monkeypatch):
    monkeypatch.setattr(finetune.sharding, "row_parts", lambda mesh: 4)
    with pytest.raises(ConfigError, match="2 rows of 64 tokens in 1 micro-batches do not split over the mesh"):
        finetune.finetune(model, model.attention, job(), tmp_path)

"""Huginn agrees with the public code, its files are read and written as they are, and every cache serves it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import hla_jax
from hla_jax import tensor_files
from hla_jax.attention.full import exact_pass, exact_stages, rotate_qk
from hla_jax.config import HUGINN_3P5B, ConfigError, HuginnConfig, ModelConfig
from hla_jax.generation import decode
from hla_jax.models import huginn, layers, looped, packed, tables, weights
from hla_jax.tensor_files import WeightsError
from tiny import GOLDEN, TOLERANCE, tiny_huginn, tiny_params, tiny_tokens

HERE = GOLDEN / "huginn-tiny"
VALUES = load_file(HERE / "golden.safetensors")
STEPS = json.loads((HERE / "golden.json").read_text())["num_steps"]
RAW = json.loads((HERE / "config.json").read_text())

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture
def model(dtype):
    return hla_jax.load(HERE, dtype=dtype)


def close(found, key, dtype):
    np.testing.assert_allclose(found, VALUES[key], atol=TOLERANCE[dtype], rtol=0, err_msg=key)


def test_golden_logits_from_zeros_and_from_a_given_state(model, dtype):
    tokens = VALUES["input_ids"]
    close(hla_jax.forward(model, tokens, num_steps=STEPS, initial_state="zeros"), "logits_zero_state", dtype)
    given = hla_jax.forward(model, tokens, num_steps=STEPS, initial_state=VALUES["input_states"])
    close(given, "logits_given_state", dtype)


def test_golden_states_keys_and_values_of_every_step(model, dtype):
    config = dataclasses.replace(model.config.with_steps(STEPS), initial_state="zeros")
    tokens = jnp.asarray(VALUES["input_ids"])
    positions = jnp.arange(tokens.shape[1])[None]
    (stage,) = exact_stages(config, positions)
    core = jnp.zeros((2, STEPS, config.num_layers, *tokens.shape, config.num_heads, config.head_dim), dtype)
    outer = jnp.zeros((2, config.outer_layers, *core.shape[3:]), dtype)

    def keep(state, inputs):
        _, k = rotate_qk(config, inputs, positions)
        return stage.attend(None, inputs)[0], (
            state[0].at[:, inputs.loop, inputs.layer].set(jnp.stack([k, inputs.v])),
            state[1],
        )

    def keep_outer(state, inputs):
        _, k = rotate_qk(config, inputs, positions)
        return stage.attend(None, inputs)[0], (state[0], state[1].at[:, inputs.layer].set(jnp.stack([k, inputs.v])))

    hidden, (core, outer) = looped.run(
        model.params, config, tokens, [stage._replace(attend=keep)], (core, outer), keep_outer
    )
    blocks = [outer[:, 0], *core.reshape(2, -1, *core.shape[3:]).swapaxes(0, 1), outer[:, 1]]
    numbers = [*range(1 + STEPS * config.num_layers), -1]
    for block, number in zip(blocks, numbers, strict=True):
        # The file's rotary pairs lie side by side, and heads come before tokens.
        k = jnp.moveaxis(block[0].reshape(*block.shape[1:-1], 2, -1), -2, -1).reshape(block.shape[1:])
        close(jnp.swapaxes(k, 1, 2), f"keys.{number}", dtype)
        close(jnp.swapaxes(block[1], 1, 2), f"values.{number}", dtype)
    states = exact_pass(model.params, config, tokens, every_loop=True)
    normed = layers.rms_norm(states[-1], model.params["norm"], config.rms_norm_eps)
    close(normed, "latent_states_zero_state", dtype)
    np.testing.assert_allclose(layers.logits(model.params, hidden), VALUES["logits_zero_state"], atol=TOLERANCE[dtype])


def test_saved_files_are_those_that_were_read(tmp_path):
    config = ModelConfig.from_directory(HERE)
    weights.save_params(weights.load_params(HERE, config), config, tmp_path / "new")
    before, after = load_file(HERE / "model.safetensors"), load_file(tmp_path / "new" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name, strict=True)
    assert ModelConfig.from_directory(tmp_path / "new") == config


def test_a_packed_tensor_reads_the_same_in_parts():
    """As on a mesh, where a device reads its own heads; a cut inside of a head must not disturb the pairs."""
    config = ModelConfig.from_directory(HERE)
    whole = weights.load_params(HERE, config)
    for cut in (slice(12, 36), slice(5, 29)):
        for row in tables.parameters(config):
            if row.packed and row.packed.pairs:
                stored = packed.part_of(
                    tensor_files.open_tensors(HERE)[row.names(config)[0]],
                    row.packed,
                    row.tensor_shape(config),
                    config.head_dim,
                )
                stack, leaf = row.path.split(".")
                np.testing.assert_array_equal(stored.read((cut,)), whole[stack][leaf][0][cut])


def test_size_of_the_released_model():
    abstract = weights.abstract_params(HUGINN_3P5B, "bfloat16")
    assert sum(leaf.size for leaf in jax.tree.leaves(abstract)) == 3_564_976_800


@pytest.mark.parametrize("change", ["missing", "shape", "head"])
def test_a_damaged_file_is_named(tmp_path, change):
    tensors = load_file(HERE / "model.safetensors")
    name = "transformer.core_block.1.attn.Wqkv.weight"
    if change == "missing":
        del tensors[name]
    elif change == "shape":
        tensors[name] = tensors[name][:-1]
    else:
        tensors[name := "lm_head.weight"] = tensors["transformer.wte.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((HERE / "config.json").read_text())
    with pytest.raises(WeightsError, match=name.replace(".", r"\.")):
        hla_jax.load(tmp_path)


def test_published_buffers_and_a_copied_head_are_left_out(tmp_path):
    tensors = load_file(HERE / "model.safetensors")
    tensors |= {"freqs_cis": np.zeros((1, 2), np.float32), "lm_head.weight": tensors["transformer.wte.weight"].copy()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((HERE / "config.json").read_text())
    assert "lm_head" not in hla_jax.load(tmp_path).params


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layers": 5}, r"n_layers must be 1 \+ 2 \+ 1, found 5"),
        ({"bias": True}, "bias must be False, found True"),
        ({"injection_type": "add"}, "injection_type must be 'linear', found 'add'"),
        ({"test_time_noise": 0.1}, "test_time_noise must be 0, found 0.1"),
        ({"state_init": "normal"}, r"state_init must be one of \['like-init', 'zero'\], found 'normal'"),
        ({"num_key_value_heads": 1}, "every head has its own keys"),
        ({"mean_recurrence": 0}, "mean_recurrence must be at least 1, found 0"),
        ({"n_layers_in_coda": 0, "n_layers": 3}, "n_layers_in_coda must be at least 1, found 0"),
        ({"qk_bias": "yes"}, "qk_bias must be true or false, found 'yes'"),
        ({"n_embd": None}, "missing keys n_embd"),
    ],
)
def test_bad_config_is_refused(changes, message):
    with pytest.raises(ConfigError, match=f"^c.json: .*{message}"):
        ModelConfig.from_dict(RAW | changes, "c.json")


def test_options_of_the_other_family_are_refused():
    tokens = np.ones((1, 3), np.int32)
    config = tiny_huginn()
    model = hla_jax.Model(config, tiny_params(config))
    with pytest.raises(ValueError, match="Huginn has num_steps"):
        hla_jax.forward(model, tokens, exit_at=1)
    with pytest.raises(ValueError, match=r"initial_state must be \[1, 3, 24\], found \[1, 3, 2\]"):
        hla_jax.forward(model, tokens, initial_state=np.zeros((1, 3, 2)))
    with pytest.raises(ValueError, match="they need `outer`"):
        looped.run(model.params, config, tokens, exact_stages(config, jnp.arange(3)[None]), None)
    with pytest.raises(ValueError, match="Ouro has exit_at"):
        hla_jax.forward(hla_jax.load(GOLDEN / "ouro-tiny"), tokens, num_steps=2)


def test_random_states_are_a_cut_normal_of_the_published_width():
    config = dataclasses.replace(tiny_huginn(), hidden_size=480, head_dim=160)
    states = np.asarray(huginn.initial_state(config, jnp.arange(400)[None], "float32"))
    width = (2 / (5 * 480)) ** 0.5 * 480**0.5
    assert np.abs(states).max() <= 3 * width
    # A normal distribution that is cut at three standard deviations has 0.98658 of the deviation.
    np.testing.assert_allclose(states.std() / width, 0.98658, atol=0.005)
    np.testing.assert_allclose(states.mean(), 0, atol=0.005)


def lossless(config: HuginnConfig) -> list:
    rest, one = (config.num_loops - 1) * config.hidden_size, config.hidden_size
    trajectory = config.num_loops * config.head_dim
    return [
        hla_jax.FullCache(),
        hla_jax.SharedLoop(32),
        hla_jax.HLA(rank_k=rest, rank_v=rest, rank_loop1=one, window=0),
        hla_jax.LLA(rank_k=trajectory, rank_v=trajectory),
        hla_jax.Evicted(hla_jax.FullCache(), 40),
    ]


@pytest.mark.long
@pytest.mark.parametrize("number", range(5))
def test_a_lossless_cache_decodes_as_the_exact_pass(number, x64):
    """Biases of queries and keys, the layers outside of the loops and the state that each token starts from are all in
    this.
    """
    config = tiny_huginn()
    model = hla_jax.Model(config, tiny_params(config, "float64"))
    tokens = tiny_tokens(config, 2, 11)
    attention = hla_jax.calibrate(model, lossless(config)[number], np.asarray(tokens), dtype="float64")
    exact = hla_jax.forward(model, tokens)
    np.testing.assert_allclose(hla_jax.decode_forced(model, tokens, 4, attention), exact, atol=1e-9)
    np.testing.assert_allclose(hla_jax.forward_swapped(model, tokens, attention), exact, atol=1e-9)


@pytest.mark.long
def test_eviction_drops_tokens_of_the_outer_layers_too():
    config = tiny_huginn()
    model = hla_jax.Model(config, tiny_params(config))
    tokens = tiny_tokens(config, 1, 12)
    attention = hla_jax.Attention(hla_jax.Evicted(hla_jax.FullCache(), budget=6, first=2))
    _, cache = decode.prefill(
        model.params, config, attention, tokens[:, :3], jnp.asarray([3], jnp.int32), tokens.shape[1]
    )
    assert cache.buffers["outer_k"].shape == (config.outer_layers, 1, 6, config.hidden_size)
    through_cache = hla_jax.decode_forced(model, tokens, 3, attention)
    np.testing.assert_allclose(through_cache, hla_jax.forward_swapped(model, tokens, attention), atol=2e-4)


def test_joined_projections_decode_alike():
    config = tiny_huginn()
    model = hla_jax.Model(config, tiny_params(config))
    tokens = tiny_tokens(config, 1, 7)
    joined = dataclasses.replace(model, params=looped.for_decoding(model.params))
    assert "qkv_proj" in joined.params["coda"]
    np.testing.assert_allclose(hla_jax.decode_forced(joined, tokens, 3), hla_jax.forward(model, tokens), atol=1e-3)


def test_more_steps_are_another_function():
    """A planted fault: were `num_steps` ignored, these would agree."""
    config = tiny_huginn()
    model = hla_jax.Model(config, tiny_params(config))
    tokens = tiny_tokens(config, 1, 5)
    at = [np.asarray(hla_jax.forward(model, tokens, num_steps=steps)) for steps in (1, 4, 5)]
    assert np.abs(at[0] - at[1]).max() > 1e-2
    assert np.abs(at[1] - at[2]).max() > 1e-4
    np.testing.assert_array_equal(at[1], hla_jax.forward(model, tokens))

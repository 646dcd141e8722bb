"""OuroConfig: both spellings of transformers read alike; what is missing, wrong or contradictory is refused."""

import json

import pytest

from hla_jax.config import OURO_1P4B, OURO_2P6B, ConfigError, OuroConfig
from tiny import GOLDEN, GOLDEN_MODELS

RAW = json.loads((GOLDEN / "ouro-tiny-gqa" / "config.json").read_text())
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rope_theta",
    "num_key_value_heads",
    "total_ut_steps",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
)


def without(*keys, **changes):
    return {key: value for key, value in (RAW | changes).items() if key not in keys}


def test_reads_every_size():
    config = OuroConfig.from_dict(RAW)
    assert (config.num_layers, config.num_loops, config.head_dim) == (2, 3, 24)
    assert (config.num_heads, config.num_kv_heads) == (4, 2)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (320, 64, 176)
    assert (config.rope_theta, config.rms_norm_eps, config.tie_word_embeddings) == (10000.0, 1e-6, False)
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (2,), 0)
    assert config.heads_per_kv == 2


@pytest.mark.parametrize("name", [*GOLDEN_MODELS, "1.4B", "2.6B"])
def test_written_config_reads_back(name):
    config = {"1.4B": OURO_1P4B, "2.6B": OURO_2P6B}.get(name) or OuroConfig.from_directory(GOLDEN / name)
    written = json.loads(json.dumps(config.to_dict("bfloat16")))
    assert OuroConfig.from_dict(written) == config
    assert written["torch_dtype"] == "bfloat16"
    assert hash(OuroConfig.from_dict(written)) == hash(config)


def test_new_spelling_equals_old():
    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    new = without("rope_theta", "torch_dtype", rope_parameters=rope, dtype="float32")
    assert OuroConfig.from_dict(new) == OuroConfig.from_dict(RAW)


def test_absent_head_dim_is_the_quotient():
    assert OuroConfig.from_dict(without("head_dim")).head_dim == 64 // 4
    with pytest.raises(ConfigError, match=r"head_dim is absent .* 64 .* 3"):
        OuroConfig.from_dict(without("head_dim", num_attention_heads=3, num_key_value_heads=1))


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("how", ["absent", "null"])
def test_missing_key_is_named(key, how):
    with pytest.raises(ConfigError, match=f"somewhere.json: .*{key}"):
        OuroConfig.from_dict(without(key) if how == "absent" else RAW | {key: None}, "somewhere.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type must be 'ouro' or 'huginn_raven', found 'llama'"),
        ({"total_ut_steps": 0}, "total_ut_steps must be at least 1, found 0"),
        ({"total_ut_steps": "4"}, "total_ut_steps must be an integer, found '4'"),
        ({"hidden_size": 64.5}, "hidden_size must be an integer, found 64.5"),
        ({"hidden_size": float("inf")}, "hidden_size must be an integer, found inf"),
        ({"vocab_size": True}, "vocab_size must be an integer, found True"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a number"),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings must be true or false, found 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads, found 4 and 3"),
        ({"head_dim": 15}, "head_dim must be even .* found 15"),
        ({"rope_theta": -1.0}, "rope_theta must be a positive number"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta is 10000.0 but rope_parameters.rope_theta is 5.0"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, "only unscaled rotary embeddings .*yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "only unscaled rotary embeddings .*linear"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', found 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must all be 'full_attention'"),
        ({"num_hidden_layers": 32}, "layer_types names 2 layers, num_hidden_layers says 32"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ({"pad_token_id": -1}, "pad_token_id must be a token id"),
    ],
)
def test_bad_value_is_refused(changes, message):
    with pytest.raises(ConfigError, match=f"^c.json: {message}"):
        OuroConfig.from_dict(RAW | changes, "c.json")


@pytest.mark.parametrize(("written", "read"), [(None, ()), (0, (0,)), ([0, 2], (0, 2))])
def test_eos_is_none_one_or_many(written, read):
    config = OuroConfig.from_dict(RAW | {"eos_token_id": written})
    assert config.eos_token_ids == read
    assert config.to_dict("float32")["eos_token_id"] == written


@pytest.mark.parametrize(("content", "message"), [("{", "not valid JSON"), ("[1]", "expected a JSON object")])
def test_damaged_file_is_named(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=rf"config\.json: {message}"):
        OuroConfig.from_directory(tmp_path)


def test_absent_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        OuroConfig.from_directory(tmp_path)

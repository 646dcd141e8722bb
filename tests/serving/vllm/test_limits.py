"""What is not served is refused before anything is loaded, in one message that says what to pass instead."""

import json
import shutil

import pytest

pytest.importorskip("vllm", reason="the plugin runs in vLLM's environment")

from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

import hla_jax
from serving.vllm.conftest import EXACT

SCHEMES = {
    "full": {},
    "hla": {"hla_config": {"rank_k": 64, "rank_v": 64, "rank_loop1": 32, "window": 16}},
    "lla": {"lla_config": {"rank_k": 24, "rank_v": 40}},
}


@pytest.fixture
def directory(tmp_path):
    """(scheme, changes of config.json) -> a directory with a configuration and no weights."""

    def make(name, **changes):
        load_general_plugins()
        for file in hla_jax.NANO.glob("*.json"):
            shutil.copy(file, tmp_path)
        kind = {"full": "Ouro", "hla": "OuroHLA", "lla": "OuroLLA"}[name]
        config = json.loads((tmp_path / "config.json").read_text())
        config |= {"architectures": [f"{kind}ForCausalLM"], **SCHEMES[name], **changes}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return make


def refused(directory, **options):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the callers look at the message)
        EngineArgs(model=str(directory), dtype="float32", max_model_len=256, **options).create_engine_config()
    return str(error.value)


def test_what_is_served_is_not_refused(directory):
    for name in SCHEMES:
        exact = EXACT if name != "full" else {}
        config = EngineArgs(model=str(directory(name)), dtype="float32", max_model_len=256, **exact)
        made = config.create_engine_config()
        assert made.model_config.architecture.startswith("Ouro")


@pytest.mark.parametrize("name", ["hla", "lla"])
def test_one_message_names_every_flag(directory, name):
    message = refused(directory(name))
    assert "--no-enable-prefix-caching" in message
    assert "--no-enable-chunked-prefill" in message


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        (dict(enable_prefix_caching=True, enable_chunked_prefill=False), "pass --no-enable-prefix-caching"),
        (dict(enable_prefix_caching=False, enable_chunked_prefill=True), "pass --no-enable-chunked-prefill"),
        (
            dict(enable_prefix_caching=False, enable_chunked_prefill=True, max_num_batched_tokens=64),
            "pass --max-num-batched-tokens 256 or more",
        ),
        (EXACT | dict(speculative_config={"method": "ngram", "num_speculative_tokens": 2}), "no --speculative-config"),
        (EXACT | dict(kv_cache_dtype="fp8"), "pass --kv-cache-dtype auto"),
        (EXACT | dict(pipeline_parallel_size=2), "pass --pipeline-parallel-size 1"),
        (EXACT | dict(tensor_parallel_size=3), "--tensor-parallel-size 3 must divide the 8 heads"),
        (EXACT | dict(disable_hybrid_kv_cache_manager=True), "pass --no-disable-hybrid-kv-cache-manager"),
        (EXACT | dict(scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler"), "pass no --scheduler-cls"),
        (EXACT | dict(enable_lora=True), "pass no --enable-lora"),
    ],
)
def test_flags(directory, options, flag):
    assert flag in refused(directory("hla"), **options)


def test_float16(directory):
    with pytest.raises(ValueError, match="pass --dtype bfloat16"):
        EngineArgs(model=str(directory("hla")), dtype="float16", max_model_len=256, **EXACT).create_engine_config()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("hla", {"early_exit_threshold": 0.5}, "set early_exit_threshold to 1.0"),
        ("lla", {"lla_config": {"rank_k": 24, "rank_v": 40, "first_pass": "exact"}}, 'export it with "latent"'),
        ("lla", {"lla_config": {"rank_k": 24, "rank_v": 40, "full_memory": True}}, "full_memory: export it without"),
        ("full", {"low_bit_config": {"bits": 4}}, "low_bit_config is a scheme that only hla_jax runs"),
        ("hla", {"eviction_config": {"budget": 9, "first": 2}}, "eviction_config is a scheme that only hla_jax runs"),
        ("hla", {"hla_config": {"rank_k": 64}}, "hla_config: missing"),
        ("hla", {"total_ut_steps": None}, "missing keys total_ut_steps"),
        (
            "hla",
            {"hla_config": None},
            "OuroHLAForCausalLM has the cache scheme hla, but config.json has the entries of full",
        ),
    ],
)
def test_configurations(directory, name, changes, message):
    assert message in refused(directory(name, **changes), **EXACT)

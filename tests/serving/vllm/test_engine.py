"""vLLM's engine against JAX, from exports of the embedded model."""

import shutil

import numpy as np
import pytest

pytest.importorskip("vllm", reason="the plugin runs in vLLM's environment")

from vllm import SamplingParams

import hla_jax
from serving.vllm.conftest import NEW, as_prompts, free_blocks, scheduler

GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module", params=["full", "hla", "lla", "absorbed", "folded"])
def running(request, served, engine):
    """An engine with plenty of room, and what it should say."""
    found = served(request.param)
    return engine(found.directory), found


def tokens_of(outputs):
    return [list(out.outputs[0].token_ids) for out in outputs]


def test_tokens_and_logprobs_are_those_of_jax(running):
    llm, expected = running
    before = free_blocks(llm)
    outputs = llm.generate(as_prompts(expected.prompts), GREEDY, use_tqdm=False)
    assert tokens_of(outputs) == expected.tokens
    for out, logprobs in zip(outputs, expected.logprobs, strict=True):
        for step, row in zip(out.outputs[0].logprobs, logprobs, strict=True):
            assert len(step) >= 3
            for token, found in step.items():
                np.testing.assert_allclose(found.logprob, row[token], atol=2e-4)
    assert free_blocks(llm) == before


def test_requests_that_come_and_go(running):
    """Prompts join a batch that decodes, some are aborted: the others say what they always do."""
    llm, expected = running
    engine, before, found = llm.llm_engine, free_blocks(llm), {}
    waiting = list(enumerate(expected.prompts))
    mixed = steps = 0
    names = {}
    while waiting or engine.has_unfinished_requests():
        for number, prompt in waiting[:2]:
            names[number] = engine.add_request(str(number), {"prompt_token_ids": prompt}, GREEDY)
        mixed += bool(waiting) and len(scheduler(llm).running) > 0
        waiting = waiting[2:]
        for out in engine.step():
            if out.finished:
                found[int(out.request_id)] = list(out.outputs[0].token_ids)
        steps += 1
        if steps == 6:
            engine.abort_request(["1", "6"])
        if steps == 20:
            engine.abort_request([str(len(expected.prompts) - 1)])
    assert mixed > 5
    aborted = {1, 6, len(expected.prompts) - 1}
    assert {n: t for n, t in found.items() if n not in aborted} == {
        n: t for n, t in enumerate(expected.tokens) if n not in aborted
    }
    assert free_blocks(llm) == before


def test_samples_seeds_and_stops(running):
    llm, expected = running
    prompts = as_prompts(expected.prompts[10:13])
    sample = lambda seed: SamplingParams(temperature=1.0, seed=seed, n=3, max_tokens=8, ignore_eos=True)
    once, again, other = (llm.generate(prompts, sample(seed), use_tqdm=False) for seed in (7, 7, 8))
    for a, b in zip(once, again, strict=True):
        assert [x.token_ids for x in a.outputs] == [x.token_ids for x in b.outputs]
        assert len({tuple(x.token_ids) for x in a.outputs}) == 3
    assert tokens_of(other) != tokens_of(once)

    tokens = expected.tokens[10]
    stop = llm.get_tokenizer().decode(tokens[5:7])
    (stopped,) = llm.generate(
        prompts[:1], SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, stop=[stop]), use_tqdm=False
    )
    assert stopped.outputs[0].finish_reason == "stop"
    assert stopped.outputs[0].stop_reason == stop
    assert len(stopped.outputs[0].token_ids) <= 7
    assert tokens[: len(stopped.outputs[0].token_ids)] == list(stopped.outputs[0].token_ids)


def count_preemptions(planner, monkeypatch, preempted, label):
    real = planner._preempt_request

    def counted(*args, **options):
        preempted.append(label)
        return real(*args, **options)

    monkeypatch.setattr(planner, "_preempt_request", counted)


@pytest.mark.parametrize(("name", "blocks"), [("hla", 60), ("lla", 40)])
@pytest.mark.parametrize("how", ["greedy", "seeded"])
def test_preempted_requests_say_what_they_would_have(served, engine, monkeypatch, name, blocks, how):
    """A pool for a few of the requests: some lose their cache, and are replayed."""
    expected = served(name)
    prompts = as_prompts(expected.prompts[6:16])
    params = [
        SamplingParams(temperature=float(how == "seeded"), seed=n, max_tokens=40, ignore_eos=True, logprobs=0)
        for n in range(10)
    ]
    preempted = []
    found = []
    for pool in (2000, blocks):
        llm = engine(expected.directory, num_gpu_blocks_override=pool)
        count_preemptions(scheduler(llm), monkeypatch, preempted, pool)
        before = free_blocks(llm)
        found.append(llm.generate(prompts, params, use_tqdm=False))
        assert free_blocks(llm) == before
    assert 2000 not in preempted
    assert blocks in preempted
    assert tokens_of(found[0]) == tokens_of(found[1])
    for calm, pressed in zip(*found, strict=True):
        ours, theirs = (
            [x.logprob for step in out.outputs[0].logprobs for x in step.values()] for out in (calm, pressed)
        )
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_a_prompt_takes_the_window_only(served, engine):
    """While a long prompt is read, its window has pages for W + 1 tokens, not for all of it."""
    llm = engine(served("hla").directory, num_gpu_blocks_override=60)
    llm.llm_engine.add_request("long", {"prompt_token_ids": [5] * 240}, GREEDY)
    llm.llm_engine.step()
    manager = scheduler(llm).kv_cache_manager
    held = manager.block_pool.num_gpu_blocks - 1 - manager.block_pool.get_num_free_blocks()
    groups = scheduler(llm).kv_cache_config.kv_cache_groups
    windows = [group for group in groups if type(group.kv_cache_spec).__name__ == "WindowSpec"]
    latents = sum(-(-240 // group.kv_cache_spec.block_size) for group in groups if group not in windows)
    assert len(windows) == 4
    assert latents + 4 <= held <= latents + 4 * 3
    llm.llm_engine.abort_request(["long"])


def test_maps_only_directories_find_their_base(served, engine, tmp_path):
    expected = served("hla")
    model = hla_jax.load(expected.directory, dtype="float32")
    base = tmp_path / "base"
    shutil.copytree(hla_jax.NANO, base)
    maps = tmp_path / "maps"
    hla_jax.export(hla_jax.load(base, dtype="float32"), model.attention, maps, maps_only=True)
    llm = engine(maps)
    outputs = llm.generate(as_prompts(expected.prompts), GREEDY, use_tqdm=False)
    assert tokens_of(outputs) == expected.tokens

    damaged = bytearray((base / "model.safetensors").read_bytes())
    damaged[-1] ^= 1
    (base / "model.safetensors").write_bytes(damaged)
    with pytest.raises(ValueError, match="belong to another base model"):
        engine(maps)


@pytest.mark.parametrize("name", ["hla", "folded"])
def test_two_processes_split_the_heads(served, engine, name):
    expected = served(name)
    llm = engine(expected.directory, tensor_parallel_size=2, distributed_executor_backend="mp")
    try:
        outputs = llm.generate(as_prompts(expected.prompts), GREEDY, use_tqdm=False)
        assert tokens_of(outputs) == expected.tokens
    finally:
        llm.llm_engine.engine_core.shutdown()

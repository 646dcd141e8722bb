"""The OpenAI-compatible server on loopback: what it says, many at once, some of whom hang up."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time

import pytest

pytest.importorskip("vllm", reason="the plugin runs in vLLM's environment")

import httpx

from serving.vllm.conftest import NEW

BLOCKS = 400


@pytest.fixture(scope="module", params=["full", "hla", "lla"])
def server(request, served, tmp_path_factory):
    expected = served(request.param)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--no-enable-prefix-caching", "--no-enable-chunked-prefill"] if request.param != "full" else []
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", expected.directory]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "ouro", "--dtype", "float32"]
    command += ["--max-model-len", "256", "--enforce-eager", "--num-gpu-blocks-override", str(BLOCKS), *flags]
    command += ["--kv-cache-memory-bytes", str(64 << 20), "--block-size", "16"]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=dict(os.environ))
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 600
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(1)
        yield url, expected
    finally:
        process.terminate()
        process.wait(60)


def request(prompt, **options):
    fixed = {"model": "ouro", "temperature": 0, "max_tokens": NEW, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": prompt, **fixed, **options}


def gauges(url):
    """The engine's state: running and waiting requests, and the share of blocks in use."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return {name: sum(float(x.split()[-1]) for x in lines if x.startswith(f"vllm:{name}{{")) for name in names}


def test_many_at_once_and_some_hang_up(server):
    """64 requests together, of which every fourth reads three pieces and hangs up: none of the others loses a token,
    and every block is free again."""
    url, expected = server
    prompts = expected.prompts

    async def whole(client, number):
        answer = await client.post(f"{url}/v1/completions", json=request(prompts[number % len(prompts)]))
        answer.raise_for_status()
        return answer.json()["choices"][0]["token_ids"]

    async def hangs_up(client, number):
        body = request(prompts[number % len(prompts)], stream=True, max_tokens=90)
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            pieces = 0
            async for line in answer.aiter_lines():
                pieces += line.startswith("data: {") and bool(json.loads(line[6:])["choices"])
                if pieces == 3:
                    return None

    async def together():
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(timeout=600, limits=limits) as client:
            return await asyncio.gather(*((hangs_up if n % 4 == 1 else whole)(client, n) for n in range(64)))

    answers = asyncio.run(together())
    wrong = [n for n, a in enumerate(answers) if a is not None and a != expected.tokens[n % len(prompts)]]
    assert wrong == []
    assert sum(answer is None for answer in answers) == 16
    for _ in range(120):
        if not any(gauges(url).values()):
            break
        time.sleep(0.5)
    assert gauges(url) == {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0}


def test_text_chat_and_logprobs(server):
    url, _ = server
    text = httpx.post(f"{url}/v1/completions", json=request("import os\n", logprobs=2), timeout=600).json()
    assert len(text["choices"][0]["logprobs"]["top_logprobs"]) == NEW
    messages = {"messages": [{"role": "user", "content": "amber472\n?amber"}]}
    fixed = {k: v for k, v in request("").items() if k != "prompt"}
    chat = httpx.post(f"{url}/v1/chat/completions", json=fixed | messages, timeout=600).json()
    assert chat["usage"]["completion_tokens"] == NEW

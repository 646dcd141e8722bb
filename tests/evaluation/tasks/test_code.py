"""Programs: what is run, what it may do, and how it is scored."""

import shutil
import socket
import subprocess

import pytest

from hla_jax.evaluation import tasks
from hla_jax.evaluation.task import Options
from hla_jax.evaluation.tasks import sandbox


@pytest.fixture
def options(data) -> Options:
    return Options(data=data, run_code=True)


def test_humaneval_scores_the_completed_function(options, tokenizer):
    task = tasks.make("humaneval", options)
    (item,) = task.items(tokenizer)
    assert item.prompt == 'def double(x):\n    """Twice x."""\n'
    results = {
        "    return 2 * x\n": ("passed", 1),
        "```python\ndef double(x):\n    return 2 * x\n```\nThat is it.": ("passed", 1),
        "Here:\n```python\n    return 2 * x\n```": ("passed", 1),
        "    return x\n": ("AssertionError", 0),
        "    return (2 * x": ("SyntaxError", 0),
        "    import sys; sys.exit(0)\n": ("SystemExit: 0", 0),
    }
    for text, (result, correct) in results.items():
        score = task.score(item, text)
        assert score["result"].startswith(result), text
        assert (score["correct"], score["answered"]) == (correct, True)
    assert task.score(item, "\n")["answered"] is False


def test_mbpp_shows_its_three_examples_and_asks_its_test_set(options, tokenizer):
    task = tasks.make("mbpp", options)
    first, last = task.items(tokenizer)
    assert (first.id, last.id) == ("11", "510")
    shown = first.prompt.split("[BEGIN]\n")
    assert [part.split("\n[DONE]")[0] for part in shown[1:4]] == [f"def f{n}():\n  return {n}" for n in (2, 3, 4)]
    assert shown[-1] == ""
    assert "Write f11. Your code should pass these tests:\n\nassert f11() == 11" in first.prompt
    assert task.score(first, "def f11():\n    return 11\n")["correct"] == 1
    assert task.score(first, "def f11():\n    return 12\n")["correct"] == 0


@pytest.mark.parametrize(
    ("program", "result"),
    [
        ("open('mine', 'w').write('x'); assert open('mine').read() == 'x'", "passed"),
        ("import os; os._exit(0)", "ended early"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("x = 'a' * 10**10", "MemoryError"),
        ("import subprocess, sys; subprocess.run([sys.executable, '-c', ''])", "PermissionError"),
        ("import os; os.kill(os.getppid(), 0)", "PermissionError"),
        ("import ctypes; ctypes.CDLL(None)", "PermissionError"),
        ("import os; assert 'PATH' not in os.environ", "passed"),
        ("import numpy", "ModuleNotFoundError"),
        ("import sys; assert not any(len(word) == 32 for word in sys.orig_argv)", "passed"),
    ],
)
def test_a_program_may_do_little(program, result):
    assert sandbox.run(program).startswith(result)


def test_a_program_cannot_change_files_elsewhere(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    for program in (f"open({str(kept)!r}, 'a')", f"import os; os.remove({str(kept)!r})", f"open({str(kept)!r}, 'w')"):
        assert sandbox.run(program).startswith("PermissionError")
    assert kept.read_text() == "as it was"


def test_a_program_cannot_reach_a_server():
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"import socket; socket.create_connection({server.getsockname()})"
        assert sandbox.run(program).startswith("PermissionError")


def test_a_program_has_no_network_where_the_system_allows_that():
    command = shutil.which("unshare")
    if not command or subprocess.run([command, "--user", "--net", "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("users may not leave the network here")
    devices = "[line.split(':')[0].strip() for line in open('/proc/net/dev').read().splitlines()[2:]]"
    assert sandbox.run(f"assert {devices} == ['lo']") == "passed"


def test_a_program_that_does_not_end_is_ended():
    assert sandbox.run("while True: pass", seconds=0.5) == "timeout"

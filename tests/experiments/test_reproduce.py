"""Every command of `experiments/reproduce.md` names a module, flags, files and tasks that exist."""

import ast
import pathlib
import re
import shlex

import pytest

from hla_jax.evaluation import tasks

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "experiments" / "reproduce.md"
COMMANDS = re.findall(r"`(python -m [^`]+)`", PAGE.read_text())


def flags(module: str, seen: frozenset[str] = frozenset()) -> dict[str, str]:
    """Flags that a module of `experiments` defines, itself or by those that it imports: name -> what DEFINE made it."""
    source = ast.parse((ROOT / "experiments" / f"{module}.py").read_text())
    found, imported = {}, set()
    for node in ast.walk(source):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.startswith("DEFINE_"):
            found[node.args[0].value] = node.func.attr
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "experiments":
            imported |= {alias.name for alias in node.names} if node.module == "experiments" else {node.module[12:]}
    for name in imported - seen:
        found |= flags(name, seen | {module, *imported})
    return found


def problems(command: str) -> list[str]:
    """What is wrong with a command line."""
    words = shlex.split(command)
    package, _, module = words[2].partition(".")
    if (
        words[:2] != ["python", "-m"]
        or package != "experiments"
        or not (ROOT / "experiments" / f"{module}.py").exists()
    ):
        return [f"no module {words[2]}"]
    known, wrong = flags(module), []
    for word in words[3:]:
        name, _, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or (name.split(".")[0] not in known and name.removeprefix("no") not in known):
            wrong.append(f"{module} has no flag {word}")
        elif not value and known.get(name) != "DEFINE_bool":
            wrong.append(f"{word} needs a value")
        elif name == "config" and not (ROOT / value).exists():
            wrong.append(f"no config {value}")
        elif name == "tasks":
            wrong += [f"no task {task}" for task in tasks.expand(value.split(",")) if not is_task(task)]
        elif name in ("what", "checks"):
            wrong += [f"no {name} {choice}" for choice in value.split(",") if choice not in choices(name)]
    return wrong


def is_task(name: str) -> bool:
    known = [re.sub(r"\\\{\w+\\\}", r"\\d+", re.escape(known)) for known in tasks.NAMES]
    return name.startswith(tasks.LM_EVAL) or any(re.fullmatch(pattern, name) for pattern in known)


def choices(flag: str) -> set[str]:
    """Functions of the modules that a flag chooses from, without importing what they need."""
    files = {"what": ("analyses", "sweeps"), "checks": ("verification",)}[flag]
    trees = [ast.parse((ROOT / "hla_jax" / "analysis" / f"{file}.py").read_text()) for file in files]
    return {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)} | {"all", "steps"}


def test_the_page_has_every_numbered_table():
    hla, lla = PAGE.read_text().split("\n## HLA\n")[1].split("\n## LLA\n")
    numbers = lambda text: {
        int(number)
        for row in text.splitlines()
        for kind in re.findall(r"Tables? ([\d, ]+)", row.split("|")[1] if row.startswith("|") else "")
        for number in re.findall(r"\d+", kind)
    }
    assert numbers(hla) == set(range(1, 9))
    assert numbers(lla) == set(range(1, 15))


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_command(command):
    assert problems(command) == []


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("python -m experiments.nothing", "no module"),
        ("python -m experiments.compare --config=configs/nano_compare.py --cels=x", "no flag --cels"),
        ("python -m experiments.compare --config=configs/nothing.py", "no config"),
        ("python -m experiments.compare --config", "needs a value"),
        ("python -m experiments.evaluate --tasks=math500,math501", "no task math501"),
        ("python -m experiments.verify_real --checks=everything", "no checks everything"),
        ("python -m experiments.compare stray", "no flag stray"),
    ],
)
def test_a_wrong_command_is_found(command, found):
    assert any(found in problem for problem in problems(command))


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", PAGE.read_text())
    assert links
    assert [link for link in links if not (PAGE.parent / link).exists()] == []

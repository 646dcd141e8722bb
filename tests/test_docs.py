"""What README, docs and notebooks name exists: links, folders, messages, quoted code."""

import ast
import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("experiments/**/*.md")])
NOTEBOOKS = sorted(ROOT.glob("experiments/notebooks/*.ipynb"))
LARGEST_NOTEBOOK = 300_000
# Said by jax, XLA and the hub.
OTHERS = {"Unable to initialize backend", "RESOURCE_EXHAUSTED", "Unknown flag in XLA_FLAGS", "Unsupported .version"}
OTHERS |= {"outgoing traffic has been disabled", "Cannot allocate memory"}


def markdown_of(path: pathlib.Path) -> str:
    """A page, or the texts of a notebook."""
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    return "\n".join("".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "markdown")


def cells(notebook: pathlib.Path) -> list[dict]:
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


@pytest.mark.parametrize("path", [*PAGES, *NOTEBOOKS], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    text = re.sub(r"```.*?```", "", markdown_of(path), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    relative = [target.split("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]
    assert [target for target in relative if not (path.parent / target).exists()] == []


def test_the_tree_names_what_there_is():
    """The README's annotated tree: every line's first word exists, and no room of the package is left out."""
    tree = re.search(r"## The house\n+((?: {4}.*\n)+)", (ROOT / "README.md").read_text(encoding="utf-8"))[1]
    folders, named = [], set()
    for line in tree.splitlines():
        indent, word = re.match(r"( *)(\S+)", line).groups()
        folders = [*folders[: len(indent) // 2 - 2], word]
        path = ROOT.joinpath(*folders)
        assert path.exists(), f"{path.relative_to(ROOT)} is in the tree, and does not exist"
        named.add(path)
    rooms = {path for path in (ROOT / "hla_jax").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert rooms - named == set()


def test_the_page_quotes_the_example():
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/add_a_scheme.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    assert code == (ROOT / "docs/loop_mean.py").read_text(encoding="utf-8")


def test_messages_are_those_of_the_code():
    """Every piece of a message in the left column of the troubleshooting page is in the package's texts."""
    said = "\n".join(said_by(path) for path in (ROOT / "hla_jax").rglob("*.py"))
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    left = "\n".join(re.findall(r"^\| (.*?) \|", page, re.MULTILINE))
    messages = re.findall("`(.+?)`", left)
    assert len(messages) > 20
    pieces = [piece.strip() for message in messages for piece in re.split(r"\.\.\.|\bowner/name\b|\b[NM]\b", message)]
    checked = [piece for piece in pieces if len(piece) > 8 and not any(other in piece for other in OTHERS)]
    assert [piece for piece in checked if piece not in said] == []


def said_by(path: pathlib.Path) -> str:
    """The string literals of a file, f-strings with `{}` for what is put in."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return "\n".join(found)


def addresses(notebook: pathlib.Path) -> set[str]:
    """Where the link and the install cell say that the repository is: owner and name."""
    return set(re.findall(r"github(?:\.com)?/([\w-]+/\w+)", notebook.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_small_and_of_one_form(path):
    assert path.stat().st_size < LARGEST_NOTEBOOK
    code = ["".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "code"]
    assert "%pip install" in code[0]
    assert code[0] in ["".join(cell["source"]) for cell in cells(NOTEBOOKS[0])], "all install in the same way"
    assert sum(bool(re.match("MODEL = hla_jax.NANO", line)) for cell in code for line in cell.splitlines()) == 1
    assert not re.search(r"\babsl\b|^from (?:experiments|configs|tests)\b", "\n".join(code), re.MULTILINE)
    assert f"/blob/main/experiments/notebooks/{path.name})" in markdown_of(path)
    assert addresses(path) == addresses(NOTEBOOKS[0])
    assert len(addresses(path)) == 1
    outputs = [output for cell in cells(path) for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]

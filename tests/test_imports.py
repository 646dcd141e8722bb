"""What an import costs: the public names need only the packages that the project is built on, and no floor looks up."""

import ast
import pathlib
import subprocess
import sys

import pytest

import hla_jax

ROOT = pathlib.Path(hla_jax.__file__).parent
EXTRAS = ("dacite", "hypothesis", "jaxtyping", "lm_eval", "math_verify", "matplotlib", "ml_collections", "tensorboardX")
FLOORS = (
    ("compat", "config", "sharding", "tensor_files", "attention_files", "tokenizer", "banner"),
    ("kernels", "models"),
    ("attention",),
    ("model",),
    ("data",),
    ("calibration",),
    ("training", "generation"),
    ("analysis", "evaluation"),
    ("serving",),
    ("recipes",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def test_public_names_import_without_extras():
    script = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {EXTRAS}:
            raise ImportError(f"{{name}} is an extra")
sys.meta_path.insert(0, Blocked())
import hla_jax
assert "jax" not in sys.modules, "import hla_jax is lazy"
for name in hla_jax.__all__:
    getattr(hla_jax, name)
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT.parent)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'LLAMA'"):
        _ = hla_jax.LLAMA


def test_nothing_imports_upwards():
    upwards = []
    for path in sorted(set(ROOT.rglob("*.py")) - {ROOT / "__init__.py"}):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom) and node.module == "hla_jax":
                names = [f"hla_jax.{alias.name}" for alias in node.names]
            for name in names:
                if name and name.startswith("hla_jax.") and FLOOR[name.split(".")[1]] > FLOOR[room]:
                    upwards.append(f"{path.relative_to(ROOT)} imports {name}")
    assert upwards == []

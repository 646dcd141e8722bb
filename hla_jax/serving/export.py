"""Export: a model and its latent cache as a Hugging Face directory that `hla_jax.load`, PyTorch and vLLM read."""

from __future__ import annotations

import os
import pathlib
import shutil

from hla_jax import attention_files, tensor_files
from hla_jax.attention import registry
from hla_jax.attention.eviction import Evicted
from hla_jax.attention.scheme import Attention, Scheme
from hla_jax.config import HuginnConfig, ModelConfig, OuroConfig
from hla_jax.model import Model
from hla_jax.models import weights

_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)

_TORCH = pathlib.Path(__file__).with_name("torch")
_TORCH_SCHEMES = ("full_cache", "hla", "lla")
_TORCH_FAMILIES: dict[type[ModelConfig], tuple[str, str]] = {
    OuroConfig: ("ouro", "OuroConfig"),
    HuginnConfig: ("huginn", "RavenConfig"),
}
"""How a family's files end, and its class of sizes; those that begin with `looped` are of all."""
_SUFFIX = "ForCausalLM"


class ExportError(ValueError):
    """A model and a scheme cannot be written in the interchange format, or not there."""


def export(
    model: Model,
    attention: Attention | None,
    directory: str | os.PathLike[str],
    maps_only: bool = False,
    *,
    base_id: str | None = None,
    overwrite: bool = False,
    torch_code: bool = False,
) -> None:
    """Writes a model with the maps of a scheme in the interchange format.

    The directory appears complete or not at all. Tensors keep their dtypes; tokenizer files and generation_config.json
    are copied from where the model was loaded.

    Args:
      attention: scheme and maps; None takes the model's own. With the full cache the plain model is written.
      directory: must not exist or be empty.
      maps_only: leaves the model's own tensors out and names the base instead: `model.path`, with a checksum.
      base_id: hub id to name the base by, instead of its local path.
      overwrite: allows `directory` to be an earlier export, which is then replaced.
      torch_code: adds the PyTorch model, the files of `serving/torch`, so that transformers loads the directory with
        `AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)`. For the full cache, HLA and LLA.

    Raises:
      ExportError: the maps do not fit the scheme, `maps_only` and the weights are not the base's, `torch_code` and the
        PyTorch model does not have the scheme, or `directory` has something that is not an earlier export.
      FileExistsError: `directory` is not empty, and `overwrite` is false.
    """
    attention = model.attention if attention is None else attention
    target = pathlib.Path(directory)
    config = model.config.to_dict(weights.stored_dtype(model.params))
    config |= _scheme_entry(model, attention)
    if torch_code:
        config |= _torch_entry(model.config, attention, config["architectures"][0])
    tensors = weights.pending_params(model.params, model.config)
    if maps_only:
        config |= {attention_files.BASE: _base_entry(model, tensors, attention, target, base_id)}
        tensors = {}
    tensors |= attention_files.pending_maps(model.config, attention.scheme.interchange, attention.params)
    replace = overwrite and target.exists() and any(target.iterdir())
    if replace and not _is_export(target):
        raise ExportError(f"{target}: overwrite replaces earlier exports only; its config.json has no scheme's entry")
    with tensor_files.new_directory(target, replace) as partial:
        tensor_files.write_json(partial / "config.json", config)
        tensor_files.write_tensors(partial, tensors)
        for name in _COPIED:
            if model.path is not None and (model.path / name).is_file():
                shutil.copyfile(model.path / name, partial / name)
        if torch_code:
            family, _ = _TORCH_FAMILIES[type(model.config)]
            for file in (*_TORCH.glob("looped_*.py"), *_TORCH.glob(f"*_{family}.py")):
                shutil.copyfile(file, partial / file.name)


def _scheme_entry(model: Model, attention: Attention) -> dict[str, object]:
    """What `config.json` says of the scheme, once its maps are known to fit."""
    scheme, entries = attention.scheme, registry.to_entries(attention.scheme)
    if not entries:
        return {}
    expected = {name: (model.config.num_layers, *shape) for name, shape in scheme.map_shapes(model.config).items()}
    found = {name: tuple(stack.shape) for name, stack in attention.params.items()}
    for key in sorted(expected.keys() | found.keys()):
        if expected.get(key) != found.get(key):
            raise ExportError(f"map {key}: the scheme implies shape {expected.get(key)}, found {found.get(key)}")
    kind = registry.SCHEMES[scheme.interchange].__name__
    # OuroForCausalLM with HLA is OuroHLAForCausalLM.
    stem = model.config.architecture.removesuffix(_SUFFIX)
    return {"architectures": [f"{stem}{kind if kind != 'FullCache' else ''}{_SUFFIX}"], **entries}


def check_torch(scheme: Scheme) -> None:
    """Raises `ExportError` unless the PyTorch model has a scheme."""
    if isinstance(scheme, Evicted) or scheme.interchange not in _TORCH_SCHEMES:
        raise ExportError(
            f"torch_code: the PyTorch model has the full cache, HLA and LLA, not {type(scheme).__name__}; "
            "export without it"
        )


def _torch_entry(config: ModelConfig, attention: Attention, architecture: str) -> dict[str, object]:
    """Where transformers finds the classes of a directory that brings its own code."""
    check_torch(attention.scheme)
    family, sizes = _TORCH_FAMILIES[type(config)]
    return {
        "auto_map": {
            "AutoConfig": f"configuration_{family}.{sizes}",
            "AutoModelForCausalLM": f"modeling_{family}.{architecture}",
        }
    }


def _base_entry(
    model: Model,
    tensors: dict[str, tensor_files.PendingTensor],
    attention: Attention,
    target: pathlib.Path,
    base_id: str | None,
) -> dict[str, str]:
    """The base model of a maps-only export, once its files are known to be the weights that the maps go with."""
    if not attention.params:
        raise ExportError(f"maps_only needs a scheme with maps, found {type(attention.scheme).__name__}")
    if model.path is None:
        raise ExportError("maps_only needs a base to load again, but this model was made in memory; export it whole")
    base = attention_files.base_directory(model.path).resolve()
    if base == target.resolve():
        raise ExportError(f"{target}: a maps-only export cannot replace the base it refers to")
    stored = tensor_files.open_tensors(base)
    for name, tensor in tensors.items():
        here = tensor.read()
        if name not in stored or stored[name].read().astype(here.dtype).tobytes() != here.tobytes():
            raise ExportError(f"tensor {name} is not that of {base}; maps_only would lose the change, export it whole")
    named = {"path": str(base)} if base_id is None else {"id": base_id}
    return {**named, "sha256": attention_files.fingerprint(base)}


def _is_export(directory: pathlib.Path) -> bool:
    return (directory / "config.json").is_file() and bool(attention_files.read_attention(directory))

"""The maps of an attention scheme in a Hugging Face directory: tensors, the entry in `config.json`, the base model.

A merged directory has the model's tensors and the maps `{attention}.{scheme}.{name}`, where the family says where a
layer's attention is: `model.layers.{layer}.self_attn` in Ouro, `transformer.core_block.{layer}.attn` in Huginn. A
maps-only directory has the maps, and in `config.json` a `base_model` entry that says which model they belong to.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import huggingface_hub
import huggingface_hub.errors
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from hla_jax import sharding, tensor_files
from hla_jax.config import FAMILIES, ModelConfig, read_json
from hla_jax.tensor_files import PendingTensor, WeightsError

SCHEMES = ["hla", "lla", "head_latent", "layer_latent", "low_bit", "shared_loop"]
"""Whose maps and entries are looked for; `attention.registry.register` adds to them."""
EVICTION = "eviction_config"
BASE = "base_model"

_ATTENTIONS = (re.escape(family.attention_module).replace(r"\{layer\}", r"\d+") for family in FAMILIES.values())
_MAP = re.compile(rf"(?:{'|'.join(_ATTENTIONS)})\.(\w+)\.\w+")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def is_map(tensor: str) -> bool:
    """Whether a tensor is an attention scheme's rather than the model's."""
    found = _MAP.fullmatch(tensor)
    return found is not None and found[1] in SCHEMES


def map_names(config: ModelConfig, scheme: str, name: str) -> list[str]:
    """One map's tensors, layer by layer."""
    attention = config.attention_module
    return [f"{attention.format(layer=layer)}.{scheme}.{name}" for layer in range(config.num_layers)]


def local_directory(path_or_hub_id: str | os.PathLike[str]) -> pathlib.Path:
    """A directory as it is, or the local copy of a hub repository ("owner/name"), downloaded if need be.

    Only JSON, safetensors and templates are fetched. Raises `WeightsError` if there is no such directory or repository.
    """
    path = pathlib.Path(path_or_hub_id)
    if path.is_dir():
        return path
    if not _HUB_ID.fullmatch(str(path_or_hub_id)):
        raise WeightsError(f"{path}: no such directory")
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(str(path_or_hub_id), allow_patterns=_HUB_FILES))
    except (huggingface_hub.errors.HfHubHTTPError, huggingface_hub.errors.HFValidationError, OSError) as error:
        raise WeightsError(f"{path_or_hub_id}: no such directory, and as a hub id: {error}") from None


def base_directory(directory: str | os.PathLike[str]) -> pathlib.Path:
    """Where the model's own tensors are: the directory itself, or the checked base of a maps-only directory.

    Raises:
      WeightsError: the base cannot be found, or is not the model that the maps were fitted to.
    """
    directory = pathlib.Path(directory)
    entry = read_json(directory / "config.json").get(BASE)
    if entry is None:
        return directory
    source = entry.get("id", entry.get("path")) if isinstance(entry, dict) else None
    if not isinstance(source, str) or not isinstance(entry.get("sha256"), str):
        raise WeightsError(f"{directory / 'config.json'}: {BASE} must have id or path, and sha256; found {entry!r}")
    try:
        base = local_directory(source)
    except WeightsError as error:
        raise WeightsError(f"{directory / 'config.json'}: {BASE} not found: {error}") from None
    if (found := fingerprint(base)) != entry["sha256"]:
        raise WeightsError(
            f"{directory}: these maps belong to another base model than {base}: "
            f"expected sha256 {entry['sha256']}, found {found}"
        )
    return base


def fingerprint(directory: str | os.PathLike[str]) -> str:
    """Identity of a model's own tensors, however they are spread over files.

    The SHA-256 of one line per tensor in order of name, `["<name>","<dtype>",[<shape>],"<SHA-256 of its bytes>"]` and a
    newline, with dtypes as safetensors spells them. Maps are left out.
    """
    lines = hashlib.sha256()
    for name, tensor in sorted(tensor_files.open_tensors(directory).items()):
        if not is_map(name):
            digest = hashlib.sha256(tensor.read().tobytes()).hexdigest()
            lines.update(json.dumps([name, tensor.dtype, tensor.shape, digest], separators=(",", ":")).encode() + b"\n")
    return lines.hexdigest()


def read_attention(directory: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """The entries of a scheme in an exported directory's `config.json`; none if it is a plain model.

    Raises:
      WeightsError: `config.json` has the entries of two schemes, an entry that is no object, or tensors but no entry.
    """
    directory = pathlib.Path(directory)
    config = read_json(directory / "config.json")
    entries = {name: config[name] for name in (f"{scheme}_config" for scheme in SCHEMES) if name in config}
    if len(entries) > 1:
        raise WeightsError(f"{directory / 'config.json'}: expected one scheme, found {', '.join(entries)}")
    if EVICTION in config:
        entries |= {EVICTION: config[EVICTION]}
    for name, fields in entries.items():
        if not isinstance(fields, dict):
            raise WeightsError(f"{directory / 'config.json'}: {name} must be an object, found {fields!r}")
    if not entries and (maps := sorted(filter(is_map, tensor_files.open_tensors(directory)))):
        raise WeightsError(f"{directory}: has the map {maps[0]}, but config.json has no entry for its scheme")
    return entries


def load_maps(
    path: str | os.PathLike[str],
    config: ModelConfig,
    scheme: str,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    axes: Mapping[str, sharding.Axes] | None = None,
) -> dict[str, Array]:
    """Reads the maps of an attention scheme, stacked over layers.

    Args:
      path: a directory, or one safetensors file.
      config: of the model.
      scheme: its name, as in `SCHEMES`.
      shapes: each map's shape in one layer.
      dtype: to convert to; None keeps what is stored.
      mesh: devices to spread the maps over, each reading its own part. None: the default device.
      axes: logical axes of each map of one layer; a map without is whole on every device.

    Returns:
      name -> [L, *shape].

    Raises:
      WeightsError: maps are missing, unknown, of another shape or not floating point, or a file is damaged.
    """
    stored = {name: tensor for name, tensor in tensor_files.open_tensors(path).items() if is_map(name)}
    names = {name: map_names(config, scheme, name) for name in shapes}
    tensor_files.check_names(path, stored, [tensor for stack in names.values() for tensor in stack])
    maps = {}
    for name, shape in shapes.items():
        sources = [stored[tensor] for tensor in names[name]]
        held = tensor_files.common_dtype(sources, tuple(shape), dtype)
        placed = sharding.maps(shapes, axes or {}, config.num_layers, mesh)[name] if mesh else None
        maps[name] = tensor_files.read_array(sources, True, held, placed)
    return maps


def pending_maps(config: ModelConfig, scheme: str, maps: Mapping[str, Array]) -> dict[str, PendingTensor]:
    """The tensors to write maps [L, ...] as."""
    return {
        tensor: tensor_files.pending_layer(stack, layer)
        for name, stack in maps.items()
        for layer, tensor in enumerate(map_names(config, scheme, name))
    }

"""One table per model family: parameter <-> Hugging Face tensor, its logical axes, how it starts.

From the table come the abstract parameters, random initialisation, shardings, reading and writing. Parameters are a nested dict in
torch layout [out, in], layers stacked on a leading axis:

    {"embed_tokens": [V, d], "layers": {"q_proj": [L, H*dh, d], ...}, "norm": [d], "early_exit_gate": {"weight": [1, d], "bias": [1]},
     "lm_head": [V, d]}                                  (no lm_head when config.tie_word_embeddings)
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from hla_jax import tensor_files
from hla_jax.config import OuroConfig
from hla_jax.tensor_files import PendingTensor, StoredTensor, WeightsError

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A row of the table.

    Attributes:
      path: where the parameter is in the tree, keys joined by ".".
      name: the Hugging Face tensor, with "{layer}" where one tensor of every layer is stacked.
      axes: the logical axis of each dimension; sizes follow from them and the config.
      start: its value at random initialisation: "normal" (a matrix), "embedding", "one", "post_norm" or "zero".
    """

    path: str
    name: str
    axes: tuple[str, ...]
    start: str

    @property
    def stacked(self) -> bool:
        return self.axes[0] == "layers"

    def names(self, config: OuroConfig) -> list[str]:
        """The tensors that make up this parameter, in the order of the stack."""
        return [self.name.format(layer=layer) for layer in range(config.num_layers)] if self.stacked else [self.name]

    def shape(self, config: OuroConfig) -> tuple[int, ...]:
        sizes = {"vocab": config.vocab_size, "embed": config.hidden_size, "layers": config.num_layers, "mlp": config.intermediate_size,
                 "heads": config.num_heads * config.head_dim, "kv_heads": config.num_kv_heads * config.head_dim, "gate": 1}
        return tuple(sizes[axis] for axis in self.axes)


def _layer(module: str, axes: tuple[str, ...], start: str = "normal") -> Parameter:
    return Parameter(f"layers.{module.split('.')[-1]}", f"model.layers.{{layer}}.{module}.weight", ("layers", *axes), start)


OURO = (
    Parameter("embed_tokens", "model.embed_tokens.weight", ("vocab", "embed"), "embedding"),
    _layer("input_layernorm", ("embed",), "one"),
    _layer("input_layernorm_2", ("embed",), "post_norm"),
    _layer("post_attention_layernorm", ("embed",), "one"),
    _layer("post_attention_layernorm_2", ("embed",), "post_norm"),
    _layer("self_attn.q_proj", ("heads", "embed")),
    _layer("self_attn.k_proj", ("kv_heads", "embed")),
    _layer("self_attn.v_proj", ("kv_heads", "embed")),
    _layer("self_attn.o_proj", ("embed", "heads")),
    _layer("mlp.gate_proj", ("mlp", "embed")),
    _layer("mlp.up_proj", ("mlp", "embed")),
    _layer("mlp.down_proj", ("embed", "mlp")),
    Parameter("norm", "model.norm.weight", ("embed",), "one"),
    Parameter("early_exit_gate.weight", "model.early_exit_gate.weight", ("gate", "embed"), "normal"),
    Parameter("early_exit_gate.bias", "model.early_exit_gate.bias", ("gate",), "zero"),
    Parameter("lm_head", "lm_head.weight", ("vocab", "embed"), "normal"),
)

# Tensor parallelism over "model"; the embedding dimension is left whole, so that a forward pass gathers no weights.
AXIS_RULES: Mapping[str, str | None] = {"vocab": "model", "heads": "model", "kv_heads": "model", "mlp": "model"}

# Tensors of an attention scheme, beside the model's own in an exported directory.
_MAP = re.compile(r"model\.layers\.\d+\.self_attn\.(hla|lla)\.\w+")
_FLOAT_TAGS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


def parameters(config: OuroConfig) -> tuple[Parameter, ...]:
    """The rows of the family's table that a model of these sizes has."""
    return tuple(row for row in OURO if not (row.path == "lm_head" and config.tie_word_embeddings))


def abstract_params(config: OuroConfig, dtype: DTypeLike) -> Params:
    """The parameter tree as `jax.ShapeDtypeStruct`."""
    return _tree({row.path: jax.ShapeDtypeStruct(row.shape(config), jnp.dtype(dtype)) for row in parameters(config)})


def logical_axes(config: OuroConfig) -> Params:
    """The parameter tree with each leaf's tuple of logical axes."""
    return _tree({row.path: row.axes for row in parameters(config)})


def shardings(config: OuroConfig, mesh: Mesh, rules: Mapping[str, str | None] = AXIS_RULES) -> Params:
    """The parameter tree with each leaf's `NamedSharding`.

    `rules` maps logical axes to mesh axes. A dimension stays whole if its axis has no rule, the mesh has no such axis or does not divide
    the heads (or the size) evenly.
    """
    whole_units = {"heads": config.num_heads, "kv_heads": config.num_kv_heads}

    def spec(row: Parameter) -> PartitionSpec:
        def place(axis: str, size: int) -> str | None:
            name = rules.get(axis)
            return name if name in mesh.shape and whole_units.get(axis, size) % mesh.shape[name] == 0 else None
        return PartitionSpec(*(place(axis, size) for axis, size in zip(row.axes, row.shape(config), strict=True)))

    return _tree({row.path: NamedSharding(mesh, spec(row)) for row in parameters(config)})


def init_params(config: OuroConfig, key: PRNGKeyArray, dtype: DTypeLike = jnp.float32, *, embedding_std: float = 0.02,
                matrix_std: float | None = None, post_norm_gain: float = 1.0) -> Params:
    """Random parameters.

    Args:
      embedding_std: standard deviation of the embeddings.
      matrix_std: of every other matrix; None is 1 / sqrt(inputs).
      post_norm_gain: weights of the two norms after attention and MLP. Small models learn with embeddings of 1 and gains of 0.3:
        otherwise the residual stream drowns the token's identity.
    """
    flat = {}
    for number, row in enumerate(parameters(config)):
        shape = row.shape(config)
        mean, std = start_moments(row, shape, embedding_std, matrix_std, post_norm_gain)
        noise = std * jax.random.normal(jax.random.fold_in(key, number), shape) if std else jnp.zeros(shape)
        flat[row.path] = (mean + noise).astype(dtype)
    return _tree(flat)


def start_moments(row: Parameter, shape: Sequence[int], embedding_std: float = 0.02, matrix_std: float | None = None,
                  post_norm_gain: float = 1.0) -> tuple[float, float]:
    """Mean and standard deviation of a parameter at random initialisation; see `init_params`."""
    matrix = 1 / math.sqrt(shape[-1]) if matrix_std is None else matrix_std
    return {"embedding": (0.0, embedding_std), "normal": (0.0, matrix), "one": (1.0, 0.0), "post_norm": (post_norm_gain, 0.0),
            "zero": (0.0, 0.0)}[row.start]


def load_params(directory: str | os.PathLike[str], config: OuroConfig, dtype: DTypeLike | None = None, mesh: Mesh | None = None,
                rules: Mapping[str, str | None] = AXIS_RULES) -> Params:
    """Reads a model's parameters from a Hugging Face directory, tensor by tensor into their final buffers.

    Args:
      directory: one `model.safetensors`, or shards and their index.
      config: the sizes expected.
      dtype: to convert to; None keeps what is stored.
      mesh: devices to spread the parameters over by `rules`; each part is then read for itself. None is the default device.

    Raises:
      WeightsError: tensors are missing, unknown, in two shards, of another shape than `config` implies, not floating point, or a file is
        damaged. The message names the file, the tensor, what was expected and what was found.
    """
    stored = {name: tensor for name, tensor in tensor_files.open_tensors(directory).items() if not _MAP.fullmatch(name)}
    if config.tie_word_embeddings:
        _drop_redundant_head(stored)
    rows = parameters(config)
    _check_names(directory, [name for row in rows for name in row.names(config)], stored)
    sources = {row.path: [stored[name] for name in row.names(config)] for row in rows}
    dtypes = {}
    for row in rows:
        shape = row.shape(config)
        dtypes[row.path] = _checked_dtype(sources[row.path], shape[1:] if row.stacked else shape, dtype)
    placed = traverse_util.flatten_dict(shardings(config, mesh, rules), sep=".") if mesh else {}
    flat = {}
    # Each tensor is held a second time while it is copied: the largest go first, when little else is resident.
    for row in sorted(rows, key=lambda row: -math.prod(sources[row.path][0].shape)):
        flat[row.path] = _assemble(sources[row.path], row.shape(config), row.stacked, dtypes[row.path], placed.get(row.path))
    return _tree({row.path: flat[row.path] for row in rows})


def save_params(params: Params, config: OuroConfig, directory: str | os.PathLike[str],
                max_shard_bytes: int = tensor_files.MAX_SHARD_BYTES) -> None:
    """Writes parameters and `config.json` as a new Hugging Face directory, one shard in memory at a time.

    Raises:
      FileExistsError: `directory` exists and is not empty.
      WeightsError: `params` is not the tree that `config` describes.
    """
    tensors = pending_tensors(params, config)
    with tensor_files.new_directory(directory) as partial:
        tensor_files.write_json(partial / "config.json", config.to_dict(stored_dtype(params)))
        tensor_files.write_tensors(partial, tensors, max_shard_bytes)


def stored_dtype(params: Params) -> str:
    """The dtype of a model's weights by name, as `config.json` has it."""
    return str(params["embed_tokens"].dtype)


def pending_tensors(params: Params, config: OuroConfig) -> dict[str, PendingTensor]:
    """The tensors that `params` is written as, by Hugging Face name. Raises `WeightsError` if it is not the tree `config` describes."""
    flat = traverse_util.flatten_dict(params, sep=".")
    expected = {row.path: row.shape(config) for row in parameters(config)}
    found = {path: tuple(leaf.shape) for path, leaf in flat.items()}
    if found != expected:
        path = sorted(path for path in expected.keys() | found.keys() if expected.get(path) != found.get(path))[0]
        raise WeightsError(f"parameter {path}: expected shape {expected.get(path, 'none')}, found {found.get(path, 'none')}")
    tensors = {}
    for row in parameters(config):
        leaf = flat[row.path]
        for layer, name in enumerate(row.names(config)):
            tensors[name] = pending(leaf, layer if row.stacked else None)
    return tensors


def pending(leaf: Array | np.ndarray, layer: int | None) -> PendingTensor:
    """A leaf, or one layer of a stacked leaf, to be brought to the host only when it is written."""
    nbytes = leaf.nbytes if layer is None else leaf.nbytes // leaf.shape[0]
    return PendingTensor(nbytes, lambda: np.asarray(leaf if layer is None else leaf[layer]))


def load_maps(path: str | os.PathLike[str], scheme: str, shapes: Mapping[str, tuple[int, ...]], num_layers: int,
              dtype: DTypeLike | None = None) -> dict[str, Array]:
    """Reads the maps of an attention scheme, stacked over layers.

    Args:
      path: a directory, or one safetensors file.
      scheme: "hla" or "lla", as in `model.layers.{layer}.self_attn.{scheme}.{name}`.
      shapes: each map's shape in one layer.
      dtype: to convert to; None keeps what is stored.

    Returns:
      name -> [L, *shape].

    Raises:
      WeightsError: as `load_params`.
    """
    stored = {name: tensor for name, tensor in tensor_files.open_tensors(path).items() if _MAP.fullmatch(name)}
    names = {name: map_names(scheme, name, num_layers) for name in shapes}
    _check_names(path, [tensor for stack in names.values() for tensor in stack], stored)
    maps = {}
    for name, shape in shapes.items():
        sources = [stored[tensor] for tensor in names[name]]
        maps[name] = _assemble(sources, (num_layers, *shape), True, _checked_dtype(sources, shape, dtype), None)
    return maps


def pending_maps(scheme: str, maps: Mapping[str, Array]) -> dict[str, PendingTensor]:
    """The tensors that maps [L, ...] are written as, by their names in the interchange format."""
    return {tensor: pending(stack, layer) for name, stack in maps.items()
            for layer, tensor in enumerate(map_names(scheme, name, stack.shape[0]))}


def map_names(scheme: str, name: str, num_layers: int) -> list[str]:
    """One map's tensors, layer by layer."""
    return [f"model.layers.{layer}.self_attn.{scheme}.{name}" for layer in range(num_layers)]


def _tree(flat: Mapping[str, Any]) -> Params:
    return traverse_util.unflatten_dict(dict(flat), sep=".")


def _assemble(sources: Sequence[StoredTensor], shape: tuple[int, ...], stacked: bool, dtype: np.dtype,
              sharding: NamedSharding | None) -> Array:
    def read(index: tuple[slice, ...]) -> np.ndarray:
        out = _aligned_empty(tuple(len(range(size)[part]) for size, part in zip(shape, index, strict=True)), dtype)
        if stacked:
            for row, source in enumerate(sources[index[0]]):
                out[row] = source.read(index[1:])
        else:
            out[...] = sources[0].read(index)
        return out

    if sharding is None:
        return jax.device_put(read(tuple(slice(None) for _ in shape)))
    return jax.make_array_from_callback(shape, sharding, _read_once(read))


def _read_once(read: Callable[[tuple[slice, ...]], np.ndarray]) -> Callable[[tuple[slice, ...]], np.ndarray]:
    """Devices that hold copies of the same part share one read."""
    parts: dict[str, np.ndarray] = {}

    def shared(index: tuple[slice, ...]) -> np.ndarray:
        if str(index) not in parts:
            parts[str(index)] = read(index)
        return parts[str(index)]

    return shared


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory on a 64-byte boundary: there JAX's CPU backend takes a numpy buffer over instead of copying it."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + nbytes].view(dtype).reshape(shape)


def _checked_dtype(sources: Sequence[StoredTensor], shape: tuple[int, ...], dtype: DTypeLike | None) -> np.dtype:
    """The dtype to hold `sources` in, after a look at their headers."""
    for source in sources:
        if source.shape != shape:
            raise WeightsError(f"{source.file}: tensor {source.name} expected shape {list(shape)} by config.json, found {list(source.shape)}")
        if source.dtype not in _FLOAT_TAGS:
            raise WeightsError(f"{source.file}: tensor {source.name} expected dtype {', '.join(_FLOAT_TAGS)}, found {source.dtype}")
        if dtype is None and source.dtype != sources[0].dtype:
            raise WeightsError(f"{source.file}: tensor {source.name} expected dtype {sources[0].dtype} as {sources[0].name}, found {source.dtype}; "
                               "give a dtype to convert to")
    wanted = jnp.dtype(_FLOAT_TAGS[sources[0].dtype] if dtype is None else dtype)
    if wanted == np.float64 and not jax.config.jax_enable_x64:
        raise WeightsError(f"{sources[0].file}: tensor {sources[0].name} in float64 needs jax_enable_x64; give a smaller dtype to convert to")
    return wanted


def _drop_redundant_head(stored: dict[str, StoredTensor]) -> None:
    """With tied embeddings `lm_head` is not a parameter; some checkpoints ship it all the same, and then it must be the same numbers."""
    head, embedding = stored.pop("lm_head.weight", None), stored.get("model.embed_tokens.weight")
    if head is None or embedding is None:
        return
    same = (head.shape, head.dtype) == (embedding.shape, embedding.dtype)
    step = 4096
    if not same or any(head.read((slice(row, row + step),)).tobytes() != embedding.read((slice(row, row + step),)).tobytes()
                       for row in range(0, head.shape[0], step)):
        raise WeightsError(f"{head.file}: config.json says tie_word_embeddings, expected no lm_head.weight or one identical to "
                           "model.embed_tokens.weight, found another")


def _check_names(path: str | os.PathLike[str], expected: Sequence[str], stored: Mapping[str, StoredTensor]) -> None:
    missing = sorted(set(expected) - stored.keys())
    unknown = sorted(stored.keys() - set(expected))
    for name in unknown:
        _refuse_wrapped(stored[name], set(expected))
    if unknown:
        raise WeightsError(f"{stored[unknown[0]].file}: unknown tensors {_some(unknown)}; expected {len(expected)} tensors by config.json, "
                           f"found {len(stored)}" + (f", and {_some(missing)} missing" if missing else ""))
    if missing:
        raise WeightsError(f"{pathlib.Path(path)}: missing tensors {_some(missing)}; expected {len(expected)} by config.json, found {len(stored)}")


def _refuse_wrapped(tensor: StoredTensor, expected: set[str]) -> None:
    """Names that wrappers (DataParallel, torch.compile, FSDP) or a double save have changed get an error that says so."""
    for wrapper in ("module.", "_orig_mod.", "_fsdp_wrapped_module."):
        if tensor.name.replace(wrapper, "") in expected:
            raise WeightsError(f"{tensor.file}: tensor names carry the prefix {wrapper!r} ({tensor.name}); "
                               f"expected {tensor.name.replace(wrapper, '')}")
    for name in expected:
        if tensor.name.endswith(f".{name}"):
            raise WeightsError(f"{tensor.file}: tensor names carry the prefix {tensor.name.removesuffix(name)!r} ({tensor.name}); expected {name}")
        if name.endswith(f".{tensor.name}"):
            raise WeightsError(f"{tensor.file}: tensor names lack the prefix {name.removesuffix(tensor.name)!r} ({tensor.name}); expected {name}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

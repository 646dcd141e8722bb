"""One table per model family: parameter <-> Hugging Face tensor, the logical axes of its dimensions, how it starts.

The abstract parameters, random initialisation, shardings, reading and writing all follow from the table. Parameters are
a nested dict in torch layout [out, in], with the layers stacked on a leading axis:

    {"embed_tokens": [V, d],
     "layers": {"input_layernorm": [L, d], ..., "q_proj": [L, H*dh, d], ..., "down_proj": [L, d, f]},
     "norm": [d],
     "early_exit_gate": {"weight": [1, d], "bias": [1]},
     "lm_head": [V, d]}                                    # absent when config.tie_word_embeddings
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from hla_jax import sharding, tensor_files
from hla_jax.attention_files import is_map
from hla_jax.config import OuroConfig
from hla_jax.tensor_files import PendingTensor, StoredTensor, WeightsError

if TYPE_CHECKING:
    from jaxtyping import PRNGKeyArray

Params = dict[str, Any]
Start = Literal["normal", "embedding", "one", "post_norm", "zero"]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A row of the table.

    Attributes:
      path: place in the parameter tree, keys joined by ".".
      name: the Hugging Face tensor; "{layer}" in it where the parameter stacks one tensor of every layer.
      axes: logical axis of each dimension. Sizes and shardings follow from it.
      start: the value at random initialisation, see `init_params`.
    """

    path: str
    name: str
    axes: tuple[str, ...]
    start: Start

    @property
    def stacked(self) -> bool:
        return self.axes[0] == "layers"

    def names(self, config: OuroConfig) -> list[str]:
        """The tensors of this parameter, in the order of the stack."""
        return [self.name.format(layer=layer) for layer in range(config.num_layers)] if self.stacked else [self.name]

    def shape(self, config: OuroConfig) -> tuple[int, ...]:
        sizes = {
            "layers": config.num_layers,
            "vocab": config.vocab_size,
            "embed": config.hidden_size,
            "mlp": config.intermediate_size,
            "heads": config.num_heads * config.head_dim,
            "kv_heads": config.num_kv_heads * config.head_dim,
            "norm": config.hidden_size,
            "gate": 1,
        }
        return tuple(sizes[axis] for axis in self.axes)

    def tensor_shape(self, config: OuroConfig) -> tuple[int, ...]:
        """Shape of each tensor of the stack."""
        return self.shape(config)[1:] if self.stacked else self.shape(config)


def _per_layer(module: str, axes: tuple[str, ...], start: Start = "normal") -> Parameter:
    leaf = module.rpartition(".")[2]
    return Parameter(f"layers.{leaf}", f"model.layers.{{layer}}.{module}.weight", ("layers", *axes), start)


OURO = (
    Parameter("embed_tokens", "model.embed_tokens.weight", ("vocab", "embed"), "embedding"),
    _per_layer("input_layernorm", ("norm",), "one"),
    _per_layer("input_layernorm_2", ("norm",), "post_norm"),
    _per_layer("post_attention_layernorm", ("norm",), "one"),
    _per_layer("post_attention_layernorm_2", ("norm",), "post_norm"),
    _per_layer("self_attn.q_proj", ("heads", "embed")),
    _per_layer("self_attn.k_proj", ("kv_heads", "embed")),
    _per_layer("self_attn.v_proj", ("kv_heads", "embed")),
    _per_layer("self_attn.o_proj", ("embed", "heads")),
    _per_layer("mlp.gate_proj", ("mlp", "embed")),
    _per_layer("mlp.up_proj", ("mlp", "embed")),
    _per_layer("mlp.down_proj", ("embed", "mlp")),
    Parameter("norm", "model.norm.weight", ("norm",), "one"),
    Parameter("early_exit_gate.weight", "model.early_exit_gate.weight", ("gate", "embed"), "normal"),
    Parameter("early_exit_gate.bias", "model.early_exit_gate.bias", ("gate",), "zero"),
    Parameter("lm_head", "lm_head.weight", ("vocab", "embed"), "normal"),
)


def parameters(config: OuroConfig) -> tuple[Parameter, ...]:
    """The rows of the table that a model of these sizes has."""
    return tuple(row for row in OURO if not (row.path == "lm_head" and config.tie_word_embeddings))


def abstract_params(config: OuroConfig, dtype: DTypeLike) -> Params:
    """The parameter tree as `jax.ShapeDtypeStruct`s."""
    return _tree(config, lambda row: jax.ShapeDtypeStruct(row.shape(config), jnp.dtype(dtype)))


def logical_axes(config: OuroConfig) -> Params:
    """The parameter tree with each leaf's tuple of logical axes."""
    return _tree(config, lambda row: row.axes)


def shardings(config: OuroConfig, mesh: Mesh, rules: sharding.Rules = sharding.RULES) -> Params:
    """The parameter tree with each leaf's `NamedSharding`.

    A dimension is left whole where `rules` or the mesh do not have its axis, and where the mesh axis would split a head
    or does not divide the size.
    """
    heads = {"heads": config.num_heads, "kv_heads": config.num_kv_heads}
    place = lambda row: NamedSharding(mesh, sharding.spec(row.axes, row.shape(config), mesh, rules, heads))
    return _tree(config, place)


def init_params(
    config: OuroConfig,
    key: PRNGKeyArray,
    dtype: DTypeLike = jnp.float32,
    *,
    embedding_std: float = 0.02,
    matrix_std: float | None = None,
    post_norm_gain: float = 1.0,
) -> Params:
    """Random parameters: normal matrices, norm weights 1, gate bias 0.

    Args:
      embedding_std: standard deviation of the embeddings.
      matrix_std: of every other matrix; None is 1 / sqrt(inputs).
      post_norm_gain: weights of the norms after attention and after the MLP. Small models learn with `embedding_std` 1
        and a gain of 0.3: otherwise what every loop adds drowns the token's identity.
    """
    keys = iter(jax.random.split(key, len(OURO)))

    def start(row: Parameter) -> jax.Array:
        shape = row.shape(config)
        mean, std = start_moments(row, config, embedding_std, matrix_std, post_norm_gain)
        noise = jax.random.normal(next(keys), shape) * std if std else jnp.zeros(shape)
        return (mean + noise).astype(dtype)

    return _tree(config, start)


def start_moments(
    row: Parameter,
    config: OuroConfig,
    embedding_std: float = 0.02,
    matrix_std: float | None = None,
    post_norm_gain: float = 1.0,
) -> tuple[float, float]:
    """Mean and standard deviation of a parameter at random initialisation; arguments as in `init_params`."""
    matrix = 1 / math.sqrt(row.shape(config)[-1]) if matrix_std is None else matrix_std
    return {
        "normal": (0.0, matrix),
        "embedding": (0.0, embedding_std),
        "one": (1.0, 0.0),
        "post_norm": (post_norm_gain, 0.0),
        "zero": (0.0, 0.0),
    }[row.start]


def load_params(
    directory: str | os.PathLike[str],
    config: OuroConfig,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    rules: sharding.Rules = sharding.RULES,
) -> Params:
    """Reads a model's parameters from a Hugging Face directory, tensor by tensor into their final buffers.

    Args:
      directory: has one `model.safetensors`, or shards and their index.
      config: the sizes expected.
      dtype: to convert to; None keeps what is stored.
      mesh: devices to spread the parameters over by `rules`, each reading its own part. None: the default device.

    Raises:
      WeightsError: tensors are missing, unknown, in two shards, of another shape than `config` implies or not floating
        point, or a file is damaged. The message names file, tensor, what was expected and what was found.
    """
    stored = {name: tensor for name, tensor in tensor_files.open_tensors(directory).items() if not is_map(name)}
    if config.tie_word_embeddings:
        _drop_redundant_head(stored)
    rows = parameters(config)
    tensor_files.check_names(directory, stored, [name for row in rows for name in row.names(config)])
    sources = {row.path: [stored[name] for name in row.names(config)] for row in rows}
    dtypes = {row.path: tensor_files.common_dtype(sources[row.path], row.tensor_shape(config), dtype) for row in rows}
    placed = traverse_util.flatten_dict(shardings(config, mesh, rules), sep=".") if mesh else {}
    arrays = {}
    # Each tensor is resident twice while it is copied, so the largest go first, when little else is there.
    for row in sorted(rows, key=lambda row: -math.prod(sources[row.path][0].shape)):
        arrays[row.path] = tensor_files.read_array(
            sources[row.path], row.stacked, dtypes[row.path], placed.get(row.path)
        )
    return _tree(config, lambda row: arrays[row.path])


def save_params(
    params: Params,
    config: OuroConfig,
    directory: str | os.PathLike[str],
    max_shard_bytes: int = tensor_files.MAX_SHARD_BYTES,
) -> None:
    """Writes parameters and `config.json` as a new Hugging Face directory, with one shard in memory at a time.

    Raises:
      FileExistsError: `directory` exists and is not empty.
      WeightsError: `params` is not the tree that `config` describes.
    """
    tensors = pending_params(params, config)
    with tensor_files.new_directory(directory) as partial:
        tensor_files.write_json(partial / "config.json", config.to_dict(stored_dtype(params)))
        tensor_files.write_tensors(partial, tensors, max_shard_bytes)


def stored_dtype(params: Params) -> str:
    """The name `config.json` gives the dtype of these parameters."""
    return str(params["embed_tokens"].dtype)


def pending_params(params: Params, config: OuroConfig) -> dict[str, PendingTensor]:
    """The tensors to write `params` as. Raises `WeightsError` if it is not the tree that `config` describes."""
    leaves = traverse_util.flatten_dict(params, sep=".")
    expected = {row.path: row.shape(config) for row in parameters(config)}
    found = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    for path in sorted(expected.keys() | found.keys()):
        if expected.get(path) != found.get(path):
            raise WeightsError(f"parameter {path}: config implies shape {expected.get(path)}, found {found.get(path)}")
    tensors = {}
    for row in parameters(config):
        leaf = leaves[row.path]
        for layer, name in enumerate(row.names(config)):
            tensors[name] = tensor_files.pending_layer(leaf, layer) if row.stacked else tensor_files.pending(leaf)
    return tensors


def _tree(config: OuroConfig, value: Callable[[Parameter], Any]) -> Params:
    return traverse_util.unflatten_dict({row.path: value(row) for row in parameters(config)}, sep=".")


def _drop_redundant_head(stored: dict[str, StoredTensor]) -> None:
    """Some checkpoints with tied embeddings ship `lm_head` all the same; it must then be the same numbers."""
    head, embedding = stored.pop("lm_head.weight", None), stored.get("model.embed_tokens.weight")
    if head is None or embedding is None:
        return
    blocks = [(slice(row, row + 4096),) for row in range(0, head.shape[0], 4096)]
    if (head.shape, head.dtype) != (embedding.shape, embedding.dtype) or any(
        head.read(block).tobytes() != embedding.read(block).tobytes() for block in blocks
    ):
        raise WeightsError(
            f"{head.file}: config.json says tie_word_embeddings: expected no lm_head.weight or one "
            "identical to model.embed_tokens.weight, found a different one"
        )

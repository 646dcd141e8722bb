"""The parameters of a model: their tree, random initialisation, shardings, reading and writing, all from the family's
table (`models.tables`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from hla_jax import sharding, tensor_files
from hla_jax.attention_files import is_map
from hla_jax.config import HuginnConfig, ModelConfig
from hla_jax.models import packed
from hla_jax.models.stages import Params
from hla_jax.models.tables import BUFFERS, Parameter, parameters
from hla_jax.tensor_files import PendingTensor, StoredTensor, WeightsError

if TYPE_CHECKING:
    from jaxtyping import PRNGKeyArray


def abstract_params(config: ModelConfig, dtype: DTypeLike) -> Params:
    """The parameter tree as `jax.ShapeDtypeStruct`s."""
    return _tree(config, lambda row: jax.ShapeDtypeStruct(row.shape(config), jnp.dtype(dtype)))


def logical_axes(config: ModelConfig) -> Params:
    """The parameter tree with each leaf's tuple of logical axes."""
    return _tree(config, lambda row: row.axes)


def shardings(config: ModelConfig, mesh: Mesh, rules: sharding.Rules = sharding.RULES) -> Params:
    """The parameter tree with each leaf's `NamedSharding`.

    A dimension is left whole where `rules` or the mesh do not have its axis, and where the mesh axis would split a head
    or does not divide the size.
    """
    heads = {"heads": config.num_heads, "kv_heads": config.num_kv_heads}
    place = lambda row: NamedSharding(mesh, sharding.spec(row.axes, row.shape(config), mesh, rules, heads))
    return _tree(config, place)


def init_params(
    config: ModelConfig,
    key: PRNGKeyArray,
    dtype: DTypeLike = jnp.float32,
    *,
    embedding_std: float | None = None,
    matrix_std: float | None = None,
    post_norm_gain: float = 1.0,
) -> Params:
    """Random parameters: normal matrices, norm weights 1, gate bias 0.

    Args:
      embedding_std: standard deviation of the embeddings; None is 0.02, and for Huginn that of its other matrices.
      matrix_std: of every other matrix; None is 1 / sqrt(inputs), and for Huginn sqrt(2 / 5d). Those that end a branch
        of Huginn's layers have it divided by the root of twice the number of layers that a token passes.
      post_norm_gain: weights of the norms after attention and after the MLP. Small models learn with `embedding_std` 1
        and a gain of 0.3: otherwise what every loop adds drowns the token's identity.
    """
    rows = parameters(config)
    keys = iter(jax.random.split(key, len(rows)))

    def start(row: Parameter) -> jax.Array:
        shape = row.shape(config)
        mean, std = start_moments(row, config, embedding_std, matrix_std, post_norm_gain)
        noise = jax.random.normal(next(keys), shape) * std if std else jnp.zeros(shape)
        return (mean + noise).astype(dtype)

    return _tree(config, start)


def start_moments(
    row: Parameter,
    config: ModelConfig,
    embedding_std: float | None = None,
    matrix_std: float | None = None,
    post_norm_gain: float = 1.0,
) -> tuple[float, float]:
    """Mean and standard deviation of a parameter at random initialisation; arguments as in `init_params`."""
    like_huginn = config.state_std if isinstance(config, HuginnConfig) else None
    matrix = matrix_std or like_huginn or 1 / math.sqrt(row.shape(config)[-1])
    passed = config.num_layers * config.num_loops + config.outer_layers
    return {
        "normal": (0.0, matrix),
        "output": (0.0, matrix / math.sqrt(2 * passed)),
        "embedding": (0.0, embedding_std or like_huginn or 0.02),
        "one": (1.0, 0.0),
        "post_norm": (post_norm_gain, 0.0),
        "zero": (0.0, 0.0),
    }[row.start]


def load_params(
    directory: str | os.PathLike[str],
    config: ModelConfig,
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
    for name in BUFFERS:
        stored.pop(name, None)
    rows = parameters(config)
    if config.tie_word_embeddings:
        _drop_redundant_head(stored, rows[0].name, config.keys["tie_word_embeddings"])
    tensor_files.check_names(directory, stored, dict.fromkeys(name for row in rows for name in row.names(config)))
    sources, dtypes = {}, {}
    for row in rows:
        tensors, shape = [stored[name] for name in row.names(config)], row.tensor_shape(config)
        whole = row.packed.stored_shape(shape, config.head_dim) if row.packed else shape
        dtypes[row.path] = tensor_files.common_dtype(tensors, whole, dtype)
        if row.packed:
            tensors = [packed.part_of(tensor, row.packed, shape, config.head_dim) for tensor in tensors]
        sources[row.path] = tensors
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
    config: ModelConfig,
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


def pending_params(params: Params, config: ModelConfig) -> dict[str, PendingTensor]:
    """The tensors to write `params` as. Raises `WeightsError` if it is not the tree that `config` describes."""
    leaves = traverse_util.flatten_dict(params, sep=".")
    expected = {row.path: row.shape(config) for row in parameters(config)}
    found = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    for path in sorted(expected.keys() | found.keys()):
        if expected.get(path) != found.get(path):
            raise WeightsError(f"parameter {path}: config implies shape {expected.get(path)}, found {found.get(path)}")
    stored = lambda row, leaf, layer: (
        tensor_files.pending_layer(leaf, layer) if row.stacked else tensor_files.pending(leaf)
    )
    return pending_tensors(config, lambda row, layer: stored(row, leaves[row.path], layer))


def pending_tensors(
    config: ModelConfig, pending: Callable[[Parameter, int], PendingTensor]
) -> dict[str, PendingTensor]:
    """The tensors of a model's files, from the part of each that is a parameter's in a layer of its stack."""
    tensors: dict[str, PendingTensor] = {}
    parts: dict[str, list[tuple[packed.Packed, PendingTensor]]] = {}
    for row in parameters(config):
        for layer, name in enumerate(row.names(config)):
            one = pending(row, layer)
            if row.packed:
                parts.setdefault(name, []).append((row.packed, one))
                one = packed.joined(parts[name], config.head_dim)
            tensors[name] = one
    return tensors


def _tree(config: ModelConfig, value: Callable[[Parameter], Any]) -> Params:
    return traverse_util.unflatten_dict({row.path: value(row) for row in parameters(config)}, sep=".")


def _drop_redundant_head(stored: dict[str, StoredTensor], embedding_name: str, key: str) -> None:
    """Some checkpoints with tied embeddings ship `lm_head` all the same; it must then be the same numbers."""
    head, embedding = stored.pop("lm_head.weight", None), stored.get(embedding_name)
    if head is None or embedding is None:
        return
    blocks = [(slice(row, row + 4096),) for row in range(0, head.shape[0], 4096)]
    if (head.shape, head.dtype) != (embedding.shape, embedding.dtype) or any(
        head.read(block).tobytes() != embedding.read(block).tobytes() for block in blocks
    ):
        raise WeightsError(
            f"{head.file}: config.json says {key}: expected no lm_head.weight or one "
            f"identical to {embedding_name}, found a different one"
        )

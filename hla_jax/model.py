"""The public face of a model: load it, run it exactly, or run it in parallel as its cache scheme would read it."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike
from transformers import PreTrainedTokenizerBase

from hla_jax import attention_files
from hla_jax import tokenizer as tokenizers
from hla_jax.attention import registry
from hla_jax.attention.full import FullCache, exact_pass
from hla_jax.attention.outer import whole
from hla_jax.attention.scheme import Attention, check_maps, run_passes
from hla_jax.config import HuginnConfig, ModelConfig, read_json
from hla_jax.models import layers, ouro, weights
from hla_jax.models.stages import Params
from hla_jax.tensor_files import WeightsError

if TYPE_CHECKING:
    from jaxtyping import Float, Int

NANO = pathlib.Path(__file__).parent / "assets" / "nano"
"""The embedded model: a small Ouro that was really trained, for tests, notebooks and the main job."""

_FULL_CACHE = Attention(FullCache())


@dataclasses.dataclass(frozen=True)
class Model:
    """A looped language model and the cache scheme that it decodes with.

    Attributes:
      config: static sizes.
      params: the parameter tree of `models.weights`.
      attention: scheme and maps; the full cache unless the checkpoint brought another.
      path: the directory it was loaded from; None for a model made in memory.
    """

    config: ModelConfig
    params: Params
    attention: Attention = _FULL_CACHE
    path: pathlib.Path | None = None

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's tokenizer, read when first used. Raises `TokenizerError` if it brought none."""
        return tokenizers.load_tokenizer(self.path)

    @functools.cached_property
    def has_tokenizer(self) -> bool:
        """Whether the checkpoint brought a tokenizer."""
        return self.path is not None and tokenizers.has_tokenizer(self.path)

    @functools.cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        """Token ids that end a generation: the union of what config, generation config and tokenizer say."""
        return tokenizers.stop_tokens(self.config, self.path)


def load(
    path_or_hub_id: str | os.PathLike[str], dtype: DTypeLike | None = "bfloat16", mesh: Mesh | None = None
) -> Model:
    """Loads a model from a Hugging Face directory or hub id, with its cache scheme attached if it is an export of this
    package.

    Args:
      path_or_hub_id: a directory (plain, merged or maps-only), or "owner/name".
      dtype: of the weights in memory; None keeps what is stored. Maps keep their own dtype.
      mesh: devices to spread the weights over (`sharding.RULES`); None is the default device.

    Raises:
      ConfigError, WeightsError, SchemeError: a file is missing, damaged or contradicts another; the message names it.
    """
    directory = attention_files.local_directory(path_or_hub_id)
    base = attention_files.base_directory(directory)
    config = ModelConfig.from_directory(base)
    params = weights.load_params(base, config, dtype, mesh)
    return Model(config, params, _load_attention(directory, config, mesh), directory)


def load_attention(path_or_hub_id: str | os.PathLike[str], model: Model, mesh: Mesh | None = None) -> Attention:
    """The cache scheme of an export, with its maps, for a model that is loaded already.

    Raises:
      WeightsError, SchemeError: as `load`; or the export has the maps of another model.
    """
    directory = attention_files.local_directory(path_or_hub_id)
    entry = read_json(directory / "config.json").get(attention_files.BASE)
    if entry is None:
        fits = ModelConfig.from_directory(directory) == model.config
    elif model.path is not None and isinstance(entry, dict):
        fits = attention_files.fingerprint(attention_files.base_directory(model.path)) == entry.get("sha256")
    else:
        fits = False
    if not fits:
        raise WeightsError(f"{directory}: these maps belong to another model than {model.path}")
    return _load_attention(directory, model.config, mesh)


def _load_attention(directory: pathlib.Path, config: ModelConfig, mesh: Mesh | None) -> Attention:
    scheme = registry.from_entries(attention_files.read_attention(directory))
    scheme.check(config)
    shapes = scheme.map_shapes(config)
    if not shapes:
        return Attention(scheme)
    maps = attention_files.load_maps(directory, config, scheme.interchange, shapes, mesh=mesh, axes=scheme.map_axes())
    return Attention(scheme, maps)


def forward(
    model: Model,
    tokens: Int[Array, "B S"],
    exit_at: int | None = None,
    exit_threshold: float | None = None,
    exit_weighted: bool = False,
    *,
    num_steps: int | None = None,
    initial_state: str | Float[Array, "B S d"] | None = None,
) -> Float[Array, "B S V"]:
    """Logits of one exact parallel pass. Rows may be padded on the right.

    Args:
      model: from `load`.
      tokens: token ids.
      exit_at, exit_threshold, exit_weighted: of Ouro, see `models.ouro.exit_logits`; without any, the last loop's.
      num_steps: of Huginn, steps of the looped core; None for the config's.
      initial_state: of Huginn, what the first step starts from: "zeros", "random" (`models.huginn.initial_state`) or
        the states themselves; None for the config's.

    Raises:
      ValueError: token ids that are not a [B, S] array, an option of the other family, or one out of range.
    """
    config, tokens, initial = model.config, token_batch(model, tokens), None
    exits = exit_at is not None or exit_threshold is not None or exit_weighted
    if not isinstance(config, HuginnConfig):
        if num_steps is not None or initial_state is not None:
            raise ValueError("num_steps and initial_state are options of Huginn; Ouro has exit_at")
        return _forward(model.params, config, tokens, exit_at, exit_threshold, exit_weighted)
    if exits:
        raise ValueError("exit_at, exit_threshold and exit_weighted are options of Ouro; Huginn has num_steps")
    if isinstance(initial_state, str):
        config = dataclasses.replace(config, initial_state=initial_state)
    elif initial_state is not None:
        initial = jnp.asarray(initial_state)
        if initial.shape != (expected := (*tokens.shape, config.hidden_size)):
            raise ValueError(f"initial_state must be {list(expected)}, found {list(initial.shape)}")
    if num_steps is not None:
        config = config.with_steps(num_steps)
    return _forward(model.params, config, tokens, initial=initial)


@functools.partial(jax.jit, static_argnames=("config", "exit_at", "exit_threshold", "exit_weighted"))
def _forward(params, config, tokens, exit_at=None, exit_threshold=None, exit_weighted=False, initial=None):
    if exit_at is None and exit_threshold is None and not exit_weighted:
        return layers.logits(params, exact_pass(params, config, tokens, initial=initial))
    hidden = exact_pass(params, config, tokens, every_loop=True)
    return ouro.exit_logits(params, hidden, exit_at, exit_threshold, exit_weighted)


def forward_swapped(
    model: Model, tokens: Int[Array, "B S"], attention: Attention | None = None
) -> Float[Array, "B S V"]:
    """Logits of a parallel pass in which every token reads the past as `attention` stores it.

    An exact pass first writes what the scheme stores of every token; the second pass reads it under the decoding rule,
    exact within the window. It differs from decoding in that the stored tokens were computed exactly (HLA, section
    4.2).
    """
    return _forward_swapped(model.params, model.config, attention or model.attention, token_batch(model, tokens))


@functools.partial(jax.jit, static_argnames="config")
def _forward_swapped(params, config, attention, tokens):
    batch, length = tokens.shape
    check_maps(attention.scheme, config, attention.params)
    scheme = whole(config, attention.scheme)
    transform = scheme.swapped(config, attention.params, batch, length, params["embed_tokens"].dtype)
    hidden, _ = run_passes(params, config, tokens, transform)
    return layers.logits(params, hidden)


def token_batch(model: Model, tokens: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """Token ids as an int32 array. Raises `ValueError` for another shape or type, or ids outside the vocabulary."""
    if not isinstance(tokens, jax.Array):
        try:
            tokens = np.asarray(tokens)
        except ValueError:
            raise ValueError(
                "tokens must be rows of one length, [batch, tokens]: pad the others on the right"
            ) from None
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.size == 0:
        raise ValueError(
            f"tokens must be a non-empty integer array [batch, tokens], found {tokens.dtype}{list(tokens.shape)}"
        )
    if not isinstance(tokens, jax.core.Tracer):  # a caller's jit hides the values, and XLA would clamp them silently
        ids = np.asarray(tokens)
        if (outside := ids[(ids < 0) | (ids >= model.config.vocab_size)]).size:
            raise ValueError(f"tokens have id {outside[0]}, the vocabulary has {model.config.vocab_size}")
    return jnp.asarray(tokens, jnp.int32)

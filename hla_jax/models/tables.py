"""One table per model family: parameter <-> Hugging Face tensor, the logical axes of its dimensions, how it starts.

Parameters are a nested dict in torch layout [out, in], with the layers of a stack on a leading axis:

    {"embed_tokens": [V, d],
     "layers": {..., "q_proj": [L, H*dh, d], "k_proj": [L, G*dh, d], ..., "down_proj": [L, d, f]},   # the looped ones
     "norm": [d], ...
     "lm_head": [V, d]}                                    # absent when config.tie_word_embeddings

Huginn's "prelude" and "coda" are stacks of their own, beside "layers".
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from hla_jax.config import HuginnConfig, ModelConfig, OuroConfig
from hla_jax.models.packed import Packed

Start = Literal["normal", "output", "embedding", "one", "post_norm", "zero"]

STACKS = ("prelude", "layers", "coda")
"""Axes along which the layers of a stack lie; each is also the stack's place in the tree."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A row of the table.

    Attributes:
      path: place in the parameter tree, keys joined by ".".
      name: the Hugging Face tensor; "{layer}" in it where the parameter stacks one tensor of every layer.
      axes: logical axis of each dimension. Sizes and shardings follow from it.
      start: the value at random initialisation, see `weights.init_params`.
      packed: where the parameter lies in a tensor that holds several; None where it is a tensor of its own.
    """

    path: str
    name: str
    axes: tuple[str, ...]
    start: Start
    packed: Packed | None = None

    @property
    def stacked(self) -> bool:
        return self.axes[0] in STACKS

    def names(self, config: ModelConfig) -> list[str]:
        """The tensors of this parameter, in the order of the stack."""
        count = _sizes(config)[self.axes[0]] if self.stacked else 1
        return [self.name.format(layer=layer) for layer in range(count)]

    def shape(self, config: ModelConfig) -> tuple[int, ...]:
        sizes = _sizes(config)
        return tuple(sizes[axis] for axis in self.axes)

    def tensor_shape(self, config: ModelConfig) -> tuple[int, ...]:
        """Shape of each tensor of the stack."""
        return self.shape(config)[1:] if self.stacked else self.shape(config)


def _sizes(config: ModelConfig) -> dict[str, int]:
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
    if isinstance(config, HuginnConfig):
        sizes |= {"prelude": config.num_prelude, "coda": config.num_coda, "joined": 2 * config.hidden_size}
    return sizes


def _ouro_layer(module: str, axes: tuple[str, ...], start: Start = "normal") -> Parameter:
    leaf = module.rpartition(".")[2]
    return Parameter(f"layers.{leaf}", f"model.layers.{{layer}}.{module}.weight", ("layers", *axes), start)


OURO = (
    Parameter("embed_tokens", "model.embed_tokens.weight", ("vocab", "embed"), "embedding"),
    _ouro_layer("input_layernorm", ("norm",), "one"),
    _ouro_layer("input_layernorm_2", ("norm",), "post_norm"),
    _ouro_layer("post_attention_layernorm", ("norm",), "one"),
    _ouro_layer("post_attention_layernorm_2", ("norm",), "post_norm"),
    _ouro_layer("self_attn.q_proj", ("heads", "embed")),
    _ouro_layer("self_attn.k_proj", ("kv_heads", "embed")),
    _ouro_layer("self_attn.v_proj", ("kv_heads", "embed")),
    _ouro_layer("self_attn.o_proj", ("embed", "heads")),
    _ouro_layer("mlp.gate_proj", ("mlp", "embed")),
    _ouro_layer("mlp.up_proj", ("mlp", "embed")),
    _ouro_layer("mlp.down_proj", ("embed", "mlp")),
    Parameter("norm", "model.norm.weight", ("norm",), "one"),
    Parameter("early_exit_gate.weight", "model.early_exit_gate.weight", ("gate", "embed"), "normal"),
    Parameter("early_exit_gate.bias", "model.early_exit_gate.bias", ("gate",), "zero"),
    Parameter("lm_head", "lm_head.weight", ("vocab", "embed"), "normal"),
)


def _huginn_stack(axis: str, block: str) -> tuple[Parameter, ...]:
    def row(leaf: str, name: str, axes: tuple[str, ...], start: Start = "normal", packed: Packed | None = None):
        return Parameter(f"{axis}.{leaf}", f"transformer.{block}.{{layer}}.{name}", (axis, *axes), start, packed)

    qkv, bias, gate_up = "attn.Wqkv.weight", "attn.qk_bias", "mlp.fc.weight"
    return (
        *(row(f"norm_{number}", f"norm_{number}.weight", ("norm",), "one") for number in range(1, 5)),
        row("q_proj", qkv, ("heads", "embed"), packed=Packed(0, 3, pairs=True)),
        row("k_proj", qkv, ("kv_heads", "embed"), packed=Packed(1, 3, pairs=True)),
        row("v_proj", qkv, ("kv_heads", "embed"), packed=Packed(2, 3)),
        row("q_bias", bias, ("heads",), "zero", Packed(0, 2, pairs=True, by_head=True)),
        row("k_bias", bias, ("kv_heads",), "zero", Packed(1, 2, pairs=True, by_head=True)),
        row("o_proj", "attn.proj.weight", ("embed", "heads"), "output"),
        row("gate_proj", gate_up, ("mlp", "embed"), packed=Packed(0, 2)),
        row("up_proj", gate_up, ("mlp", "embed"), packed=Packed(1, 2)),
        row("down_proj", "mlp.proj.weight", ("embed", "mlp"), "output"),
    )


HUGINN = (
    Parameter("embed_tokens", "transformer.wte.weight", ("vocab", "embed"), "embedding"),
    *_huginn_stack("prelude", "prelude"),
    Parameter("adapter", "transformer.adapter.weight", ("embed", "joined"), "normal"),
    *_huginn_stack("layers", "core_block"),
    *_huginn_stack("coda", "coda"),
    Parameter("norm", "transformer.ln_f.weight", ("norm",), "one"),
    Parameter("lm_head", "lm_head.weight", ("vocab", "embed"), "normal"),
)

_TABLES: dict[type[ModelConfig], tuple[Parameter, ...]] = {OuroConfig: OURO, HuginnConfig: HUGINN}
BUFFERS = frozenset({"freqs_cis"})
"""Tensors of published files that are no parameters."""


def parameters(config: ModelConfig) -> tuple[Parameter, ...]:
    """The rows of its family's table that a model of these sizes has."""

    def has(row: Parameter) -> bool:
        if row.path.endswith(("q_bias", "k_bias")):
            return config.qk_bias
        return not (row.path == "lm_head" and config.tie_word_embeddings)

    return tuple(filter(has, _TABLES[type(config)]))

"""Sizes of the models, read from and written to Hugging Face `config.json`.

A frozen dataclass holds every static size of a model, so that a config is hashable and can be a static argument of
`jax.jit`. The class defaults of the public configurations describe other models, so no size has a default here: a
missing key is an error.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar


class ConfigError(ValueError):
    """A configuration is incomplete, contradicts itself, or asks for what this package does not compute."""


@dataclasses.dataclass(frozen=True)
class ModelConfig(abc.ABC):
    """Sizes of a looped model: the same `num_layers` layers applied `num_loops` times to every token.

    What every family has; a family is a subclass, with the keys that `config.json` gives the fields. Code that attends,
    calibrates or decodes knows this class only.
    """

    model_type: ClassVar[str]
    """Of the family, in `config.json`."""
    architecture: ClassVar[str]
    """The family's class in `config.json`."""
    attention_module: ClassVar[str]
    """Where a looped layer's attention is among the Hugging Face tensors: "{layer}" is its number."""
    keys: ClassVar[Mapping[str, str]]
    """Field -> key of `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_loops: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None = dataclasses.field(default=None, kw_only=True)
    eos_token_ids: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)
    pad_token_id: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in _COUNTS and value < 1:
                raise ConfigError(f"{self.keys.get(field.name, field.name)} must be at least 1, found {value}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "num_attention_heads must be a multiple of num_key_value_heads, "
                f"found {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embeddings, found {self.head_dim}")

    @property
    def heads_per_kv(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def outer_layers(self) -> int:
        """Layers that are applied once, before and after the loops."""
        return 0

    @property
    def qk_bias(self) -> bool:
        """Whether queries and keys have a bias."""
        return False

    @staticmethod
    def from_dict(raw: Mapping[str, Any], source: str = "config") -> ModelConfig:
        """Builds the config of a family from the mapping in a `config.json`.

        Args:
          raw: the parsed file.
          source: how errors name the file.

        Raises:
          ConfigError: a key is missing or malformed, or asks for something that the family's forward pass does not
            have.
        """
        family = FAMILIES.get(str(raw.get("model_type")))
        if family is None:
            known = " or ".join(map(repr, FAMILIES))
            raise ConfigError(f"{source}: model_type must be {known}, found {raw.get('model_type')!r}")
        values: dict[str, Any] = {}
        types = {field.name: field.type for field in dataclasses.fields(family)}
        for field, key in family.keys.items():
            if key in raw and raw[key] is not None:
                values[field] = _checked(str(types[field]), raw[key], source, key)
        values["bos_token_id"] = next(iter(token_ids(raw, "bos_token_id", source)), None)
        values["eos_token_ids"] = token_ids(raw, "eos_token_id", source)
        values["pad_token_id"] = next(iter(token_ids(raw, "pad_token_id", source)), None)
        values |= family.complete(raw, values, source)
        missing = [
            family.keys[field.name]
            for field in dataclasses.fields(family)
            if field.default is dataclasses.MISSING and field.name not in values
        ]
        if missing:
            raise ConfigError(f"{source}: missing keys {', '.join(missing)}")
        try:
            return family(**values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    @staticmethod
    @abc.abstractmethod
    def complete(raw: Mapping[str, Any], values: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Fields that are not simply read from a key. Raises `ConfigError` for what the family does not compute."""

    @staticmethod
    def from_json(path: str | os.PathLike[str]) -> ModelConfig:
        """Reads a `config.json`. Raises `ConfigError` naming the file."""
        return ModelConfig.from_dict(read_json(pathlib.Path(path)), str(path))

    @staticmethod
    def from_directory(directory: str | os.PathLike[str]) -> ModelConfig:
        """Reads `config.json` of a Hugging Face directory. Raises `ConfigError` naming the file."""
        return ModelConfig.from_json(pathlib.Path(directory) / "config.json")

    def to_dict(self, dtype: str) -> dict[str, Any]:
        """The mapping to write as `config.json`; `dtype` is the name of the stored weights' dtype, e.g. "bfloat16"."""
        eos = list(self.eos_token_ids)
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{key: getattr(self, field) for field, key in self.keys.items()},
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
            "pad_token_id": self.pad_token_id,
            "torch_dtype": dtype,
        }


_COUNTS = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_loops",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
}


@dataclasses.dataclass(frozen=True)
class OuroConfig(ModelConfig):
    """Sizes of an Ouro model: every layer is looped, and a gate after each loop may stop a token."""

    model_type = "ouro"
    architecture = "OuroForCausalLM"
    attention_module = "model.layers.{layer}.self_attn"
    keys = {  # noqa: RUF012
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_loops": "total_ut_steps",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "rope_theta": "rope_theta",
        "rms_norm_eps": "rms_norm_eps",
        "max_position_embeddings": "max_position_embeddings",
        "tie_word_embeddings": "tie_word_embeddings",
        "early_exit_threshold": "early_exit_threshold",
    }

    early_exit_threshold: float = 1.0

    @staticmethod
    def complete(raw: Mapping[str, Any], values: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Reads the old and the new spellings of transformers."""
        _refuse_unsupported(raw, source)
        completed = {"rope_theta": _rope_theta(raw, source)}
        if "head_dim" not in values and {"hidden_size", "num_heads"} <= values.keys():
            # Old configs leave head_dim out; the reference then divides.
            if values["hidden_size"] % values["num_heads"]:
                raise ConfigError(
                    f"{source}: head_dim is absent and hidden_size {values['hidden_size']} is not a "
                    f"multiple of num_attention_heads {values['num_heads']}"
                )
            completed["head_dim"] = values["hidden_size"] // values["num_heads"]
        return completed

    def to_dict(self, dtype: str) -> dict[str, Any]:
        return super().to_dict(dtype) | {
            "rope_scaling": None,
            "hidden_act": "silu",
            "layer_types": ["full_attention"] * self.num_layers,
            "use_sliding_window": False,
        }


@dataclasses.dataclass(frozen=True)
class HuginnConfig(ModelConfig):
    """Sizes of a Huginn model: a prelude and a coda of ordinary layers around a looped core, which starts from a state
    of its own and is given the prelude's output at every loop.

    Attributes:
      num_prelude, num_coda: layers before and after the loops; `num_layers` counts those of the core.
      num_loops: steps of the core. Trained for a random number of them, the model runs with any (`with_steps`).
      qk_bias: queries and keys have a bias.
      initial_state: "random", drawn for each token id from a fixed seed, or "zeros".
    """

    model_type = "huginn_raven"
    architecture = "RavenForCausalLM"
    attention_module = "transformer.core_block.{layer}.attn"
    keys = {  # noqa: RUF012
        "vocab_size": "vocab_size",
        "hidden_size": "n_embd",
        "intermediate_size": "intermediate_size",
        "num_layers": "n_layers_in_recurrent_block",
        "num_loops": "mean_recurrence",
        "num_heads": "n_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "rope_theta": "rope_base",
        "rms_norm_eps": "norm_eps",
        "max_position_embeddings": "block_size",
        "tie_word_embeddings": "tie_embeddings",
        "num_prelude": "n_layers_in_prelude",
        "num_coda": "n_layers_in_coda",
        "qk_bias": "qk_bias",
    }

    num_prelude: int
    num_coda: int
    qk_bias: bool = True
    initial_state: str = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_prelude", "num_coda"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{self.keys[name]} must be at least 1, found {getattr(self, name)}")
        if self.num_heads * self.head_dim != self.hidden_size or self.num_kv_heads != self.num_heads:
            raise ConfigError(
                f"n_heads times head_dim must be n_embd, and every head has its own keys: found {self.num_heads} heads "
                f"of {self.head_dim}, {self.num_kv_heads} key-value heads, n_embd {self.hidden_size}"
            )
        if self.initial_state not in _STATES.values():
            raise ConfigError(f"initial_state must be one of {list(_STATES.values())}, found {self.initial_state!r}")

    @property
    def outer_layers(self) -> int:
        return self.num_prelude + self.num_coda

    @property
    def state_std(self) -> float:
        """Standard deviation of initial states before they are cut, and of the embeddings' initialisation."""
        return math.sqrt(2 / (5 * self.hidden_size))

    def with_steps(self, num_steps: int) -> HuginnConfig:
        """The same model with another number of steps."""
        return dataclasses.replace(self, num_loops=num_steps)

    @staticmethod
    def complete(raw: Mapping[str, Any], values: Mapping[str, Any], source: str) -> dict[str, Any]:
        for key, supported in _HUGINN_ONLY.items():
            if raw.get(key, supported) != supported:
                raise ConfigError(f"{source}: {key} must be {supported!r}, found {raw[key]!r}")
        if raw.get("state_init", "like-init") not in _STATES:
            raise ConfigError(f"{source}: state_init must be one of {list(_STATES)}, found {raw['state_init']!r}")
        completed: dict[str, Any] = {"initial_state": _STATES[raw.get("state_init", "like-init")]}
        if {"hidden_size", "num_heads"} <= values.keys():
            heads = values["num_heads"]
            completed |= {"num_kv_heads": values.get("num_kv_heads", heads)}
            completed |= {"head_dim": values.get("head_dim", values["hidden_size"] // max(heads, 1))}
        layers = [values[name] for name in ("num_prelude", "num_layers", "num_coda") if name in values]
        if len(layers) == 3 and raw.get("n_layers", sum(layers)) != sum(layers):
            raise ConfigError(f"{source}: n_layers must be {' + '.join(map(str, layers))}, found {raw['n_layers']}")
        return completed

    def to_dict(self, dtype: str) -> dict[str, Any]:
        state = next(key for key, value in _STATES.items() if value == self.initial_state)
        layers = {"n_layers": self.num_layers + self.outer_layers, "padded_vocab_size": self.vocab_size}
        return _HUGINN_ONLY | super().to_dict(dtype) | layers | {"state_init": state}


_STATES = {"like-init": "random", "zero": "zeros"}
# What the public code could be asked for besides, and this package computes nothing else of.
_HUGINN_ONLY = {
    "bias": False,
    "injection_type": "linear",
    "block_class_name": "SandwichBlock",
    "norm_class_name": "RMSNorm_llama",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "test_time_noise": 0,
}
FAMILIES: dict[str, type[ModelConfig]] = {family.model_type: family for family in (OuroConfig, HuginnConfig)}
"""By `model_type`."""

OURO_1P4B = OuroConfig(
    vocab_size=49152,
    hidden_size=2048,
    intermediate_size=5632,
    num_layers=24,
    num_loops=4,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    max_position_embeddings=65536,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_ids=(0,),
)
"""The released Ouro-1.4B and its Thinking variant: 1,434,652,673 parameters."""

OURO_2P6B = dataclasses.replace(OURO_1P4B, num_layers=48)
"""The released Ouro-2.6B and its Thinking variant: 2,667,974,657 parameters."""

HUGINN_3P5B = HuginnConfig(
    vocab_size=65536,
    hidden_size=5280,
    intermediate_size=17920,
    num_layers=4,
    num_loops=32,
    num_heads=55,
    num_kv_heads=55,
    head_dim=96,
    rope_theta=5e4,
    rms_norm_eps=1e-6,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
    num_prelude=2,
    num_coda=2,
    bos_token_id=65504,
    eos_token_ids=(65505, 65508),
    pad_token_id=65509,
)
"""The released Huginn-0125: 3,564,976,800 parameters."""


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Parses a JSON object. Raises `ConfigError` naming the file if it is absent, malformed or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def token_ids(raw: Mapping[str, Any], key: str, source: str) -> tuple[int, ...]:
    """The token ids under a key of `config.json` or `generation_config.json`, where they are absent, one, or a list."""
    value = raw.get(key)
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
        raise ConfigError(f"{source}: {key} must be a token id, a list of them or null, found {value!r}")
    return ids


def _checked(kind: str, value: Any, source: str, key: str) -> Any:
    """`value` as a field of this type."""
    if kind == "bool":
        if not isinstance(value, bool):
            raise ConfigError(f"{source}: {key} must be true or false, found {value!r}")
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "float":
        if not number:
            raise ConfigError(f"{source}: {key} must be a number, found {value!r}")
        return float(value)
    if not number or not float(value).is_integer():
        raise ConfigError(f"{source}: {key} must be an integer, found {value!r}")
    return int(value)


def _rope_theta(raw: Mapping[str, Any], source: str) -> float:
    """`rope_theta` at the top level (transformers 4) or inside `rope_parameters` (transformers 5); both must agree."""
    parameters = raw.get("rope_parameters") or {}
    for key, entry in (("rope_parameters", parameters), ("rope_scaling", raw.get("rope_scaling") or {})):
        kind = entry.get("rope_type", entry.get("type", "default")) if isinstance(entry, dict) else None
        if kind != "default":
            raise ConfigError(f"{source}: only unscaled rotary embeddings are supported, found {key} {entry!r}")
    found = [value for value in (raw.get("rope_theta"), parameters.get("rope_theta")) if value is not None]
    if not found:
        raise ConfigError(f"{source}: missing key rope_theta (or rope_parameters.rope_theta)")
    if any(isinstance(value, bool) or not isinstance(value, int | float) or value <= 0 for value in found):
        raise ConfigError(f"{source}: rope_theta must be a positive number, found {found[0]!r}")
    if len(set(found)) > 1:
        raise ConfigError(f"{source}: rope_theta is {found[0]} but rope_parameters.rope_theta is {found[1]}")
    return float(found[0])


def _refuse_unsupported(raw: Mapping[str, Any], source: str) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{source}: hidden_act must be 'silu', found {raw['hidden_act']!r}")
    if raw.get("use_sliding_window"):
        raise ConfigError(f"{source}: use_sliding_window is not part of Ouro's forward pass, found true")
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        if set(layer_types) - {"full_attention"}:
            raise ConfigError(f"{source}: layer_types must all be 'full_attention', found {sorted(set(layer_types))}")
        if len(layer_types) != raw.get("num_hidden_layers"):
            raise ConfigError(
                f"{source}: layer_types names {len(layer_types)} layers, "
                f"num_hidden_layers says {raw.get('num_hidden_layers')}"
            )

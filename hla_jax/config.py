"""Sizes of the models, read from and written to Hugging Face `config.json`.

A frozen dataclass holds every static size of a model, so that a config is hashable and can be a static argument of
`jax.jit`. The class defaults of Ouro's public configuration describe another model, so no size has a default here: a
missing key is an error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any


class ConfigError(ValueError):
    """A configuration is incomplete, contradicts itself, or asks for what this package does not compute."""


@dataclasses.dataclass(frozen=True)
class OuroConfig:
    """Sizes of an Ouro model: the same `num_layers` layers applied `num_loops` times to every token.

    Attributes carry the usual short names; `_HF_NAMES` maps them to the keys of `config.json`.
    """

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
    early_exit_threshold: float = 1.0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_loops",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, field) < 1:
                raise ConfigError(f"{_HF_NAMES.get(field, field)} must be at least 1, found {getattr(self, field)}")
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

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "config") -> OuroConfig:
        """Builds a config from the mapping in a `config.json`, in the old and the new spellings of transformers.

        Args:
          raw: the parsed file.
          source: how errors name the file.

        Raises:
          ConfigError: a key is missing or malformed, or asks for something that Ouro's forward pass does not have.
        """
        if raw.get("model_type") != "ouro":
            raise ConfigError(f"{source}: model_type must be 'ouro', found {raw.get('model_type')!r}")
        _refuse_unsupported(raw, source)
        values: dict[str, Any] = {}
        for field, key in _HF_NAMES.items():
            if key in raw and raw[key] is not None:
                values[field] = _checked(field, raw[key], source, key)
        values["rope_theta"] = _rope_theta(raw, source)
        if "head_dim" not in values and {"hidden_size", "num_heads"} <= values.keys():
            # Old configs leave head_dim out; the reference then divides.
            if values["hidden_size"] % values["num_heads"]:
                raise ConfigError(
                    f"{source}: head_dim is absent and hidden_size {values['hidden_size']} is not a "
                    f"multiple of num_attention_heads {values['num_heads']}"
                )
            values["head_dim"] = values["hidden_size"] // values["num_heads"]
        values["bos_token_id"] = next(iter(token_ids(raw, "bos_token_id", source)), None)
        values["eos_token_ids"] = token_ids(raw, "eos_token_id", source)
        values["pad_token_id"] = next(iter(token_ids(raw, "pad_token_id", source)), None)
        missing = [
            _HF_NAMES[f.name]
            for f in dataclasses.fields(cls)
            if f.default is dataclasses.MISSING and f.name not in values
        ]
        if missing:
            raise ConfigError(f"{source}: missing keys {', '.join(missing)}")
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> OuroConfig:
        """Reads a `config.json`. Raises `ConfigError` naming the file."""
        return cls.from_dict(read_json(pathlib.Path(path)), str(path))

    @classmethod
    def from_directory(cls, directory: str | os.PathLike[str]) -> OuroConfig:
        """Reads `config.json` of a Hugging Face directory. Raises `ConfigError` naming the file."""
        return cls.from_json(pathlib.Path(directory) / "config.json")

    def to_dict(self, dtype: str) -> dict[str, Any]:
        """The mapping to write as `config.json`; `dtype` is the name of the stored weights' dtype, e.g. "bfloat16"."""
        eos = list(self.eos_token_ids)
        return {
            "architectures": ["OuroForCausalLM"],
            "model_type": "ouro",
            **{key: getattr(self, field) for field, key in _HF_NAMES.items()},
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
            "pad_token_id": self.pad_token_id,
            "hidden_act": "silu",
            "layer_types": ["full_attention"] * self.num_layers,
            "use_sliding_window": False,
            "torch_dtype": dtype,
        }


_HF_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_loops": "total_ut_steps",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
    "early_exit_threshold": "early_exit_threshold",
}
_FLOATS = {"rms_norm_eps", "early_exit_threshold"}

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


def _checked(field: str, value: Any, source: str, key: str) -> Any:
    if field == "tie_word_embeddings":
        if not isinstance(value, bool):
            raise ConfigError(f"{source}: {key} must be true or false, found {value!r}")
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if field in _FLOATS:
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

"""Sizes of Ouro and of its cache scheme: what `config.json` says, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .looped_schemes import LoopedConfig


class OuroConfig(LoopedConfig):
    """Sizes of an Ouro model and of its cache scheme, as in `config.json`. A missing size is an error: the defaults of
    Ouro's public configuration describe another model.
    """

    model_type = "ouro"
    has_no_defaults_at_init = True
    required = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "total_ut_steps"),
        *("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings"),
    )

    def __init__(self, **fields: Any):
        # transformers makes empty configs to see what differs from them.
        if fields:
            if missing := [name for name in self.required if fields.get(name) is None]:
                raise ValueError(f"config.json: missing keys {', '.join(missing)}")
            fields["head_dim"] = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
            theta = _rope_theta(fields.pop("rope_theta", None), fields.pop("rope_parameters", None) or {})
            for key, expected in (("hidden_act", "silu"), ("rope_scaling", None), ("use_sliding_window", False)):
                if (found := fields.setdefault(key, expected)) != expected:
                    raise ValueError(f"config.json: {key} must be {expected!r}, found {found!r}")
            del fields["rope_scaling"]
        special = {name: fields.pop(name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        tied = bool(fields.pop("tie_word_embeddings", False))
        super().__init__(**fields)
        for name, value in {**special, "tie_word_embeddings": tied}.items():
            setattr(self, name, value)
        self.use_cache = True
        if fields:
            self.rope_theta = theta
            self.scheme.check(self)


def _rope_theta(old: float | None, new: Mapping[str, Any]) -> float:
    if new.get("rope_type", "default") != "default":
        raise ValueError(f"config.json: only unscaled rotary embeddings are supported, found {dict(new)!r}")
    found = {float(theta) for theta in (old, new.get("rope_theta")) if theta is not None}
    if len(found) != 1:
        raise ValueError(f"config.json: expected one rope_theta, found {sorted(found)}")
    return found.pop()

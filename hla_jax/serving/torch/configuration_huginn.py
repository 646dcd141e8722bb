"""Sizes of Huginn and of its cache scheme: what `config.json` says, checked."""

from __future__ import annotations

from typing import Any

from .looped_schemes import LoopedConfig

_ONLY = {
    "bias": False,
    "injection_type": "linear",
    "block_class_name": "SandwichBlock",
    "norm_class_name": "RMSNorm_llama",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "test_time_noise": 0,
}
_STATES = {"like-init": "random", "zero": "zeros"}


class RavenConfig(LoopedConfig):
    """Sizes of a Huginn model and of its cache scheme, as in `config.json`. A missing size is an error."""

    model_type = "huginn_raven"
    has_no_defaults_at_init = True
    attribute_map = {  # noqa: RUF012
        "hidden_size": "n_embd",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers_in_recurrent_block",
        "total_ut_steps": "mean_recurrence",
        "rope_theta": "rope_base",
        "rms_norm_eps": "norm_eps",
        "max_position_embeddings": "block_size",
    }
    required = (
        *("vocab_size", "n_embd", "intermediate_size", "n_heads", "rope_base", "norm_eps", "block_size"),
        *("n_layers_in_prelude", "n_layers_in_recurrent_block", "n_layers_in_coda", "mean_recurrence"),
        "tie_embeddings",
    )

    def __init__(self, **fields: Any):
        # transformers makes empty configs to see what differs from them.
        if fields:
            if missing := [name for name in self.required if fields.get(name) is None]:
                raise ValueError(f"config.json: missing keys {', '.join(missing)}")
            for key, expected in _ONLY.items():
                if (found := fields.get(key, expected)) != expected:
                    raise ValueError(f"config.json: {key} must be {expected!r}, found {found!r}")
            if (state := fields.setdefault("state_init", "like-init")) not in _STATES:
                raise ValueError(f"config.json: state_init must be one of {list(_STATES)}, found {state!r}")
            heads = fields["n_heads"]
            fields["head_dim"] = fields.get("head_dim") or fields["n_embd"] // heads
            fields["num_key_value_heads"] = fields.get("num_key_value_heads") or heads
            if heads * fields["head_dim"] != fields["n_embd"] or fields["num_key_value_heads"] != heads:
                raise ValueError(
                    "config.json: n_heads times head_dim must be n_embd, and every head has its own keys; found "
                    f"{heads} heads of {fields['head_dim']}, {fields['num_key_value_heads']} key-value heads"
                )
            fields["qk_bias"] = fields.get("qk_bias", True)
        special = {name: fields.pop(name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        tied = bool(fields.get("tie_embeddings", False))
        super().__init__(**(fields | {"tie_word_embeddings": tied}))
        for name, value in {**special, "tie_word_embeddings": tied}.items():
            setattr(self, name, value)
        self.use_cache = True
        if fields:
            self.scheme.check(self)

    @property
    def outer_layers(self) -> int:
        return self.n_layers_in_prelude + self.n_layers_in_coda

    @property
    def initial_state(self) -> str:
        """What the first step starts from: "random" or "zeros"."""
        return _STATES[self.state_init]

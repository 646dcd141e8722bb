"""The optimizer of every recipe: AdamW with clipping, warm-up and a cosine decay."""

from __future__ import annotations

import dataclasses

import optax


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW as the HLA paper sets it (appendix C).

    Attributes:
      peak_learning_rate: reached after `warmup_steps`, from zero.
      total_steps: the cosine ends here, at `final_fraction` of the peak.
      warmup_steps: of linear warm-up, part of the total.
      weight_decay: decoupled; on every parameter.
      clip_norm: largest global norm of the gradient.
    """

    peak_learning_rate: float
    total_steps: int
    warmup_steps: int = 0
    final_fraction: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.01
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_steps < self.total_steps:
            raise ValueError(f"warmup_steps must be below total_steps; got {self.warmup_steps} of {self.total_steps}")


def learning_rate(config: OptimizerConfig) -> optax.Schedule:
    """Step -> learning rate. Step 0 is the first update."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup_steps else config.peak_learning_rate,
        peak_value=config.peak_learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.total_steps,
        end_value=config.peak_learning_rate * config.final_fraction,
    )


def adamw(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW on the schedule of `learning_rate`."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(learning_rate(config), config.beta1, config.beta2, weight_decay=config.weight_decay),
    )

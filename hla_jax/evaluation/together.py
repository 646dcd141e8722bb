"""Several caches filled by one pass: every scheme reads a prompt exactly at first, so one pass serves all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jax import Array

from hla_jax.attention.outer import whole
from hla_jax.attention.scheme import Attention, Cache, Transform, check_maps, run_passes
from hla_jax.config import ModelConfig
from hla_jax.models import looped
from hla_jax.models.stages import Attend, LayerInputs, Params, Stage

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def prefill_hidden(
    params: Params,
    config: ModelConfig,
    schemes: dict[str, Attention],
    tokens: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    capacity: int,
) -> tuple[dict[str, Float[Array, "B S d"]], dict[str, Cache]]:
    """As `generation.decode.prefill_hidden` of every scheme: hidden states by name, and the filled caches."""

    def prefill(attention: Attention) -> Transform:
        check_maps(attention.scheme, config, attention.params)
        scheme = whole(config, attention.scheme)
        cache = scheme.init_cache(config, tokens.shape[0], capacity, params["embed_tokens"].dtype)
        return scheme.prefill(config, attention.params, cache, tokens.shape[1], lengths)

    transforms = {name: prefill(attention) for name, attention in schemes.items()}
    states = {name: transform.state for name, transform in transforms.items()}
    outers = {name: transform.outer for name, transform in transforms.items() if transform.outer}
    outer = _merged(outers) if outers else None
    hidden, states = looped.run(params, config, tokens, _merged_stages(config, transforms), states, outer)
    results = {}
    for name, transform in transforms.items():
        made = transform.finish(states[name])
        results[name] = (hidden, made) if isinstance(made, Cache) else run_passes(params, config, tokens, made)
    return {name: hidden for name, (hidden, _) in results.items()}, {
        name: cache for name, (_, cache) in results.items()
    }


def _merged(attends: dict[str, Attend]) -> Attend:
    """Hands each layer's inputs to all of them. All return the same output: all but one are dead code."""

    def attend(states: dict[str, Any], inputs: LayerInputs) -> tuple[Array, dict[str, Any]]:
        results = {name: one(states[name], inputs) for name, one in attends.items()}
        out = next(iter(results.values()))[0]
        return out, {name: state for name, (_, state) in results.items()}

    return attend


def _merged_stages(config: ModelConfig, transforms: dict[str, Transform]) -> list[Stage]:
    def merge(loops: range) -> Stage:
        of = lambda stages: next(stage.attend for stage in stages if loops.start in stage.loops)
        return Stage(loops, _merged({name: of(transform.stages) for name, transform in transforms.items()}))

    starts = sorted({stage.loops.start for transform in transforms.values() for stage in transform.stages})
    return [merge(range(start, stop)) for start, stop in zip(starts, [*starts[1:], config.num_loops], strict=True)]

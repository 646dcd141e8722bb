"""The analyses by name: each takes a `Subject` and returns plain numbers, as they are kept in JSON."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm.auto import tqdm

from hla_jax.analysis import structure
from hla_jax.analysis.divergence import RANGES, by_distance
from hla_jax.analysis.structure import AXES, PROJECTIONS, Moments, Projected
from hla_jax.attention import registry
from hla_jax.attention.scheme import Attention
from hla_jax.calibration.moments import Sequences
from hla_jax.model import Model

if TYPE_CHECKING:
    from jaxtyping import Float, Int

AS_THEY_ARE, AROUND_MEAN = "as they are", "around their mean"
FRACTIONS = tuple(n / 16 for n in range(1, 17))
"""Of the full rank, at which spectra are kept."""

Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the analyses do with the data.

    Attributes:
      penalty: of the ridge regression, in units of the inputs' mean variance.
      queries: positions of each sequence whose attention is split by distance; None for all.
      ranges: first distance of each range.
    """

    penalty: float = 1e-4
    queries: int | None = 32
    ranges: tuple[int, ...] = RANGES


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, token ids without padding to fit to and held-out ones, and HLA maps made when first asked for."""

    model: Model
    rows: Int[np.ndarray, "N S"]
    held_out_rows: Int[np.ndarray, "M S"]
    make_attention: Callable[[], Attention]
    settings: Settings = Settings()

    @functools.cached_property
    def sequences(self) -> Sequences:
        """Those to fit to."""
        return Sequences.of(self.rows)

    @functools.cached_property
    def moments(self) -> Moments:
        """Of the data to fit to; several analyses share them."""
        return structure.hidden_moments(self.model.params, self.model.config, self.sequences)

    @functools.cached_property
    def held_out_moments(self) -> Moments:
        """Of the held-out data."""
        return structure.hidden_moments(self.model.params, self.model.config, Sequences.of(self.held_out_rows))

    @property
    def later_loops(self) -> list[int]:
        """Loops 2 .. T, counted from 0: those that share HLA's main latent."""
        loops = self.model.config.num_loops
        return list(range(min(1, loops - 1), loops))

    def weight(self, kind: str, layer: int) -> Float[np.ndarray, "D d"]:
        """The projection that makes keys or values."""
        return np.asarray(self.model.params["layers"][PROJECTIONS[kind]][layer], np.float64)

    def by_layer(self, what: str, kind: str, function: Callable[[int], Any]) -> list[Any]:
        """A function of each layer's number, with a progress bar."""
        layers = tqdm(range(self.model.config.num_layers), desc=f"{what}, {kind}", unit="layer", leave=False)
        return [function(layer) for layer in layers]

    def projected(self, kind: str, layer: int, held_out: bool = False) -> Projected:
        """Keys or values of one layer."""
        found = self.held_out_moments if held_out else self.moments
        return structure.projected(found, layer, self.weight(kind, layer))


def effective_rank(subject: Subject) -> Result:
    """Normalised effective rank and energies along loops, heads and layers; by layer, but for the axis of layers."""
    params, config = subject.model.params, subject.model.config
    mean = structure.hidden_mean(params, config, subject.sequences)
    result: Result = {}
    for axis in AXES:
        for name, around in ((AS_THEY_ARE, None), (AROUND_MEAN, mean)):
            found = structure.axis_energies(params, config, subject.sequences, axis, around)
            for number, kind in enumerate(PROJECTIONS):
                result.setdefault(axis, {}).setdefault(kind, {})[name] = {
                    "effective_rank": found.effective_rank[:, number].tolist(),
                    "energy": found.spectrum[:, number].tolist(),
                }
    return result


def spectra(subject: Subject) -> Result:
    """Singular values, over the largest, and the share of the variance kept, at `FRACTIONS` of the full rank: of one
    loop, of loops 2 .. T together, and of one head's trajectory over all loops; averaged over layers, loops and heads.
    """
    config = subject.model.config

    def curves(values: np.ndarray) -> np.ndarray:
        last = [math.ceil(fraction * len(values)) - 1 for fraction in FRACTIONS]
        return np.stack([np.sqrt(values[last] / values[0]), np.cumsum(values)[last] / values.sum()])

    def one_layer(kind: str, layer: int) -> list[np.ndarray]:
        x = subject.projected(kind, layer)
        families = (
            [structure.joint(x, [loop]) for loop in range(config.num_loops)],
            [structure.joint(x, subject.later_loops)],
            [structure.trajectory(x, head, config.head_dim) for head in range(config.num_kv_heads)],
        )
        return [np.mean([curves(structure.variances(one)) for one in family], axis=0) for family in families]

    names = ["one loop", f"loops 2-{config.num_loops}", "one head, all loops"]
    result: Result = {"fractions": FRACTIONS}
    for kind in PROJECTIONS:
        layers = subject.by_layer("spectra", kind, functools.partial(one_layer, kind))
        for name, (singular, share) in zip(names, np.mean(layers, axis=0), strict=True):
            result.setdefault(name, {})[kind] = {"singular_values": singular.tolist(), "variance": share.tolist()}
    return result


def stabilisation(subject: Subject) -> Result:
    """Change from loop to loop and distance to the last loop, by layer."""

    def one_layer(kind: str, layer: int) -> structure.Changes:
        return structure.changes(subject.projected(kind, layer))

    result: Result = {}
    for kind in PROJECTIONS:
        found = subject.by_layer("stabilisation", kind, functools.partial(one_layer, kind))
        result[kind] = {
            "step": [one.step.tolist() for one in found],
            "to_last": [one.to_last.tolist() for one in found],
        }
    return result


def variance(subject: Subject) -> Result:
    """Shares of the variance that belong to tokens, to loops, and to both together, by layer."""
    one_layer = lambda kind, layer: structure.variance(subject.projected(kind, layer))._asdict()
    return {kind: subject.by_layer("variance", kind, functools.partial(one_layer, kind)) for kind in PROJECTIONS}


def ridge(subject: Subject) -> Result:
    """Held-out R2 from the last loop's hidden state to every loop's keys and values, by layer."""

    def one_layer(kind: str, layer: int) -> list[float]:
        weight, penalty = subject.weight(kind, layer), subject.settings.penalty
        return structure.ridge_r2(subject.moments, subject.held_out_moments, layer, weight, penalty).tolist()

    return {kind: subject.by_layer("ridge", kind, functools.partial(one_layer, kind)) for kind in PROJECTIONS}


def projection(subject: Subject) -> Result:
    """Held-out variance kept by projections to an eighth, a quarter (the paper's 512 of 2,048) and half of one loop's
    dimensions, fitted to each loop alone and to loops 2 .. T jointly, by layer.
    """
    config = subject.model.config
    dimensions = config.num_kv_heads * config.head_dim
    ranks = [dimensions // 8, dimensions // 4, dimensions // 2]

    def one_layer(kind: str, layer: int) -> Result:
        fit, held_out = (subject.projected(kind, layer, held_out) for held_out in (False, True))
        part = lambda loops: structure.kept(structure.joint(fit, loops), structure.joint(held_out, loops), ranks)
        return {
            "alone": [part([loop]).tolist() for loop in range(config.num_loops)],
            "together": part(subject.later_loops).tolist(),
        }

    result: Result = {"ranks": ranks, "dimensions": dimensions}
    for kind in PROJECTIONS:
        result[kind] = subject.by_layer("projection", kind, functools.partial(one_layer, kind))
    return result


def divergence(subject: Subject) -> Result:
    """Attention and its divergence by distance to the attended token, by layer and loop."""
    attention, settings = subject.make_attention(), subject.settings
    found = by_distance(
        subject.model.params,
        subject.model.config,
        attention,
        subject.held_out_rows,
        queries=settings.queries,
        starts=settings.ranges,
    )
    (sizes,) = registry.to_entries(attention.scheme).values()
    return {
        "scheme": {name: value for name, value in sizes.items() if value is not None},
        "starts": found.starts,
        "ranges": found.names,
        "attention": found.attention.tolist(),
        "kl": found.kl.tolist(),
    }


ANALYSES: dict[str, Callable[[Subject], Result]] = {
    "effective_rank": effective_rank,
    "spectra": spectra,
    "stabilisation": stabilisation,
    "variance": variance,
    "ridge": ridge,
    "projection": projection,
    "divergence": divergence,
}

"""Every cache scheme by its name, and as the entries of a `config.json` or a config file.

A scheme is written as `{"<name>_config": {its fields}}`; eviction around it adds `"eviction_config"`. A scheme from
elsewhere is known once `register` has seen it (docs/add_a_scheme.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from hla_jax import attention_files
from hla_jax.attention.baselines import HeadLatent, LayerLatent
from hla_jax.attention.eviction import Evicted
from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.attention.low_bit import LowBit
from hla_jax.attention.scheme import Scheme, SchemeError
from hla_jax.attention.shared import SharedLoop
from hla_jax.attention_files import EVICTION

SCHEMES: dict[str, type[Scheme]] = {
    scheme.interchange: scheme for scheme in (FullCache, SharedLoop, HLA, LLA, HeadLatent, LayerLatent, LowBit)
}

Kind = TypeVar("Kind", bound=type[Scheme])


def register(scheme: Kind) -> Kind:
    """Makes a scheme known by its `interchange` name, to `load`, `export` and config files; a class decorator.

    Raises `ValueError` if another class has the name.
    """
    where = lambda kind: f"{kind.__module__}.{kind.__qualname__}"
    name = scheme.interchange
    if where(SCHEMES.get(name, scheme)) != where(scheme):
        raise ValueError(f"scheme {name!r} is already that of {where(SCHEMES[name])}")
    SCHEMES[name] = scheme
    if name not in attention_files.SCHEMES:
        attention_files.SCHEMES.append(name)
    return scheme


def to_entries(scheme: Scheme) -> dict[str, dict[str, Any]]:
    """The entries of a scheme; none for the full cache alone."""
    if isinstance(scheme, Evicted):
        return to_entries(scheme.scheme) | {EVICTION: {"budget": scheme.budget, "first": scheme.first}}
    return {} if scheme == FullCache() else {f"{scheme.interchange}_config": scheme.to_config()}


def from_entries(entries: Mapping[str, Any]) -> Scheme:
    """The inverse of `to_entries`; other keys are left alone. Raises `SchemeError` for two schemes, or bad fields."""
    found = [name for name in SCHEMES if f"{name}_config" in entries]
    if len(found) > 1:
        raise SchemeError(f"expected one scheme, found {', '.join(f'{name}_config' for name in found)}")
    scheme = SCHEMES[found[0]].from_config(entries[f"{found[0]}_config"]) if found else FullCache()
    if EVICTION not in entries:
        return scheme
    around = entries[EVICTION]
    if around.keys() != {"budget", "first"} or any(type(value) is not int for value in around.values()):
        raise SchemeError(f"{EVICTION} must have the integers budget and first, found {dict(around)!r}")
    return Evicted(scheme, **around)

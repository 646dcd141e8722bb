"""Cache schemes of a looped model and their part of `config.json`, checked."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from transformers import PretrainedConfig

Shape = tuple[int, ...]

_ELSEWHERE = ("head_latent_config", "layer_latent_config", "low_bit_config", "shared_loop_config", "eviction_config")


@dataclasses.dataclass(frozen=True)
class FullCache:
    """Exact keys and values of every loop."""

    name: ClassVar[str] = "full"

    def check(self, config: LoopedConfig) -> None:
        pass

    def map_shapes(self, config: LoopedConfig) -> dict[str, Shape]:
        return {}


@dataclasses.dataclass(frozen=True)
class HLA:
    """Hybrid Latent Attention, `hla_config`."""

    name: ClassVar[str] = "hla"

    rank_k: int
    rank_v: int
    rank_loop1: int
    window: int
    pair_frequency: list[int] | None = None
    pair_frequency_loop1: list[int] | None = None

    def check(self, config: LoopedConfig) -> None:
        size, loops = config.head_dim, config.total_ut_steps
        if loops < 2:
            raise ValueError(f"config.json: HLA needs at least 2 loops, found {loops}")
        if self.window < 0 or self.rank_v < 1:
            raise ValueError("config.json: hla_config: window must be at least 0, and rank_v at least 1")
        for name, rank, pairs_name, pairs in (
            ("rank_k", self.rank_k, "pair_frequency", self.pair_frequency),
            ("rank_loop1", self.rank_loop1, "pair_frequency_loop1", self.pair_frequency_loop1),
        ):
            if rank < size or rank % size:
                raise ValueError(f"config.json: hla_config: {name} must be a multiple of head_dim {size}, found {rank}")
            if pairs is not None and (len(pairs) != rank // 2 or min(pairs) < 0 or max(pairs) >= size // 2):
                raise ValueError(
                    f"config.json: hla_config: {pairs_name} must be {rank // 2} indices of the {size // 2} frequencies"
                )

    def map_shapes(self, config: LoopedConfig) -> dict[str, Shape]:
        rest, heads = config.total_ut_steps - 1, config.num_attention_heads
        size, d = config.head_dim, config.hidden_size
        return {
            "write_k": (rest, self.rank_k, d),
            "write_v": (rest, self.rank_v, d),
            "write_k1": (self.rank_loop1, d),
            "write_v1": (self.rank_loop1, d),
            "read_q": (rest, heads, size, self.rank_k),
            "read_o": (rest, heads, self.rank_v, size),
            "read_q1": (heads, size, self.rank_loop1),
            "read_o1": (heads, self.rank_loop1, size),
        } | ({"bias_k": (self.rank_k,), "bias_k1": (self.rank_loop1,)} if config.qk_bias else {})


@dataclasses.dataclass(frozen=True)
class LLA:
    """Looped Latent Attention, `lla_config`."""

    name: ClassVar[str] = "lla"

    rank_k: int
    rank_v: int
    fold_heads: bool = False
    first_pass: str = "latent"
    single_pass: bool = False
    full_memory: bool = False
    rank_rope: int | None = None
    query_adapter: bool = False

    @property
    def keeps_all(self) -> bool:
        """Whether the first pass reads keys and values kept beside the latents: exact ones, or rebuilt ones."""
        return self.first_pass == "exact" or self.full_memory

    @property
    def passes(self) -> int:
        """Runs of the model for a token."""
        return 1 if self.single_pass or self.full_memory else 2

    def check(self, config: LoopedConfig) -> None:
        size = self.trajectory(config)
        if not (1 <= self.rank_k <= size and 1 <= self.rank_v <= size):
            raise ValueError(
                f"config.json: lla_config: ranks must be in 1 .. {size}, found {self.rank_k} and {self.rank_v}"
            )
        if self.first_pass not in ("latent", "exact"):
            raise ValueError(
                f'config.json: lla_config: first_pass must be "latent" or "exact", found {self.first_pass!r}'
            )
        if self.full_memory and (self.first_pass == "exact" or self.rank_rope is not None):
            raise ValueError('config.json: lla_config: full_memory excludes first_pass "exact" and rank_rope')
        if self.query_adapter and self.rank_rope is None:
            raise ValueError("config.json: lla_config: query_adapter needs rank_rope")
        if self.rank_rope is not None and (self.rank_rope % 2 or not 2 <= self.rank_rope <= size):
            raise ValueError(f"config.json: lla_config: rank_rope must be even and in 2 .. {size}")

    def trajectory(self, config: LoopedConfig) -> int:
        """Numbers that one latent stands for."""
        return config.total_ut_steps * config.head_dim * (config.num_key_value_heads if self.fold_heads else 1)

    def map_shapes(self, config: LoopedConfig) -> dict[str, Shape]:
        leading = () if self.fold_heads else (config.num_key_value_heads,)
        size = self.trajectory(config)
        shapes: dict[str, Shape] = {}
        for name, rank in (("k", self.rank_k), ("v", self.rank_v)):
            shapes |= {f"{name}_down": (*leading, size, rank), f"{name}_up": (*leading, rank, size)}
            shapes |= {f"{name}_mean": (*leading, size)}
        if self.rank_rope is not None:
            query = config.total_ut_steps, config.num_attention_heads, config.head_dim
            shapes |= {"rope_down": (*leading, size, self.rank_rope), "rope_query": (*query, self.rank_rope)}
            if self.query_adapter:
                shapes |= {"query_adapter": (*query, config.head_dim)}
        return shapes


class LoopedConfig(PretrainedConfig):
    """What every family has. The caches know the names of Ouro's fields; another family's `attribute_map` has them."""

    qk_bias = False

    @property
    def outer_layers(self) -> int:
        """Layers that are applied once, before and after the loops."""
        return 0

    @property
    def scheme(self) -> FullCache | HLA | LLA:
        """The cache scheme. Raises `ValueError` for an entry that is malformed or of a scheme this file lacks."""
        if found := [name for name in _ELSEWHERE if getattr(self, name, None) is not None]:
            raise ValueError(
                f"config.json: {found[0]} is a scheme that only hla_jax runs; here: hla_config, lla_config"
            )
        kinds = [kind for kind in (HLA, LLA) if getattr(self, f"{kind.name}_config", None) is not None]
        if len(kinds) > 1:
            raise ValueError("config.json: expected one scheme, found hla_config and lla_config")
        if not kinds:
            return FullCache()
        return _from_entry(kinds[0], getattr(self, f"{kinds[0].name}_config"))


def _from_entry(kind: type, entry: Any) -> Any:
    """A scheme from its entry, with errors that name the key."""
    name = f"config.json: {kind.name}_config"  # type: ignore[attr-defined]
    if not isinstance(entry, dict):
        raise ValueError(f"{name} must be an object, found {entry!r}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    required = {field for field in fields if fields[field].default is dataclasses.MISSING}
    for problem, names in (("missing", required - entry.keys()), ("unknown", entry.keys() - fields.keys())):
        if names:
            raise ValueError(f"{name}: {problem} {sorted(names)}; its fields are {list(fields)}")
    for field, value in entry.items():
        allowed = {
            "int": (int,),
            "bool": (bool,),
            "str": (str,),
            "int | None": (int, type(None)),
            "list[int] | None": (list, type(None)),
        }[str(fields[field].type)]
        if type(value) not in allowed:
            raise ValueError(f"{name}: {field} must be {fields[field].type}, found {value!r}")
    return kind(**entry)

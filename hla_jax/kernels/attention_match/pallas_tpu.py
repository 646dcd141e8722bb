"""`attention_match` for TPU: block of queries by block of keys, with an online softmax of both attentions.

Nothing of the size queries x tokens leaves the chip, neither on the way forward nor backward. The kernels end at sums
over tokens (`Sums`); the read maps, `o_proj` and the relative error are plain jnp, which jax differentiates.

For a query and a head, with exact scores e_j, latent scores l_j, and s_j = l_j for far tokens (F) and e_j for near
ones (N):

    a_j = exp(e_j - E),  E = log sum_j exp(e_j)         p_j = exp(s_j - S),  S = log sum_j exp(s_j)
    KL  = sum_F a_j (e_j - l_j) + S - E                 exact  = sum_j a_j v_j
    latent = sum_F p_j c_j                              window = sum_N p_j v_j

Backward, from the gradients g_KL, g_latent and g_window. The window's scores are given, but its weights are not: the
normaliser S holds the latent scores, so moving one l_j moves every p, and with D = g_latent . latent + g_window .
window

    dl_j = p_j (g_latent . c_j - D + g_KL) - g_KL a_j   for far tokens, and 0 for near ones
    dq = scale sum_F dl_j k_j,   dk_j = scale sum dl_j q,   dc_j = sum p_j g_latent   (sums over queries and heads)

Scores lie with tokens in rows and queries in columns: what belongs to a query (maxima, sums, E, S) is then a row,
which a TPU holds and spreads cheaply, and so are the sums over tokens, which come out transposed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hla_jax import sharding
from hla_jax.kernels.attention_match import Fitted, Fixed
from hla_jax.kernels.attention_match.reference import Match, relative_error

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

LANES = 128
# Instead of minus infinity: a row that has seen nothing yet stays finite, and its first real score rescales it to zero.
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
VMEM_BYTES = 32 << 20


class Options(NamedTuple):
    """What is known when the kernels are compiled."""

    window: int
    scale: float
    queries: int  # in a block; a multiple of 128, as are the keys
    keys: int
    interpret: Any  # False, or pltpu.InterpretParams


class Latent(NamedTuple):
    """What gets a gradient."""

    q: Float[Array, "B H Q rk"]
    k: Float[Array, "B S rk"]
    v: Float[Array, "B S rv"]


class Exact(NamedTuple):
    q: Float[Array, "B H Q dh"]
    k: Float[Array, "B G S dh"]
    v: Float[Array, "B G S dh"]


class Places(NamedTuple):
    """Which query sees which token. Queries ascend, so that a block of them needs few blocks of keys."""

    tokens: Int[Array, "B 1 Q"]
    segments: Int[Array, "B 1 Q"]
    key_segments: Int[Array, "B S 1"]


class Sums(NamedTuple):
    """What the kernels give for each query and head, in float32."""

    stats: Float[Array, "B H 3 Q"]  # E, S and KL
    latent: Float[Array, "B H rv Q"]
    exact: Float[Array, "B H dh Q"]
    window: Float[Array, "B H dh Q"]


_QUERIES, _KEYS = ("batch", "kv_heads", "queries", None), ("batch", "kv_heads", None, None)
_OF_LATENT = _QUERIES, ("batch", None, None), ("batch", None, None)
_OF_EXACT = _QUERIES, _KEYS, _KEYS
_OF_PLACES = ("batch", None, "queries"), ("batch", None, "queries"), ("batch", None, None)
OPERANDS = (*_OF_LATENT, *_OF_EXACT, *_OF_PLACES)
SUMS = ("batch", "kv_heads", None, "queries")
"""Logical axes of what the kernels take and give."""


def attention_match(
    fitted: Fitted,
    fixed: Fixed,
    index: Int[Array, "B Q"],
    counted: Float[Array, "B Q"],
    window: int,
    *,
    block_queries: int = 512,
    block_keys: int = 512,
    interpret: Any = False,
) -> tuple[Float[Array, ""], Match]:
    """The loss KL + error, differentiable in `fitted`, and both terms for the record (`reference.attention_match`).

    Sums are taken in float32, whatever the inputs are.
    """
    fixed, counted = jax.lax.stop_gradient((fixed, counted))
    batch, queries = index.shape
    tokens = fixed.k.shape[1]
    index, segments = index.astype(jnp.int32), fixed.segments.astype(jnp.int32)
    order = jnp.argsort(index, axis=1)
    rows = jnp.arange(batch)[:, None]
    ascending = lambda x: x.at[rows, order].get(unique_indices=True, mode="promise_in_bounds")
    index, counted = ascending(index), ascending(counted)

    devices = sharding.parts("queries")
    mine = -(-queries // devices)
    size = min(block_queries, _round_up(mine, LANES)), min(block_keys, _round_up(tokens, LANES))
    options = Options(window, fixed.q.shape[-1] ** -0.5, *size, interpret)
    more_queries, more_keys = -queries % (devices * options.queries), -tokens % options.keys
    # Repeats the last query, which is then left out; tokens of the padding lie in the future of every query.
    index_padded = jnp.pad(index, ((0, 0), (0, more_queries)), mode="edge")
    of_queries = lambda x: jnp.pad(ascending(x).swapaxes(1, 2), ((0, 0), (0, 0), (0, more_queries), (0, 0)))
    of_keys = lambda x: jnp.pad(x, ((0, 0), (0, more_keys)) + ((0, 0),) * (x.ndim - 2))
    places = Places(
        index_padded[:, None],
        jnp.take_along_axis(segments, index_padded, axis=1)[:, None],
        of_keys(segments)[:, :, None],
    )
    latent = Latent(of_queries(fitted.q), of_keys(fitted.k), of_keys(fitted.v))
    exact = Exact(of_queries(fixed.q), *(of_keys(x).swapaxes(1, 2) for x in (fixed.k, fixed.v)))

    # XLA cannot split a kernel: on a mesh each device runs it on its own rows, heads and queries.
    padded = sharding.split(functools.partial(_sums, options), OPERANDS, SUMS)(latent, exact, places)
    sums = jax.tree.map(lambda x: x[..., :queries], padded)
    by_query = lambda x: jnp.einsum("bheq->bqhe", x)
    from_latent = jnp.einsum("bhrq,hre->bqhe", sums.latent, fitted.read, preferred_element_type=jnp.float32)
    error = relative_error(from_latent + by_query(sums.window), by_query(sums.exact), fixed.o_proj)
    match = Match(jnp.sum(jnp.mean(sums.stats[:, :, 2], axis=1) * counted), jnp.sum(error * counted))
    return match.kl + match.error, match


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(options: Options, latent: Latent, exact: Exact, places: Places) -> Sums:
    return _forward(options, latent, exact, places)


def _save(options: Options, latent: Latent, exact: Exact, places: Places):
    sums = _forward(options, latent, exact, places)
    return sums, (latent, exact, places, sums)


def _backward(options: Options, saved: tuple[Latent, Exact, Places, Sums], gradient: Sums):
    latent, exact, places, sums = saved
    # E and S are not read outside, and what is exact has no gradient.
    of_kl = gradient.stats[:, :, 2]
    mean = jnp.sum(gradient.latent * sums.latent, axis=2) + jnp.sum(gradient.window * sums.window, axis=2)
    stats = jnp.stack([sums.stats[:, :, 0], sums.stats[:, :, 1], mean - of_kl, of_kl], axis=2)
    operands = latent, exact[:2], places, Given(stats, gradient.latent.astype(latent.v.dtype))
    found = Latent(_gradient_of_queries(options, *operands), *_gradient_of_keys(options, *operands))
    return jax.tree.map(lambda g, x: g.astype(x.dtype), found, latent), None, None


_sums.defvjp(_save, _backward)


class Given(NamedTuple):
    """What the backward kernels get of each query and head."""

    stats: Float[Array, "B H 4 Q"]  # E, S, D - g_KL and g_KL
    of_latent: Float[Array, "B H rv Q"]  # g_latent


def _forward(options: Options, latent: Latent, exact: Exact, places: Places) -> Sums:
    batch, heads, queries, _ = latent.q.shape
    first, last = places.tokens[:, 0, :: options.queries], places.tokens[:, 0, options.queries - 1 :: options.queries]
    last_seen = last // options.keys
    first_near = jnp.maximum(first - options.window, 0) // options.keys

    def at(b, h, i, j, last_seen, _):
        return b, h, i, jnp.minimum(j, last_seen[b, i])

    specs = _Specs(options, latent, exact, at)
    heights = [3, latent.v.shape[-1], exact.v.shape[-1], exact.v.shape[-1]]
    running = pltpu.VMEM((1, options.queries), jnp.float32)
    width = latent.q.shape[-1] + latent.v.shape[-1] + 2 * exact.v.shape[-1]
    sums = pl.pallas_call(
        functools.partial(_forward_kernel, options),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, heads, queries // options.queries, latent.k.shape[1] // options.keys),
            in_specs=[specs.latent(), Exact(*specs.exact(), specs.exact()[1]), specs.places()],
            out_specs=[specs.columns(height) for height in heights],
            scratch_shapes=[running] * 4,
        ),
        out_shape=[jax.ShapeDtypeStruct((batch, heads, height, queries), jnp.float32) for height in heights],
        compiler_params=_compiler_params("parallel", "parallel", "parallel", "arbitrary"),
        cost_estimate=_cost(width, latent, (latent, exact)),
        interpret=options.interpret,
        name="attention_match_forward",
    )(last_seen, first_near, latent, exact, places)
    return Sums(*sums)


def _forward_kernel(
    options: Options, last_seen, first_near, latent: Latent, exact: Exact, places: Places, *refs
) -> None:
    b, _, i, j = (pl.program_id(axis) for axis in range(4))
    sums, (top_e, total_e, top_s, total_s) = Sums(*refs[:4]), refs[4:]

    @pl.when(j == 0)
    def start():
        for ref in (*sums, total_e, total_s):
            ref[...] = jnp.zeros_like(ref)
        for ref in (top_e, top_s):
            ref[...] = jnp.full_like(ref, MASKED)

    @pl.when(j <= last_seen[b, i])
    def block():
        score_e = _scores(options, exact.q[0, 0], exact.k[0, 0])
        score_l = _scores(options, latent.q[0, 0], latent.k[0])
        visible, far = _masks(options, places, j)
        a, keep_e = _online_softmax(jnp.where(visible, score_e, MASKED), top_e, total_e)
        p, keep_s = _online_softmax(jnp.where(visible, jnp.where(far, score_l, score_e), MASKED), top_s, total_s)
        apart = jnp.sum(jnp.where(visible & far, a * (score_e - score_l), 0), axis=0, keepdims=True)
        sums.stats[0, 0, 2:] = sums.stats[0, 0, 2:] * keep_e + apart
        sums.exact[0, 0] = sums.exact[0, 0] * keep_e + _weighted(exact.v[0, 0], a)
        sums.latent[0, 0] = sums.latent[0, 0] * keep_s + _weighted(latent.v[0], jnp.where(far, p, 0))
        sums.window[0, 0] *= keep_s

        @pl.when(j >= first_near[b, i])
        def near():
            sums.window[0, 0] += _weighted(exact.v[0, 0], jnp.where(far, 0, p))

    @pl.when(j == pl.num_programs(3) - 1)
    def finish():
        lse_e, lse_s = top_e[...] + jnp.log(total_e[...]), top_s[...] + jnp.log(total_s[...])
        kl = sums.stats[0, 0, 2:] / total_e[...] + lse_s - lse_e
        sums.stats[0, 0] = jnp.concatenate([lse_e, lse_s, kl], axis=0)
        sums.exact[0, 0] /= total_e[...]
        sums.latent[0, 0] /= total_s[...]
        sums.window[0, 0] /= total_s[...]


def _online_softmax(score: Float[Array, "k q"], top, total) -> tuple[Float[Array, "k q"], Float[Array, "1 q"]]:
    """Weights exp(score - top) with the maximum so far, and the factor for what was summed before."""
    before = top[...]
    now = jnp.maximum(before, jnp.max(score, axis=0, keepdims=True))
    keep, weights = jnp.exp(before - now), jnp.exp(score - now)
    top[...] = now
    total[...] = total[...] * keep + jnp.sum(weights, axis=0, keepdims=True)
    return weights, keep


def _gradient_of_queries(
    options: Options, latent: Latent, exact: tuple[Array, Array], places: Places, given: Given
) -> Float[Array, "B H Q rk"]:
    batch, heads, queries, rank = latent.q.shape
    last_far = _last_far(options, places)

    def at(b, h, i, j, last_far):
        return b, h, i, jnp.minimum(j, jnp.maximum(last_far[b, i], 0))

    specs = _Specs(options, latent, exact, at)
    transposed = pl.pallas_call(
        functools.partial(_gradient_of_queries_kernel, options),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, queries // options.queries, latent.k.shape[1] // options.keys),
            in_specs=[specs.latent(), specs.exact(), specs.places(), specs.given()],
            out_specs=specs.columns(rank),
        ),
        out_shape=jax.ShapeDtypeStruct((batch, heads, rank, queries), jnp.float32),
        compiler_params=_compiler_params("parallel", "parallel", "parallel", "arbitrary"),
        cost_estimate=_cost(exact[0].shape[-1] + 2 * rank + latent.v.shape[-1], latent, (latent, exact, given)),
        interpret=options.interpret,
        name="attention_match_gradient_of_queries",
    )(last_far, latent, exact, places, given)
    return transposed.swapaxes(2, 3)


def _gradient_of_queries_kernel(options: Options, last_far, latent: Latent, exact, places, given, out) -> None:
    b, _, i, j = (pl.program_id(axis) for axis in range(4))

    @pl.when(j == 0)
    def start():
        out[...] = jnp.zeros_like(out)

    @pl.when(j <= last_far[b, i])
    def block():
        _, of_score = _gradient_of_scores(options, latent, exact, places, given, j)
        out[0, 0] += options.scale * _weighted(latent.k[0], of_score)


def _gradient_of_keys(
    options: Options, latent: Latent, exact: tuple[Array, Array], places: Places, given: Given
) -> tuple[Float[Array, "B S rk"], Float[Array, "B S rv"]]:
    batch, heads, queries, rank = latent.q.shape
    blocks, key_blocks = queries // options.queries, latent.k.shape[1] // options.keys
    last_far = _last_far(options, places)
    # Queries ascend, so a block of keys is needed from some block of queries on.
    first = jnp.sum(last_far[:, None] < jnp.arange(key_blocks)[:, None], axis=-1)
    first = jnp.minimum(first, blocks - 1)

    def at(b, j, h, i, _, first):
        return b, h, jnp.maximum(i, first[b, j]), j

    specs = _Specs(options, latent, exact, at)
    size, rank_v = exact[0].shape[-1], latent.v.shape[-1]
    return pl.pallas_call(
        functools.partial(_gradient_of_keys_kernel, options),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, key_blocks, heads, blocks),
            in_specs=[specs.latent(), specs.exact(), specs.places(), specs.given()],
            out_specs=[specs.keys(rank), specs.keys(rank_v)],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in latent[1:]],
        compiler_params=_compiler_params("parallel", "parallel", "arbitrary", "arbitrary"),
        cost_estimate=_cost(size + 2 * rank + 2 * rank_v, latent, (latent, exact, given)),
        interpret=options.interpret,
        name="attention_match_gradient_of_keys",
    )(last_far, first, latent, exact, places, given)


def _gradient_of_keys_kernel(
    options: Options, last_far, first, latent: Latent, exact, places, given: Given, out_k, out_v
) -> None:
    b, j, h, i = (pl.program_id(axis) for axis in range(4))

    @pl.when((h == 0) & (i == 0))
    def start():
        out_k[...] = jnp.zeros_like(out_k)
        out_v[...] = jnp.zeros_like(out_v)

    @pl.when(j <= last_far[b, i])
    def block():
        p, of_score = _gradient_of_scores(options, latent, exact, places, given, j)
        q, of_latent = latent.q[0, 0], given.of_latent[0, 0]
        out_k[0] += options.scale * _dot(of_score.astype(q.dtype), q, 1, 0)
        out_v[0] += _dot(p.astype(of_latent.dtype), of_latent, 1, 1)


def _last_far(options: Options, places: Places) -> Int[Array, "B n"]:
    """The last block of keys with far tokens for each block of queries; negative without any."""
    last = places.tokens[:, 0, options.queries - 1 :: options.queries]
    return (last - options.window - 1) // options.keys


def _gradient_of_scores(
    options: Options, latent: Latent, exact, places: Places, given: Given, j
) -> tuple[Float[Array, "k q"], Float[Array, "k q"]]:
    """p and dl of the docstring above, zero but for visible far tokens."""
    lse_e, lse_s, mean, of_kl = (given.stats[0, 0, n : n + 1] for n in range(4))
    visible, far = _masks(options, places, j)
    weights = lambda scores, lse: jnp.exp(jnp.where(visible & far, scores, MASKED) - lse)
    a = weights(_scores(options, exact[0][0, 0], exact[1][0, 0]), lse_e)
    p = weights(_scores(options, latent.q[0, 0], latent.k[0]), lse_s)
    return p, p * (_dot(latent.v[0], given.of_latent[0, 0], 1, 0) - mean) - of_kl * a


def _masks(options: Options, places: Places, j) -> tuple[Bool[Array, "k q"], Bool[Array, "k q"]]:
    """Which tokens of block j each query sees, and which are beyond its window."""
    token = j * options.keys + jax.lax.broadcasted_iota(jnp.int32, (options.keys, options.queries), 0)
    distance = places.tokens[0] - token
    return (distance >= 0) & (places.key_segments[0] == places.segments[0]), distance > options.window


def _scores(options: Options, q: Float[Array, "q r"], k: Float[Array, "k r"]) -> Float[Array, "k q"]:
    return options.scale * _dot(k, q, 1, 1)


def _weighted(values: Float[Array, "k r"], weights: Float[Array, "k q"]) -> Float[Array, "r q"]:
    return _dot(values, weights.astype(values.dtype), 0, 0)


def _dot(x: Array, y: Array, of_x: int, of_y: int) -> Array:
    """Sums over one axis of each, in float32."""
    # bfloat16 has one precision; float32 takes the one that jax is set to.
    precision = None if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        x, y, (((of_x,), (of_y,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


class _Specs:
    """Blocks of the operands. `at` tells sequence, head, block of queries and block of keys at a step of the grid.

    A block that is not needed is not fetched: `at` names the nearest one that is, which is there already.
    """

    def __init__(self, options: Options, latent: Latent, exact: Sequence[Array], at: Callable[..., tuple]):
        self.options, self.at = options, at
        self.ranks = latent.q.shape[-1], latent.v.shape[-1]
        self.size, self.per_group = exact[0].shape[-1], exact[0].shape[1] // exact[1].shape[1]

    def _spec(self, shape: tuple[int, ...], place: Callable[..., tuple]) -> Any:
        return pl.BlockSpec(shape, lambda *step: place(*self.at(*step)))

    def rows(self, width: int) -> Any:
        return self._spec((1, 1, self.options.queries, width), lambda b, h, i, j: (b, h, i, 0))

    def columns(self, height: int) -> Any:
        return self._spec((1, 1, height, self.options.queries), lambda b, h, i, j: (b, h, 0, i))

    def keys(self, width: int) -> Any:
        return self._spec((1, self.options.keys, width), lambda b, h, i, j: (b, j, 0))

    def latent(self) -> Latent:
        rank_k, rank_v = self.ranks
        return Latent(self.rows(rank_k), self.keys(rank_k), self.keys(rank_v))

    def exact(self) -> tuple[Any, Any]:
        shape = (1, 1, self.options.keys, self.size)
        return self.rows(self.size), self._spec(shape, lambda b, h, i, j: (b, h // self.per_group, j, 0))

    def places(self) -> Places:
        of_queries = self._spec((1, 1, self.options.queries), lambda b, h, i, j: (b, 0, i))
        return Places(of_queries, of_queries, self.keys(1))

    def given(self) -> Given:
        return Given(self.columns(4), self.columns(self.ranks[1]))


def _compiler_params(*semantics: Any) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=VMEM_BYTES)


def _cost(width: int, latent: Latent, operands: Any) -> pl.CostEstimate:
    """Of dot products of `width` numbers in all for each query and head and half of the tokens."""
    pairs = math.prod(latent.q.shape[:3]) * latent.k.shape[1] // 2
    read = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(operands))
    return pl.CostEstimate(flops=2 * pairs * width, transcendentals=2 * pairs, bytes_accessed=read)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple

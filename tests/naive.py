"""Decoding written out in numpy and float64, one token, one head, one score at a time: an oracle of the cache schemes.

A `Store` notes what a scheme keeps of each token, and says how a query reads one stored token: its score and its value.
Everything else is common: which tokens are read exactly, which are read from the store, one softmax over both.

Layers outside of the loops (Huginn's) have loop number `OUTER`, and are always read exactly.
"""

import copy
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from hla_jax.config import HuginnConfig, ModelConfig
from hla_jax.models import huginn

Visible = Callable[[int, int], bool]
OUTER = -1


def rotate(config: ModelConfig, x: np.ndarray, position: int) -> np.ndarray:
    """Turns x [..., dh], pairs (f, f + dh/2)."""
    half = config.head_dim // 2
    turn = np.exp(1j * position * config.rope_theta ** (-np.arange(half) / half))
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([z.real, z.imag], axis=-1)


class Store:
    """Exact keys (not rotated) and values of every token, loop and layer: the full cache."""

    rewritten = range(0)
    """Loops whose stored part a second pass writes anew."""

    def __init__(self, config: ModelConfig, maps: dict | None = None):
        self.config = config
        self.maps = {name: np.asarray(value, np.float64) for name, value in (maps or {}).items()}
        self.kv: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}

    def note(self, i: int, loop: int, layer: int, h: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        self.kv[i, loop, layer] = k, v

    def rebuilt(self, j: int, loop: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys before rotation, and values, [G, dh], as the store has them."""
        return self.kv[j, loop, layer]

    def read(self, i: int, j: int, loop: int, layer: int, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scores [H] of token i's queries [H, dh] for the stored token j, and its values [H, dh]."""
        return self.match(q, i, j, *self.rebuilt(j, loop, layer))

    def exact(self, i: int, j: int, loop: int, layer: int, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same for the token itself and those of the window."""
        return self.match(q, i, j, *self.kv[j, loop, layer])

    def match(self, q: np.ndarray, i: int, j: int, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        k, v = (np.repeat(x, self.config.heads_per_kv, axis=0) for x in (k, v))
        scores = (rotate(self.config, q, i) * rotate(self.config, k, j)).sum(-1)
        return scores / self.config.head_dim**0.5, v


class SharedStore(Store):
    """The last loop's keys and values, or with several slots those of the last loop that shares the slot."""

    def __init__(self, config, maps=None, slots: int = 1):
        super().__init__(config, maps)
        self.slots = slots

    def rebuilt(self, j, loop, layer):
        sharing = [t for t in range(self.config.num_loops) if t % self.slots == loop % self.slots]
        return self.kv[j, max(sharing), layer]


class LatentStore(Store):
    """HLA: the main latent and loop 1's, in blocks that rotate like heads."""

    rewritten = range(1)

    def __init__(self, config, maps):
        super().__init__(config, maps)
        self.latents: dict[tuple[int, bool, int], tuple[np.ndarray, np.ndarray]] = {}

    def note(self, i, loop, layer, h, k, v):
        super().note(i, loop, layer, h, k, v)
        if loop == OUTER:
            return
        at, mine = ((layer,), "1") if loop == 0 else ((layer, loop - 1), "")
        parts = [self.maps[name + mine][at] @ h for name in ("write_k", "write_v")]
        if loop <= 1 and self.config.qk_bias:
            parts[0] = parts[0] + self.maps["bias_k" + mine][layer]
        before = (0, 0) if loop <= 1 else self.latents[i, True, layer]
        self.latents[i, loop > 0, layer] = before[0] + parts[0], before[1] + parts[1]

    def read(self, i, j, loop, layer, q):
        at, mine = ((layer,), "1") if loop == 0 else ((layer, loop - 1), "")
        key, value = self.latents[j, loop > 0, layer]
        turned = lambda x, position: rotate(self.config, x.reshape(-1, self.config.head_dim), position).ravel()
        read_q, read_o = self.maps["read_q" + mine][at], self.maps["read_o" + mine][at]
        queries = [turned(one @ down, i) for one, down in zip(q, read_q, strict=True)]
        scores = np.array([query @ turned(key, j) for query in queries]) / self.config.head_dim**0.5
        return scores, np.einsum("r,hre->he", value, read_o)


class TrajectoryStore(Store):
    """LLA: a latent of each head's keys, and of its values, over all loops."""

    def rebuilt(self, j, loop, layer):
        def part(name: str, which: int) -> np.ndarray:
            loops = range(self.config.num_loops)
            x = np.concatenate([self.kv[j, each, layer][which] for each in loops], axis=-1)  # [G, T dh]
            mean, down, up = (self.maps[f"{name}_{part}"][layer] for part in ("mean", "down", "up"))
            z = np.einsum("ge,ger->gr", x - mean, down)
            back = mean + np.einsum("gr,gre->ge", z, up)
            return back.reshape(len(back), self.config.num_loops, -1)[:, loop]

        return part("k", 0), part("v", 1)


class FoldedStore(TrajectoryStore):
    """LLA-2D: one latent of all heads, in the order head, loop, coordinate."""

    def rebuilt(self, j, loop, layer):
        def part(name: str, which: int) -> np.ndarray:
            x = np.stack([self.kv[j, each, layer][which] for each in range(self.config.num_loops)], axis=1)
            mean, down, up = (self.maps[f"{name}_{part}"][layer] for part in ("mean", "down", "up"))
            return (mean + (x.ravel() - mean) @ down @ up).reshape(x.shape)[:, loop]

        return part("k", 0), part("v", 1)


class AbsorbedStore(TrajectoryStore):
    """LLA's absorbed mode: content and position are scored apart, as its formula says."""

    def read(self, i, j, loop, layer, q):
        content = q
        if "query_adapter" in self.maps:
            content = np.einsum("he,hef->hf", q, self.maps["query_adapter"][layer, loop])
        keys, values = (np.repeat(x, self.config.heads_per_kv, axis=0) for x in self.rebuilt(j, loop, layer))
        loops = range(self.config.num_loops)
        trajectory = np.concatenate([self.kv[j, each, layer][0] for each in loops], axis=-1)
        rotary = np.einsum("ge,ger->gr", trajectory, self.maps["rope_down"][layer])
        query = np.einsum("he,her->hr", q, self.maps["rope_query"][layer, loop])
        position = np.sum(self.turn(query, i) * np.repeat(self.turn(rotary, j), self.config.heads_per_kv, axis=0), -1)
        return (np.sum(content * keys, -1) + position) / self.config.head_dim**0.5, values

    def turn(self, x: np.ndarray, position: int) -> np.ndarray:
        """Pair p of [..., r], coordinates (p, p + r/2), by the frequency p mod (dh/2)."""
        pairs, half = x.shape[-1] // 2, self.config.head_dim // 2
        turn = np.exp(1j * position * self.config.rope_theta ** (-(np.arange(pairs) % half) / half))
        z = (x[..., :pairs] + 1j * x[..., pairs:]) * turn
        return np.concatenate([z.real, z.imag], axis=-1)


class LowBitStore(Store):
    """Codes of keys with a quantiser a channel, and of values with a quantiser a token and head."""

    def __init__(self, config, maps, bits: int):
        super().__init__(config, maps)
        self.bits = bits

    def rebuilt(self, j, loop, layer):
        most = 2**self.bits - 1
        nearest = lambda x, low, step: low + np.clip(np.rint((x - low) / step), 0, most) * step
        k, v = self.kv[j, loop, layer]
        step = self.maps["k_step"][layer, loop]
        low = v.min(axis=-1, keepdims=True).astype(np.float16).astype(float)
        step_v = ((v.max(axis=-1, keepdims=True) - low) / most).astype(np.float16).astype(float)
        return nearest(k, self.maps["k_center"][layer, loop] - most / 2 * step, step), nearest(v, low, step_v)


def decode(
    params: dict,
    config: ModelConfig,
    store: Store,
    tokens: np.ndarray,
    prompt: int,
    visible: Visible = lambda i, j: True,
    window: int = 0,
    passes: int = 1,
) -> np.ndarray:
    """Logits [S, V] of one sequence whose first `prompt` tokens are read exactly. With two passes, the second's, in
    which every token, of the prompt too, is read from the store. `visible(i, j)`: whether token i, beyond the prompt,
    still finds token j in the store.
    """
    logits = []
    for i, token in enumerate(np.asarray(tokens)):

        def first(loop, layer, h, q, k, v, i=i):
            store.note(i, loop, layer, h, k, v)
            exact = [j for j in range(i + 1) if i < prompt or i - j <= (0 if loop == OUTER else window)]
            stored = [j for j in range(i + 1) if j not in exact and visible(i, j)]
            at = loop, layer, q
            read = store.exact if loop == OUTER else store.read
            return attend([store.exact(i, j, *at) for j in exact] + [read(i, j, *at) for j in stored])

        def second(loop, layer, h, q, k, v, i=i):
            if loop == OUTER:
                return first(loop, layer, h, q, k, v)
            return attend([store.read(i, j, loop, layer, q) for j in range(i + 1) if i < prompt or visible(i, j)])

        logits.append([forward(params, config, token, one) for one in (first, second)[:passes]][-1])
    return np.stack(logits)


def swapped(
    params: dict, config: ModelConfig, store: Store, tokens: np.ndarray, visible: Visible, window: int
) -> np.ndarray:
    """Logits [S, V] of a second pass over one sequence that an exact pass has stored; a window of -1 reads even the
    token itself from the store.
    """
    own = copy.deepcopy(store)
    decode(params, config, store, tokens, len(tokens))
    logits = []
    for i, token in enumerate(np.asarray(tokens)):

        def again(loop, layer, h, q, k, v, i=i):
            own.note(i, loop, layer, h, k, v)
            exact = [j for j in range(i + 1) if i - j <= (0 if loop == OUTER else window)]
            stored = [j for j in range(i + 1) if j not in exact and visible(i, j)]
            read = own.exact if loop == OUTER else own.read if loop in own.rewritten else store.read
            at = loop, layer, q
            return attend([own.exact(i, j, *at) for j in exact] + [read(i, j, *at) for j in stored])

        logits.append(forward(params, config, token, again))
    return np.stack(logits)


def attend(read: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Softmax over what was read: scores [H] and values [H, dh] of every token."""
    scores, values = (np.stack(x) for x in zip(*read, strict=True))
    weights = np.exp(scores - scores.max(axis=0))
    return np.einsum("jh,jhe->he", weights / weights.sum(axis=0), values)


def forward(params: dict, config: ModelConfig, token: int, attend: Callable) -> np.ndarray:
    """Logits of one token; `attend(loop, layer, h, q, k, v)` gives the heads' output."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    return (_huginn if isinstance(config, HuginnConfig) else _ouro)(params, config, token, attend)


def norm(config: ModelConfig, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2) + config.rms_norm_eps) * weight


def mlp(p: dict, h: np.ndarray) -> np.ndarray:
    gate = p["gate_proj"] @ h
    return p["down_proj"] @ (gate / (1 + np.exp(-gate)) * (p["up_proj"] @ h))


def _ouro(params: dict, config: ModelConfig, token: int, attend: Callable) -> np.ndarray:
    x = params["embed_tokens"][token]
    for loop in range(config.num_loops):
        for layer in range(config.num_layers):
            p = {name: stacked[layer] for name, stacked in params["layers"].items()}
            h = norm(config, x, p["input_layernorm"])
            q, k, v = ((p[name] @ h).reshape(-1, config.head_dim) for name in ("q_proj", "k_proj", "v_proj"))
            x = x + norm(config, p["o_proj"] @ attend(loop, layer, h, q, k, v).ravel(), p["input_layernorm_2"])
            h = norm(config, x, p["post_attention_layernorm"])
            x = x + norm(config, mlp(p, h), p["post_attention_layernorm_2"])
        x = norm(config, x, params["norm"])
    return params["lm_head"] @ x


def _huginn(params: dict, config: ModelConfig, token: int, attend: Callable) -> np.ndarray:
    def block(x: np.ndarray, stack: str, loop: int, layer: int, number: int) -> np.ndarray:
        p = {name: stacked[layer] for name, stacked in params[stack].items()}
        h = norm(config, x, p["norm_1"])
        q, k, v = (p[name] @ h for name in ("q_proj", "k_proj", "v_proj"))
        if config.qk_bias:
            q, k = q + p["q_bias"], k + p["k_bias"]
        heads = attend(loop, number, h, *(x.reshape(-1, config.head_dim) for x in (q, k, v)))
        x = norm(config, x + p["o_proj"] @ heads.ravel(), p["norm_2"])
        return norm(config, x + mlp(p, norm(config, x, p["norm_3"])), p["norm_4"])

    e = params["embed_tokens"][token] * config.hidden_size**0.5
    for layer in range(config.num_prelude):
        e = block(e, "prelude", OUTER, layer, layer)
    x = np.asarray(huginn.initial_state(config, jnp.asarray([[token]]), jnp.float64)[0, 0])
    for loop in range(config.num_loops):
        x = params["adapter"] @ np.concatenate([x, e])
        for layer in range(config.num_layers):
            x = block(x, "layers", loop, layer, layer)
    x = norm(config, x, params["norm"])
    for layer in range(config.num_coda):
        x = block(x, "coda", OUTER, layer, config.num_prelude + layer)
    return params.get("lm_head", params["embed_tokens"]) @ norm(config, x, params["norm"])

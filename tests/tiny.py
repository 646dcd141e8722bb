"""Small models and maps for tests: the golden checkpoints, random models, and HLA maps of full rank made by hand."""

import dataclasses
import functools
import json
import pathlib
import shutil
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from safetensors.numpy import load_file

import hla_jax
from hla_jax import attention_files
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.attention.scheme import Attention, Scheme
from hla_jax.config import HuginnConfig, ModelConfig, OuroConfig
from hla_jax.models import weights

GOLDEN = pathlib.Path(__file__).parent / "golden"
GOLDEN_MODELS = ("ouro-tiny", "ouro-tiny-gqa")
# A float32 run on "highest" precision and a float64 run agree with the float64 truth to this.
TOLERANCE = {"float32": 2e-4, "float64": 2e-5}


@dataclasses.dataclass(frozen=True)
class Golden:
    """A golden checkpoint: `values` from the public PyTorch code, `codecs` from a float64 oracle of the schemes."""

    config: OuroConfig
    params: dict
    values: dict[str, np.ndarray]
    codecs: dict[str, np.ndarray]
    hla: HLA
    maps: dict[str, jax.Array]
    lla: LLA
    lla_maps: dict[str, jax.Array]
    prompt_length: int


@functools.cache
def golden(name: str, dtype: str) -> Golden:
    directory = GOLDEN / name
    config = OuroConfig.from_directory(directory)
    about = json.loads((directory / "golden_codecs.json").read_text())
    hla, lla = HLA(**about["hla"]), LLA(**about["lla"])
    maps = lambda file, scheme: attention_files.load_maps(
        directory / file, config, scheme.interchange, scheme.map_shapes(config), dtype
    )
    return Golden(
        config,
        weights.load_params(directory, config, dtype),
        load_file(directory / "golden.safetensors"),
        load_file(directory / "golden_codecs.safetensors"),
        hla,
        maps("hla_random.safetensors", hla),
        lla,
        maps("lla_svd.safetensors", lla),
        about["prompt_length"],
    )


def golden_copy(name: str, directory: pathlib.Path) -> pathlib.Path:
    """A new directory with a golden checkpoint, to damage or to export from."""
    directory.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / name / file, directory / file)
    return directory


def copy_tokenizer(directory: pathlib.Path) -> None:
    """Gives a model the embedded one's tokenizer."""
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(hla_jax.NANO / file, directory / file)


def auto_mesh(*sizes: int, axes: Sequence[str]) -> AbstractMesh:
    """Sizes and axes of a mesh, without devices."""
    return AbstractMesh(sizes, tuple(axes), axis_types=(AxisType.Auto,) * len(sizes))


def long_cases(*values: object) -> list:
    """Parameters of a test whose other cases say enough in the default suite."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


def tiny_config(**changes) -> OuroConfig:
    """A model small enough to compile in a second or two."""
    sizes = dict(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=32,
        num_layers=2,
        num_loops=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=100.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    return OuroConfig(**(sizes | changes))


def tiny_huginn(**changes) -> HuginnConfig:
    """The same of the other family, with more steps."""
    sizes = dict(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=32,
        num_layers=2,
        num_loops=4,
        num_heads=3,
        num_kv_heads=3,
        head_dim=8,
        rope_theta=100.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        num_prelude=1,
        num_coda=2,
    )
    return HuginnConfig(**(sizes | changes))


def tiny_params(config: ModelConfig, dtype: str = "float32", seed: int = 0, scale: float = 0.3) -> dict:
    """Random parameters whose norms and gate are not at their neutral start, so that a forgotten one shows."""
    rng = np.random.default_rng(seed)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(("norm" in path[-1].key) + scale * rng.normal(size=leaf.shape), dtype)

    return jax.tree_util.tree_map_with_path(draw, weights.abstract_params(config, dtype))


def tiny_tokens(config: ModelConfig, batch: int, length: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, config.vocab_size, (batch, length)), jnp.int32)


def random_hla(config: ModelConfig, window: int, dtype: str = "float32", seed: int = 0) -> Attention:
    """HLA with fewer ranks than the keys have, and random maps."""
    scheme = HLA(config.head_dim * (config.num_loops - 1), config.head_dim, config.head_dim, window)
    return random_maps(scheme, config, dtype, seed)


def random_maps(scheme: Scheme, config: ModelConfig, dtype: str = "float32", seed: int = 0) -> Attention:
    """Random maps that give outputs of the size of the exact ones."""
    rng = np.random.default_rng(seed)
    draw = lambda shape: jnp.asarray(rng.normal(size=(config.num_layers, *shape)) / shape[-1] ** 0.5, dtype)
    return Attention(scheme, {name: draw(shape) for name, shape in scheme.map_shapes(config).items()})


def full_rank_hla(config: ModelConfig, params: dict, window: int, shuffle: int | None = None) -> Attention:
    """HLA that loses nothing: the main latent holds the keys and values of loops 2 .. T and all key-value heads.

    The writer's rows are the projections' rows, block by block; the readers select the block of their own loop and
    head. With `shuffle` (a seed), pairs are put in random order, with a `pair_frequency` that says so, and pairs of one
    frequency are mixed by a random orthogonal matrix, which rotation must commute with.
    """
    main = _full_rank(config, params, config.num_loops - 1, shuffle)
    loop1 = _full_rank(config, params, 1, None if shuffle is None else shuffle + 1)
    scheme = HLA(
        main["write_k"].shape[2],
        main["write_v"].shape[2],
        loop1["write_k"].shape[2],
        window,
        main["pair_frequency"],
        loop1["pair_frequency"],
    )
    names = ("write_k", "write_v", "read_q", "read_o")
    return Attention(
        scheme,
        {name: jnp.asarray(main[name]) for name in names}
        | {f"{name}1": jnp.asarray(loop1[name][:, 0]) for name in names},
    )


def _full_rank(config: ModelConfig, params: dict, loops: int, shuffle: int | None) -> dict:
    """Maps of one latent that serves `loops` loops: block t G + g of it is loop t's key-value head g."""
    layers, heads, kv_heads, size = config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim
    rank = loops * kv_heads * size
    split = lambda name: np.asarray(params["layers"][name]).reshape(layers, kv_heads, size, -1)
    key, value = split("k_proj"), split("v_proj")
    write_k, write_v = (np.zeros((layers, loops, rank, config.hidden_size), key.dtype) for _ in range(2))
    select = np.zeros((layers, loops, heads, size, rank), key.dtype)
    for t in range(loops):
        for h in range(heads):
            g = h // config.heads_per_kv
            block = t * kv_heads + g
            at = slice(block * size, (block + 1) * size)
            write_k[:, t, at], write_v[:, t, at], select[:, t, h, :, at] = key[:, g], value[:, g], np.eye(size)
    read_k, pair_frequency = select, None
    if shuffle is not None:
        rng = np.random.default_rng(shuffle)
        half = size // 2
        pair = np.arange(rank // 2)
        coordinates = np.stack([pair // half * size + pair % half, pair // half * size + half + pair % half])
        mixed = np.zeros((rank // 2, rank // 2))
        for frequency in range(half):
            mine = np.flatnonzero(pair % half == frequency)
            mixed[np.ix_(mine, mine)] = np.linalg.qr(rng.normal(size=(mine.size, mine.size)))[0]
        order = rng.permutation(rank // 2)
        turn = np.zeros((rank, rank), key.dtype)
        for row in coordinates:
            turn[np.ix_(row, row)] = mixed[order]
        write_k, read_k = np.einsum("rs,ltsd->ltrd", turn, write_k), np.einsum("rs,lthes->lther", turn, select)
        pair_frequency = tuple(int(p % half) for p in order)
    return {
        "write_k": write_k,
        "write_v": write_v,
        "read_q": read_k,
        "read_o": np.swapaxes(select, -1, -2).copy(),
        "pair_frequency": pair_frequency,
    }

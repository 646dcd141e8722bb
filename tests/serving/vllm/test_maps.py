"""Maps cut for tensor parallelism: what the processes compute together is what one computes."""

# ruff: noqa: E402 (the imports below need torch)

import dataclasses

import pytest

torch = pytest.importorskip("torch", reason="the plugin runs in vLLM's environment")

from hla_jax.serving.torch.looped_schemes import HLA, LLA
from hla_jax.serving.vllm.maps import Maps, arranged, is_map
from hla_jax.serving.vllm.parallel import Share

T, H, G, SIZE, D, N = 3, 8, 4, 6, 10, 5


@dataclasses.dataclass
class Config:
    scheme: object
    num_hidden_layers: int = 2
    total_ut_steps: int = T
    num_attention_heads: int = H
    num_key_value_heads: int = G
    head_dim: int = SIZE
    hidden_size: int = D
    qk_bias: bool = False


def draw(config):
    torch.manual_seed(0)
    return {name: torch.randn(shape).double() for name, shape in config.scheme.map_shapes(config).items()}


def shares(ranks):
    return [Share(rank, ranks) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_hla(ranks):
    config = Config(HLA(rank_k=12, rank_v=7, rank_loop1=6, window=4))
    maps, h, q = draw(config), torch.randn(N, T, D).double(), torch.randn(N, H, SIZE).double()
    parts = [{name: arranged(name, x, config, share) for name, x in maps.items()} for share in shares(ranks)]
    latent = torch.einsum("ntd,trd->nr", h[:, 1:], maps["write_k"])
    for part in parts:  # every process makes the whole latent
        torch.testing.assert_close(h[:, 1:].flatten(1) @ part["write_k"].T, latent)
        torch.testing.assert_close(part["write_v1"], maps["write_v1"])
    for name, axis in (("read_q", 1), ("read_o", 1), ("read_q1", 0), ("read_o1", 0)):
        torch.testing.assert_close(torch.cat([part[name] for part in parts], dim=axis), maps[name])
    mine = [torch.einsum("nhe,her->nhr", share.queries(q, 1), p["read_q1"]) for share, p in zip(shares(ranks), parts)]
    torch.testing.assert_close(torch.cat(mine, 1), torch.einsum("nhe,her->nhr", q, maps["read_q1"]))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("fold", [False, True])
def test_lla(ranks, fold):
    config = Config(LLA(rank_k=5, rank_v=4, fold_heads=fold, rank_rope=2, query_adapter=True))
    if fold and ranks > G:
        with pytest.raises(ValueError, match="must be at most 4: with fold_heads"):
            Share(0, ranks).check(config.scheme, H, G)
        return
    Share(0, ranks).check(config.scheme, H, G)
    maps, k = draw(config), torch.randn(N, T, G, SIZE).double()
    trajectory = k.transpose(1, 2)  # [N, G, T, dh]
    down, up, mean = (maps[f"k_{name}"] for name in ("down", "up", "mean"))
    if fold:
        whole = (trajectory.flatten(1) - mean) @ down
        rebuilt = (whole @ up + mean).reshape(N, G, T, SIZE)
    else:
        whole = torch.einsum("ngi,gir->ngr", trajectory.flatten(2) - mean, down)
        rebuilt = (torch.einsum("ngr,gri->ngi", whole, up) + mean).reshape(N, G, T, SIZE)
    total = torch.zeros_like(whole) if fold else None
    for share in shares(ranks):
        mine = {name: arranged(name, x, config, share) for name, x in maps.items()}
        heads = share.keys(trajectory, 1).transpose(1, 2)  # [N, T, mine, dh]
        product = "ntge,tger->nr" if fold else "ntge,tger->ngr"
        latent = torch.einsum(product, heads - mine["k_mean"], mine["k_down"])
        if fold:
            total += latent
        else:
            torch.testing.assert_close(latent, share.keys(whole, 1))
        source = whole[:, None].expand(-1, heads.shape[2], -1) if fold else latent
        back = torch.einsum("ngr,tgre->ntge", source, mine["k_up"]) + mine["k_mean"]
        torch.testing.assert_close(back, share.keys(rebuilt, 1).transpose(1, 2))
        torch.testing.assert_close(mine["rope_query"], share.queries(maps["rope_query"], 1))
    if fold:
        torch.testing.assert_close(total, whole)


@pytest.mark.parametrize(("ranks", "heads", "kv_heads"), [(3, 8, 8), (8, 24, 3)])
def test_heads_that_cannot_be_split(ranks, heads, kv_heads):
    with pytest.raises(ValueError, match=f"--tensor-parallel-size {ranks} must divide the {heads} heads"):
        Share(0, ranks).check(HLA(12, 7, 6, 4), heads, kv_heads)


def test_loading():
    config = Config(HLA(rank_k=12, rank_v=7, rank_loop1=6, window=4))
    maps = Maps(config, Share(1, 2))
    given = draw(config)
    for layer in range(2):
        for name, tensor in given.items():
            maps.load(f"model.layers.{layer}.self_attn.hla.{name}", tensor + layer)
    assert not maps.missing
    torch.testing.assert_close(maps.read_q[1], (given["read_q"][:, 4:] + 1).float())
    for name, tensor, message in (
        ("model.layers.0.self_attn.hla.read_x", given["read_q"], "unknown tensor"),
        ("model.layers.2.self_attn.hla.read_q", given["read_q"], "unknown tensor"),
        ("model.layers.0.self_attn.lla.k_up", given["read_q"], "unknown tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            maps.load(name, tensor)
    with pytest.raises(ValueError, match=r"must be \[2, 8, 6, 12\], found \[2, 8, 6, 11\]"):
        Maps(config, Share(0, 1)).load("model.layers.0.self_attn.hla.read_q", given["read_q"][..., 1:])


def test_names_of_maps():
    assert is_map("model.layers.11.self_attn.lla.k_up")
    assert not is_map("model.layers.11.self_attn.q_proj.weight")
    assert not is_map("model.layers.1.input_layernorm.weight")

"""Pages of equal bytes for any ranks, and the memory that they leave unused."""

import pytest

from hla_jax.serving.vllm import pages

OURO = {"main": 512 + 512, "first": 2 * 256, "window": 2 * 16 * 128}


def test_ouro_1p4b_and_2p6b():
    """Both models have the same layers; in bf16 a page is 131,072 bytes."""
    found = pages.cut(OURO)
    assert found == pages.Pages({"main": 64, "first": 128, "window": 16}, 65536)
    assert found.numbers * 2 == 131072


@pytest.mark.parametrize("heads", [1, 2, 8, 16])
@pytest.mark.parametrize("ranks", [(64, 40, 32), (512, 384, 256), (128, 128, 128), (2048, 2048, 64), (96, 1, 32)])
@pytest.mark.parametrize("tokens", [1, 16, 50])
def test_any_ranks(heads, ranks, tokens):
    rank_k, rank_v, rank_loop1 = ranks
    widths = {"main": rank_k + rank_v, "first": 2 * rank_loop1, "window": 2 * heads * 32}
    found = pages.cut(widths, tokens)
    for kind, width in widths.items():
        assert found.tokens[kind] >= tokens
        rest = found.numbers - found.tokens[kind] * width
        assert 0 <= rest < width
    assert found.tokens[max(widths, key=widths.get)] == tokens

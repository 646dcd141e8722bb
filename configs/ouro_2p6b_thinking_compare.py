"""Every cache scheme at matched bytes on Ouro-2.6B-Thinking: the settings of `ouro_1p4b_compare`, as in the LLA paper.

    python -m experiments.compare --config=configs/ouro_2p6b_thinking_compare.py --workdir=runs/ouro_2p6b_compare

Needs the hub (ByteDance/Ouro-2.6B-Thinking and the data of `ouro_1p4b_compare`) and an accelerator with 80 GB; not yet
run on one. LLA-2D at 4x trains 3.2 billion numbers: leave it out (`--cells`) where its optimizer finds no room.
"""

from __future__ import annotations

import ml_collections

from configs import ouro_1p4b_compare
from hla_jax.config import OURO_2P6B


def get_config() -> ml_collections.ConfigDict:
    return ouro_1p4b_compare.comparison("ByteDance/Ouro-2.6B-Thinking", ouro_1p4b_compare.ouro_cells(OURO_2P6B))

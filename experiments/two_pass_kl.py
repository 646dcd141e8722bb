"""How close fine-tuning's parallel passes come to sequential decoding, in 32 and 16 bits (HLA, table 5).

    python -m experiments.two_pass_kl --workdir=runs/two_pass_kl                             # the embedded model
    python -m experiments.two_pass_kl --workdir=runs/two_pass_kl --model=runs/nano_hla/export

A model without HLA gets maps in closed form, at the papers' 10.7 times fewer numbers per token. Each held-out sequence
is a prompt and a response, decoded token by token and run through each procedure. Leaves two_pass_kl.json and
two_pass_kl.md in the work directory, and prints the table: KL from decoding in 1e-4 nats. Expect it to fall by
an order of magnitude or more with every pass, in bfloat16 down to a floor of rounding. Six minutes on two busy cores.
"""

from __future__ import annotations

import dataclasses
import pathlib

from absl import flags

import hla_jax
from experiments import command_line
from hla_jax import tensor_files
from hla_jax.attention.hla import HLA
from hla_jax.attention.scheme import Attention
from hla_jax.banner import banner
from hla_jax.data import pipeline
from hla_jax.data.pipeline import STANDARD_LIBRARY, SYNTHETIC, Source
from hla_jax.evaluation import two_pass

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the table.", required=True)
_MODEL = flags.DEFINE_string("model", str(hla_jax.NANO), "Directory or hub id of the model.")
_WINDOW = flags.DEFINE_integer("window", 32, "Of a model that brings no HLA.", lower_bound=0)
_SEQUENCES = flags.DEFINE_integer("sequences", 16, "Held-out sequences.", lower_bound=1)
_PROMPT = flags.DEFINE_integer("prompt", 64, "Tokens of a prompt.", lower_bound=1)
_RESPONSE = flags.DEFINE_integer("response", 192, "Tokens of a response.", lower_bound=2)
_REPETITIONS = flags.DEFINE_multi_integer("repetitions", [0, 1, 2], "Numbers of repetitions.", lower_bound=0)
_DTYPES = flags.DEFINE_multi_string("dtypes", ["float32", "bfloat16"], "Of the weights and the cache.")

SOURCES = (Source(SYNTHETIC, 3.0, tokens=(128, 512)), Source(STANDARD_LIBRARY, 1.0))
# Sequences and tokens of a closed-form initialisation, and the seed of all data.
CALIBRATION, SEED = (64, 256), 0


def attention_of(model: hla_jax.Model) -> Attention:
    """The model's own HLA, or one in closed form with an eighth of the numbers of keys and values as main latent."""
    if isinstance(model.attention.scheme, HLA):
        return model.attention
    numbers = 2 * model.config.num_kv_heads * model.config.head_dim
    scheme = HLA(rank_k=numbers // 8, rank_v=numbers // 8, rank_loop1=numbers // 16, window=_WINDOW.value)
    rows = pipeline.sequences(SOURCES, model.tokenizer, *CALIBRATION, held_out=False, seed=SEED)
    return hla_jax.calibrate(model, scheme, rows)


def main() -> None:
    workdir = pathlib.Path(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    model = hla_jax.load(_MODEL.value, "float32")
    dtypes = ", ".join(_DTYPES.value)
    print(banner("two_pass_kl", dtype=dtypes, dtype_reason="--dtypes", attention="jnp", attention_reason="all passes"))
    attention = attention_of(model)
    length = _PROMPT.value + _RESPONSE.value
    rows = pipeline.sequences(SOURCES, model.tokenizer, _SEQUENCES.value, length, held_out=True, seed=SEED)
    found = {
        dtype: two_pass.agreement_with_decoding(
            hla_jax.load(_MODEL.value, dtype), attention, rows, _PROMPT.value, _REPETITIONS.value
        )
        for dtype in _DTYPES.value
    }
    settings = {"model": _MODEL.value, "scheme": attention.scheme.to_config(), "sequences": len(rows)}
    agreement = {
        dtype: {name: dataclasses.asdict(one) for name, one in by_name.items()} for dtype, by_name in found.items()
    }
    result = settings | {"prompt": _PROMPT.value, "response": _RESPONSE.value, "agreement": agreement}
    with tensor_files.new_file(workdir / "two_pass_kl.json") as partial:
        tensor_files.write_json(partial, result)
    with tensor_files.new_file(workdir / "two_pass_kl.md") as partial:
        partial.write_text(two_pass.markdown(found), encoding="utf-8")
    print(two_pass.markdown(found))


if __name__ == "__main__":
    command_line.run(main)

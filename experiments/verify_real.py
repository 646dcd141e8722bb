"""Holds a released Ouro model against published numbers, without training: is the port right, and does the theory hold?

    python -m experiments.verify_real --model=ByteDance/Ouro-1.4B --workdir=runs/verify_1p4b
    python -m experiments.verify_real --rehearse --sequences=8 --held_out=4 --tokens=256 --workdir=runs/rehearsal

For the first user who has the weights. It counts parameters and bytes, and measures the structure of the cache (HLA,
table 3; LLA, section 4), closed-form maps by rank (HLA, table 6) and their attention KL (HLA, section 5.3).
`verification.md` in the work directory has a row for every number, with its tolerance: pass, fail, "differs" where the
paper does not define the number, or "no published value". The exit code is 1 if a row fails. A finished check is not
run again.

The data are those of the paper's calibration, OpenR1-Math and FineWeb-Edu 3 : 2 from the hub, or with --data a folder
of text; the paper's own rows are not known. A model of other sizes is measured without a verdict; with --rehearse so
is one of a released size (random weights). The embedded model and rehearsals read built-in text.

Memory for Ouro-1.4B, by its arrays' sizes: 13 GB on the host for the moments of table 3 (26 GB for 2.6B), 17 GB for the
maps of table 6; on the device the weights and about 20 GB. It was not run on these weights, so its time is not known. A
continuation to compare with is not among the checks: the models' cards show none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import jax
from absl import flags

import hla_jax
from configs.ouro_1p4b_hla import UPTRAIN
from experiments import command_line, launch
from hla_jax.analysis.verification import CHECKS
from hla_jax.config import ConfigError
from hla_jax.data.pipeline import STANDARD_LIBRARY, SYNTHETIC, Source
from hla_jax.recipes import verify

_MODEL = flags.DEFINE_string("model", str(hla_jax.NANO), "Directory or hub id.")
_DTYPE = flags.DEFINE_string("dtype", None, "Of the weights; by default bfloat16, and float32 on a CPU.")
_DATA = flags.DEFINE_list("data", None, "Files, folders or hub data sets, in equal parts; by default the paper's mix.")
_CHECKS = flags.DEFINE_list("checks", ["all"], f"Which: all, or some of {', '.join(CHECKS)}.")
_SEQUENCES = flags.DEFINE_integer("sequences", 128, "To fit to.", lower_bound=1)
_HELD_OUT = flags.DEFINE_integer("held_out", 64, "Held-out sequences.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 2048, "Of each sequence.", lower_bound=2)
_REHEARSE = flags.DEFINE_bool("rehearse", False, "See only that it works: no verdicts, and built-in text by default.")


def main() -> None:
    job, checks = from_flags(), chosen(_CHECKS.value)
    rows = verify.run(job, checks, launch.workdir(), launch.title(), rehearse=_REHEARSE.value, mesh=launch.devices())
    print(f"page: {launch.workdir() / 'verification.md'} ({verify.summary(rows)})")
    sys.exit(1 if any(row.verdict == "fail" for row in rows) else 0)


def from_flags() -> verify.Job:
    """The job of the command line."""
    built_in = _REHEARSE.value or _MODEL.value == str(hla_jax.NANO)
    if _DATA.value is not None:
        sources = tuple(map(Source, _DATA.value))
    else:
        sources = (Source(SYNTHETIC), Source(STANDARD_LIBRARY)) if built_in else UPTRAIN.sources
    dtype = _DTYPE.value or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    return verify.Job(_MODEL.value, dtype, sources, _SEQUENCES.value, _HELD_OUT.value, _TOKENS.value)


def chosen(names: Sequence[str]) -> list[str]:
    """The checks asked for, in their order. Raises `ConfigError` for an unknown one."""
    if unknown := sorted(set(names) - {"all", *CHECKS}):
        raise ConfigError(f"--checks: no check {', '.join(unknown)}; there are all, {', '.join(CHECKS)}")
    return [name for name in CHECKS if name in names or "all" in names]


if __name__ == "__main__":
    flags.mark_flag_as_required("workdir")
    command_line.run(main)

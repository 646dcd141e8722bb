"""A released model held against published numbers: runs the checks, keeps each, and writes the page."""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
import platform
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from hla_jax import tensor_files
from hla_jax.analysis.analyses import Subject
from hla_jax.analysis.verification import CHECKS, PUBLISHED, WITHOUT_DATA, Row, released, verdicts
from hla_jax.attention.full import FullCache
from hla_jax.attention.scheme import Attention
from hla_jax.banner import banner
from hla_jax.config import ConfigError, OuroConfig, read_json
from hla_jax.data import pipeline
from hla_jax.data.pipeline import Source
from hla_jax.evaluation.markdown import table
from hla_jax.model import Model, load
from hla_jax.recipes.workdir import claim

if TYPE_CHECKING:
    from jaxtyping import Int


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that decides the numbers.

    Attributes:
      model: a directory or hub id.
      dtype: of the weights.
      sources: of the text.
      sequences, held_out, tokens: rows to fit to, held-out rows, and the tokens of each.
    """

    model: str
    dtype: str
    sources: tuple[Source, ...]
    sequences: int
    held_out: int
    tokens: int

    def rows(self, model: Model, *, held_out: bool) -> Int[np.ndarray, "N S"]:
        """Token ids of the data."""
        count = self.held_out if held_out else self.sequences
        return pipeline.sequences(self.sources, model.tokenizer, count, self.tokens, held_out=held_out, seed=0)


def run(
    job: Job,
    names: Sequence[str],
    workdir: pathlib.Path,
    title: str,
    *,
    rehearse: bool = False,
    mesh: Mesh | None = None,
) -> list[Row]:
    """Runs those of the checks that the work directory does not hold, and writes the page anew after each.

    Args:
      job: see there.
      names: of checks.
      workdir: of `verification.md` and `verification.json`, and a file a check.
      title: the command.
      rehearse: hold nothing against published numbers.
      mesh: of devices that share the rows by its axis "data"; None for one device.

    Returns:
      The numbers of all finished checks with their verdicts.

    Raises:
      ConfigError: the model is no Ouro, or `workdir` belongs to another job or cannot be written.
    """
    claim(workdir, dataclasses.asdict(job))
    print(banner(title, mesh=mesh, dtype=job.dtype, dtype_reason="--dtype", attention="jnp", attention_reason="exact"))
    model = load(job.model, job.dtype, mesh)
    if not isinstance(model.config, OuroConfig):
        raise ConfigError(
            f"{job.model}: the published numbers are of Ouro, found model_type {model.config.model_type!r}; "
            "experiments.analyze measures any model"
        )
    known = released(model.config, job.model)
    result_file = lambda name: workdir / f"{name}.json"
    missing = [name for name in names if not result_file(name).exists()]
    rows = held_out_rows = np.zeros((0, job.tokens), np.int32)
    if set(missing) - WITHOUT_DATA:
        rows, held_out_rows = (job.rows(model, held_out=held_out) for held_out in (False, True))
    for number, name in enumerate(missing, start=1):
        print(f"check {number} of {len(missing)}: {name}", flush=True)
        start = time.monotonic()
        # A new subject for every check: none keeps another's moments in memory.
        measured = CHECKS[name](Subject(model, rows, held_out_rows, lambda: Attention(FullCache())))
        found = {"command": title, "seconds": round(time.monotonic() - start, 1), "measured": measured}
        with tensor_files.new_file(result_file(name)) as partial:
            tensor_files.write_json(partial, found)
        _write(job, known, rehearse, workdir)
    return _write(job, known, rehearse, workdir)


def summary(rows: Sequence[Row]) -> str:
    """How many rows have which verdict."""
    verdicts = [row.verdict for row in rows]
    return ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))


def _write(job: Job, known: str | None, rehearse: bool, workdir: pathlib.Path) -> list[Row]:
    """`verification.md` and `verification.json`, of all finished checks."""
    paths = {name: workdir / f"{name}.json" for name in CHECKS}
    finished = {name: read_json(path) for name, path in paths.items() if path.exists()}
    published = {} if rehearse or known is None else PUBLISHED[known]
    rows = verdicts({name: one["measured"] for name, one in finished.items()}, published)
    facts = _facts(job, finished, rows)
    facts["compared with"] = "nothing: a rehearsal" if rehearse else known or "nothing: no released model has its sizes"
    lines = ["# Against published numbers", "", *(f"- {name}: {text}" for name, text in facts.items()), ""]
    for check in finished:
        head = ("number", "measured", "published", "tolerance", "source", "verdict")
        lines += [f"## {check.replace('_', ' ')}", ""]
        lines += [*table(head, [_cells(row) for row in rows if row.check == check]), ""]
    if any(row.published and not row.published.defined for row in rows):
        lines += ["\\* The paper's text, as it was at hand, does not define this number: ours may be another one.", ""]
    with tensor_files.new_file(workdir / "verification.md") as partial:
        partial.write_text("\n".join(lines), encoding="utf-8")
    with tensor_files.new_file(workdir / "verification.json") as partial:
        tensor_files.write_json(partial, {"facts": facts, "rows": [dataclasses.asdict(row) for row in rows]})
    return rows


def _facts(job: Job, finished: Mapping[str, Mapping[str, Any]], rows: Sequence[Row]) -> dict[str, str]:
    weights = " and ".join(f"{source.path} (weight {source.weight:g})" for source in job.sources)
    return {
        "commands": ", ".join(dict.fromkeys(f"`{one['command']}`" for one in finished.values())),
        "date": f"{datetime.date.today():%Y-%m-%d}",
        "model": f"{job.model}, {job.dtype}",
        "data": f"{weights}: {job.sequences} sequences to fit to and {job.held_out} held-out ones, of {job.tokens:,} "
        "tokens, documents joined end to end",
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}, python {platform.python_version()}, jax "
        f"{jax.__version__}",
        "seconds": ", ".join(f"{name} {one['seconds']:,.0f}" for name, one in finished.items()),
        "verdicts": summary(rows),
        "not checked": "a greedy continuation: the models' cards show none",
    }


def _cells(row: Row) -> tuple[str, ...]:
    number = lambda value: f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if row.published is None:
        return row.name, number(row.measured), "", "", "", row.verdict
    about = row.published
    name = row.name if about.defined else f"{row.name} \\*"
    return name, number(row.measured), number(about.value), f"{about.tolerance:.3g}", about.source, row.verdict

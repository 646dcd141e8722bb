"""Exporting as one function: a model, the maps that were fitted to it or are fitted here, a directory, read back."""

from __future__ import annotations

import dataclasses
import pathlib
import shlex
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.attention.scheme import Attention, Scheme
from hla_jax.calibration.calibrate import calibrate
from hla_jax.config import ConfigError, ModelConfig, OuroConfig
from hla_jax.data import pipeline
from hla_jax.data.pipeline import Source
from hla_jax.evaluation.memory import Memory, cache_memory
from hla_jax.evaluation.schemes import FULL
from hla_jax.model import Model, load, load_attention
from hla_jax.models import weights
from hla_jax.recipes.workdir import exported
from hla_jax.serving.export import check_torch, export
from hla_jax.tensor_files import WeightsError, check_new

_SERVED_TOKENS = 16384  # of a sequence, in the command that is printed


@dataclasses.dataclass(frozen=True)
class Job:
    """What to export.

    Attributes:
      directory: where to; must not exist or be empty.
      model: a directory or hub id; None takes the model that `maps` belong to.
      maps: an export, or the work directory of a run that left one; None fits `scheme`.
      scheme: fitted in closed form to the data below; None takes what the model has, the full cache if nothing.
      data, sequences, tokens, seed: sources in equal parts, rows, tokens of each and their order.
      maps_only: leaves the model's own tensors out.
      torch_code: adds the code that transformers runs.
      dtype: of the weights; None keeps what is stored. Maps keep theirs.
    """

    directory: str
    model: str | None
    maps: str | None
    scheme: Scheme | None
    data: tuple[str, ...]
    sequences: int
    tokens: int
    seed: int
    maps_only: bool
    torch_code: bool
    dtype: str | None

    def __post_init__(self) -> None:
        if self.maps is not None and self.scheme is not None:
            raise ConfigError("--maps and --scheme: give one; maps bring their scheme")
        if self.model is None and self.maps is None:
            raise ConfigError("--model: give a directory or hub id, or --maps that say which model they belong to")
        if self.maps_only and self.dtype is not None:
            raise ConfigError("--dtype: a maps-only export has no weights; leave it out")


def run(job: Job) -> list[str]:
    """Loads, fits where that was asked, writes, and reads what was written.

    Returns:
      Lines that say what was written, and how it is run.

    Raises:
      ConfigError, WeightsError, SchemeError, ExportError: what was given does not fit together; the message says what.
      FileExistsError: the directory is not empty.
    """
    directory = pathlib.Path(job.directory)
    check_new(directory)
    model = resolve(job)
    base_id = None
    if job.model is not None and not pathlib.Path(job.model).is_dir():
        base_id = job.model
    export(model, None, directory, job.maps_only, base_id=base_id, torch_code=job.torch_code)
    check(model, directory)
    dtype = job.dtype or weights.stored_dtype(model.params)
    return [*written(directory), "", *cache_lines(model, dtype), "", *commands(model, directory, job.torch_code)]


def resolve(job: Job) -> Model:
    """The model with the scheme to export. What would be refused at the end is refused before maps are fitted."""
    maps = exported(job.maps) if job.maps is not None else None
    model = load(job.model if job.model is not None else str(maps), job.dtype)
    if maps is not None and job.model is not None:
        model = dataclasses.replace(model, attention=load_attention(maps, model))
    if job.torch_code:
        check_torch(job.scheme or model.attention.scheme)
    if job.scheme is None:
        return model
    job.scheme.check(model.config)
    if not job.scheme.map_shapes(model.config):
        return dataclasses.replace(model, attention=Attention(job.scheme))
    sources = tuple(Source(path) for path in job.data)
    rows = pipeline.sequences(sources, model.tokenizer, job.sequences, job.tokens, held_out=False, seed=job.seed)
    return dataclasses.replace(model, attention=calibrate(model, job.scheme, rows))


def check(model: Model, directory: pathlib.Path) -> None:
    """Loads an export. Raises `WeightsError` unless it is the model and its scheme, bit by bit."""
    found = load(directory, dtype=None)
    same = found.config == model.config and found.attention.scheme == model.attention.scheme
    if same:
        pairs = jax.tree.map(_same_bits, (found.params, found.attention.params), (model.params, model.attention.params))
        same = all(jax.tree.leaves(pairs))
    if not same:
        raise WeightsError(f"{directory}: reads back as something else than was written; delete it")


def _same_bits(a: jax.Array, b: jax.Array) -> bool:
    one, other = np.asarray(a), np.asarray(b)
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def written(directory: pathlib.Path) -> list[str]:
    """The files, and their bytes."""
    sizes = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
    width = max(map(len, sizes))
    lines = [f"  {name:<{width}} {size:>16,} bytes" for name, size in sizes.items()]
    return [f"{directory}: read back, {len(sizes)} files, {sum(sizes.values()):,} bytes", *lines]


def cache_lines(model: Model, dtype: str) -> list[str]:
    """Bytes of the cache, against the full one."""
    kind = type(model.attention.scheme).__name__
    both = {FULL: Attention(FullCache()), kind: Attention(model.attention.scheme)}
    found = cache_memory(model.config, both, (), jnp.dtype(dtype))
    if kind not in found:
        return [f"cache: full, {_bytes(found[FULL].per_token)} a token in {dtype}"]
    mine: Memory = found[kind]
    window = f", {_bytes(mine.per_sequence)} a sequence" if mine.per_sequence else ""
    fewer = f"{mine.ratio:.1f} times fewer a token than the full cache's {_bytes(found[FULL].per_token)}"
    return [f"cache: {kind}, {_bytes(mine.per_token)} a token{window} in {dtype}: {fewer}"]


def commands(model: Model, directory: pathlib.Path, torch_code: bool) -> list[str]:
    """How to run an export."""
    lines = [f'JAX:     hla_jax.load("{directory}")']
    if torch_code:
        lines += [f'PyTorch: AutoModelForCausalLM.from_pretrained("{directory}", trust_remote_code=True)']
    flags = vllm_flags(model.attention.scheme, model.config)
    if not isinstance(model.config, OuroConfig):
        return [*lines, "vLLM:    has Ouro, not this family"]
    if flags is None:
        return [*lines, "vLLM:    has the full cache, HLA and LLA that keeps latents only, not this scheme"]
    return [*lines, f"vLLM:    {shlex.join(['vllm', 'serve', str(directory), *flags])}"]


def vllm_flags(scheme: Scheme, config: ModelConfig) -> Sequence[str] | None:
    """Flags that `vllm serve` needs for a scheme; None: it is not served (`serving/vllm/limits.py`)."""
    if scheme == FullCache():
        return ()
    kept = isinstance(scheme, LLA) and scheme.first_pass == "latent" and not scheme.full_memory
    if not isinstance(scheme, HLA) and not kept:
        return None
    tokens = str(min(_SERVED_TOKENS, config.max_position_embeddings))
    # Prompts are read in one pass, so a step must take the longest.
    return (
        *("--no-enable-prefix-caching", "--no-enable-chunked-prefill"),
        *("--max-model-len", tokens, "--max-num-batched-tokens", tokens),
    )


def _bytes(count: int) -> str:
    """Bytes in the largest binary unit that they fill."""
    value, units = float(count), ["bytes", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:,.4g} {units[0]}"

"""How a latent's rank must grow with the number of loops.

The same model is run with several numbers of loops, and HLA and LLA are fitted to each in closed form. HLA's main
latent is read by all loops but the first, so its rank is what more loops might ask more of. Huginn runs with any
number; Ouro, trained to answer after each loop, with its own or fewer.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from tqdm.auto import tqdm

from hla_jax.analysis.bench import Bench, Result, StepSweep, Sweeps, resized
from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.lla import LLA
from hla_jax.attention.scheme import Attention, Scheme
from hla_jax.attention.steps import for_steps
from hla_jax.calibration.calibrate import calibrate
from hla_jax.config import ConfigError, HuginnConfig, ModelConfig
from hla_jax.evaluation.comparison import bytes_of
from hla_jax.evaluation.fidelity import compare_decoding
from hla_jax.evaluation.schemes import FULL
from hla_jax.model import Model


def steps_sweep(bench: Bench) -> Result:
    """Decoding with HLA by rank and with LLA by compression, for several numbers of loops.

    Of Huginn also with maps that were fitted to the model's own number of them and adapted by the rule of
    `attention.steps.for_steps`, beside maps of the same sizes that are fitted to each number.

    Raises:
      ConfigError: see `sizes`.
    """
    model = bench.subject.model
    sweep = sizes(bench.sweeps, model.config)
    own, any_number = model.config.num_loops, isinstance(model.config, HuginnConfig)
    middle = {name: schemes[len(schemes) // 2] for name, schemes in schemes_of(model.config, sweep).items()}
    fitted_to_own = functools.cache(lambda name: calibrate(model, middle[name], bench.subject.rows))

    def adapted(running: Model) -> Result:
        return {name: _adapted(bench, running, scheme, fitted_to_own(name)) for name, scheme in middle.items()}

    found: dict[str, dict[str, Any]] = {"hla": {}, "lla": {}, "adapted": {}}
    for steps in tqdm(sweep.numbers, desc="steps", unit="number"):
        config = dataclasses.replace(model.config, num_loops=steps)
        running = dataclasses.replace(model, config=config)
        for name, schemes in schemes_of(config, sweep).items():
            cells = bench.kept(f"{steps} steps {name}", lambda: {"cells": _measured(bench, running, schemes)})  # noqa: B023
            found[name][str(steps)] = cells["cells"]
        if any_number and steps != own:
            found["adapted"][str(steps)] = bench.kept(f"{steps} steps adapted", lambda: adapted(running))  # noqa: B023
    return found


def sizes(sweeps: Sweeps, config: ModelConfig) -> StepSweep:
    """What `steps_sweep` runs. Raises `ConfigError` without any, and for more loops than an Ouro has."""
    if sweeps.steps is None:
        raise ConfigError("steps: --config has no sizes for it; configs/nano_sweeps.py has")
    most = max(sweeps.steps.numbers)
    if most > config.num_loops and not isinstance(config, HuginnConfig):
        raise ConfigError(f"steps: the model has {config.num_loops} loops, the sweep asks for {most}")
    return sweeps.steps


def schemes_of(config: ModelConfig, sweep: StepSweep) -> dict[str, list[Scheme]]:
    """From the largest to the smallest."""
    hla: list[Scheme] = [HLA(rank, rank, sweep.rank_loop1, 0) for rank in sorted(sweep.ranks, reverse=True)]
    lla: list[Scheme] = []
    for ratio in sorted(sweep.ratios):
        trajectory = config.num_loops * config.head_dim
        ranks = round(2 * trajectory / ratio)
        keys = max(1, 3 * ranks // 8, ranks - trajectory)
        if ranks > keys:
            lla.append(LLA(keys, ranks - keys))
    return {"hla": hla, "lla": lla}


def _measured(bench: Bench, model: Model, schemes: list[Scheme]) -> list[Result]:
    largest = calibrate(model, schemes[0], bench.subject.rows)

    def measure(scheme: Scheme) -> dict[str, Any]:
        # Smaller closed-form maps are parts of the largest; at one size, one program serves them all.
        attention = resized(resized(largest, scheme, model.config), schemes[0], model.config)
        ratio = bytes_of(model.config, scheme, bench.subject.held_out_rows.shape[1]).ratio
        return {"scheme": scheme.to_config(), "ratio": ratio} | _decoded(bench, model, attention)

    return [measure(scheme) for scheme in schemes]


def _adapted(bench: Bench, running: Model, scheme: Scheme, fitted_to_own: Attention) -> dict[str, Any]:
    """A scheme fitted to the number of loops that run, and to the model's own."""
    fitted = calibrate(running, scheme, bench.subject.rows)
    adapted = for_steps(fitted_to_own, bench.subject.model.config, running.config.num_loops)
    both = {"fitted": fitted, "adapted": adapted}
    return {"scheme": scheme.to_config()} | {key: _decoded(bench, running, one) for key, one in both.items()}


def _decoded(bench: Bench, model: Model, attention: Attention) -> dict[str, Any]:
    rows, prompt = bench.subject.held_out_rows[: bench.sweeps.rows], bench.sweeps.prompt
    compared = {FULL: Attention(FullCache()), "latent": attention}
    decoded = compare_decoding(model, compared, rows, prompt, batch_size=bench.sweeps.batch_size)["latent"]
    return {"decoding_kl": dataclasses.asdict(decoded.kl), "top1": dataclasses.asdict(decoded.top1)}

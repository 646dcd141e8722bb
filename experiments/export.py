"""Writes a model and its latent cache as a directory for JAX, PyTorch and vLLM.

    python -m experiments.export --maps=runs/ouro_1p4b_hla --directory=exported --torch_code
    python -m experiments.export --maps="runs/nano_compare/cells/LLA 4x" --directory=exported
    python -m experiments.export --model=hla_jax/assets/nano --directory=exported \\
        --scheme="HLA(rank_k=64, rank_v=64, rank_loop1=32, window=32)"

`--maps` takes the work directory of a run, the folder of a comparison's cell, or any export, maps-only ones too, and
finds the model that they belong to. `--scheme` is fitted in closed form to `--data`, and not trained. Without either,
the model is written with the cache that it has. The directory appears complete or not at all, never over another one,
and is read back before the command ends.
"""

from __future__ import annotations

from absl import flags

from experiments import command_line
from hla_jax.data.pipeline import STANDARD_LIBRARY, SYNTHETIC
from hla_jax.recipes import export


def main() -> None:
    options = flags.FLAGS
    job = export.Job(
        directory=options.directory,
        model=options.model,
        maps=options.maps,
        scheme=command_line.scheme("scheme", options.scheme) if options.scheme else None,
        data=tuple(options.data),
        sequences=options.sequences,
        tokens=options.tokens,
        seed=options.seed,
        maps_only=options.maps_only,
        torch_code=options.torch_code,
        dtype=options.dtype,
    )
    print("\n".join(export.run(job)))


if __name__ == "__main__":
    flags.DEFINE_string("directory", None, "Where to write; must not exist or be empty.", required=True)
    flags.DEFINE_string("model", None, "Directory or hub id; by default the one that the maps belong to.")
    flags.DEFINE_string("maps", None, "An export with maps, or the work directory of a run that left one.")
    flags.DEFINE_string("scheme", None, 'Fit this scheme in closed form, such as "LLA(rank_k=96, rank_v=160)".')
    flags.DEFINE_list("data", [SYNTHETIC, STANDARD_LIBRARY], "To fit to: files, folders or hub data sets, equal parts.")
    flags.DEFINE_integer("sequences", 64, "To fit to.", lower_bound=1)
    flags.DEFINE_integer("tokens", 512, "Of each sequence.", lower_bound=2)
    flags.DEFINE_integer("seed", 0, "Of the data.")
    flags.DEFINE_bool("maps_only", False, "Leave the model's own tensors out, and name it instead.")
    flags.DEFINE_bool("torch_code", False, "Add the code that transformers runs with trust_remote_code=True.")
    flags.DEFINE_enum("dtype", None, ["bfloat16", "float16", "float32"], "Of the weights; by default as stored.")
    command_line.run(main)

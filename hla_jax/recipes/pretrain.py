"""Pretraining as one function: vocabulary, curriculum, weights, scores, and a directory that `hla_jax.load` reads."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from hla_jax import tensor_files
from hla_jax.banner import banner
from hla_jax.data import standard_library, synthetic, vocabulary
from hla_jax.data.curriculum import Curriculum
from hla_jax.evaluation import synthetic_tasks
from hla_jax.models import weights
from hla_jax.models.stages import Params
from hla_jax.tokenizer import CHATML_TEMPLATE
from hla_jax.training import loop, pretrain, step

_EXAMPLES, _EVALUATION_SEED, _TEXT_ROWS, _TEXT_LENGTH = 64, 1, 16, 512


def run(recipe: pretrain.Recipe, workdir: pathlib.Path, title: str) -> dict[str, float]:
    """Trains, writes `workdir/model` in bfloat16, and returns its scores. A run that was stopped continues."""
    print(
        banner(
            title,
            dtype="float32",
            dtype_reason="Muon and a model this small gain nothing from less",
            attention="jnp, block-wise",
            attention_reason="differentiated through",
        )
    )
    documents = list(standard_library.documents("train"))
    tokenizer = vocabulary.train(documents, synthetic.WORDS, recipe.model.vocab_size)

    def tokenize(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    curriculum = Curriculum(recipe.stages, documents, tokenize, vocabulary.END_ID, recipe.seed)

    held_out = list(standard_library.documents("held_out"))
    filler = synthetic.Filler(held_out, lambda lines: [len(tokenize(line)) for line in lines])
    longest = 2 * max(stage.length for stage in recipe.stages)  # longer questions than this are hopeless
    questions = {
        setting.name: setting.examples(_EXAMPLES, filler, _EVALUATION_SEED)
        for setting in synthetic_tasks.SETTINGS
        if setting.length <= longest
    }
    text = np.concatenate([tokenize(document) for document in held_out])[: _TEXT_ROWS * _TEXT_LENGTH]

    def evaluate(params: Params) -> dict[str, float]:
        scores = {
            name: synthetic_tasks.exact_match(params, recipe.model, examples, tokenize)
            for name, examples in questions.items()
        }
        return scores | {"text_loss": synthetic_tasks.text_loss(params, recipe.model, text.reshape(_TEXT_ROWS, -1))}

    state = loop.run(
        pretrain.init(recipe),
        step.make_step(pretrain.make_loss(recipe), pretrain.optimizer(recipe)),
        curriculum.batches(),
        loop.LoopConfig(
            curriculum.steps, log_every=20, evaluate_every=recipe.evaluate_every, save_every=recipe.save_every
        ),
        workdir,
        lambda state: evaluate(state.params),
    )
    # 16 bits are what ships, so they are what is scored.
    stored = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params)
    scores = evaluate(jax.tree.map(lambda x: x.astype(jnp.float32), stored))
    write_model(recipe, stored, tokenizer, scores, workdir / "model")
    return scores


def write_model(
    recipe: pretrain.Recipe,
    params: Params,
    tokenizer: tokenizers.Tokenizer,
    scores: dict[str, float],
    directory: pathlib.Path,
) -> None:
    """Writes weights, tokenizer and scores as one Hugging Face directory, replacing the one of an earlier run."""
    config = recipe.model
    tensors = weights.pending_params(params, config)
    with tensor_files.new_directory(directory, replace=True) as partial:
        tensor_files.write_json(partial / "config.json", config.to_dict(weights.stored_dtype(params)))
        tensor_files.write_tensors(partial, tensors)
        tensor_files.write_json(partial / "scores.json", scores)
        tensor_files.write_json(
            partial / "generation_config.json",
            {
                "bos_token_id": config.bos_token_id,
                "eos_token_id": list(config.eos_token_ids),
                "pad_token_id": config.pad_token_id,
            },
        )
        vocabulary.save(tokenizer, partial, CHATML_TEMPLATE, config.max_position_embeddings)

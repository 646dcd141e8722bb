"""HLA from the first step against HLA added afterwards, at equal tokens: two arms, their scores, and a report.

Both arms start from the same weights and read the same batches. One trains weights and maps through the two passes all
the way. The other trains the weights with exact attention, then freezes them and uptrains the maps on the last batches.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hla_jax import tensor_files
from hla_jax.attention.full import FullCache
from hla_jax.attention.hla import HLA
from hla_jax.attention.scheme import Attention
from hla_jax.banner import banner
from hla_jax.calibration.calibrate import calibrate
from hla_jax.data import standard_library, synthetic, vocabulary
from hla_jax.data.curriculum import TASKS, Curriculum
from hla_jax.data.packing import Tokenize
from hla_jax.data.streams import Indexed
from hla_jax.evaluation import answers, native_report, two_pass
from hla_jax.evaluation.answers import Rows
from hla_jax.evaluation.fidelity import compare_decoding
from hla_jax.evaluation.native_report import AFTER_PROMPT, EXACT, FROM_FIRST, NATIVE, STANDARD, TEXT, UPTRAINED
from hla_jax.evaluation.schemes import FULL
from hla_jax.model import Model
from hla_jax.recipes.workdir import claim, kept_maps
from hla_jax.serving.export import export
from hla_jax.tokenizer import CHATML_TEMPLATE
from hla_jax.training import loop, native, pretrain, step, uptrain
from hla_jax.training.optimizer import OptimizerConfig, adamw
from hla_jax.training.two_pass import exact_hidden, two_pass_hidden

if TYPE_CHECKING:
    from jaxtyping import Int

_EVALUATION_SEED = 1


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that decides a run.

    Attributes:
      recipe: of pretraining; its stages are those of the native arm. The other arm leaves out the last steps of the
        last stage, as many as uptraining has.
      scheme: sizes of HLA.
      repetitions: of the second pass, in the native arm.
      uptrain: optimizer of uptraining; its `total_steps` are the steps of uptraining.
      calibration_batches: first batches from which maps start in closed form.
      tasks: kinds of questions that are scored.
      lengths: tokens of the rows that are scored, questions and text; the first is followed during training.
      examples: rows of each task and length.
      log_every: steps between two lines of metrics.
    """

    recipe: pretrain.Recipe
    scheme: HLA
    repetitions: int
    uptrain: OptimizerConfig
    calibration_batches: int
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    examples: int = 64
    log_every: int = 20

    def __post_init__(self) -> None:
        if self.uptrain.total_steps >= self.recipe.stages[-1].steps:
            raise ValueError(
                f"uptrain.total_steps must be below the last stage's {self.recipe.stages[-1].steps} steps, "
                f"found {self.uptrain.total_steps}"
            )
        if unknown := set(self.tasks) - set(TASKS):
            raise ValueError(f"tasks must be of {', '.join(TASKS)}; found {', '.join(sorted(unknown))}")

    @property
    def standard(self) -> pretrain.Recipe:
        """The recipe of the arm that is uptrained afterwards."""
        *stages, last = self.recipe.stages
        shorter = dataclasses.replace(last, steps=last.steps - self.uptrain.total_steps)
        return dataclasses.replace(self.recipe, stages=(*stages, shorter))


@dataclasses.dataclass(frozen=True)
class Data:
    """What both arms read.

    Attributes:
      curriculum: makes the batches.
      questions: name -> rows with answers, and the tokens before the first answer of each row; of text, every token
        is an answer's.
      text: held-out text, rows [N, S] of the longest length.
    """

    curriculum: Curriculum
    questions: Mapping[str, tuple[Rows, Int[np.ndarray, " N"]]]
    text: Int[np.ndarray, "N S"]

    @classmethod
    def of(cls, job: Job, directory: pathlib.Path) -> Data:
        """Learns the vocabulary, which `directory` gets as a tokenizer, and makes the rows to score."""
        documents = list(standard_library.documents("train"))
        tokenizer = vocabulary.train(documents, synthetic.WORDS, job.recipe.model.vocab_size)
        with tensor_files.new_directory(directory, replace=True) as partial:
            vocabulary.save(tokenizer, partial, CHATML_TEMPLATE, job.recipe.model.max_position_embeddings)
        tokenize = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        held_out = list(standard_library.documents("held_out"))
        questions = {
            f"{kind}/{length}": question_rows(TASKS[kind], job.examples, length, tokenize)
            for length in job.lengths
            for kind in job.tasks
        }
        longest = max(job.lengths)
        joined = np.concatenate([tokenize(document) for document in held_out])[: job.examples * longest]
        text = joined.reshape(job.examples, longest).astype(np.int32)
        whole = {"tokens": text, "segments": np.ones_like(text), "response": np.ones_like(text)}
        questions[f"{TEXT}/{longest}"] = whole, np.ones(len(text), np.int32)
        curriculum = Curriculum(job.recipe.stages, documents, tokenize, vocabulary.END_ID, job.recipe.seed)
        return cls(curriculum, questions, text)


def question_rows(
    task: synthetic.Task, count: int, length: int, tokenize: Tokenize
) -> tuple[Rows, Int[np.ndarray, " N"]]:
    """Rows of one document without filler, with all its questions, and the tokens before the first answer of each."""
    rows = {name: np.zeros((count, length), np.int32) for name in ("tokens", "segments", "response")}
    prompts = np.zeros(count, np.int32)
    for row in range(count):
        rng = np.random.default_rng([_EVALUATION_SEED, row])
        example = task.sample(rng, length, None, questions=len(synthetic.WORDS))
        turns = [(tokenize(question), tokenize(answer)) for question, answer in example.turns]
        ids = np.concatenate([part for turn in turns for part in turn])[:length]
        asked = np.repeat([0, 1] * len(turns), [len(part) for turn in turns for part in turn])[:length]
        rows["tokens"][row, : len(ids)], rows["segments"][row, : len(ids)] = ids, 1
        rows["response"][row, : len(ids)] = asked
        prompts[row] = len(turns[0][0])
    return rows, prompts


def run(job: Job, workdir: pathlib.Path, title: str) -> pathlib.Path:
    """Trains both arms, from where an earlier start left them, and writes `report.md`, `results.json` and figures.

    Returns:
      The path of the report.

    Raises:
      ConfigError: `workdir` belongs to another job, or cannot be written.
      SchemeError: the scheme does not fit the model.
    """
    job.scheme.check(job.recipe.model)
    claim(workdir, dataclasses.asdict(job))
    print(
        banner(
            title,
            dtype="float32",
            dtype_reason="Muon and a model this small gain nothing from less",
            attention="jnp, block-wise",
            attention_reason="differentiated through",
        )
    )
    tokenizer = workdir / "tokenizer"
    data = Data.of(job, tokenizer)
    standard = train_standard(job, data, workdir)
    uptrained = uptrain_standard(job, data, standard, workdir)
    models = {STANDARD: standard, UPTRAINED: uptrained, NATIVE: train_native(job, data, workdir)}
    models = {name: dataclasses.replace(model, path=tokenizer) for name, model in models.items()}
    for name in (NATIVE, UPTRAINED):
        export(models[name], None, workdir / name / "export", overwrite=True)
    results = {
        "command": title,
        "job": json.loads(json.dumps(dataclasses.asdict(job))),
        "tokens": {name: tokens_by_step(job, name)[-1] for name in (NATIVE, STANDARD, UPTRAINED)},
        "answers": {name: score_answers(job, model, data) for name, model in models.items()},
        "decoding": {name: agreement(models[name], data) for name in (NATIVE, UPTRAINED)},
        "training": {name: follow(job, name, workdir / name) for name in (NATIVE, STANDARD, UPTRAINED)},
    }
    return native_report.write_report(results, workdir)


def train_native(job: Job, data: Data, workdir: pathlib.Path) -> Model:
    """The arm that has HLA from the first step. Its maps start in closed form, from the untrained weights."""
    recipe, config = job.recipe, job.recipe.model
    start = Model(config, pretrain.init(recipe).params)
    initial = _closed_form(job, start, data, workdir / NATIVE / "initial")
    optimizer = pretrain.optimizer(recipe)

    @jax.jit
    def hidden(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
        everywhere = jnp.ones(tokens.shape, bool)
        maps, times = params["maps"], job.repetitions
        return two_pass_hidden(params["base"], maps, job.scheme, config, tokens, everywhere, repetitions=times)

    state = _train(
        job,
        native.init(recipe, initial.params, optimizer),
        native.make_loss(recipe, job.scheme, job.repetitions),
        optimizer,
        data,
        data.curriculum.steps,
        workdir / NATIVE,
        lambda params, rows: answers.in_parallel(params["base"], rows, lambda part: hidden(params, part["tokens"])),
    )
    return Model(config, state.params["base"], Attention(job.scheme, state.params["maps"]))


def train_standard(job: Job, data: Data, workdir: pathlib.Path) -> Model:
    """The arm that is pretrained with exact attention."""
    recipe = job.standard
    optimizer = pretrain.optimizer(recipe)
    hidden = jax.jit(lambda params, tokens: exact_hidden(params, recipe.model, tokens))
    state = _train(
        job,
        pretrain.init(recipe),
        pretrain.make_loss(recipe),
        optimizer,
        data,
        sum(stage.steps for stage in recipe.stages),
        workdir / STANDARD,
        lambda params, rows: answers.in_parallel(params, rows, lambda part: hidden(params, part["tokens"])),
    )
    return Model(recipe.model, state.params)


def uptrain_standard(job: Job, data: Data, model: Model, workdir: pathlib.Path) -> Model:
    """The same weights with maps that are uptrained on the batches that the native arm has left."""
    initial = _closed_form(job, model, data, workdir / UPTRAINED / "initial")
    done = data.curriculum.steps - job.uptrain.total_steps
    kept = ("tokens", "positions", "segments")
    batches = Indexed(lambda index: {name: data.curriculum.batch(done + index)[name] for name in kept})
    optimizer = adamw(job.uptrain)
    update = step.make_step(uptrain.make_loss(job.scheme, model.config), optimizer)
    state = loop.run(
        step.init(initial.params, optimizer, job.recipe.seed),
        lambda state, batch: update(state, batch, model.params),
        batches,
        loop.LoopConfig(job.uptrain.total_steps, log_every=job.log_every, save_every=job.recipe.save_every),
        workdir / UPTRAINED,
    )
    return dataclasses.replace(model, attention=Attention(job.scheme, state.params))


def _train(
    job: Job,
    state: step.TrainState,
    loss: step.Loss,
    optimizer: optax.GradientTransformation,
    data: Data,
    steps: int,
    workdir: pathlib.Path,
    score: Callable[[Any, Rows], answers.Answers],
) -> step.TrainState:
    """One arm, whose answers to the questions of the first length are followed."""
    followed = [f"{kind}/{job.lengths[0]}" for kind in job.tasks]

    def evaluate(state: step.TrainState) -> dict[str, float]:
        found = {name: score(state.params, data.questions[name][0]) for name in followed}
        by_name = {f"right/{name}": float(one.right.mean()) for name, one in found.items()}
        return by_name | {f"answer_loss/{name}": float(one.cross_entropy.mean()) for name, one in found.items()}

    every, save = job.recipe.evaluate_every, job.recipe.save_every
    config = loop.LoopConfig(steps, log_every=job.log_every, evaluate_every=every, save_every=save)
    return loop.run(state, step.make_step(loss, optimizer), data.curriculum.batches(), config, workdir, evaluate)


def _closed_form(job: Job, model: Model, data: Data, directory: pathlib.Path) -> Attention:
    """Maps in closed form, from the first batches; kept in `directory`."""

    def make() -> Attention:
        rows = [data.curriculum.batch(index)["tokens"] for index in range(job.calibration_batches)]
        return calibrate(model, job.scheme, np.concatenate(rows))

    return kept_maps(directory, job.scheme, model.config, make)


def score_answers(job: Job, model: Model, data: Data) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Way of reading -> questions -> {cross_entropy, right} of each row. Ways: exact attention; and, with HLA, token by
    token through the cache, after an exact prompt and from the first token on.
    """
    exact = jax.jit(lambda tokens: exact_hidden(model.params, model.config, tokens))
    found: dict[str, dict[str, answers.Answers]] = {}
    for name, (rows, prompts) in data.questions.items():
        ways = {EXACT: answers.in_parallel(model.params, rows, lambda part: exact(part["tokens"]))}
        if isinstance(model.attention.scheme, HLA):
            through = lambda prompts, rows=rows: answers.decoded(
                model.params, model.config, model.attention, rows, prompts
            )
            ways[AFTER_PROMPT] = through(prompts)
            ways[FROM_FIRST] = through(np.ones_like(prompts))
        for way, one in ways.items():
            found.setdefault(way, {})[name] = one
    as_lists = lambda one: {"cross_entropy": one.cross_entropy.tolist(), "right": one.right.tolist()}
    return {way: {name: as_lists(one) for name, one in of_way.items()} for way, of_way in found.items()}


def agreement(model: Model, data: Data) -> dict[str, Any]:
    """On held-out text, from the first token on: the training passes against sequential decoding, and decoding against
    the full cache.
    """
    passes = two_pass.agreement_with_decoding(model, model.attention, data.text, 1)
    full = compare_decoding(model, {FULL: Attention(FullCache()), "HLA": model.attention}, data.text, 1)["HLA"]
    return {
        "passes": {name: dataclasses.asdict(one) for name, one in passes.items()},
        "full_cache": {"kl": dataclasses.asdict(full.kl), "top1": dataclasses.asdict(full.top1)},
    }


def tokens_by_step(job: Job, arm: str) -> list[int]:
    """Tokens read after each step of an arm; uptraining goes on where the standard arm ended."""
    sizes = [stage.rows * stage.length for stage in job.recipe.stages for _ in range(stage.steps)]
    total = np.cumsum(sizes).tolist()
    done = len(total) - job.uptrain.total_steps
    return {NATIVE: total, STANDARD: total[:done], UPTRAINED: total[done:]}[arm]


def follow(job: Job, arm: str, directory: pathlib.Path) -> list[dict[str, float]]:
    """The metrics of an arm, line by line, with the tokens read."""
    tokens = [tokens_by_step(job, arm)[0], *tokens_by_step(job, arm)]
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line | {"tokens": tokens[line["step"]]} for line in lines]

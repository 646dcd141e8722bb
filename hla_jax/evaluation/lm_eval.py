"""A model and its cache for lm-eval (EleutherAI's lm-evaluation-harness). `lm_eval_tasks` has its tasks.

    from lm_eval import simple_evaluate
    from hla_jax.evaluation.lm_eval import HlaLM

    simple_evaluate(HlaLM(hla_jax.load("runs/nano_hla/export")), tasks=["gsm8k"], limit=10)

Generation is the engine's. Log-likelihoods are those of `loglikelihood.score`: by default a context is read exactly and
its continuation is decoded through the cache. Not imported by the rest of the package, which does not need lm-eval.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from hla_jax.attention.scheme import Attention
from hla_jax.evaluation import loglikelihood
from hla_jax.evaluation.loglikelihood import Likelihood, Pair
from hla_jax.evaluation.task import TaskError
from hla_jax.generation.engine import Engine, Request
from hla_jax.generation.slots import whole_groups
from hla_jax.model import Model

_SAMPLING = ("temperature", "top_p", "top_k")


class HlaLM(LM):
    """A model behind lm-eval's interface.

    Args:
      model: from `load`, with a tokenizer.
      attention: scheme and maps; None for the model's own.
      batch_size: sequences at a time; results do not depend on it.
      max_length: most tokens of a sequence; contexts beyond it lose their beginning. None: `max_position_embeddings`.
      max_gen_toks: most new tokens where a task does not say.
      read: how log-likelihoods read the context, see `evaluation.loglikelihood`.
      seed: of sampled answers, each of which has its own.

    Raises:
      TokenizerError: the model has no tokenizer.
      ValueError: `max_length` is out of range, or `read` unknown.
    """

    def __init__(
        self,
        model: Model,
        attention: Attention | None = None,
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        read: str = "decode",
        seed: int = 0,
    ) -> None:
        super().__init__()
        longest = model.config.max_position_embeddings
        self.max_length = longest if max_length is None else max_length
        if not 2 <= self.max_length <= longest:
            raise ValueError(f"max_length must be in 2 .. {longest}, the model's longest sequence, found {max_length}")
        if read not in loglikelihood.READS:
            raise ValueError(f"read must be one of {', '.join(loglikelihood.READS)}, found {read!r}")
        self.model, self.attention, self.tokenizer = model, attention or model.attention, model.tokenizer
        self.batch_size, self.max_gen_toks, self.read, self.seed = batch_size, max_gen_toks, read, seed

    @property
    def prefix_token(self) -> int:
        """Stands before a text without a context: the begin of sequence, or else an end."""
        begin = self.tokenizer.bos_token_id
        return int(self.model.stop_tokens[0] if begin is None else begin)

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        encode = functools.partial(loglikelihood.encode_pair, self.tokenizer, self.prefix_token)
        pairs = [loglikelihood.cut_left(encode(*request.args), self.max_length) for request in requests]
        found = [(one.logprob, one.greedy) for one in self._score(pairs)]
        self._remember("loglikelihood", requests, found)
        return found

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Every token is scored once, in windows of `max_length` that begin after a token of the one before."""
        pairs: list[Pair] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                list(self.tokenizer.encode(request.args[0])), self.prefix_token, self.max_length, context_len=1
            )
            new = [Pair(*map(list, make_disjoint_window(window))) for window in windows]
            pairs += new
            owners += [number] * len(new)
        found = [0.0] * len(requests)
        for owner, one in zip(owners, self._score(pairs), strict=True):
            found[owner] += one.logprob
        self._remember("loglikelihood_rolling", requests, found)
        return found

    def generate_until(self, requests: list[Instance]) -> list[str]:
        if not requests:
            return []
        asked = [self._request(request.args[0], request.args[1], number) for number, request in enumerate(requests)]
        # Prompts of one length follow each other, so that few shapes are compiled at a time; the longest come first.
        order = sorted(range(len(asked)), key=lambda number: len(asked[number].prompt), reverse=True)
        capacity = max(len(request.prompt) + request.max_new_tokens for request in asked)
        slots = whole_groups(self.model, self.batch_size)
        engine = Engine(self.model, self.attention, slots=slots, capacity=capacity, queue=len(asked))
        found = [""] * len(asked)
        for number, made in zip(order, engine.run(asked[number] for number in order), strict=True):
            found[number] = made.text or ""
            self.cache_hook.add_partial("generate_until", requests[number].args, found[number])
        return found

    def _request(self, context: str, settings: Mapping[str, Any], number: int) -> Request:
        settings = dict(settings)
        new_tokens = int(settings.get("max_gen_toks", settings.get("max_new_tokens", self.max_gen_toks)))
        new_tokens = min(new_tokens, self.max_length - 1)
        until = settings.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        sampled = settings.get("do_sample", settings.get("temperature", 0) > 0)
        sampling = {name: settings[name] for name in _SAMPLING if settings.get(name) is not None} if sampled else {}
        if sampled:
            sampling.setdefault("temperature", 1.0)
        prompt = list(self.tokenizer.encode(context)) or [self.prefix_token]
        return Request(
            prompt[-(self.max_length - new_tokens) :],
            new_tokens,
            seed=(self.seed + number) % 2**32,
            stop_strings=[text for text in until if text],
            **sampling,
        )

    def _score(self, pairs: Sequence[Pair]) -> list[Likelihood]:
        return loglikelihood.score(self.model, self.attention, pairs, read=self.read, batch_size=self.batch_size)

    def _remember(self, kind: str, requests: Sequence[Instance], found: Sequence[Any]) -> None:
        """For lm-eval's cache of answers, with which a run that was stopped continues."""
        for request, one in zip(requests, found, strict=True):
            self.cache_hook.add_partial(kind, request.args, one)

    @property
    def tokenizer_name(self) -> str:
        return str(self.model.path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The tokenizer's template; its name is ignored, for there is one."""
        return str(self.tokenizer.chat_template) if chat_template and self.tokenizer.chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text; without `add_generation_prompt` the last turn goes on."""
        if self.tokenizer.chat_template is None:
            raise TaskError(f"{self.model.path}: the tokenizer has no chat template; leave out --chat")
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

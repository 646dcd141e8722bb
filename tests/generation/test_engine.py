"""The engine against `generate`: tokens whatever else is there, order, streaming, stopping, refilling, lost memory."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from hla_jax.attention.eviction import Evicted
from hla_jax.attention.full import FullCache
from hla_jax.attention.lla import LLA
from hla_jax.attention.scheme import Attention
from hla_jax.generation import decode
from hla_jax.generation import engine as engine_file
from hla_jax.generation.engine import Engine, EngineMemoryError, QueueFullError, Request
from hla_jax.generation.generate import Generation, generate
from hla_jax.generation.text import TextStream
from hla_jax.model import NANO, Model
from hla_jax.tokenizer import load_tokenizer
from tiny import long_cases, random_hla, random_maps, tiny_config, tiny_params

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIG = tiny_config()
PARAMS = tiny_params(CONFIG)
SETTINGS = dict(temperature=1.0, top_p=0.95, top_k=30)
PROMPTS = [np.random.default_rng(n).integers(0, 40, n).tolist() for n in (3, 31, 1, 12, 5, 30, 2)]
NEW = [9, 3, 14, 1, 6, 11, 8, 5]
LONG = np.random.default_rng(7).integers(0, 40, 40).tolist()


def attention_of(name: str) -> Attention:
    hla = random_hla(CONFIG, 3)
    return {
        "full": lambda: Attention(FullCache()),
        "hla": lambda: hla,
        "lla": lambda: random_maps(LLA(6, 6), CONFIG),
        "evicted": lambda: Attention(Evicted(hla.scheme, 34, first=2), hla.params),
    }[name]()


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(CONFIG, PARAMS, random_hla(CONFIG, 3))


def requests(prompts: Sequence[list[int]] = PROMPTS, **settings) -> list[Request]:
    return [
        Request(prompt, new, seed=70 + n, **(SETTINGS | settings)) for n, (prompt, new) in enumerate(zip(prompts, NEW))
    ]


def engine_of(model: Model, slots: int = 3, **options) -> Engine:
    return Engine(model, slots=slots, capacity=64, **(dict(tokens_per_dispatch=4) | options))


@pytest.mark.parametrize("scheme", ["hla", *long_cases("lla", "evicted")])
def test_the_tokens_of_generate_alone_and_in_a_crowd(scheme):
    """Seven requests take turns in three slots, in two orders; then each has the engine for itself."""
    model = Model(CONFIG, PARAMS, attention_of(scheme))
    # An evicting cache keeps 34 tokens: its ring turns while decoding, and one prompt is longer than it.
    mix = requests([*PROMPTS, *([LONG] if scheme == "evicted" else [])])
    made = generate(model, [one.prompt for one in mix], max(NEW), seed=70, **SETTINGS)
    expected = [one.tokens[: request.max_new_tokens] for one, request in zip(made, mix, strict=True)]
    engine = engine_of(model)
    assert [made.tokens for made in engine.run(mix)] == expected
    assert [made.tokens for made in engine.run(mix[::-1])] == expected[::-1]
    for request, tokens in zip(mix[1::2], expected[1::2], strict=True):
        assert [made.tokens for made in engine.run([request])] == [tokens]


@pytest.mark.long
def test_every_request_has_settings_of_its_own(model):
    """Greedy, sampled and filtered requests, each with its own stop tokens, in one compiled step."""
    greedy = generate(model, PROMPTS[0], 9)[0].tokens
    sampled = generate(model, PROMPTS[0], 9, seed=5, **SETTINGS)[0].tokens
    assert greedy != sampled
    mix = [
        Request(PROMPTS[0], 9),
        Request(PROMPTS[0], 9, seed=5, **SETTINGS),
        Request(PROMPTS[0], 9, seed=5, stop_tokens=[39, greedy[4], 38, 37, 36], temperature=3.0, top_k=1),
        Request(PROMPTS[0], 9, seed=5, stop_tokens=[sampled[0]], **SETTINGS),
    ]
    made = list(engine_of(model, slots=4).run(mix))
    assert [one.tokens for one in made] == [greedy, sampled, greedy[: greedy.index(greedy[4])], []]
    assert [one.finish_reason for one in made] == ["length", "length", "stop", "stop"]
    own = dataclasses.replace(model, config=dataclasses.replace(CONFIG, eos_token_ids=(greedy[4],)))
    assert next(engine_of(own, slots=4).run(mix[:1])) == made[2]


@pytest.mark.long
def test_one_compile_a_shape(model, monkeypatch):
    traced = {"step": 0, "prefill_hidden": 0}
    for name in traced:

        def counting(function, name, *args):
            traced[name] += 1
            return function(*args)

        monkeypatch.setattr(decode, name, functools.partial(counting, getattr(decode, name), name))
    engine = engine_of(model, slots=5)
    list(engine.run(requests()[:1]))
    before = dict(traced)
    assert before["step"] > 0
    list(engine.run([Request([4] * n, n, temperature=n / 9, stop_tokens=[n]) for n in range(1, 9)]))
    assert traced == before
    list(engine.run([Request([4] * n, 2) for n in (33, 45)]))
    assert traced["step"] == before["step"]
    assert traced["prefill_hidden"] <= before["prefill_hidden"] + 1


def test_a_free_slot_is_refilled_between_dispatches(model, monkeypatch):
    """Four short requests pass through the second slot while a long one has the first."""
    dispatches = count_calls(monkeypatch, "advance")
    made = list(engine_of(model, slots=2).run([Request([1], new, stop_tokens=()) for new in (17, 5, 5, 5, 5)]))
    assert [len(one.tokens) for one in made] == [17, 5, 5, 5, 5]
    assert len(dispatches) == 4


def test_a_dispatch_ends_when_a_slot_gets_free_that_somebody_waits_for(model, monkeypatch):
    """Two short requests wait for the second slot; when nobody waits any more, the long one has long dispatches."""
    dispatches = count_calls(monkeypatch, "advance")
    engine = engine_of(model, slots=2, tokens_per_dispatch=16)
    made = list(engine.run([Request([1], new, stop_tokens=()) for new in (20, 3, 3, 3)]))
    assert [len(one.tokens) for one in made] == [20, 3, 3, 3]
    assert len(dispatches) == 3  # of 2, 2 and 15 tokens


@pytest.mark.parametrize(("waiting", "expected"), [(2, [2, 16, 16]), (1, [1, 16, 16, 16])])
def test_a_dispatch_ends_when_an_eighth_of_the_slots_is_free(model, monkeypatch, waiting, expected):
    """Of sixteen slots the first that gets free waits two tokens for the second, unless only one request waits."""
    dispatches = count_calls(monkeypatch, "advance")
    new = [12] * 14 + [2, 4] + [2] * waiting
    made = list(engine_of(model, slots=16).run([Request([1], one, stop_tokens=()) for one in new]))
    assert [len(one.tokens) for one in made] == new
    # Of 3, 4 and 4 tokens, or of 1, 4, 4 and 2; each ends early when so many slots are free.
    assert [int(args[-1]) for args in dispatches] == expected


def test_prompts_are_read_by_eighths_of_the_slots_and_nobody_starves(model, monkeypatch):
    """Requests bring others of their width along, wherever they wait; the one that waits longest is always next."""
    reads = count_calls(monkeypatch, "prefill")
    short, long = [5], LONG
    prompts = [short, long, short, short, short, long, short]
    engine = engine_of(model, slots=16)
    made = list(engine.run([Request([n + 1, *prompt], n + 1, stop_tokens=()) for n, prompt in enumerate(prompts)]))
    assert [len(one.tokens) for one in made] == [1, 2, 3, 4, 5, 6, 7]  # in order of submission
    first_tokens = [np.asarray(tokens)[:, 0].tolist() for _, _, _, tokens, *_ in reads]
    assert first_tokens == [[1, 3], [2, 6], [4, 5], [7, 0]]
    assert [tokens.shape for _, _, _, tokens, *_ in reads] == [(2, 32), (2, 64), (2, 32), (2, 32)]

    # One slot: the second request must not wait for the others.
    reads.clear()
    list(engine_of(model, slots=1).run([Request([n + 1, *prompt], 2) for n, prompt in enumerate(prompts)]))
    assert [int(tokens[0, 0]) for _, _, _, tokens, *_ in reads] == [1, 2, 3, 4, 5, 6, 7]

    # Long prompts have batches of fewer.
    reads.clear()
    monkeypatch.setattr(engine_file, "_PROMPT_TOKENS", 64)
    list(engine_of(model, slots=16).run([Request(prompt, 2) for prompt in prompts]))
    assert {tokens.shape for _, _, _, tokens, *_ in reads} == {(2, 32), (1, 64)}


def test_a_prompt_is_read_to_the_same_bits_in_any_company(model, monkeypatch):
    """Prompts of two widths, in several orders, so that each has other neighbours or none."""
    seen: dict[tuple[int, ...], set[bytes]] = {}
    function = decode.prefill

    def noting(*args):
        logits, cache = function(*args)
        for row, (tokens, length) in enumerate(zip(np.asarray(args[3]), np.asarray(args[4]))):
            seen.setdefault(tuple(tokens[:length].tolist()), set()).add(np.asarray(logits[row]).tobytes())
        return logits, cache

    monkeypatch.setattr(decode, "prefill", noting)
    engine = engine_of(model, slots=16)
    mix = requests([*PROMPTS[:6], LONG, LONG[::-1]])
    expected = [made.tokens for made in engine.run(mix)]
    assert [made.tokens for made in engine.run(mix[::-1])] == expected[::-1]
    for request, tokens in zip(mix, expected):
        assert [made.tokens for made in engine.run([request])] == [tokens]
    del seen[(0,)]  # nobody's
    assert len(seen) == 8
    assert all(len(bits) == 1 for bits in seen.values())


def test_finished_is_told_at_once(model):
    """Long before its turn in the order, with the same result, once; a request that is cancelled is finished, too."""
    told, order = {}, []

    def finished(number: int, result: Generation) -> None:
        told[number] = result
        order.append(number)

    engine = engine_of(model, slots=2, tokens_per_dispatch=2)
    for new in (12, 2, 3, 4):
        engine.submit(Request([3], new, stop_tokens=(), finished=finished))
    assert engine.cancel(3)
    assert list(engine.run()) == [told[number] for number in range(4)]
    assert order == [3, 1, 2, 0]


def test_results_come_in_order_and_the_queue_is_bounded(model):
    engine = engine_of(model, slots=1, queue=2)
    taken = []

    def source():
        for request in requests():
            taken.append(request)
            yield request

    results = engine.run(source())
    first = next(results)
    assert len(first.tokens) == NEW[0]
    assert len(taken) <= 4  # one done, one in the slot, two waiting
    assert [len(made.tokens) for made in results] == NEW[1:7]
    for request in requests()[:2]:
        engine.submit(request)
    with pytest.raises(QueueFullError, match=r"2 requests wait already; take results from run\(\)"):
        engine.submit(requests()[2])
    assert len(list(engine.run())) == 2


@pytest.mark.long
def test_streaming_and_stop_strings():
    """With the embedded model's tokenizer. Pieces joined are the results, and no piece shows part of a stop string."""
    config = tiny_config(vocab_size=1024)
    model = Model(config, tiny_params(config), path=NANO)
    whole = generate(model, [[5]], 24, temperature=1.0, seed=3, stop_tokens=())[0]
    cut = len(whole.text) // 2
    stop = whole.text[cut : cut + 6]
    cut = whole.text.index(stop)
    pieces: dict[int, list] = {}

    def stream(number: int, tokens: list[int], text: str) -> None:
        pieces.setdefault(number, []).append((tokens, text))

    ask = dict(temperature=1.0, seed=3, stop_tokens=(), stream=stream)
    made = list(engine_of(model).run([Request([5], 24, **ask), Request([5], 24, stop_strings=("never", stop), **ask)]))
    assert made[0] == whole
    assert (made[1].text, made[1].finish_reason) == (whole.text[:cut], "stop")
    assert made[1].tokens == whole.tokens[: len(made[1].tokens)]
    decoded = lambda tokens: model.tokenizer.decode(tokens)
    assert stop in decoded(made[1].tokens)
    assert stop not in decoded(made[1].tokens[:-1])
    for number, one in enumerate(made):
        assert [t for tokens, _ in pieces[number] for t in tokens] == one.tokens
        assert "".join(text for _, text in pieces[number]) == one.text
    assert len(pieces[0]) > 4


def test_text_comes_in_whole_characters_and_stops_at_the_first_stop_string():
    tokenizer = load_tokenizer(NANO)
    text = "naïve — 日本 🙂 STOP and END"
    tokens = tokenizer.encode(text)
    assert len(tokens) > 12
    stream, pieces = TextStream(tokenizer, ["END", "STOP", "STOPPED"]), []
    for token in tokens:
        if stream.push(token):
            break
        pieces.append(stream.take())
    stream.finish()
    pieces.append(stream.take())
    assert "".join(pieces) == stream.text == "naïve — 日本 🙂 "
    assert not any("\ufffd" in piece or "S" in piece for piece in pieces)
    cut = TextStream(tokenizer)
    for token in tokenizer.encode("🙂")[:-1]:
        assert not cut.push(token)
        assert cut.take() == ""
    cut.finish()
    assert "\ufffd" in cut.take()


def test_cancelling(model):
    engine = engine_of(model, slots=2)
    streamed = []

    def stream(number: int, tokens: list[int], text: str) -> None:
        streamed.append(number)
        if number == 1 and streamed.count(1) == 2:
            assert engine.cancel(1)
            assert not engine.cancel(1)

    numbers = [engine.submit(Request([3], 40, seed=n, stop_tokens=(), stream=stream)) for n in range(4)]
    assert engine.cancel(numbers[3])
    made = list(engine.run())
    assert [one.finish_reason for one in made] == ["length", "cancelled", "length", "cancelled"]
    assert [len(one.tokens) for one in made] == [40, 5, 40, 0]
    assert streamed.count(1) == 2
    assert not engine.cancel(numbers[0])


def count_calls(monkeypatch, name: str, fail_at: int = -1, error: BaseException | None = None) -> list[tuple]:
    """Notes the calls of a function of `decode`; call `fail_at` does its work, donates its arguments, and fails."""
    calls, function = [], getattr(decode, name)

    def counting(*args):
        calls.append(args)
        out = function(*args)
        if len(calls) - 1 == fail_at:
            raise error or out_of_memory()
        return out

    monkeypatch.setattr(decode, name, counting)
    return calls


def out_of_memory() -> BaseException:
    return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes.")


@pytest.mark.parametrize(("name", "at"), [("advance", 4), ("prefill", 0), ("prefill", 5)])
def test_out_of_memory_halves_the_slots_and_repeats_no_finished_work(model, monkeypatch, caplog, name, at):
    expected = list(engine_of(model, slots=4, tokens_per_dispatch=2).run(requests()))
    streamed: dict[int, list[int]] = {}
    stream = lambda number, tokens, text: streamed.setdefault(number, []).extend(tokens)
    prompts = count_calls(monkeypatch, "prefill", *([at] if name == "prefill" else []))
    if name == "advance":
        count_calls(monkeypatch, "advance", at)
    engine = engine_of(model, slots=4, tokens_per_dispatch=2)
    assert list(engine.run(requests(stream=stream))) == expected
    assert [streamed[n] for n in range(7)] == [one.tokens for one in expected]
    assert engine.slots == 2
    assert "out of memory with 4 slots: going on with 2" in caplog.text
    # Only what was in flight is read again: at most one prompt a slot.
    assert len(prompts) <= 7 + 4
    # Greedy requests could not tell given tokens from new ones: these are sampled, through a cache that loses much.
    assert any(len(set(one.tokens)) > 3 for one in expected)


@pytest.mark.long
def test_tokens_made_before_a_restart_are_given_not_sampled(model, monkeypatch):
    """Whatever a second run would sample, what was handed out stays."""
    handed: list[int] = []
    count_calls(monkeypatch, "advance", 2)
    engine = engine_of(model, slots=2)
    stream = lambda number, tokens, text: handed.extend(tokens)
    engine.submit(Request([7], 20, seed=1, stop_tokens=(), stream=stream, **SETTINGS))
    run = engine.run()
    original = engine._put_back

    def put_back() -> None:
        original()
        (entry,) = engine._waiting
        entry.request = dataclasses.replace(entry.request, seed=999)

    monkeypatch.setattr(engine, "_put_back", put_back)
    (made,) = run
    monkeypatch.undo()
    assert made.tokens == handed
    one, other = (generate(model, [7], 20, seed=seed, stop_tokens=(), **SETTINGS)[0].tokens for seed in (1, 999))
    assert made.tokens[:9] == one[:9] != other[:9]
    assert made.tokens != one


def test_one_slot_without_memory_is_an_error(model, monkeypatch):
    count_calls(monkeypatch, "advance", 0)
    engine = engine_of(model, slots=1)
    with pytest.raises(EngineMemoryError, match="one slot of 64 tokens does not fit the device's memory"):
        list(engine.run(requests()))


@pytest.mark.parametrize("where", ["dispatch", "callback"])
def test_an_interrupted_run_is_taken_up(model, monkeypatch, where):
    expected = list(engine_of(model).run(requests()))
    calls, streamed = itertools.count(), {}

    def stream(number: int, tokens: list[int], text: str) -> None:
        streamed.setdefault(number, []).extend(tokens)
        if where == "callback" and next(calls) == 5:
            raise KeyboardInterrupt

    if where == "dispatch":
        count_calls(monkeypatch, "advance", 3, KeyboardInterrupt())
    engine, made = engine_of(model), []
    for request in requests(stream=stream):
        engine.submit(request)
    with pytest.raises(KeyboardInterrupt):
        made.extend(engine.run())  # keeps what came before the interrupt
    assert [*made, *engine.run()] == expected
    assert [streamed[n] for n in range(7)] == [one.tokens for one in expected]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], 4), "prompt 0 is empty"),
        (Request([1, 40], 4), "prompt 0 has token id 40, the vocabulary has 40"),
        (Request([1], 0), "request 0: max_new_tokens must be at least 1, found 0"),
        (Request([1] * 60, 5), "a prompt of 60 tokens and 5 new ones exceed the capacity of 64 tokens; make the eng"),
        (Request([1], 4, seed=-1), r"seed must be in 0 .. 2\^32 - 1, found -1"),
        (Request([1], 4, top_p=0.0), "top_p must be in"),
        (Request([1], 4, stop_strings="ab"), "stop_strings must be a list of texts, none empty, found 'ab'"),
        (Request([1], 4, stop_strings=[""]), "stop_strings must be a list of texts"),
        (Request([1], 4, stop_strings=["a"]), "this model was made in memory and has no tokenizer"),
    ],
)
def test_impossible_requests_are_refused(model, request_, message):
    engine = engine_of(model)
    with pytest.raises(ValueError, match=message):
        engine.submit(request_)
    assert list(engine.run()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(slots=0), "slots must be at least 1, found 0"),
        (dict(tokens_per_dispatch=0), "tokens_per_dispatch must be at least 1"),
        (dict(queue=0), "queue must be at least 1"),
        (dict(capacity=129), "capacity must be in 2 .. 128, the model's longest sequence, found 129"),
    ],
)
def test_impossible_engines_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        Engine(model, **options)

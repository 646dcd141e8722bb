"""The synthetic tasks: answers follow from the prompts, and lengths and distances are what was asked for."""

import dataclasses
import re

import numpy as np
import pytest

from hla_jax.data import synthetic

TASKS = {task.kind: task for task in (synthetic.Recall(), synthetic.Tracking(), synthetic.Chain())}


def tokens(text: str) -> int:
    return len(re.findall(r"[a-z]+|[^a-z]", text))


@pytest.fixture(scope="module")
def filler() -> synthetic.Filler:
    rng = np.random.default_rng(0)
    document = "".join(f"   {'x = f(y) # why? ' * int(rng.integers(1, 3))}\n\n" for _ in range(500))
    return synthetic.Filler([document], lambda lines: [tokens(line) for line in lines], longest=40)


def solve(prompt: str, summing: bool) -> str:
    """What a reader who looks definitions up in the prompt would answer."""
    *body, question = prompt.split("\n")
    pattern = re.compile(r"([a-z]+)(=([a-z]+))?([+-]?\d+)?")
    definitions = {match[1]: match for line in body if (match := pattern.fullmatch(line))}
    key: str | None = question.removeprefix("?")
    total, steps = 0, []
    while key is not None:
        text, _, _, following, number = definitions[key][0], *definitions[key].groups()
        total = (total + int(number or 0)) % 10
        steps.append(f"{text}:{total}" if summing else text.removeprefix(key))
        key = following
    return ";".join(steps).removeprefix(question[1:]) if summing else "".join(steps)


@pytest.mark.parametrize("kind", ["tracking", "chain"])
@pytest.mark.parametrize("distance", [None, 100])
def test_answers_follow_from_the_definitions(kind, distance, filler):
    for seed in range(30):
        example = TASKS[kind].sample(np.random.default_rng(seed), 300, filler, distance=distance)
        assert solve(example.prompt, kind == "chain") == example.answer


def test_recall_gives_the_value_beside_the_key(filler):
    for seed in range(30):
        example = TASKS["recall"].sample(np.random.default_rng(seed), 300, filler)
        key = re.search(r"\?([a-z]+)$", example.prompt)[1]
        assert re.findall(rf"^{key}(\d+)\n", example.prompt, re.MULTILINE) == [example.answer]


def test_the_place_of_a_definition_tells_nothing(filler):
    """Nothing but the key may tell which definition a question is about."""
    places = []
    for seed in range(300):
        example = TASKS["recall"].sample(np.random.default_rng(seed), 200, filler, questions=5)
        keys = re.findall(r"^([a-z]+)\d+\n", example.prompt, re.MULTILINE)
        places.append(keys.index(example.prompt.split("?")[-1]) / (len(keys) - 1))
    assert abs(np.mean(places) - 0.5) < 0.07
    assert 0.1 < np.mean(np.equal(places, 0.0)) < 0.4


@pytest.mark.parametrize("kind", TASKS)
def test_length_and_distance_are_met(kind, filler):
    for seed in range(30):
        example = TASKS[kind].sample(np.random.default_rng(seed), 400, filler, distance=200)
        assert 340 <= tokens(example.prompt + example.answer) <= 400
        assert 150 <= example.distance <= 200
        if kind == "recall":
            key = example.prompt.split("?")[-1]
            behind = example.prompt.split(f"\n{key}{example.answer}\n")[1]
            assert tokens(behind) == example.distance


def test_more_questions_follow_with_their_answers(filler):
    example = TASKS["recall"].sample(np.random.default_rng(0), 300, filler, questions=1000)
    asked, defined = (
        re.findall(pattern, example.document, re.MULTILINE) for pattern in (r"^\?([a-z]+\d+)$", r"^([a-z]+\d+)$")
    )
    assert len(asked) == 2 * len(defined) == 1 + len(example.more)
    assert set(asked) <= set(defined)
    assert tokens(example.document) <= 300


def test_same_generator_same_example(filler):
    first, again, other = (TASKS["chain"].sample(np.random.default_rng(seed), 200, filler) for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize(
    ("answer", "completion", "right"),
    [
        ("472", "472\nand more", True),
        ("472", "4721\n", False),
        ("472", "47", False),
        ("=plum81", "=oak=fox81\n", True),
        ("=plum81", "=plum18\n", False),
        ("=fox-1:9;fox8:7", "=fox-1:3;fox8:7", True),
        ("=fox-1:9;fox8:7", "=fox-1:9;fox8:6", False),
    ],
)
def test_score_looks_at_the_result_of_the_first_line(answer, completion, right):
    example = synthetic.Example("", answer, "any", 0)
    assert synthetic.score(example, completion) is right
    assert synthetic.score(example, dataclasses.replace(example).answer)


def test_filler_needs_lines(filler):
    with pytest.raises(ValueError, match="at most 3 tokens"):
        synthetic.Filler(["a long line of text"], lambda lines: [len(line) for line in lines], longest=3)
    assert sum(tokens(line) for line in filler.take(np.random.default_rng(0), 100)) <= 100
    assert filler.take(np.random.default_rng(0), -5) == []

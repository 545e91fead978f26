"""The prompt stream: what a resumed run trains on is what the uninterrupted one would have."""

import json

import numpy as np
import pytest

from trainer.run.prompts import PromptStream
from workers.environments.base import Problem, digest


def problems(count):
    return [Problem(id=f"p{i}", tokens=np.array([i], np.int32), payload={}) for i in range(count)]


def named(contents, name="a.jsonl", tokens=0):
    return [Problem(f"{name}:{i + 1}", np.array([tokens], np.int32), {}, digest(c)) for i, c in enumerate(contents)]


def ids(prompts):
    return [prompt.id for prompt in prompts]


def test_every_problem_comes_once_an_epoch_and_epochs_differ():
    stream = PromptStream(problems(10), "env", seed=3)
    first, second = ids(stream.take(10)), ids(stream.take(10))
    assert sorted(first) == sorted(second) == sorted(f"p{i}" for i in range(10))
    assert first != second
    assert stream.epoch == 2.0


@pytest.mark.parametrize("position", [4, 10, 17])
def test_resuming_gives_the_same_remaining_ids_in_the_same_order(position):
    whole = ids(PromptStream(problems(10), "env", seed=3).take(30))
    resumed = PromptStream(problems(10), "env", seed=3)
    resumed.position = position
    assert ids(resumed.take(30 - position)) == whole[position:]


def test_a_prompt_in_flight_can_be_made_again_from_its_index():
    stream = PromptStream(problems(7), "env", seed=0)
    prompts = stream.take(20)
    for prompt in reversed(prompts):
        again = stream.prompt(prompt.index)
        assert (again.id, again.index) == (prompt.id, prompt.index)


def test_the_order_depends_on_the_seed():
    assert ids(PromptStream(problems(50), "env", 0).take(50)) != ids(PromptStream(problems(50), "env", 1).take(50))


@pytest.mark.parametrize(
    ("now", "sentence"),
    [
        (list(range(1000)), None),
        (list(range(999)), "are 999 and were 1000"),
        ([*range(600), -1, *range(601, 1000)], "have changed; the first that differs is a.jsonl:598 or one of the 3 behind it"),
        (
            [*range(600), *range(999, 599, -1)],
            "are the same in another order; the first that moved is a.jsonl:598 or one of the 3 behind it",
        ),
    ],
)
def test_other_problems_than_before_are_described(now, sentence):
    """1000 problems are kept in 256 parts: number 601 is in the part of 598 to 601, since 1000 * 153 // 256 = 597."""
    then = json.loads(json.dumps(PromptStream(named(range(1000), "elsewhere.jsonl", tokens=7), "env", 0).fingerprint))
    assert PromptStream(named(now), "env", 0).difference(then) == sentence


def test_of_a_few_problems_the_one_that_differs_is_named_and_copies_count():
    then = PromptStream(named("abca"), "env", 0).fingerprint
    assert PromptStream(named("abca"), "env", 0).difference(then) is None
    assert PromptStream(named("abcb"), "env", 0).difference(then) == "have changed; the first that differs is a.jsonl:4"
    assert PromptStream(named("bbca"), "env", 0).difference(then) == "have changed; the first that differs is a.jsonl:1"


def test_a_problem_without_a_content_of_its_own_is_known_by_id_and_payload():
    def content(payload, tokens=(1,)):
        return Problem("p", np.array(tokens, np.int32), payload).content

    assert content({"a": 1, "b": np.array([2])}) == content({"b": [2], "a": 1}, tokens=(5, 6))
    assert content({"a": 1}) != content({"a": 2}) and content({}) != content({}, tokens=(2,))
    assert content({"a": {1, 2}}) == content({"a": {3}}), "what JSON cannot write counts by its type"
    itself: dict = {}
    itself["x"] = itself
    assert content({1: 2, "a": 3}) == content({(1, 2): 3}) == content(itself), "the id alone"


def test_a_task_without_prompts_is_refused():
    with pytest.raises(ValueError, match="no training prompts"):
        PromptStream([], "env", 0)

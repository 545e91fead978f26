"""The prompt stream: what a resumed run trains on is what the uninterrupted one would have."""

import numpy as np
import pytest

from trainer.data import PromptStream
from workers.environments.base import Problem


def problems(count):
    return [Problem(id=f"p{i}", tokens=np.array([i], np.int32), payload={}) for i in range(count)]


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


def test_a_task_without_prompts_is_refused():
    with pytest.raises(ValueError, match="no training prompts"):
        PromptStream([], "env", 0)

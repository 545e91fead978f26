"""The environment of docs/tasks.md: copied out of the page, played by the torch engine, and trained on."""

import asyncio
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from rlframe.config import ConfigError, ModelConfig
from rlframe.models import resolve_model
from tests.support import local_run
from trainer.run.prompts import as_prompt
from workers.engines.protocol import SamplingParams
from workers.engines.torch.engine import TorchEngine
from workers.environments.registry import make_environment
from workers.environments.settings import TaskConfig
from workers.rollout.episode import run_episode

PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"
BUILD = {"warmup_steps": 0}


@pytest.fixture
def guess(tmp_path, monkeypatch):
    """``guess.py`` of the page, in the current directory."""
    (program,) = [block for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S) if "Guess" in block]
    (tmp_path / "guess.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "guess:Guess"
    sys.modules.pop("guess", None)


def told(text: str, secret: int) -> str:
    """What the game should say to a turn, from its text alone; empty for the right guess."""
    if not re.fullmatch("[0-9]+", text):
        return "\na number\n"
    return "" if text == str(secret) else "\nhigher\n" if int(text) < secret else "\nlower\n"


def test_an_episode_is_turns_of_the_policy_and_replies_of_the_game(guess):
    path = resolve_model(ModelConfig(name="tiny", builder="tiny", build=BUILD))
    tokenizer = AutoTokenizer.from_pretrained(path)
    environment = make_environment(TaskConfig(name=guess), tokenizer, seed=0, eval_size=8)
    problem = environment.train_prompts()[3]
    params = SamplingParams(max_new_tokens=4, logprobs=2, seed=5)
    engine = TorchEngine(path, max_model_len=128)
    prompt = as_prompt(problem, 0, environment.name)
    trajectory = asyncio.run(run_episode(engine, environment, prompt, params, max_model_len=128))
    edges = np.flatnonzero(np.diff(trajectory.action_mask, prepend=False, append=False))
    turns = [trajectory.tokens[start:end] for start, end in edges.reshape(-1, 2)]
    replies = [trajectory.tokens[end:start] for end, start in zip(edges[1::2], edges[2::2], strict=False)]
    said = [tokenizer.decode(turn, skip_special_tokens=True).strip() for turn in turns]
    wanted = [told(text, 11) for text in said]
    assert problem.payload == {"secret": 11} and 1 < len(turns) <= 3
    assert [tokenizer.decode(reply) for reply in replies] == wanted[:-1] and "" not in wanted[:-1]
    assert trajectory.rewards.sum() == (wanted[-1] == "")
    assert trajectory.metadata["reward_extra"] == {"guesses": len(turns)}


@pytest.mark.slow
def test_two_steps_train_on_it_and_log_its_numbers(guess, tmp_path):
    settings = [f"task.name={guess}", "model.build.warmup_steps=0", "steps=2", "rollout.max_new_tokens=4"]
    steps = local_run.run(tmp_path / "run", *settings, "eval.size=null")
    trained = [step for step in steps if "reward/mean" in step]
    assert len(trained) == 2 and all(1 <= step["reward_extra/guesses/mean"] <= 3 for step in trained)
    assert any("eval/guess/reward_extra/guesses/mean" in step for step in steps)


def test_what_is_no_environment_is_refused_and_says_what_it_lacks():
    with pytest.raises(ConfigError, match=r"made a dict without name, .*episode, close; derive its class from"):
        make_environment(TaskConfig(name="tests.workers.test_own_environment:nothing"), None, seed=0, eval_size=1)


def nothing(task, tokenizer, *, seed, eval_size):
    return {}

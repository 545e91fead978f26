"""A scripted multi-turn environment, a worker configuration and prompts for the rollout tests."""

from __future__ import annotations

import asyncio

import numpy as np

from rlframe.models.characters import character_tokenizer
from rlframe.types import Prompt
from tests.support.engines import MAX_MODEL_LEN, prompt_of, save, tiny_model
from trainer.settings.config import Config
from workers.environments.base import Environment, StepResult

STOPS = tuple(range(40, 64))
OBSERVATION = np.array([5, 6, 7], np.int32)


class Scripted(Environment):
    """``payload["turns"]`` turns, each rewarded with its number; ``payload["fault"]`` makes the first step fail or hang."""

    name = "scripted"
    max_turns = 4

    def __init__(self, task, tokenizer, *, seed: int, eval_size: int) -> None:
        self.stop_token_ids = tuple(task.options.get("stop_token_ids", STOPS))

    def train_prompts(self):
        return []

    def eval_prompts(self):
        return []

    def episode(self, prompt: Prompt) -> ScriptedEpisode:
        return ScriptedEpisode(prompt.payload)


class ScriptedEpisode:
    def __init__(self, payload: dict) -> None:
        self.payload, self.turn = payload, 0

    async def step(self, action: np.ndarray, finish: str) -> StepResult:
        fault = self.payload.get("fault")
        if fault == "fail":
            raise ValueError("the reward function returned NaN")
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "tokens":
            return StepResult(1.0, False, np.array([10**6]))
        self.turn += 1
        done = self.turn == self.payload["turns"]
        return StepResult(
            float(self.turn), done, np.zeros(0, np.int32) if done else OBSERVATION, {f"finish_{self.turn}": finish}
        )


def config_of(stop_token_ids: tuple[int, ...] = STOPS, **rollout) -> Config:
    config = Config(seed=11)
    config.task.name = "tests.support.rollouts:Scripted"
    config.task.options = {"stop_token_ids": list(stop_token_ids)}
    config.rollout.engine = "torch"
    config.rollout.max_model_len = MAX_MODEL_LEN
    for name, value in rollout.items():
        setattr(config.rollout, name, value)
    return config


def model_folder(folder) -> str:
    character_tokenizer().save_pretrained(folder)
    return save(tiny_model(), folder)


def prompts_of(n: int, turns: int = 3, **payload) -> list[Prompt]:
    return [Prompt(f"p{i}", i, prompt_of(4 + i, seed=i), "scripted", {"turns": turns, **payload}) for i in range(n)]

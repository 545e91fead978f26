"""Episodes of several turns on arithmetic's prompts, each turn rewarded with its number, whatever the policy says."""

from __future__ import annotations

import numpy as np

from workers.environments.arithmetic import Arithmetic
from workers.environments.base import StepResult

OBSERVATION = np.array([5, 6, 7], np.int32)


class Talk(Arithmetic):
    """Prompt ``i`` has 1 + i % 3 turns; the step of turn 2 of prompt `FAILS` fails."""

    max_turns = 3
    FAILS = 11

    def __init__(self, task, tokenizer, *, seed, eval_size):
        super().__init__(task, tokenizer, seed=seed, eval_size=eval_size)
        self.stop_token_ids = ()  # every turn uses up its budget

    def episode(self, prompt):
        return TalkEpisode(prompt.index)


class TalkEpisode:
    def __init__(self, index: int) -> None:
        self.index, self.turn = index, 0

    async def step(self, action, finish):
        self.turn += 1
        if self.index == Talk.FAILS and self.turn == 2:
            raise ValueError("the tool is gone")
        done = self.turn == 1 + self.index % 3
        return StepResult(float(self.turn), done, np.zeros(0, np.int32) if done else OBSERVATION)

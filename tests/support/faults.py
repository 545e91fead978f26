"""Arithmetic whose episodes do harm to the process that they run in, each once, at a prompt that is always the same."""

from __future__ import annotations

import os
import signal
import time
from asyncio import sleep
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import ray

from workers.environments.arithmetic import Arithmetic
from workers.environments.base import FatalRewardError, RewardError, StepResult

KILL, STOP, NODE = 8, 9, range(24, 32)
"""Numbers of the prompts that kill their worker, stop it (it hangs), and take its node away if it is the doomed one."""


class Faulty(Arithmetic):
    """``task.options.marks``: a folder that remembers what has happened, with the file ``doomed`` that names a node."""

    def __init__(self, task, tokenizer, *, seed, eval_size):
        options = dict(task.options)
        self.marks = Path(options.pop("marks"))
        super().__init__(replace(task, options=options), tokenizer, seed=seed, eval_size=eval_size)

    def episode(self, prompt):
        return FaultyEpisode(self, prompt)


class FaultyEpisode(Arithmetic.Episode):
    def __init__(self, environment, prompt):
        super().__init__(environment.tokenizer, prompt)
        self.marks, self.index = environment.marks, prompt.index

    async def step(self, action, finish):
        if self.index == KILL and self.first("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.index == STOP and self.first("stopped"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.index in NODE and on_node((self.marks / "doomed").read_text()):
            self.first("reached")
            await sleep(3600)
        return await super().step(action, finish)

    def first(self, mark):
        """Whether this happens for the first time; the file holds the pid of the process that it happens to."""
        with suppress(FileExistsError), (self.marks / mark).open("x") as file:
            file.write(str(os.getpid()))
            return True
        return False


def on_node(node_id):
    return ray.is_initialized() and ray.get_runtime_context().get_node_id() == node_id


class Hanging(Arithmetic):
    """The first eight prompts are rewarded; the reward of any other never returns."""

    def episode(self, prompt):
        episode = super().episode(prompt)
        if prompt.index >= 8:
            episode.step = never
        return episode


async def never(action, finish):
    await sleep(3600)


SIGNS: set[str] = set()
"""What has happened, for jobs in one process."""


class Breaking(Arithmetic):
    """Every ``task.options.every``-th episode, from the ``first``-th prompt on and below ``until``, fails with
    ``task.options.fault``, of training prompts or (``held_out``) of the others.
    """

    max_turns = 2

    def __init__(self, task, tokenizer, *, seed, eval_size):
        options = dict(task.options)
        self.fault, self.every, self.first = options.pop("fault", None), options.pop("every", 1), options.pop("first", 0)
        self.until, self.held_out = options.pop("until", 10**6), options.pop("held_out", False)
        super().__init__(replace(task, options=options), tokenizer, seed=seed, eval_size=eval_size)
        self.kept_out = {problem.id for problem in self.eval_prompts()}

    def episode(self, prompt):
        episode = super().episode(prompt)
        chosen = (prompt.id in self.kept_out) == self.held_out and self.first <= prompt.index < self.until
        if self.fault and chosen and prompt.index % self.every == 0:
            episode.step = getattr(self, f"with_{self.fault}")
        return episode

    async def with_timeout(self, action, finish):
        await sleep(3600)

    async def with_reward(self, action, finish):
        raise RewardError("there was no time to count")

    async def with_fatal(self, action, finish):
        raise FatalRewardError("it is time to stop")

    async def with_late(self, action, finish):
        """Fatal, while the actor is updated (``SIGNS``)."""
        while "updating" not in SIGNS:
            await sleep(0.01)
        SIGNS.add("raised")
        raise FatalRewardError("it is time to stop")

    async def with_nan(self, action, finish):
        return StepResult(float("nan"), True)

    async def with_environment(self, action, finish):
        raise TimeoutError("the tool ran out of time")

    async def with_rejected(self, action, finish):
        return StepResult(0.0, False, np.array([10**6], np.int32))


class BreaksAtStart(Arithmetic):
    """Works in the driver, and not in a rollout worker."""

    def __init__(self, task, tokenizer, *, seed, eval_size):
        super().__init__(task, tokenizer, seed=seed, eval_size=eval_size)
        if ray.is_initialized():
            raise MemoryError("the accelerator is full,\nas it was yesterday")


class HangsAtStart(Arithmetic):
    """Works in the driver, and in a rollout worker never comes to an end; ``task.options.mark``: a file that is made then."""

    def __init__(self, task, tokenizer, *, seed, eval_size):
        super().__init__(replace(task, options={}), tokenizer, seed=seed, eval_size=eval_size)
        if ray.is_initialized():
            Path(task.options["mark"]).touch()
            time.sleep(3600)

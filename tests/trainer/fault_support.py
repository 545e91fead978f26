"""Arithmetic whose episodes do harm to the process that they run in, each once, at a prompt that is always the same."""

from __future__ import annotations

import os
import signal
from asyncio import sleep
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import ray

from workers.environments.arithmetic import Arithmetic

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

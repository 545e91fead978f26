"""The prompt stream: every training problem once an epoch, in an order that depends on the seed and the epoch alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from rlframe.types import Prompt
from workers.environments.base import Problem


class PromptStream:
    """An endless stream whose whole state is ``position``, the index of the next prompt, and ``returned``, indices before it.

    Prompt ``i`` of the stream is problem ``order(epoch)[i % len]`` with ``epoch = i // len``, so that any prompt, also one that
    was in flight when a run died, can be made again from its index.
    """

    def __init__(self, problems: Sequence[Problem], env: str, seed: int) -> None:
        if not len(problems):
            raise ValueError("The task has no training prompts.")
        self.problems, self.env, self.seed = problems, env, seed
        self.position = 0
        self.returned: list[int] = []
        """Prompts that were taken and given back; they come first."""
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.position / len(self.problems)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with any prompt, its id, or their order in the data set."""
        digest = hashlib.sha256()
        for problem in self.problems:
            digest.update(f"{problem.id}:{len(problem.tokens)}:".encode() + problem.tokens.tobytes())
        return digest.hexdigest()[:16]

    def prompt(self, index: int) -> Prompt:
        """Prompt number ``index`` of the stream."""
        epoch, i = divmod(index, len(self.problems))
        if self._order is None or self._order[0] != epoch:
            rng = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._order = (epoch, rng.permutation(len(self.problems)))
        return as_prompt(self.problems[int(self._order[1][i])], index, self.env)

    def take(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts."""
        again, self.returned = self.returned[:count], self.returned[count:]
        first, self.position = self.position, self.position + count - len(again)
        return [self.prompt(index) for index in (*again, *range(first, self.position))]


def as_prompt(problem: Problem, index: int, env: str) -> Prompt:
    """A problem as number ``index`` of a stream."""
    return Prompt(id=problem.id, index=index, tokens=problem.tokens, env=env, payload=problem.payload)

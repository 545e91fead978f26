"""The prompt stream: every training problem once an epoch, in an order that depends on the seed and the epoch alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from rlframe.types import Prompt
from workers.environments.base import Problem

BLOCKS = 256
"""Parts of the problems that a checkpoint can tell apart."""


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
        self.held_out_by_tokens = False
        """As in `workers.environments.prompt_file.PromptFile`: which of a file's problems these are."""
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.position / len(self.problems)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What the problems are, in their order, for `difference`; neither a file's name nor a chat template changes it."""
        contents = [problem.content for problem in self.problems]
        edges = _edges(len(contents))
        return {
            "count": len(contents),
            "blocks": [_short("".join(contents[start:end])) for start, end in pairwise(edges)],
            "any_order": _short("".join(sorted(contents))),
            "held_out_by_tokens": self.held_out_by_tokens,
        }

    @property
    def legacy_fingerprint(self) -> str:
        """What older checkpoints hold: 16 hex digits that change with any prompt's id or tokens, or their order."""
        digest = hashlib.sha256()
        for problem in self.problems:
            digest.update(f"{problem.id}:{len(problem.tokens)}:".encode() + problem.tokens.tobytes())
        return digest.hexdigest()[:16]

    def difference(self, then: dict[str, Any]) -> str | None:
        """How the problems differ from those of an earlier `fingerprint`, or None; completes "The training prompts ..."."""
        now = self.fingerprint
        if now["count"] != then["count"]:
            return f"are {now['count']} and were {then['count']}"
        first = next((i for i, (a, b) in enumerate(zip(now["blocks"], then["blocks"], strict=True)) if a != b), None)
        if first is None:
            return None
        start, end = list(pairwise(_edges(now["count"])))[first]
        which = self.problems[start].id + (f" or one of the {end - start - 1} behind it" if end - start > 1 else "")
        if now["any_order"] == then["any_order"]:
            return f"are the same in another order; the first that moved is {which}"
        return f"have changed; the first that differs is {which}"

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


def _edges(count: int) -> list[int]:
    blocks = min(count, BLOCKS)
    return [count * i // blocks for i in range(blocks + 1)]


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def as_prompt(problem: Problem, index: int, env: str) -> Prompt:
    """A problem as number ``index`` of a stream."""
    return Prompt(id=problem.id, index=index, tokens=problem.tokens, env=env, payload=problem.payload)

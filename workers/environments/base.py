"""What an environment is: where prompts come from, and how an episode answers the policy's turns.

Tokens in, tokens out: an environment gives a rendered prompt, takes the sampled tokens of one turn, and gives the reward
and the tokens that come before the next turn. Nothing here knows an engine, Ray or a learner.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rlframe.types import Prompt

EXTRAS = "reward_extra"
FAILURE = "reward_failure"


class RewardError(RuntimeError):
    """No reward for one rollout, which is left out; the message is one sentence."""


class FatalRewardError(RewardError):
    """No reward for one rollout, and the run shall end because of it."""


@dataclass
class Problem:
    """One task instance of a data set; the prompt stream turns it into a `Prompt` each time it is drawn."""

    id: str
    """What messages and files call it; the same in every run on the same data."""
    tokens: np.ndarray
    """int32[P], the rendered prompt; never empty."""
    payload: dict[str, Any] = field(default_factory=dict)
    """What the episode needs to reward the answer (JSON-like)."""
    content: str = ""
    """`digest` of what the problem is, however it is rendered and wherever it lies; a run that resumes compares it. Empty: made
    of ``id`` and ``payload``, or without a payload of ``id`` and ``tokens``; of ``id`` alone if the payload is no JSON."""

    def __post_init__(self) -> None:
        if not self.content:
            try:
                self.content = digest([self.id, self.payload or self.tokens])
            except (TypeError, ValueError, RecursionError):  # keys that are no text, or a payload that contains itself
                self.content = digest(self.id)


def digest(value: Any) -> str:
    """32 hex digits of a JSON-like value, the same for every order of its keys; what is not JSON counts by its type alone.

    Raises:
        TypeError, ValueError, RecursionError: keys that are neither text nor comparable, or a value that contains itself.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__


@dataclass
class StepResult:
    """What the environment answers to one turn of the policy."""

    reward: float
    """Reward of this turn."""
    done: bool
    """The episode is over."""
    observation: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32[O], tokens appended before the next turn; empty when done."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What else is worth keeping (JSON-like, small).

    Numbers in a dict under `EXTRAS` are logged as means by their names; a reason under `FAILURE` says that there was no reward
    and 0 stands for it.
    """


class Episode(Protocol):
    """One running episode; it belongs to one prompt and is stepped until ``done``."""

    async def step(self, action: np.ndarray, finish: str) -> StepResult:
        """Answer the turn ``action`` (int32[A], stop token included) that ended because of ``finish`` (stop | length).

        Raises:
            RewardError: there is no reward for this rollout; `FatalRewardError` ends the run.
        """
        ...


class Environment(Protocol):
    """A source of problems and of the episodes that run on them."""

    name: str
    """What metrics and `Prompt.env` call it."""
    stop_token_ids: tuple[int, ...]
    """Sampling one of these ends a turn."""
    max_turns: int
    """Most turns of one episode.

    An environment may also have ``answer_tokens``, the fewest tokens of a turn that can hold any right answer (a run whose
    ``rollout.max_new_tokens`` is smaller is refused), and ``notes``, sentences about its data that a run prints when it starts.
    """

    def train_prompts(self) -> Sequence[Problem]:
        """The training problems, in the order of the data set (the prompt stream shuffles); asked for by the driver only.

        Raises:
            ConfigError: the data cannot be used; one sentence for the user.
        """
        ...

    def eval_prompts(self) -> Sequence[Problem]:
        """The held-out problems; none of them is among the training problems."""
        ...

    def episode(self, prompt: Prompt) -> Episode:
        """Start an episode on ``prompt``."""
        ...


EnvironmentFactory = Callable[..., Environment]
"""Called as ``factory(task, tokenizer, seed=..., eval_size=...)``; see `make_environment`."""

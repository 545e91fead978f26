"""The environment protocol: where prompts come from, and how an episode answers the policy's turns.

Tokens in, tokens out: an environment gives a rendered prompt, takes the sampled tokens of one turn, and gives the reward
and the tokens that come before the next turn. Nothing here knows an engine, Ray or a learner.

`workers.rollout.episode` checks what an episode answers. An unusable answer costs this rollout alone, which is left out and
counted as a fault; the run continues until too many in a row fail (`trainer.run.faults`):

- a reward that is not a finite float32: as ``task.on_reward_failure`` says (``raise`` ends the run, ``drop`` is fault
  ``reward``, ``zero`` counts 0); one that is no number at all is fault ``environment``;
- an observation that is not token ids: fault ``environment``; token ids outside of the model's vocabulary, or more of them than
  ``rollout.max_model_len`` has room for: ``rejected``, or, for the room, the end of the episode with finish ``length``;
- `RewardError`: fault ``reward``; `FatalRewardError`: the run ends; any other exception: fault ``environment``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

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
    """Further data worth keeping (JSON-like, small).

    Numbers in a dict under `EXTRAS` are logged as means by their names; a reason under `FAILURE` says that there was no reward
    and 0 stands for it.
    """


SOURCES = ("train", "eval", "reward")
"""Settings of ``task`` that name files and functions of the user."""
COLUMNS = ("prompt_key", "tools_key", "last_assistant")
"""Settings of ``task`` that say how a row becomes a prompt."""
REWARD_CALLS = ("reward_workers", "reward_timeout_s", "reward_startup_timeout_s", "reward_memory_mb", "on_reward_failure")
"""Settings of ``task`` that say how a reward function is called."""
CHATS = ("chat_template", "template_args", "stop")
"""Settings of ``task`` that say how texts are rendered and where an answer ends."""


class Episode(Protocol):
    """One running episode; it belongs to one prompt and is stepped until ``done``."""

    async def step(self, action: np.ndarray, finish: str) -> StepResult:
        """Answer the turn ``action`` (int32[A], stop token included) that ended because of ``finish`` (stop | length).

        Raises:
            RewardError: there is no reward for this rollout; `FatalRewardError` ends the run.
        """
        ...


class Environment(Protocol):
    """A source of problems and of the episodes that run on them.

    Derive from it; members that have a value here are optional. It is built as
    ``factory(task, tokenizer, seed=..., eval_size=...)`` (`workers.environments.registry.make_environment`), once in the driver
    and once in every rollout worker.
    """

    name: str
    """What metrics and `Prompt.env` call it."""
    stop_token_ids: tuple[int, ...]
    """Sampling one of these ends a turn."""
    max_turns: int = 1
    """Most turns of one episode."""
    answer_tokens: int = 1
    """Fewest tokens of a turn that can hold any right answer; a run whose ``rollout.max_new_tokens`` is smaller is refused."""
    notes: Sequence[str] = ()
    """Sentences about its data that a run prints when it starts; read after `train_prompts`."""
    held_out_by_tokens: bool = False
    """Set by a run that resumes from a checkpoint which says nothing else: hold out problems as runs did then, by a digest of
    the rendered prompt. For environments that hold out rows of a file."""
    settings: ClassVar[tuple[str, ...] | None] = None
    """Settings of ``task`` that it reads, beside ``name`` and ``options`` (`SOURCES`, `COLUMNS`, `REWARD_CALLS`, `CHATS`);
    giving another one is refused. None: any may be given."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Those of `SOURCES` that must be given."""

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

    def close(self) -> None:
        """Release resources when the rollout worker ends; episodes have ended."""


TO_DEFINE = ("train_prompts", "eval_prompts", "episode")
"""Methods without a default."""
MEMBERS = ("name", "stop_token_ids", "max_turns", "answer_tokens", "notes", "held_out_by_tokens", *TO_DEFINE, "close")
"""Members that an environment must have."""


def missing_members(environment: Any) -> list[str]:
    """Which of `MEMBERS` an object lacks, or has only as `Environment` declares them."""
    kind = type(environment)
    declared = [name for name in TO_DEFINE if getattr(kind, name, None) is getattr(Environment, name)]
    return [name for name in MEMBERS if name in declared or not hasattr(environment, name)]

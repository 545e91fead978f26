"""Faults of a rollout as values that cross process boundaries: a kind and one sentence, which is never parsed.

See `trainer.run.faults` for how the controller counts each kind and which of them end a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from workers.engines.protocol import EngineDeadError
from workers.environments.base import FatalRewardError, RewardError


class Kind(StrEnum):
    """Whose fault it is."""

    TIMEOUT = "timeout"
    """The episode took longer than it may."""
    REWARD = "reward"
    """There is no reward for it."""
    ENVIRONMENT = "environment"
    """The environment raised an exception, or returned something that is not a step."""
    ENGINE = "engine"
    """The engine failed, died, or returned something that is not a completion."""
    WORKER_LOST = "worker_lost"
    """The process of the rollout worker, or its node, is gone or silent."""
    REJECTED = "rejected"
    """The sequence cannot be sampled from: no room is left, or a token is not in the vocabulary."""


@dataclass(frozen=True)
class Fault:
    """Why there is no trajectory."""

    kind: Kind
    """Whose fault it is."""
    reason: str
    """One sentence or clause."""
    fatal: bool = False
    """Whether the run shall end because of it."""


class EpisodeFailed(Exception):
    """An episode gave no trajectory; ``fault`` says why."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.reason)
        self.fault = fault


@contextmanager
def failures_as(kind: Kind, of_values: Kind | None = None) -> Iterator[None]:
    """Turn exceptions of the body into faults of ``kind``; a ValueError into one of ``of_values``, if given.

    Raises:
        EpisodeFailed: instead of any exception but this one and EngineDeadError, which is more than one episode's.
    """
    try:
        yield
    except (EpisodeFailed, EngineDeadError):
        raise
    except RewardError as error:
        raise EpisodeFailed(Fault(Kind.REWARD, str(error), isinstance(error, FatalRewardError))) from error
    except Exception as error:
        whose = of_values if of_values and isinstance(error, ValueError) else kind
        raise EpisodeFailed(Fault(whose, describe(error))) from error


def describe(error: BaseException) -> str:
    """Type and message of an exception; of Ray's copy of one, those of the original, without the traceback."""
    error = getattr(error, "cause", None) or error
    return f"{type(error).__name__}: {error}".strip(": ")

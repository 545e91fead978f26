"""What the workers read of a job's configuration; its dataclass is the trainer's (`trainer.settings.config.Config`)."""

from __future__ import annotations

from typing import Optional, Protocol

from rlframe.config import AlgorithmConfig, ModelConfig
from workers.environments.settings import PROMPT_FILES, TaskConfig
from workers.learner.settings import ActorConfig, CriticConfig
from workers.rollout.settings import RolloutConfig

HELD_OUT = 256
"""Held-out problems where nothing says how many."""


class Cluster(Protocol):
    """Where learners compute, and how long workers may take to start."""

    device: str
    startup_timeout_s: float


class Eval(Protocol):
    """How many problems are held out."""

    size: Optional[int]


class Server(Protocol):
    """How many adapters a sampler holds, and how large."""

    max_loras: int
    max_rank: int


class Config(Protocol):
    """The sections and settings of a job that workers read."""

    seed: int
    model: ModelConfig
    task: TaskConfig
    algorithm: AlgorithmConfig
    rollout: RolloutConfig
    actor: ActorConfig
    critic: CriticConfig

    @property
    def cluster(self) -> Cluster:
        """The cluster."""

    @property
    def eval(self) -> Eval:
        """Held-out evaluation."""

    @property
    def server(self) -> Server:
        """The HTTP API."""


def eval_size(config: Config) -> int | None:
    """Number of held-out problems; None: all rows of ``task.eval``."""
    if config.eval.size is None and config.task.eval is not None and config.task.name in PROMPT_FILES:
        return None
    return HELD_OUT if config.eval.size is None else config.eval.size

"""The parts of a job's configuration that workers read; `trainer.settings.config.Config` is its dataclass."""

from __future__ import annotations

from typing import Optional, Protocol

from rlframe.config import AlgorithmConfig, ModelConfig
from workers.environments.settings import TaskConfig
from workers.learner.settings import ActorConfig, CriticConfig
from workers.rollout.settings import RolloutConfig


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


class Log(Protocol):
    """Whether events are recorded."""

    events: bool


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
    def log(self) -> Log:
        """What a user watches."""

    @property
    def server(self) -> Server:
        """The HTTP API."""

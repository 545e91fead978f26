"""The configuration of a job: sections defined next to the code that reads them; YAML groups hold only what differs.

Plain dataclasses. `trainer.settings.compose` composes it with Hydra, `trainer.settings.checks` checks it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from rlframe.config import AlgorithmConfig, ModelConfig
from rlframe.config.validate import at_least, choice, rule
from rlframe.seeding import SEEDS
from trainer.settings.sections import CheckpointConfig, ClusterConfig, EvalConfig, LogConfig, ServerConfig
from workers.environments.settings import TaskConfig
from workers.learner.settings import ActorConfig, CriticConfig
from workers.rollout.settings import RolloutConfig


@dataclass
class Config:
    """A whole job."""

    name: str = "run"
    """Name of the run."""
    run_dir: str = "runs/${name}"
    """Run directory; ``${name}`` stands for the name."""
    seed: int = field(default=0, metadata=rule(lambda v: 0 <= v < SEEDS, "at least 0 and below 2**32"))
    """Seed of data order, adapters and, where the engine allows it, sampling."""
    steps: int = field(default=100, metadata=at_least(1))
    """Policy steps."""
    batch_size: int = field(default=128, metadata=at_least(1))
    """Trajectories per step."""
    max_staleness: int = field(default=2, metadata=at_least(0))
    """Policy versions that a trajectory may lag when it is trained on; 0: synchronous."""
    reorder_window: int = field(default=0, metadata=at_least(0))
    """Prompts by which training may run ahead of the oldest unfinished rollout, so that a slow one does not hold up the batch;
    they are taken from the prompts in flight, so that ``max_staleness`` holds. Short answers then train first, and fresher than
    long ones. 0: strict order of admission."""
    admission: str = field(default="fresh", metadata=choice(("fresh", "full")))
    """When prompts are admitted. fresh: as late as keeps the learner from waiting, so that rollouts are less stale where
    sampling is faster than training; full: as soon as ``max_staleness`` allows."""
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        """``runs/${name}`` follows the name without Hydra, too; ``~`` is the user's folder, as in all other paths."""
        self.run_dir = os.path.expanduser(self.run_dir.replace("${name}", self.name))

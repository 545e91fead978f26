"""Settings of the job that only the trainer reads: cluster, evaluation, checkpoints, logs and the server.

Ranges stand beside the fields; `trainer.settings.checks.check` looks at them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from rlframe.config.validate import above, at_least, check_fields, choice, refuse, rule


@dataclass
class ClusterConfig:
    """Ray."""

    address: Optional[str] = None
    """null: the cluster of RAY_ADDRESS (Ray sets it inside a job), else a Ray head started on this machine; ``local``: the
    latter in any case; ``auto`` or host:port: join a running cluster."""
    device: str = field(default="auto", metadata=choice(("auto", "cpu", "cuda")))
    """``cpu``, ``cuda`` or auto: cuda where ``actor.gpus`` is above 0."""
    startup_timeout_s: float = field(default=600.0, metadata=above(0))
    """Longest time the engines and ranks may take to start."""
    watchdog_s: float = field(default=900.0, metadata=above(0))
    """Longest time without progress: no rollout ends and no part of a step does. At half of it a sentence says what waits for
    what, at all of it the run ends with a dump."""


@dataclass
class EvalConfig:
    """Held-out evaluation."""

    every: int = field(default=20, metadata=at_least(0))
    """Steps between evaluations; 0: only before the first step and after the last."""
    size: Optional[int] = field(default=None, metadata=at_least(1, optional=True))
    """Held-out problems; null: all of ``task.eval``, or 256 without one."""
    temperature: float = field(default=0.0, metadata=at_least(0))
    """Sampling temperature; 0 is greedy."""
    max_failed: float = field(default=0.1, metadata=rule(lambda v: 0 <= v <= 1, "a share, from 0 to 1"))
    """Largest share of the held-out episodes that may fail; they are left out of the mean. More of them end the run."""


@dataclass
class CheckpointConfig:
    """Recovery."""

    every: int = field(default=100, metadata=at_least(0))
    """Steps between checkpoints; 0: only after the last step."""
    keep_last: int = field(default=3, metadata=at_least(1))
    """Newest checkpoints that are kept."""
    keep_every: int = field(default=0, metadata=at_least(0))
    """Checkpoints of steps that this divides are kept permanently; 0: none."""
    keep_best: int = field(default=1, metadata=at_least(0))
    """Checkpoints with the highest held-out reward that are kept; only those of steps with an evaluation have one."""
    max_failures: int = field(default=3, metadata=at_least(0))
    """Times that a run starts again by itself from its last checkpoint after a process that it needs has died, counted again
    from each new checkpoint; one that cannot even start ends the run."""


def check_checkpoint(checkpoint: CheckpointConfig, key: str = "checkpoint") -> None:
    """Refuse what is out of range, and steps to keep that have no checkpoint.

    Raises:
        ConfigError: one sentence that names the setting and says what to change.
    """
    check_fields(checkpoint, key)
    every, keep_every = checkpoint.every, checkpoint.keep_every
    refuse(
        keep_every > 0 and every > 0 and keep_every % every != 0,
        f"{key}.keep_every={keep_every} is not a multiple of {key}.every={every}, so the steps it names have no "
        "checkpoint; choose a multiple.",
    )


@dataclass
class LogConfig:
    """What a user watches."""

    wandb: str = field(default="auto", metadata=choice(("auto", "online", "offline", "disabled")))
    """``auto`` (online with a key, else offline), ``online``, ``offline`` or ``disabled``."""
    project: str = "rlframe"
    """wandb project."""
    entity: Optional[str] = None
    """wandb entity."""
    rollouts_every: int = field(default=10, metadata=at_least(0))
    """Steps between samples of rollouts written to ``rollouts/``; 0: none."""
    rollouts_count: int = field(default=8, metadata=at_least(0))
    """Trajectories in such a sample, from the worst to the best reward of the batch."""
    rollouts_tokens: int = field(default=2048, metadata=at_least(1))
    """Tokens of such a trajectory that are written with all their numbers; of a longer one, its beginning and its end."""
    rollouts_mb: float = field(default=256.0, metadata=at_least(0))
    """Most MiB of all samples together; when they take more, some in the middle of the run are removed."""
    console: bool = True
    """One line a step and a progress bar."""
    events: bool = True
    """Write ``events.jsonl``: what every loop, worker, engine and learner phase did, and when (``rlframe timeline``)."""
    events_mb: float = field(default=256.0, metadata=above(0))
    """Most MiB of that file; later events are not written."""


@dataclass
class ServerConfig:
    """``rlframe serve``: the HTTP API in front of sessions and samplers."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = field(default=8000, metadata=at_least(0))
    """Port to listen on; 0: any free one."""
    keys_file: Optional[str] = None
    """File of API keys, a line each: a key that begins with ``tml-``, or a user's name and a key; null: one key is made up and
    kept in the run directory."""
    lora_alpha: float = 32.0
    """Scale of the adapters: alpha / rank * B A."""
    max_rank: int = field(default=64, metadata=at_least(1))
    """Largest rank that a client may ask for."""
    max_models: int = field(default=64, metadata=at_least(1))
    """Most models in memory; more are put to sleep on disk, longest unused first."""
    max_loras: int = field(default=8, metadata=at_least(1))
    """Most adapters that a sampler holds ready at once."""
    max_request_mb: int = field(default=64, metadata=at_least(1))
    """Largest body of a request."""
    idle_timeout_s: float = field(default=1800.0, metadata=above(0))
    """After this long without a sign of its client a model is saved and leaves memory, until it is asked for again."""
    result_ttl_s: float = field(default=900.0, metadata=above(0))
    """How long the result of a request is kept for its client."""

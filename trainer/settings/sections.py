"""Settings of the job that only the trainer reads: cluster, evaluation, checkpoints, logs and the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional


@dataclass
class ClusterConfig:
    """Ray."""

    address: Optional[str] = None
    """null: the cluster of RAY_ADDRESS (Ray sets it inside a job), else a Ray head started on this machine; ``local``: the
    latter in any case; ``auto`` or host:port: join a running cluster."""
    device: str = "auto"
    """``cpu``, ``cuda`` or auto: cuda where ``actor.gpus`` is above 0."""
    startup_timeout_s: float = 600.0
    """Longest time the engines and ranks may take to start."""
    watchdog_s: float = 900.0
    """Longest time without progress: no rollout ends and no part of a step does. At half of it a sentence says what waits for
    what, at all of it the run ends with a dump."""


@dataclass
class EvalConfig:
    """Held-out evaluation."""

    every: int = 20
    """Steps between evaluations; 0: only before the first step and after the last."""
    size: Optional[int] = None
    """Held-out problems; null: all of ``task.eval``, or 256 without one."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    max_failed: float = 0.1
    """Largest share of the held-out episodes that may fail; they are left out of the mean. More of them end the run."""


@dataclass
class CheckpointConfig:
    """Recovery."""

    every: int = 100
    """Steps between checkpoints; 0: only after the last step."""
    keep_last: int = 3
    """Newest checkpoints that are kept."""
    keep_every: int = 0
    """Checkpoints of steps that this divides are kept for good; 0: none."""
    keep_best: int = 1
    """Checkpoints with the highest held-out reward that are kept; only those of steps with an evaluation have one."""
    max_failures: int = 3
    """Times that a run starts again by itself from its last checkpoint after a process that it needs has died, counted anew
    from each new checkpoint; one that cannot even start ends the run."""


@dataclass
class LogConfig:
    """What a user watches."""

    wandb: str = "auto"
    """``auto`` (online with a key, else offline), ``online``, ``offline`` or ``disabled``."""
    project: str = "rlframe"
    """wandb project."""
    entity: Optional[str] = None
    """wandb entity."""
    rollouts_every: int = 10
    """Steps between samples of rollouts written to ``rollouts/``; 0: none."""
    rollouts_count: int = 8
    """Trajectories in such a sample, from the worst to the best reward of the batch."""
    rollouts_tokens: int = 2048
    """Tokens of such a trajectory that are written with all their numbers; of a longer one, its beginning and its end."""
    rollouts_mb: float = 256.0
    """Most MiB of all samples together; when they take more, some in the middle of the run are removed."""
    console: bool = True
    """One line a step and a progress bar."""


@dataclass
class ServerConfig:
    """``rlframe serve``: the HTTP API in front of sessions and samplers."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0: any free one."""
    keys_file: Optional[str] = None
    """File of API keys, a line each: a key that begins with ``tml-``, or a user's name and a key; null: one key is made up and
    kept in the run directory."""
    lora_alpha: float = 32.0
    """Scale of the adapters: alpha / rank * B A."""
    max_rank: int = 64
    """Largest rank that a client may ask for."""
    max_models: int = 64
    """Most models in memory; more are put to sleep on disk, longest unused first."""
    max_loras: int = 8
    """Most adapters that a sampler holds ready at once."""
    max_request_mb: int = 64
    """Largest body of a request."""
    idle_timeout_s: float = 1800.0
    """After this long without a sign of its client a model is saved and leaves memory, until it is asked for again."""
    result_ttl_s: float = 900.0
    """How long the result of a request is kept for its client."""

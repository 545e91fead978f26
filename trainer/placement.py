"""Which Ray actors a job needs, what each reserves, and whether a machine or a cluster has it. Starts nothing.

Memory is estimated in `trainer.memory`; the actors themselves are started by `workers.group` and `workers.rollout.group`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rlframe.config import Config, ConfigError, critic_names, serves_other_weights


@dataclass(frozen=True)
class Backbone:
    """One copy of the base model, sharded over the ranks of the learner."""

    trainable: bool
    """Whether its own weights train (mode full) or stay frozen under adapters."""
    sessions: tuple[str, ...]
    """Sessions that train on it."""


@dataclass(frozen=True)
class Group:
    """Ray actors of one kind."""

    name: str
    """``learner``, ``rollout`` or ``evaluation``."""
    count: int
    """Ray actors."""
    cpus: float
    """CPUs that each reserves."""
    gpus: float
    """GPUs that each reserves."""
    count_key: str
    """The setting that ``count`` comes from, for messages."""


@dataclass(frozen=True)
class Placement:
    """What a job asks of Ray."""

    groups: tuple[Group, ...]
    """Learner, rollout, and the engine for evaluation if it is another one."""
    backbones: tuple[Backbone, ...]
    """Copies of the base model in the learner; the actor's first."""
    address: str | None
    """Cluster to join; None: a Ray head on this machine."""

    @property
    def cpus(self) -> float:
        """CPUs of all Ray actors together."""
        return sum(group.count * group.cpus for group in self.groups)

    @property
    def gpus(self) -> float:
        """GPUs of all Ray actors together."""
        return sum(group.count * group.gpus for group in self.groups)

    def check_cluster(self, resources: Mapping[str, float]) -> None:
        """Compare with what Ray has (``ray.cluster_resources()``).

        Raises:
            ConfigError: more CPUs or GPUs are asked for than there are.
        """
        where = "this machine" if self.address is None else f"the cluster at {self.address}"
        self._check("CPU", self.cpus, resources.get("CPU", 0.0), where)
        self._check("GPU", self.gpus, resources.get("GPU", 0.0), where)

    def check_machine(self) -> None:
        """Refuse before Ray starts what this machine cannot hold: its CPUs are logical, its GPUs are counted.

        Raises:
            ConfigError: a local job asks for more GPUs than there are.
        """
        if self.address is None and self.gpus > 0:
            self._check("GPU", self.gpus, local_gpus(), "this machine")

    def _check(self, kind: str, asked: float, there: float, where: str) -> None:
        if asked <= there:
            return
        field = f"{kind.lower()}s"
        parts = " and ".join(
            f"{g.count_key}={g.count} x {g.count_key.split('.')[0]}.{field}={getattr(g, field):g}"
            for g in self.groups
            if getattr(g, field)
        )
        raise ConfigError(
            f"The job asks for {asked:g} {kind}s ({parts}), but {where} has {there:g}; lower one of these settings."
        )

    def describe(self) -> str:
        """The placement as lines of text."""
        lines = ["Ray: " + (f"joins {self.address}" if self.address else "a local head, started for this run")]
        for group in self.groups:
            each = f"{group.cpus:g} CPU" + (f" + {group.gpus:g} GPU" if group.gpus else "")
            lines.append(f"  {group.count} x {group.name} ({each} each)")
            if group.name == "learner":
                lines += [_describe_backbone(i, backbone, group.count) for i, backbone in enumerate(self.backbones)]
        lines.append(f"asked for: {self.cpus:g} CPUs, {self.gpus:g} GPUs")
        if self.address is None:
            lines.append(
                f"this machine: {os.cpu_count()} CPUs, {local_gpus()} GPUs, {total_memory() / 2**30:.1f} GiB of memory"
            )
        return "\n".join(lines)


def _describe_backbone(i: int, backbone: Backbone, ranks: int) -> str:
    shards = f"sharded over {ranks} ranks" if ranks > 1 else "whole on its rank"
    kind = "all weights train" if backbone.trainable else "frozen"
    return f"      backbone {i} ({kind}, {shards}): {', '.join(backbone.sessions)}"


def plan(config: Config) -> Placement:
    """Ray actors and backbones of a job.

    A LoRA actor and its critics share one frozen backbone; with a full-weights actor, LoRA critics share a second, frozen
    one; a full-weights critic has its own. All backbones live in the learner's ranks.

    Raises:
        ConfigError: this machine has fewer GPUs than a local job asks for.
    """
    actor, rollout = config.actor, config.rollout
    groups = [
        Group("learner", actor.ranks, actor.cpus, actor.gpus, "actor.ranks"),
        Group("rollout", rollout.workers, rollout.cpus, rollout.gpus, "rollout.workers"),
    ]
    if serves_other_weights(rollout):  # held-out problems are answered by the actor's own weights
        groups.append(Group("evaluation", 1, rollout.cpus, rollout.gpus, "rollout.workers"))
    placement = Placement(
        groups=tuple(groups),
        backbones=_backbones(config),
        address=config.cluster.address,
    )
    placement.check_machine()
    return placement


def _backbones(config: Config) -> tuple[Backbone, ...]:
    critics = critic_names(config)
    if critics and config.actor.mode == "lora" and config.critic.mode == "lora":
        return (Backbone(False, ("actor", *critics)),)
    policy = Backbone(config.actor.mode == "full", ("actor",))
    return (policy, Backbone(config.critic.mode == "full", critics)) if critics else (policy,)


def local_gpus() -> int:
    """GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def total_memory() -> int:
    """Bytes of main memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

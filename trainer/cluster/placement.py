"""Which Ray actors a job needs, what each reserves, and whether a machine or a cluster has it. Starts nothing.

Whether actors fit on nodes is computed in `trainer.cluster.fitting`, memory is estimated in `trainer.cluster.memory`; the
cluster is joined and asked in `trainer.cluster.ray_cluster`, bundles are reserved in `workers.pools`, the actors started by
`workers.learner.group` and `workers.rollout.group`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rlframe.config import ConfigError
from trainer.cluster.fitting import fit
from trainer.settings.config import Config
from workers.learner.roles import critic_names
from workers.rollout.settings import serves_other_weights


@dataclass(frozen=True)
class BackbonePlan:
    """One copy of the base model, sharded over the ranks of the learner."""

    trainable: bool
    """Whether its own weights train (mode full) or stay frozen under adapters."""
    sessions: tuple[str, ...]
    """Sessions that train on it."""


@dataclass(frozen=True)
class ActorGroup:
    """Ray actors of one kind."""

    name: str
    """``learner`` or ``rollout``."""
    count: int
    """Ray actors."""
    cpus: float
    """CPUs that each reserves."""
    gpus: float
    """GPUs that each reserves."""
    count_key: str
    """The setting that ``count`` comes from, for messages."""
    strategy: str
    """``PACK``: on as few nodes as possible; ``SPREAD``: on as many as possible."""

    @property
    def section(self) -> str:
        """The section of the configuration that says what each reserves."""
        return {"learner": "actor"}.get(self.name, self.name)

    def __str__(self) -> str:
        each = f"{self.cpus:g} CPU" + (f" + {self.gpus:g} GPU" if self.gpus else "")
        return f"{self.count} x {self.name} ({each} each)"


@dataclass(frozen=True)
class Placement:
    """What a job asks of Ray."""

    groups: tuple[ActorGroup, ActorGroup]
    """Learner, then rollout (the engine for evaluation last, if it is one of its own)."""
    backbones: tuple[BackbonePlan, ...]
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

    def check_cluster(self, nodes: Mapping[str, Mapping[str, float]]) -> None:
        """Compare with the resources that each node of the cluster has in all, by the node's name.

        Raises:
            ConfigError: more CPUs or GPUs are asked for than there are, or the actors do not fit on the nodes (none can span
                two).
        """
        where = "this machine" if self.address is None else f"the cluster at {self.address}"
        for kind, asked in (("CPU", self.cpus), ("GPU", self.gpus)):
            self._check(kind, asked, sum(node.get(kind, 0.0) for node in nodes.values()), where)
        if not fit(self.groups, nodes.values()):
            there = "; ".join(f"{name}: {n.get('CPU', 0):g} CPU, {n.get('GPU', 0):g} GPU" for name, n in nodes.items())
            parts = " and a part of a GPU not two GPUs" if any(0 < group.gpus < 1 for group in self.groups) else ""
            raise ConfigError(
                f"{self.asked()} cannot be placed on the nodes of {where}, since an actor does not span nodes{parts} "
                f"({there}); ask for smaller actors or fewer."
            )

    def check_machine(self) -> None:
        """Refuse before Ray starts what this machine cannot hold: its CPUs are logical, its GPUs are counted.

        Raises:
            ConfigError: a local job asks for more GPUs than there are, or for parts of GPUs that do not fit on them.
        """
        if self.address is None and self.gpus > 0:
            self._check("GPU", self.gpus, there := local_gpus(), "this machine")
            if not fit(self.groups, [{"CPU": self.cpus, "GPU": there}]):
                raise ConfigError(
                    f"{self.asked()} cannot be placed on the {there} GPUs of this machine, since a part of a GPU does not span "
                    "two GPUs; ask for other parts, or for fewer."
                )

    def _check(self, kind: str, asked: float, there: float, where: str) -> None:
        if asked <= there:
            return
        field = f"{kind.lower()}s"
        parts = " and ".join(
            f"{g.count_key}={g.count} x {g.section}.{field}={getattr(g, field):g}" for g in self.groups if getattr(g, field)
        )
        raise ConfigError(
            f"The job asks for {asked:g} {kind}s ({parts}), but {where} has {there:g}; lower one of these settings."
        )

    def asked(self) -> str:
        """The actors in words."""
        return " and ".join(map(str, self.groups))

    def describe(self) -> str:
        """The placement as lines of text."""
        lines = ["Ray: " + (f"joins {self.address}" if self.address else "a local head, started for this run")]
        for group in self.groups:
            lines.append(f"  {group}" + (f", {_STRATEGIES[group.strategy]}" if group.count > 1 else ""))
            if group.name == "learner":
                lines += [_describe_backbone(i, backbone, group.count) for i, backbone in enumerate(self.backbones)]
        lines.append(f"asked for: {self.cpus:g} CPUs, {self.gpus:g} GPUs")
        if self.address is None:
            lines.append(
                f"this machine: {os.cpu_count()} CPUs, {local_gpus()} GPUs, {total_memory() / 2**30:.1f} GiB of memory"
            )
        return "\n".join(lines)


_STRATEGIES = {"PACK": "packed on as few nodes as possible", "SPREAD": "spread over the nodes"}


def _describe_backbone(i: int, backbone: BackbonePlan, ranks: int) -> str:
    shards = f"sharded over {ranks} ranks" if ranks > 1 else "whole on its rank"
    kind = "all weights train" if backbone.trainable else "frozen"
    return f"      backbone {i} ({kind}, {shards}): {', '.join(backbone.sessions)}"


def plan(config: Config) -> Placement:
    """Ray actors and backbones of a job.

    A LoRA actor and its critics share one frozen backbone; with a full-weights actor, LoRA critics share a second, frozen
    one; a full-weights critic has its own. All backbones live in the learner's ranks.

    Raises:
        ConfigError: this machine has fewer GPUs than a local job asks for, or they cannot be given out like that.
    """
    actor, rollout = config.actor, config.rollout
    engines, engines_key = rollout.workers, "rollout.workers"
    if serves_other_weights(rollout):
        engines, engines_key = engines + 1, "one for evaluation + rollout.workers"
    placement = Placement(
        groups=(
            ActorGroup("learner", actor.ranks, actor.cpus, actor.gpus, "actor.ranks", "PACK"),
            ActorGroup("rollout", engines, rollout.cpus, rollout.gpus, engines_key, "SPREAD"),
        ),
        backbones=_backbones(config),
        address=cluster_address(config),
    )
    for group in placement.groups:
        if group.gpus > 1 and group.gpus % 1:
            key = f"{group.count_key.split('.')[0]}.gpus"
            raise ConfigError(f"{key}={group.gpus:g} is not possible; Ray gives out parts of one GPU, or whole ones.")
    placement.check_machine()
    return placement


def cluster_address(config: Config) -> str | None:
    """The cluster to join: ``cluster.address``, else RAY_ADDRESS, which Ray sets inside a job; None: a local head.

    Raises:
        ConfigError: the address is that of a dashboard or of a Ray client server.
    """
    name, address = "cluster.address", config.cluster.address
    if address is None:
        name, address = "RAY_ADDRESS", os.environ.get("RAY_ADDRESS")
    if not address or address == "local":
        return None
    if "://" in address:
        raise ConfigError(
            f"{name}={address} is not the address of a Ray head: use auto, or host:port as `ray start` takes it; "
            "`rlframe submit --address http://HOST:8265` sends a job through the dashboard."
        )
    return address


def _backbones(config: Config) -> tuple[BackbonePlan, ...]:
    critics = critic_names(config)
    if critics and config.actor.mode == "lora" and config.critic.mode == "lora":
        return (BackbonePlan(False, ("actor", *critics)),)
    policy = BackbonePlan(config.actor.mode == "full", ("actor",))
    return (policy, BackbonePlan(config.critic.mode == "full", critics)) if critics else (policy,)


def local_gpus() -> int:
    """GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def total_memory() -> int:
    """Bytes of main memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

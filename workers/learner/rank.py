"""One learner rank: a process that hosts the backbones and the roles (actor, critic) on them.

A LoRA actor and its critics share one frozen backbone. A full-weights actor has its own; LoRA critics then share a second,
frozen one, and a full-weights critic owns its backbone. The controller talks to all ranks through `workers.learner.group`.
"""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path
from urllib.parse import urlsplit

from workers.process import find_modules_in, redirect_output, without_garbage_collection

with without_garbage_collection():
    import numpy as np
    import psutil
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file, save_file
    from torch.distributed.constants import default_pg_timeout
    from torch.distributed.device_mesh import init_device_mesh

    from rlframe.backbone import Backbone
    from rlframe.files import Entry, seal
    from rlframe.metrics import Metrics
    from rlframe.sessions import Session
    from rlframe.types import Batch
    from workers.engines.protocol import WeightUpdate
    from workers.engines.registry import engine_spec
    from workers.engines.weights import announce, streams
    from workers.learner.actor import Actor
    from workers.learner.critic import Critic
    from workers.learner.sessions import actor_spec, critic_spec
    from workers.settings import Config


class LearnerRank:
    """Ray actor: one rank of the learner group."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        rank: int,
        log_file: str | None,
        critics: tuple[str, ...] = (),
        user_folder: str | None = None,
    ) -> None:
        """A rank that waits for `start`.

        Args:
            config: the job.
            model_path: folder of the base model.
            rank: this rank's number.
            log_file: where its output goes; None: where the process's goes.
            critics: names of the critic sessions, `workers.learner.roles.critic_names` of a run.
            user_folder: where a custom policy loss is found: the driver's current directory.
        """
        redirect_output(log_file)
        if user_folder is not None:
            find_modules_in(user_folder)
        torch.set_num_threads(config.actor.threads)
        self.config, self.model_path, self.rank, self.ranks = config, model_path, rank, config.actor.ranks
        self.critics = critics
        self._store: dist.TCPStore | None = None
        on_gpu = config.cluster.device == "cuda" or (config.cluster.device == "auto" and config.actor.gpus > 0)
        self.device = torch.device("cuda" if on_gpu else "cpu")

    def rendezvous(self) -> str:
        """Tcp address where the ranks of the group meet, held by this rank from now on (asked of rank 0)."""
        self._store = dist.TCPStore(
            _node_ip(), 0, self.ranks, is_master=True, wait_for_workers=False, timeout=default_pg_timeout
        )
        return f"tcp://{_node_ip()}:{self._store.port}"

    def address(self) -> str:
        """A tcp address on this rank's host that is free now."""
        with socket.socket() as s:
            s.bind(("", 0))
            return f"tcp://{_node_ip()}:{s.getsockname()[1]}"

    def join(self, address: str) -> None:
        """Join the process group and seed this process."""
        if interface := _interface_of(_node_ip()):  # gloo would take that of the host name, often the loopback's
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if self._store is None:
            where = urlsplit(address)
            assert where.hostname is not None and where.port is not None
            self._store = dist.TCPStore(where.hostname, where.port, self.ranks, timeout=default_pg_timeout)
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo", store=self._store, rank=self.rank, world_size=self.ranks
        )
        self.mesh = init_device_mesh(self.device.type, (self.ranks,))
        _seed_everything(self.config.seed * 1000 + self.rank)

    def start(self, address: str) -> None:
        """Join the process group and build backbones, sessions and roles."""
        self.join(address)
        actor, critic = self.config.actor, self.config.critic
        policy_backbone = self._backbone(trainable=actor.mode == "full")
        self.actor = Actor(policy_backbone.create_session("actor", actor_spec(self.config)), self.config)
        self.critic: Critic | None = None
        if self.critics:
            shared = actor.mode == "lora" and critic.mode == "lora"
            backbone = policy_backbone if shared else self._backbone(trainable=critic.mode == "full")
            sessions = {name: backbone.create_session(name, critic_spec(self.config, i)) for i, name in enumerate(self.critics)}
            self.critic = Critic(sessions, self.config)

    def _backbone(self, trainable: bool) -> Backbone:
        model = self.config.model
        return Backbone.load(
            self.model_path,
            mesh=self.mesh,
            device=self.device,
            dtype=model.dtype,
            trainable=trainable,
            activation_checkpointing=self.config.actor.activation_checkpointing,
            attn_implementation=model.attn_implementation,
            trust_remote_code=model.trust_remote_code,
        )

    def values(self, *parts: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Values and bootstrap values of this rank's shard of a batch, which comes in parts (see `SharedBatch`)."""
        assert self.critic is not None
        return self.critic.values(Batch.union(parts).shard(self.rank, self.ranks))

    def update_critic(self, *parts: Batch) -> Metrics:
        """One critic step on a batch in parts (returns and values set); the metrics of this rank's shard."""
        assert self.critic is not None
        batch = Batch.union(parts)
        return self.critic.update(batch.shard(self.rank, self.ranks), batch.num_actions)

    def update_actor(self, *parts: Batch) -> Metrics:
        """One policy step on a batch in parts (advantages set); the metrics of this rank's shard."""
        batch = Batch.union(parts)
        return self.actor.update(batch.shard(self.rank, self.ranks), batch.num_actions)

    def weight_update(self, version: int, mode: str, dtype: str, exact: bool = False) -> tuple[WeightUpdate | None, str]:
        """The weights to serve as ``version`` (rank 0) and their checksum; see `Actor.weight_update`."""
        update, checksum = self.actor.weight_update(version, mode, dtype, exact)
        if update is not None and streams(self.config):
            update, self._outgoing = announce(update, self.address())
            self._stream = update.stream
        return update, checksum

    def send_weights(self, places: int) -> None:
        """Send what `weight_update` announced last to ``places`` rollout workers by the engine's own channel (rank 0)."""
        assert self._stream is not None
        rollout = self.config.rollout
        engine_spec(rollout.engine).send(self._outgoing, self._stream, 1 + places * rollout.tensor_parallel_size)

    def logprobs(self, batch: Batch, temperature: float) -> dict[str, np.ndarray]:
        """The policy's own log-probabilities of this rank's shard, for the served-weights check."""
        outputs = self.actor.logprobs(batch.shard(self.rank, self.ranks), temperature)
        return {name: tensor.cpu().numpy() for name, tensor in outputs.items()}

    def snapshot(self) -> None:
        """Copy all sessions and this rank's random state to host memory; training may continue before `write`."""
        sessions = {name: session.snapshot() for name, session in self._sessions().items()}
        self._taken = (sessions, _rng_state(self.device))

    def write(self, directory: str) -> dict[str, Entry]:
        """Write what `snapshot` took under ``directory``, in a thread during training; sizes and hashes of the files."""
        (sessions, rng), root = self._taken, Path(directory)
        paths = [path for name, taken in sessions.items() for path in taken.write(root / name)]
        paths.append(root / f"rng_{self.rank:05d}.safetensors")
        save_file(rng, paths[-1])
        return {str(path.relative_to(root)): seal(path) for path in paths}

    def load(self, directory: str) -> None:
        """Restore what `write` wrote; the random state only if this rank existed then."""
        for name, session in self._sessions().items():
            session.load(str(Path(directory) / name))
        rng = Path(directory) / f"rng_{self.rank:05d}.safetensors"
        if rng.exists():
            _restore_rng(load_file(str(rng)), self.device)

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()
        self._store = None

    def _sessions(self) -> dict[str, Session]:
        return {"actor": self.actor.session, **(self.critic.sessions if self.critic else {})}


def _node_ip() -> str:
    import ray

    return ray.util.get_node_ip_address()


def _interface_of(ip: str) -> str | None:
    """The network interface of this machine that has the address ``ip``."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(each.address == ip for each in addresses)), None)


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _restore_rng(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)

"""One base model, sharded by FSDP2 over the ranks of a worker group, and the sessions that train on it.

Here: loading without a full copy in any rank's memory, the padding-free forward up to the last hidden state, the LM head as
losses need it. Not here: gradients, optimisers and files of sessions (`rlframe.sessions`), losses (`rlframe.losses`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from rlframe.checksum import bit_sum
from rlframe.columns import TokenBatch
from rlframe.config import MODEL_DTYPES, ConfigError
from rlframe.exactness import Verdict, examine
from rlframe.forward import Body, PackedForward
from rlframe.hf_checkpoint import conversions, load_weights, read_tensors, to_checkpoint_names
from rlframe.lora import Adapters, bare
from rlframe.losses.base import LMHead
from rlframe.model_setup import blocks, empty_model, materialise, named_blocks, read_config, recompute_activations, shard
from rlframe.optim import local
from rlframe.precision import full_precision
from rlframe.ranks import Ranks
from rlframe.sessions import Session, SessionSpec

logger = logging.getLogger(__name__)

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in MODEL_DTYPES}


class Backbone:
    """A base model that sessions share. Build it with `load`; every rank calls every method in the same order."""

    def __init__(self, body: Body, verdict: Verdict, *, path: Path, ranks: Ranks, device: torch.device) -> None:
        model = body.model
        self.model = model
        self.path = path
        self.ranks = ranks
        self.device = device
        self.sessions: dict[str, Session] = {}
        self.adapters = Adapters(model)
        self.trainable = False
        self.packs = verdict.packs
        """Whether one pass can take several trajectories; otherwise each goes alone."""
        self.notes: list[str] = []
        """What the user should know of how the model is run; of an `outline`."""
        self._body = body
        self._forward = PackedForward(body, device)
        self._table = conversions(model)
        self._bit_sums: dict[tuple[frozenset[str], torch.dtype], int] = {}

    @classmethod
    @full_precision()
    def load(
        cls,
        path: str,
        *,
        mesh: DeviceMesh | None,
        device: torch.device,
        dtype: str = "float32",
        trainable: bool = False,
        activation_checkpointing: bool = False,
        attn_implementation: str = "sdpa",
        trust_remote_code: bool = False,
    ) -> Backbone:
        """Load a Hugging Face folder; each rank reads only the rows that it keeps.

        Args:
            path: folder with ``config.json`` and safetensors weights.
            mesh: one-dimensional device mesh to shard over; None: one process, no sharding.
            device: where parameters live and compute.
            dtype: ``float32`` or ``bfloat16``, of forward and backward.
            trainable: keep float32 master weights, so that a session may train all of them.
            activation_checkpointing: recompute each block in the backward pass.
            attn_implementation: attention kernel of transformers.
            trust_remote_code: run code that the folder ships.

        Raises:
            ConfigError: no usable weights, a quantised model, an unknown dtype, or bfloat16 masters asked for without a mesh.
        """
        if dtype not in DTYPES:
            raise ConfigError(f"model.dtype is {dtype!r}; choose {' or '.join(DTYPES)}.")
        if trainable and mesh is None and dtype != "float32":
            raise ConfigError("Training all weights in bfloat16 needs a device mesh (of one rank, if need be), or float32.")
        ranks = Ranks.of(mesh)
        verdict = _agreed(ranks, read_config(Path(path), trust_remote_code), attn_implementation, trust_remote_code)
        model = empty_model(Path(path), DTYPES["float32" if trainable else dtype], verdict.kernel, trust_remote_code)
        if activation_checkpointing:
            recompute_activations(model)
        body = Body(model, verdict.final)
        if mesh is not None:
            shard(body, model, mesh, DTYPES[dtype], trainable=trainable)
        materialise(model, device)
        ranks.together(lambda: load_weights(model, Path(path), ranks))
        backbone = cls(body, verdict, path=Path(path), ranks=ranks, device=device)
        backbone.trainable = trainable
        if not verdict.packs:
            logger.warning(
                "%s does not keep packed trajectories apart; each will take a pass of its own.", type(model).__name__
            )
        # FSDP decides in its first forward in which dtype it reduces, from the parameters that are trainable then.
        model.requires_grad_(trainable)
        backbone._first_pass()
        model.requires_grad_(False)
        return backbone

    @classmethod
    def outline(
        cls, path: str, *, trainable: bool, attn_implementation: str = "sdpa", trust_remote_code: bool = False
    ) -> Backbone:
        """A backbone without memory, to see whether sessions fit: they can be created, not run. Arguments as in `load`.

        Raises:
            ConfigError: a quantised model, none, one that is not computed exactly (`rlframe.exactness`), or one that ranks
                cannot share because its blocks are not known.
        """
        verdict = examine(read_config(Path(path), trust_remote_code), attn_implementation, trust_remote_code)
        # The parameters are the same under any kernel, and a flash kernel need not be installed on this machine.
        model = empty_model(Path(path), torch.float32, verdict.checked, trust_remote_code)
        blocks(model)
        backbone = cls(Body(model, verdict.final), verdict, path=Path(path), ranks=Ranks.of(None), device=torch.device("meta"))
        backbone.trainable = trainable
        if verdict.checked != verdict.kernel:
            backbone.notes.append(
                f"model.attn_implementation={verdict.kernel} does not run on a CPU, so it was not compared with transformers' "
                f"eager attention; {verdict.checked} was, and is exact."
            )
        return backbone

    def create_session(self, name: str, spec: SessionSpec) -> Session:
        """Add a session with fresh parameters that depend on ``spec.seed`` alone.

        Raises:
            ConfigError: the name is taken, or the spec does not fit this model.
        """
        if name in self.sessions:
            raise ConfigError(f"This backbone already has a session called {name!r}.")
        if spec.kind == "full" and not self.trainable:
            raise ConfigError("A session on all weights needs a backbone loaded with trainable=True.")
        others = {session.spec.kind for session in self.sessions.values()}
        if others and (spec.kind == "full" or "full" in others):
            raise ConfigError("A session on all weights needs a backbone of its own, because it moves the base of the others.")
        self.reshard()
        self.sessions[name] = Session(name, spec, self)
        return self.sessions[name]

    def delete_session(self, name: str) -> None:
        """Remove a session and its parameters; a session on all weights gives the base back as it was loaded.

        Raises:
            ConfigError: there is no such session.
        """
        if name not in self.sessions:
            raise ConfigError(f"This backbone has no session called {name!r}.")
        session = self.sessions.pop(name)
        session.close()
        if session.spec.kind == "full":
            self.reshard()
            self.ranks.together(lambda: load_weights(self.model, self.path, self.ranks))

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.model.config.get_text_config().hidden_size

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Base parameters by their bare names, each tied one once; no adapter factors."""
        for name, parameter in self.model.named_parameters():
            if ".lora_" not in name:
                yield bare(name), parameter

    def run(self, micro: TokenBatch | None, consume: Callable[[Tensor, LMHead], Any]) -> Any:
        """Forward one micro-batch, trajectories packed into rows, and hand its hidden states to ``consume``.

        Args:
            micro: whole trajectories; None takes part in the collectives with one token.
            consume: called with hidden [N, H] and the LM head; must not raise.

        Returns:
            What ``consume`` returned. Tensors that are differentiated must be reachable in it (tuples, lists, dicts).
        """
        if micro is None:
            return self._forward(np.zeros(1, np.int64), np.ones(1, np.int64), consume)
        return self._forward(micro.tokens, micro.lengths, consume)

    @torch.no_grad()
    def _first_pass(self) -> None:
        """Run a few tokens.

        Raises:
            ConfigError: the weights give numbers that are not finite.
        """
        finite = self._forward(np.arange(4), np.array([4]), lambda hidden, head: bool(hidden.isfinite().all()))
        self.reshard()
        (broken,) = self.ranks.maximum([int(not finite)])
        if broken:
            raise ConfigError(
                f"The weights in {self.path} give hidden states that are not finite; they are damaged, or need float32."
            )

    def reshard(self) -> None:
        """Leave everything sharded, as it is outside of forward and backward: what stayed whole would miss the next step."""
        for module in self._body.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def reset(self) -> None:
        """Bring FSDP back to rest after a pass that was broken off."""
        if isinstance(self._body, FSDPModule):
            self._body.reset_iter_state()

    def whole(self, parameter: Tensor) -> Tensor:
        """The whole of a parameter, detached; every rank takes part."""
        return parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach()

    def groups(self) -> list[dict[str, nn.Parameter]]:
        """Base parameters in groups that translate to checkpoint names together: one per block, one for the rest."""
        owner = {id(p): i for i, block in enumerate(named_blocks(self.model)) for p in block.parameters()}
        grouped: dict[int, dict[str, nn.Parameter]] = {}
        for name, parameter in self.parameters():
            grouped.setdefault(owner.get(id(parameter), -1), {})[name] = parameter
        return list(grouped.values())

    def stored_buffers(self) -> dict[str, Tensor]:
        """Buffers that the folder holds (a router's correction, constants of an activation), as it holds them; none trains."""
        persistent = self.model.state_dict().keys() - dict(self.model.named_parameters(remove_duplicate=False)).keys()
        buffers = {bare(name): tensor for name, tensor in self.model.named_buffers() if name in persistent}
        return read_tensors(self.path, self.checkpoint_names(buffers))

    def checkpoint_names(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors of one group under the names, and in the cuts, of the checkpoint."""
        return to_checkpoint_names(self.model, self._table, tensors)

    def bit_sum(self, dtype: torch.dtype, *, without: Collection[str] = ()) -> int:
        """Sum of `rlframe.checksum.bit_sum` of the base parameters as cast to ``dtype``, over all ranks, modulo 2**64.

        While no session trains the base itself, the answer is remembered.
        """
        key = (frozenset(without), dtype)
        known = self._bit_sums.get(key)
        if known is None:
            parts = [local(p.detach()) for name, p in self.parameters() if name not in without]
            known = sum(bit_sum(part.to(dtype)) for part in parts if part.numel()) % 2**64
            if isinstance(self._body, FSDPModule):
                known = self.ranks.total(known)
            if not self.trainable:
                self._bit_sums[key] = known
        return known


def _agreed(ranks: Ranks, config: PreTrainedConfig, attn_implementation: str, trust_remote_code: bool) -> Verdict:
    """A verdict for all ranks: they pack only if each of them found that it may, since machines may round differently."""
    found: list[Verdict] = []
    ranks.together(lambda: found.append(examine(config, attn_implementation, trust_remote_code)))
    (verdict,) = found
    (mixes,) = ranks.maximum([int(not verdict.packs)])
    return replace(verdict, packs=not mixes)

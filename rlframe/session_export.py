"""What a session gives away: tensors for samplers with their checksum, and folders for other tools. Never the value head.

Merged weights are computed from the untouched base each time, so nothing drifts. Saving for recovery is `rlframe.session_io`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlframe.checksum import bit_sum
from rlframe.config import ConfigError
from rlframe.hf_checkpoint import write_folder

if TYPE_CHECKING:
    from rlframe.sessions import Session

MODES = ("merged", "adapter", "full")


def _check_mode(session: Session, mode: str) -> None:
    if mode not in MODES:
        raise ConfigError(f"Weights can be given as {', '.join(MODES)}, not {mode!r}.")
    if mode != "full" and session.adapter is None:
        raise ConfigError(f"Session {session.name!r} trains all weights, so its weights are given as full, not {mode}.")


@torch.no_grad()
def _module_groups(session: Session, dtype: torch.dtype, *, changed_only: bool) -> Iterator[dict[str, Tensor]]:
    """Whole parameters with the adapter added, as cast to ``dtype``, one block at a time; every rank takes part."""
    deltas = session.adapter.deltas() if session.adapter else {}
    backbone = session.backbone
    for group in backbone.groups():
        tensors = {}
        for name, parameter in group.items():
            if name in deltas:
                delta = session.adapter.delta(deltas[name]).float()  # type: ignore[union-attr]
                tensors[name] = (backbone.whole(parameter).float() + delta).to(dtype)
            elif not changed_only:
                tensors[name] = backbone.whole(parameter).to(dtype)
        if tensors:
            yield tensors


def _adapter_tensors(session: Session, dtype: torch.dtype) -> dict[str, Tensor]:
    masters = {t.name: t.master for t in session.trainables}
    factors = session.adapter.factors() if session.adapter else {}
    return {f"base_model.model.{name}": masters.get(name, p.detach()).to(dtype) for name, p in factors.items()}


def sampler_tensors(session: Session, mode: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors that a sampler loads, as `Session.sampler_tensors` returns them."""
    _check_mode(session, mode)
    backbone = session.backbone
    keep = backbone.ranks.rank == 0
    if mode == "adapter":
        return {name: tensor.cpu() for name, tensor in _adapter_tensors(session, dtype).items()} if keep else {}
    tensors: dict[str, Tensor] = {}
    remembered = mode == "merged" or session.adapter is None
    total = 0
    for group in _module_groups(session, dtype, changed_only=mode == "merged"):
        if keep:
            total += sum(bit_sum(tensor) for tensor in group.values()) if remembered else 0
            tensors.update({name: t.cpu().contiguous() for name, t in backbone.checkpoint_names(group).items()})
    if remembered:
        session.sent_bits = (session.revision, dtype, total)
    return tensors


def sampler_checksum(session: Session, mode: str, dtype: torch.dtype) -> str:
    """Checksum of the tensors that `sampler_tensors` yields, in the dtype that is sent."""
    _check_mode(session, mode)
    backbone = session.backbone
    if mode == "adapter":
        return f"{sum(bit_sum(t) for t in _adapter_tensors(session, dtype).values()) % 2**64:016x}"
    if session.adapter is None:
        return f"{_sent_bits(session, dtype) % 2**64:016x}"
    unchanged = backbone.bit_sum(dtype, without=session.adapter.deltas().keys())
    return f"{(unchanged + _sent_bits(session, dtype)) % 2**64:016x}"


def _sent_bits(session: Session, dtype: torch.dtype) -> int:
    """Bit sum of the parameters that the session changes; rank 0 remembers it from `sampler_tensors`."""
    ranks = session.backbone.ranks
    known = session.sent_bits
    if known is None or known[:2] != (session.revision, dtype):
        if session.adapter is None:
            return session.backbone.bit_sum(dtype)
        groups = _module_groups(session, dtype, changed_only=True)
        known = (session.revision, dtype, sum(bit_sum(t) for group in groups for t in group.values()))
        session.sent_bits = known
    return ranks.total(known[2] if ranks.rank == 0 else 0)


def export(session: Session, directory: Path, *, merged: bool) -> None:
    """Write the session as a Hugging Face or PEFT folder, as `Session.export` describes."""
    if merged:
        _export_merged(session, directory)
        return
    config = session.adapter_config()
    ranks = session.backbone.ranks

    def write() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.cpu() for name, tensor in _adapter_tensors(session, torch.float32).items()}
        save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
        (directory / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True))

    ranks.together(write if ranks.rank == 0 else lambda: None)


def _export_merged(session: Session, directory: Path) -> None:
    backbone = session.backbone
    config = json.loads((backbone.path / "config.json").read_text())
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
    groups = _module_groups(session, dtype, changed_only=False)

    def write() -> None:
        if backbone.ranks.rank == 0:
            trained = ({name: t.cpu() for name, t in backbone.checkpoint_names(group).items()} for group in groups)
            write_folder(backbone.path, directory, chain(trained, [backbone.stored_buffers()]))

    def write_and_continue() -> None:
        try:
            write()
        finally:
            # The other ranks take part in gathering every group, whatever happens to the files.
            for _ in groups:
                pass

    backbone.ranks.together(write_and_continue)

"""Directories of saved sessions between any numbers of ranks; each function runs on every rank of its group."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlframe.config import ConfigError
from rlframe.sessions import Session
from tests.support.session_cases import EXPERTS, Policy, Value, load, make_batch, same, spec, state
from tests.support.session_rank_checks import step

STORED = {
    "lora": ("moe", {"kind": "lora", "lora": {"target_parameters": EXPERTS}}),
    "lora-value": ("tied", {"kind": "lora", "value_head": True}),
    "full": ("untied", {"kind": "full"}),
    "full-value": ("moe", {"kind": "full", "value_head": True}),
}
"""Every kind of session that a directory can hold, on a model of its own."""


def _session_of(name: str, mesh: DeviceMesh | None, models: dict[str, str], seed: int) -> Session:
    model, options = STORED[name]
    backbone = load(models[model], mesh, trainable=options["kind"] == "full")
    return backbone.create_session("a", spec(**options, seed=seed))


def _held(session: Session) -> dict[str, Tensor]:
    """Masters, moments and all parameters, whole."""
    return state(session) | {f"all/{name}": session.backbone.whole(p) for name, p in session.named_parameters()}


def every_kind_is_written(mesh: DeviceMesh, models: dict[str, str], tmp: Path) -> None:
    """After one step; beside each directory, what the session held, gathered by the tests' own means."""
    for name, (_, options) in STORED.items():
        session = _session_of(name, mesh, models, seed=1)
        step(session, make_batch(seed=1), Value() if options.get("value_head") else Policy())
        session.save(str(tmp / f"{name}-by-{mesh.size()}"))
        held = _held(session)
        if session.backbone.ranks.rank == 0:
            save_file({n: t.clone() for n, t in held.items()}, tmp / f"{name}-by-{mesh.size()}.safetensors")


def every_writer_is_read(mesh: DeviceMesh, models: dict[str, str], tmp: Path) -> None:
    """By this number of ranks, and by one process without a mesh, as `rlframe export` reads."""
    readers = (mesh, None) if mesh.size() == 1 else (mesh,)
    for name in STORED:
        for reader in readers:
            session = _session_of(name, reader, models, seed=2)
            for writers in (1, 2, 4):
                session.load(str(tmp / f"{name}-by-{writers}"))
                same(_held(session), load_file(tmp / f"{name}-by-{writers}.safetensors"))


def files_that_fail_on_one_rank_fail_on_all(mesh: DeviceMesh, models: dict[str, str], tmp: Path) -> None:
    """Rank 0 alone writes exports and alone misses a file here; afterwards the session goes on."""
    batch = make_batch()
    backbone = load(models["untied"], mesh)
    session = backbone.create_session("a", spec())
    blocked = tmp / f"a-file-{mesh.size()}-{backbone.ranks.rank}"
    blocked.write_text("not a directory")
    expected = OSError if backbone.ranks.rank == 0 else RuntimeError
    for merged in (True, False):
        with pytest.raises(expected):
            session.export(str(blocked / "export"), merged=merged)
    folder = tmp / f"one-rank-misses-{mesh.size()}"
    session.save(str(folder))
    with pytest.raises(ConfigError if backbone.ranks.rank == 0 else RuntimeError):
        session.load(str(folder if backbone.ranks.rank else blocked))
    assert step(session, batch, Policy())["grad_norm"] > 0


CHECKS = (every_kind_is_written, every_writer_is_read, files_that_fail_on_one_rank_fail_on_all)
PLAN = [(check.__name__, size, check) for check in CHECKS for size in (1, 2, 4)]

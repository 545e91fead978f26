"""Checkpoints on disk: an incomplete or damaged one is never used, and what was in the buffer comes back."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from rlframe.types import Batch, Trajectory
from trainer.recovery import CheckpointError, Checkpoints, _read_batches, read_state, verify


class Ranks:
    """Stands where the learner group does: writes one file, as a rank would."""

    async def save(self, directory):
        (Path(directory) / "actor.safetensors").write_bytes(b"weights" * 100)


def batch(index, tokens):
    n = len(tokens)
    return Batch.from_trajectories(
        [
            Trajectory(
                tokens=tokens,
                action_mask=np.arange(n) > 0,
                logprobs=np.full(n, -0.5),
                head_ids=np.tile([1, 2], (n, 1)),
                head_logprobs=np.full((n, 2), -np.inf),
                versions=np.full(n, 4),
                rewards=np.arange(n),
                finish="stop",
                prompt_id=f"p{index}",
                index=index,
                env="env",
                metadata={"note": "ü"},
            )
        ]
    )


def state(step, batches=()):
    return {"step": step, "slots": [], "batches": list(batches)}


def save(checkpoints, step, **kwargs):
    asyncio.run(checkpoints.save(step, Ranks(), state(step, **kwargs)))


def test_the_newest_complete_one_is_used_and_the_others_are_named(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=10, config_hash="abc")
    for step in (10, 20, 30, 40):
        save(checkpoints, step)
    root = tmp_path / "checkpoints"
    assert (root / "LATEST").read_text().strip() == "step_000040"
    (root / "step_000040" / "manifest.json").unlink()
    damaged = root / "step_000030" / "actor.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"X")
    (root / "step_000050.tmp").mkdir()
    directory, skipped = checkpoints.newest()
    assert directory.name == "step_000020"
    assert skipped == [
        "step_000040 was skipped: it has no manifest.",
        "step_000030 was skipped: actor.safetensors does not match its sha256.",
    ]


def test_a_truncated_file_and_a_missing_file_are_found(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=10, config_hash="abc")
    save(checkpoints, 1)
    directory = tmp_path / "checkpoints" / "step_000001"
    assert verify(directory) is None
    (directory / "actor.safetensors").write_bytes(b"short")
    assert "5 bytes instead of 700" in verify(directory)
    (directory / "actor.safetensors").unlink()
    assert "actor.safetensors is missing" in verify(directory)


def test_nothing_to_resume_from_is_one_sentence(tmp_path):
    with pytest.raises(CheckpointError, match="Nothing to resume from"):
        Checkpoints(tmp_path, 1, "abc").newest()


def test_only_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=2, config_hash="abc")
    for step in (1, 2, 3):
        save(checkpoints, step)
    assert sorted(d.name for d in (tmp_path / "checkpoints").glob("step_*")) == ["step_000002", "step_000003"]


def test_finished_trajectories_come_back_slot_by_slot(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=2, config_hash="abc")
    two = Batch.concat([batch(1, [5, 6]), batch(1, [7, 8, 9])])
    save(checkpoints, 7, batches=[batch(0, [1, 2, 3]), two])
    directory = tmp_path / "checkpoints" / "step_000007"
    first, second = _read_batches(directory)
    assert (len(first), len(second)) == (1, 2)
    for restored, original in ((first, batch(0, [1, 2, 3])), (second, two)):
        assert restored.prompt_ids == original.prompt_ids and restored.metadata == original.metadata
        for name in ("tokens", "action_mask", "logprobs", "head_logprobs", "versions", "rewards", "offsets"):
            np.testing.assert_array_equal(getattr(restored, name), getattr(original, name))
    assert json.dumps(read_state(directory)["slots"]) == "[]"

"""Checkpoints on disk: a damaged one is never used, training continues beside the writing, rules say which ones stay."""

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from rlframe.advantages import make_estimator
from rlframe.config import AlgorithmConfig
from rlframe.types import Batch, Trajectory
from tests.support.checkpoints import Ranks, rest, save
from trainer.run.checkpoints import Checkpoints, verify
from trainer.run.failures import CheckpointError
from trainer.run.recovery import read_batches, read_state, write_state
from trainer.settings.sections import CheckpointConfig


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


def kept(run_dir):
    return [int(directory.name[5:]) for directory in sorted((run_dir / "checkpoints").glob("step_*"))]


def test_the_newest_complete_one_is_used_and_the_others_are_named(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=10))
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
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=10))
    save(checkpoints, 1)
    directory = tmp_path / "checkpoints" / "step_000001"
    assert verify(directory) is None
    (directory / "actor.safetensors").write_bytes(b"short")
    assert "5 bytes instead of 700" in verify(directory)
    (directory / "actor.safetensors").unlink()
    assert "actor.safetensors is missing" in verify(directory)


def test_damaged_ones_alone_are_an_error_and_none_at_all_is_not(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    assert checkpoints.newest() == (None, [])
    save(checkpoints, 1)
    (tmp_path / "checkpoints" / "step_000001" / "actor.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"Nothing to resume from .* step_000001 was skipped: actor\.safetensors is missing"
    ):
        checkpoints.newest()
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7 .* there are: 1"):
        checkpoints.at(7)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"keep_last": 2}, [9, 10]),
        ({"keep_last": 1, "keep_every": 4}, [4, 8, 10]),
        ({"keep_last": 1, "keep_best": 2}, [3, 7, 10]),
        ({"keep_last": 1, "keep_every": 5, "keep_best": 1}, [5, 7, 10]),
    ],
)
def test_rules_say_which_checkpoints_stay(tmp_path, rules, expected):
    """Held-out rewards are measured at odd steps; the best are at steps 3 and 7, equal, and then 1."""
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(**{"keep_best": 0, **rules}))
    for step in range(1, 11):
        score = {1: 0.5, 3: 0.9, 5: 0.2, 7: 0.9, 9: 0.4}.get(step)
        save(checkpoints, step, score=score)
    assert kept(tmp_path) == expected


def test_what_a_damaged_newer_one_left_does_not_push_good_ones_out(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=2))
    for step in (1, 2, 9):
        save(checkpoints, step)
    (tmp_path / "checkpoints" / "step_000009" / "manifest.json").unlink()
    save(checkpoints, 3)
    assert kept(tmp_path) == [2, 3, 9]
    assert checkpoints.newest()[0].name == "step_000003"


def test_training_continues_while_a_checkpoint_of_the_earlier_state_is_written(tmp_path):
    checkpoints, ranks = Checkpoints(tmp_path, CheckpointConfig()), Ranks()

    async def train():
        ranks.may_write.clear()
        await checkpoints.save(1, ranks, rest(1), None)
        ranks.weights = b"of a later step"
        await checkpoints.check()
        assert kept_while_writing() == []
        second = asyncio.create_task(checkpoints.save(2, ranks, rest(2), None))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not second.done() and ranks.taken != ranks.weights, "at most one is written at a time"
        ranks.may_write.set()
        await second
        await checkpoints.settle()

    def kept_while_writing():
        return [d for d in (tmp_path / "checkpoints").glob("step_*") if d.suffix != ".tmp"]

    asyncio.run(train())
    root = tmp_path / "checkpoints"
    assert kept(tmp_path) == [1, 2]
    assert (root / "step_000001" / "actor.safetensors").read_bytes() == b"weights" * 100
    assert (root / "step_000002" / "actor.safetensors").read_bytes() == b"of a later step"
    assert set(checkpoints.timings()) == {"time/checkpoint", "time/checkpoint_write"} and not checkpoints.timings()


@pytest.mark.parametrize("waits", ["check", "settle", "save"])
def test_a_failure_in_the_background_surfaces_and_leaves_the_old_checkpoint(tmp_path, waits):
    checkpoints, ranks = Checkpoints(tmp_path, CheckpointConfig()), Ranks()

    async def train():
        await checkpoints.save(1, ranks, rest(1), None)
        await checkpoints.settle()
        await checkpoints.save(2, ranks, lambda directory: [directory / "not written"], None)
        writing = checkpoints._writing
        await asyncio.wait([writing])
        with pytest.raises(CheckpointError, match=r"step 2 could not be written: .*not written"):
            await (checkpoints.save(3, ranks, rest(3), None) if waits == "save" else getattr(checkpoints, waits)())

    asyncio.run(train())
    assert checkpoints.newest()[0].name == "step_000001"


def test_files_that_the_driver_cannot_see_are_an_error(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())

    class Elsewhere(Ranks):
        async def write(self, directory):
            entries = await super().write(directory)
            shutil.rmtree(directory)
            Path(directory).mkdir()
            return entries

    async def train():
        await checkpoints.save(1, Elsewhere(), rest(1), None)
        with pytest.raises(CheckpointError, match="run_dir must be on a shared path"):
            await checkpoints.settle()

    asyncio.run(train())


def test_what_a_killed_write_left_is_swept_and_never_reused(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    leftover = tmp_path / "checkpoints" / "step_000001.abcd.tmp"
    leftover.mkdir(parents=True)
    (leftover / "manifest.json").write_text("{}")
    assert checkpoints.newest() == (None, [])
    save(checkpoints, 1)
    assert [d.name for d in (tmp_path / "checkpoints").glob("step_*")] == ["step_000001"]


def test_finished_trajectories_come_back_slot_by_slot(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=2))
    two = Batch.concat([batch(1, [5, 6]), batch(1, [7, 8, 9])])
    save(checkpoints, 7, batches=[batch(0, [1, 2, 3]), two])
    directory = tmp_path / "checkpoints" / "step_000007"
    first, second = read_batches(directory)
    assert (len(first), len(second)) == (1, 2)
    for restored, original in ((first, batch(0, [1, 2, 3])), (second, two)):
        assert restored.prompt_ids == original.prompt_ids and restored.metadata == original.metadata
        for name in ("tokens", "action_mask", "logprobs", "head_logprobs", "versions", "rewards", "offsets"):
            np.testing.assert_array_equal(getattr(restored, name), getattr(original, name))
    assert json.dumps(read_state(directory)["slots"]) == "[]"


def test_a_checkpoint_of_former_versions_still_gives_its_running_mean(tmp_path):
    """They named the state of that estimator, whatever the run used; the decay was part of it once."""
    state = {"step": 3, "slots": [], "running_mean": {"decay": 0.5, "total": 1.5, "weight": 0.75}}
    write_state(tmp_path, state, [], "steps: 1")
    restored = read_state(tmp_path)["advantage"]
    for name in ("running_mean", "gae", "group", "none"):
        estimator = make_estimator(AlgorithmConfig(advantage=name))
        estimator.load_state_dict(restored)
        assert name != "running_mean" or estimator.mean == 2.0

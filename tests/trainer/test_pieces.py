"""Whole runs whose episodes are cut: every token and reward is trained once, in order and within the bound, whatever fails."""

from collections import defaultdict
from typing import ClassVar

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.kill_points import numbers
from tests.support.local_run import run
from tests.support.talk import Talk
from trainer.run import recovery
from trainer.run.checkpoints import Checkpoints
from trainer.run.controller import Controller
from trainer.settings.sections import CheckpointConfig
from trainer.watch import glossary
from workers.rollout.worker import RolloutWorker

CUT = 4
TALK = ["task.name=tests.support.talk:Talk", "rollout.max_new_tokens=6", f"rollout.segment_tokens={CUT}", "steps=5"]


@pytest.fixture
def trained(monkeypatch):
    """The pieces of every step, as the learner gets them: lists of (policy version, piece) by prompt index."""
    seen = defaultdict(list)
    sample = Controller.sample

    async def spy(self, batch):
        for piece in batch:
            seen[piece.index].append((self.version, piece))
        return await sample(self, batch)

    monkeypatch.setattr(Controller, "sample", spy)
    return seen


def check(trained, max_staleness):
    """Everything that holds for the pieces of every episode; returns how many episodes ended, in more than one piece."""
    ended = 0
    for index, seen in trained.items():
        pieces, before = [piece for _, piece in seen], 0
        assert [piece.piece for piece in pieces] == list(range(len(pieces))), index
        for number, (version, piece) in enumerate(seen):
            actions, mask = int(piece.action_mask.sum()), piece.action_mask
            assert actions == CUT if not piece.last else 1 <= actions <= CUT
            assert piece.actions_before == CUT * number and not mask[:before].any() and (piece.versions[~mask] == -1).all()
            assert 0 <= version - piece.versions[mask].min() <= max_staleness
            if number:
                np.testing.assert_array_equal(piece.tokens[:before], pieces[number - 1].tokens)
            assert piece.reward_before == sum(p.reward for p in pieces[:number])
            before = len(piece)
        if pieces[-1].last:
            turns = 1 + index % 3
            assert sum(piece.reward for piece in pieces) == turns * (turns + 1) / 2
            ended += len(pieces) > 1
        assert all(not piece.last for piece in pieces[:-1])
    return ended


@pytest.mark.slow
@pytest.mark.parametrize(("max_staleness", "on_update"), [(0, "keep"), (2, "keep"), (2, "abort")])
def test_every_token_and_reward_of_an_episode_is_trained_once_and_in_time(tmp_path, trained, max_staleness, on_update):
    rows = run(tmp_path / "a", *TALK, f"max_staleness={max_staleness}", f"rollout.on_update={on_update}")
    assert check(trained, max_staleness) >= 4
    assert sum(len(seen) for seen in trained.values()) == 5 * 8, "batch_size counts pieces"
    assert trained[Talk.FAILS] and not trained[Talk.FAILS][-1][1].last, "what was handed in before the fault stays"
    assert rows[-1]["fault/environment"] == rows[-1]["fault/dropped"] == 1 and rows[-1]["fault/lost_rests"] == 0
    assert {name for row in rows for name in row if glossary.find(name) is None} == set()
    rewards = [piece.reward_before + piece.reward for seen in trained.values() for _, piece in seen if piece.last]
    counted = [row for row in rows[1:] if "reward/max" in row]
    assert max(row["reward/max"] for row in counted) == max(rewards) and min(row["reward/min"] for row in counted) == min(
        rewards
    )
    assert all(0 < row["segments/continued"] < 1 and row["segments/pieces"] >= 1 for row in counted)


@pytest.mark.slow
def test_synchronous_runs_with_pieces_repeat_to_the_bit(tmp_path):
    first, second = (numbers(run(tmp_path / name, *TALK, "max_staleness=0", "steps=3")) for name in "ab")
    assert first == second and first[2]["segments/pieces"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_resumed_run_drops_the_rest_of_cut_episodes_and_trains_nothing_twice(tmp_path, trained, max_staleness):
    options = [*TALK, f"max_staleness={max_staleness}", "checkpoint.every=1"]
    run(tmp_path, *options, "steps=3")
    newest, _ = Checkpoints(tmp_path, CheckpointConfig()).newest()
    lost = recovery.read_state(newest)["lost_rests"]
    rows = run(tmp_path, *options, "steps=7", resume=True)
    assert check(trained, max_staleness) >= 4
    assert lost > 0 and rows[-1]["fault/lost_rests"] == lost and rows[-1]["step"] == 7


class DiesResuming(RolloutWorker):
    """Its engine dies with the first episodes that continue, once."""

    died: ClassVar[list] = []

    async def resume(self, *arguments):
        await super().resume(*arguments)
        if not self.died:
            self.died.append(True)
            await self.engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_lost_worker_takes_the_rest_of_its_episodes_along_and_nothing_is_trained_twice(tmp_path, trained, workers):
    DiesResuming.died.clear()
    rows = run(tmp_path, *TALK, "max_staleness=2", f"rollout.workers={workers}", worker=DiesResuming)
    assert DiesResuming.died and rows[-1]["step"] == 5
    assert rows[-1]["fault/lost_rests"] > 0 and rows[-1]["fault/worker_restarts"] == 1
    check(trained, 2)


@pytest.mark.slow
def test_checkpoints_from_before_there_were_pieces_still_load(tmp_path):
    run(tmp_path, "max_staleness=2", "steps=2")
    newest, _ = Checkpoints(tmp_path, CheckpointConfig()).newest()
    now, path = recovery.read_batches(newest), newest / "buffer.safetensors"
    columns = load_file(str(path))
    former = {name: columns.pop(name) for name in ("piece", "last", "actions_before", "reward_before")}
    save_file(columns, str(path))
    then = recovery.read_batches(newest)
    assert len(then) == len(now) > 0 and all(len(column) == len(now) for column in former.values())
    for batch in then:
        assert batch.last.all() and not batch.piece.any() and not batch.actions_before.any() and not batch.reward_before.any()

"""A run that is killed in the middle of anything, and resumed, ends as if nothing had happened."""

import json
import random
import signal
import sys

import pytest

from tests.support.kill_points import (
    IN_A_CHECKPOINT,
    IN_A_STEP,
    Point,
    check_log,
    check_survivors,
    numbers,
    read_rows,
    train,
    trained,
    waiting,
)
from tests.support.local_run import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # also of a machine that does much else
UNTRAINED = "model.build.warmup_steps=0"


def test_killed_in_a_step_or_a_checkpoint_a_synchronous_run_ends_with_the_same_numbers(tmp_path):
    """To the bit: it dies in the middle of a step, then of a checkpoint (drawn from a seed), then SIGTERM stops it."""
    options = ["max_staleness=0", "checkpoint.every=1", "checkpoint.keep_last=2", "eval.every=2", "steps=5", UNTRAINED]
    whole = numbers(run(tmp_path / "whole", *options))
    rng = random.Random(0)
    points = [Point(*rng.choice(group), nth=rng.randint(2, 3)) for group in (IN_A_STEP, IN_A_CHECKPOINT)]
    codes = [train(tmp_path / "killed", options, point) for point in points]
    codes.append(train(tmp_path / "killed", options, Point("trainer.watch.tracking", "Tracker.log", number=signal.SIGTERM)))
    before = len(read_rows(tmp_path / "killed"))
    codes.append(train(tmp_path / "killed", options))
    assert codes == [-9, -9, 0, 0]
    assert before < len(whole), "SIGTERM ends a run early, in order"
    assert numbers(read_rows(tmp_path / "killed")) == whole
    check_log(tmp_path / "killed", 5)


REWARD = """
def unless_three(response, row):
    return float("nan") if row["number"] == 3 else float(len(response) % 2)
"""


def test_an_asynchronous_run_trains_every_prompt_once_an_epoch_or_drops_it_with_a_reason(tmp_path, monkeypatch):
    """12 prompts, of which one has no reward, in steps of 4, so epochs end within steps; checkpoints fall on both sides."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    rows = [{"prompt": f"{i}+{i}=", "number": i} for i in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"prompt": "1+2=", "number": 0}) + "\n")
    (tmp_path / "parity.py").write_text(REWARD)
    steps, batch = 9, 4
    options = ["task=jsonl", "task.train=prompts.jsonl", "task.eval=held_out.jsonl", "task.reward=parity:unless_three"]
    options += ["task.on_reward_failure=drop", "max_staleness=2", f"steps={steps}", f"batch_size={batch}", "eval.size=1"]
    options += [UNTRAINED, "checkpoint.every=1", "log.rollouts_every=1", f"log.rollouts_count={batch}"]
    rng = random.Random(1)
    survivors, codes = {}, []
    for group in (IN_A_CHECKPOINT, IN_A_STEP):
        codes.append(train(tmp_path / "run", options, Point(*rng.choice(group), nth=rng.randint(3, 5))))
        survivors |= waiting(tmp_path / "run")
    assert codes == [-9, -9] and train(tmp_path / "run", options) == 0
    check_log(tmp_path / "run", steps)

    used = trained(tmp_path / "run")
    assert [row["index"] for row in used] == sorted({row["index"] for row in used}) and len(used) == steps * batch
    for epoch in range(used[-1]["index"] // 12):
        ids = sorted(row["prompt_id"] for row in used if row["index"] // 12 == epoch)
        assert ids == sorted(f"prompts.jsonl:{line + 1}" for line in range(12) if line != 3)
    assert "dropped a rollout: " in (tmp_path / "run" / "logs" / "controller.log").read_text()
    assert min(survivors) <= used[-1]["index"], "rollouts had finished before the kills"
    check_survivors(tmp_path / "run", survivors)

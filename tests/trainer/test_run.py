"""The product as a user starts it: real Ray, real vLLM, real FSDP2 ranks, through the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from wandb_file import wandb_files

pytestmark = pytest.mark.slow
COMMON = ["batch_size=16", "eval.size=16", "eval.every=2", "checkpoint.every=2"]


def rlframe(*arguments, fails=False):
    command = [str(Path(sys.executable).parent / "rlframe"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def vllm_run(tmp_path_factory):
    """Four steps with vLLM, then two more after a resume."""
    run_dir = tmp_path_factory.mktemp("run") / "tiny"
    first = rlframe("train", f"run_dir={run_dir}", "name=tiny", "steps=4", "rollout.probe_every=1", *COMMON)
    before = metrics(run_dir)
    second = rlframe("resume", run_dir, "steps=6")
    return run_dir, before, first, second


def test_a_tiny_run_on_vllm_ray_and_fsdp2(vllm_run):
    run_dir, rows, console, _ = vllm_run
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all("eval/arithmetic/reward" in rows[step] for step in (0, 2, 4))
    assert abs(rows[1]["rollout_corr/kl"]) < 1e-4, "on-policy, sampler and trainer agree"
    assert max(row["off_policy/max"] for row in rows[1:]) <= 2
    assert [row["version"] for row in rows[1:]] == [1, 2, 3, 4]
    lines = [line for line in console.splitlines() if line.startswith("step ")]
    assert len(lines) == 5
    assert (run_dir / "logs" / "rollout_0.log").read_text().strip(), "engine chatter is in logs/"
    assert "vllm" not in console.lower()
    assert list((run_dir / "wandb").glob("offline-run-*"))


def test_resume_goes_on_at_the_next_step_in_the_same_wandb_run(vllm_run):
    run_dir, before, _, console = vllm_run
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert rows[:5] == before
    assert [row["version"] for row in rows[5:]] == [5, 6]
    assert "resumed after step 4" in console
    files = wandb_files(run_dir)
    assert len({file.id for file in files}) == 1
    assert [step for file in files for step in file.steps] == [0, 1, 2, 3, 4, 5, 6]
    assert files[-1].summary["eval/arithmetic/reward"] == rows[-1]["eval/arithmetic/reward"]


def test_a_second_run_in_the_same_directory_is_refused(vllm_run):
    run_dir, *_ = vllm_run
    message = rlframe("train", f"run_dir={run_dir}", "steps=1", fails=True)
    assert "holds a run already" in message and "rlframe resume" in message and "Traceback" not in message


def test_two_ranks_give_the_numbers_of_one(tmp_path):
    options = ["rollout=torch", "max_staleness=0", "steps=2", "log.wandb=disabled", "checkpoint.every=0", *COMMON[:3]]
    for ranks in (1, 2):
        rlframe("train", f"run_dir={tmp_path / str(ranks)}", f"actor.ranks={ranks}", *options)
    one, two = metrics(tmp_path / "1"), metrics(tmp_path / "2")
    assert [row["step"] for row in two] == [0, 1, 2]
    for name in ("reward/mean", "actor/pg_loss", "actor/entropy", "actor/grad_norm", "critic/value_loss", "critic/grad_norm"):
        assert two[1][name] == pytest.approx(one[1][name], rel=1e-4, abs=1e-6), name
    assert two[2]["actor/entropy"] == pytest.approx(one[2]["actor/entropy"], rel=1e-3)

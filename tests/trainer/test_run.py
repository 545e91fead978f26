"""The product as a user starts it: real Ray, real vLLM, real FSDP2 ranks, through the command line."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import alive, descendants, named, wait_for
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


def resume_with_faults(run_dir):
    """Resume a run, kill its engine core, and press Ctrl-C when it has come back; the console, and all processes there were."""
    command = [str(Path(sys.executable).parent / "rlframe"), "resume", str(run_dir), "steps=1000000"]
    with (run_dir / "console").open("w+") as console:
        driver = subprocess.Popen(command, stdout=console, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            wait_for(lambda: metrics(run_dir)[-1]["step"] > 4)
            processes = descendants(driver.pid)
            (core,) = named(processes, "EngineCore")
            os.kill(core, signal.SIGKILL)
            wait_for(lambda: metrics(run_dir)[-1].get("fault/worker_restarts"))
            processes |= descendants(driver.pid)
            os.killpg(driver.pid, signal.SIGINT)
            code = driver.wait(timeout=200)
        finally:
            driver.kill()
        console.seek(0)
        text = console.read()
        assert code == 0, text
    return text, processes


@pytest.fixture(scope="module")
def vllm_run(tmp_path_factory):
    """Four steps with vLLM, then more after a resume, in which the engine dies."""
    run_dir = tmp_path_factory.mktemp("run") / "tiny"
    first = rlframe("train", f"run_dir={run_dir}", "name=tiny", "steps=4", "rollout.probe_every=1", *COMMON)
    before = metrics(run_dir)
    return run_dir, before, first, *resume_with_faults(run_dir)


def test_a_tiny_run_on_vllm_ray_and_fsdp2(vllm_run):
    run_dir, rows, console, *_ = vllm_run
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
    run_dir, before, _, console, _ = vllm_run
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert rows[:5] == before
    assert [row["version"] for row in rows[5:]] == list(range(5, len(rows)))
    assert "resumed after step 4" in console
    files = wandb_files(run_dir)
    assert len({file.id for file in files}) == 1
    assert [step for file in files for step in file.steps] == [row["step"] for row in rows]
    held_out = [row["eval/arithmetic/reward"] for row in rows if "eval/arithmetic/reward" in row]
    assert files[-1].summary["eval/arithmetic/reward"] == held_out[-1]


def test_a_killed_engine_comes_back_under_the_weights_of_the_actor(vllm_run):
    run_dir, *_, console, _ = vllm_run
    rows = metrics(run_dir)
    assert rows[-1]["fault/worker_restarts"] == 1 and rows[-1]["fault/dropped"] == 0
    assert "Rollout worker 0 is lost: The vLLM engine core died" in console and "started again" in console
    assert max(row["off_policy/max"] for row in rows[1:]) <= 2


def test_ctrl_c_saves_and_leaves_no_process_behind(vllm_run):
    run_dir, *_, processes = vllm_run
    assert (run_dir / "checkpoints" / "LATEST").read_text().strip() == f"step_{metrics(run_dir)[-1]['step']:06d}"
    assert len(processes) > 5
    wait_for(lambda: not any(map(alive, processes)))


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

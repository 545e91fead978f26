"""The product as a user starts it: real Ray, real vLLM, real FSDP2 ranks, through the command line."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.local_run import run
from tests.support.processes import PATIENCE_S, alive, descendants, named, wait_for
from tests.support.wandb_file import wandb_files
from trainer.cli import main
from trainer.run import recovery
from trainer.watch import glossary, samples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]  # also of a machine that does much else
SAMPLED = ["log.rollouts_every=2", "log.rollouts_count=4"]
COMMON = ["batch_size=16", "eval.size=16", "eval.every=2", "checkpoint.every=2"]


def rlframe(*arguments, fails=False):
    command = [str(Path(sys.executable).parent / "rlframe"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def metrics(run_dir):
    """Complete lines: a run may be writing the last one."""
    whole = (run_dir / "metrics.jsonl").read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def last(run_dir):
    """The newest line of metrics; nothing before there is one."""
    return (metrics(run_dir) or [{}])[-1] if (run_dir / "metrics.jsonl").exists() else {}


def wait_until(driver, condition):
    """Wait for ``condition``, as long as the driver runs."""
    wait_for(lambda: driver.poll() is not None or condition())
    assert driver.poll() is None, "the driver has ended; its console is in a file beside the run"


def interrupted(run_dir, meanwhile, ctrl_c, *arguments):
    """Run the command line until ``meanwhile(run_dir, driver)`` ends, then press Ctrl-C, or send SIGTERM to the driver alone.

    Returns what the console shows and all processes that there were.
    """
    command = [str(Path(sys.executable).parent / "rlframe"), *arguments]
    with run_dir.with_suffix(".console").open("w+") as console:
        driver = subprocess.Popen(command, stdout=console, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            processes = meanwhile(run_dir, driver) | descendants(driver.pid)
            os.killpg(driver.pid, signal.SIGINT) if ctrl_c else os.kill(driver.pid, signal.SIGTERM)
            code = driver.wait(timeout=PATIENCE_S)
        finally:
            driver.kill()
        console.seek(0)
        text = console.read()
        assert code == 0, text
    return text, processes


def engine_core(driver):
    """The engine process; a child that it forks has its name until it executes something else."""
    cores = named(descendants(driver.pid), "EngineCore")
    return next((pid for pid in cores if not any(pid in descendants(other) for other in cores)), None)


def four_steps(run_dir, driver):
    wait_until(driver, lambda: last(run_dir).get("step", 0) >= 4)
    return set()


def two_faults(run_dir, driver):
    """Kill the engine core of a resumed run, then stop the one that replaced it, which hangs; wait until it trains again.

    Returns the processes that there were before each.
    """
    processes, begun = set(), last(run_dir)["step"]
    wait_until(driver, lambda: last(run_dir)["step"] > begun)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        processes |= descendants(driver.pid)
        core = wait_for(lambda: engine_core(driver))
        before = last(run_dir)["fault/worker_restarts"]
        os.kill(core, number)
        wait_until(driver, lambda before=before: last(run_dir)["fault/worker_restarts"] > before)
        step = last(run_dir)["step"] + 4  # more than the buffer holds: these rollouts are of the new engine
        wait_until(driver, lambda step=step: last(run_dir)["step"] >= step)
    return processes


@pytest.fixture(scope="module")
def vllm_run(tmp_path_factory):
    """Steps with vLLM, until SIGTERM; more after a resume, in which an engine dies and another hangs, until Ctrl-C."""
    run_dir = tmp_path_factory.mktemp("run") / "tiny"
    options = [f"run_dir={run_dir}", "name=tiny", "steps=1000000", "rollout.probe_every=1", *SAMPLED, *COMMON]
    first = interrupted(run_dir, four_steps, False, "train", *options)
    before = metrics(run_dir)
    limits = ["rollout.timeout_s=15", "rollout.max_restarts=50"]
    return run_dir, before, first, interrupted(run_dir, two_faults, True, "resume", str(run_dir), *limits)


def test_a_tiny_run_on_vllm_ray_and_fsdp2(vllm_run):
    run_dir, rows, (console, _), _ = vllm_run
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert all("eval/arithmetic/reward" in rows[step] for step in (0, 2, 4))
    assert abs(rows[1]["rollout_corr/kl"]) < 1e-4, "on-policy, sampler and trainer agree"
    assert max(row["off_policy/max"] for row in rows[1:]) <= 2
    assert [row["version"] for row in rows[1:]] == list(range(1, len(rows)))
    lines = [line for line in console.splitlines() if line.startswith("step ")]
    assert len(lines) == len(rows)
    assert (run_dir / "logs" / "rollout_0.log").read_text().strip(), "engine chatter is in logs/"
    assert "vllm" not in console.lower()
    assert list((run_dir / "wandb").glob("offline-run-*"))


def test_resume_continues_at_the_next_step_in_the_same_wandb_run(vllm_run):
    run_dir, before, _, (console, _) = vllm_run
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert rows[: len(before)] == before
    assert [row["version"] for row in rows[1:]] == list(range(1, len(rows)))
    assert f"resumed after step {before[-1]['step']}" in console
    files = wandb_files(run_dir)
    assert len({file.id for file in files}) == 1
    assert [step for file in files for step in file.steps] == [row["step"] for row in rows]
    held_out = [row["eval/arithmetic/reward"] for row in rows if "eval/arithmetic/reward" in row]
    assert files[-1].summary["eval/arithmetic/reward"] == held_out[-1]


def test_a_killed_engine_and_one_that_hangs_come_back_under_the_weights_of_the_actor(vllm_run):
    """An engine that hangs is found by the time limit of a call. Each prompt is trained on once, dropped, or still held."""
    run_dir, *_, (console, _) = vllm_run
    rows = metrics(run_dir)
    assert rows[-1]["fault/worker_restarts"] >= 2
    assert rows[-1]["fault/dropped"] == rows[-1]["fault/timeouts"], "none but of episodes that were slow on a living engine"
    assert "Rollout worker 0 is lost: The vLLM engine core died" in console and "started again" in console
    assert re.search(r"Rollout worker 0 is lost: .*(did not answer|took longer than|did not say)", console), console
    state = recovery.read_state(run_dir / "checkpoints" / f"step_{rows[-1]['step']:06d}")
    held = len(state["slots"]) + len(state["returned"])
    assert state["position"] == 16 * rows[-1]["step"] + held + state["dropped"]
    assert max(row["off_policy/max"] for row in rows[1:]) <= 2


def test_sigterm_and_ctrl_c_save_and_leave_no_process_behind(vllm_run):
    """Of the engine that was stopped neither. That SIGTERM saved is seen by the resume, which continues at the next step."""
    run_dir, _, (_, first), (_, second) = vllm_run
    assert (run_dir / "checkpoints" / "LATEST").read_text().strip() == f"step_{metrics(run_dir)[-1]['step']:06d}"
    assert len(first) > 5 and len(second) > len(first)
    wait_for(lambda: not any(map(alive, first | second)))


def test_what_the_run_left_can_be_shown(vllm_run, tmp_path, capsys):
    run_dir, *_ = vllm_run
    assert [name for row in metrics(run_dir) for name in row if glossary.find(name) is None] == []
    first = samples.read(samples.sampled_steps(run_dir)[2])
    ratios = [x for row in first for x in row["tokens"]["ratio"] if x is not None]
    assert len(first) == 4 and len(ratios) >= 4 and all(0.5 < x < 2 for x in ratios), "one version late at most"
    assert main.main(["rollouts", str(run_dir), "--step", "2"]) == 0
    assert "advantage" in capsys.readouterr().out
    assert main.main(["report", str(run_dir), "-o", str(tmp_path / "page.html")]) == 0
    assert "critic/explained_variance" in (tmp_path / "page.html").read_text()


def test_a_second_run_in_the_same_directory_is_refused(vllm_run):
    run_dir, *_ = vllm_run
    message = rlframe("train", f"run_dir={run_dir}", "steps=1", fails=True)
    assert "holds a run already" in message and "rlframe resume" in message and "Traceback" not in message


REWARD = """
import pathlib, time
def parity(response, row):
    logged, killed = pathlib.Path({run!r}, "metrics.jsonl"), pathlib.Path({run!r} + "-killed")
    while logged.exists() and logged.read_text().count(chr(10)) > 1 and not killed.exists():
        time.sleep(0.01)  # the last step at the latest waits for the kill
    return float(len(response) % 2)
"""


def test_two_ranks_of_which_one_dies_give_the_numbers_of_one(tmp_path, monkeypatch):
    """The driver notices, starts again from the last checkpoint, and ends with what one undisturbed rank computes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    run_dir, killed = tmp_path / "two", tmp_path / "two-killed"
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{a}+{a}="}) + "\n" for a in range(40)))
    (tmp_path / "waiting_reward.py").write_text(REWARD.format(run=str(run_dir)))
    options = ["rollout=torch", "max_staleness=0", "steps=3", "log.wandb=disabled", "checkpoint.every=1", *COMMON[:2]]
    options += ["eval.every=0", "task=jsonl", "task.train=prompts.jsonl", "task.reward=waiting_reward:parity"]
    options += ["task.reward_timeout_s=280", "model.build.warmup_steps=0"]
    command = [str(Path(sys.executable).parent / "rlframe"), "train", f"run_dir={run_dir}", "actor.ranks=2", *options]
    with (tmp_path / "console").open("w+") as console:
        driver = subprocess.Popen(command, stdout=console, stderr=subprocess.STDOUT)
        try:
            wait_until(driver, (run_dir / "checkpoints" / "LATEST").exists)
            os.kill(min(named(descendants(driver.pid), "ray::LearnerRank")), signal.SIGKILL)
            killed.touch()
            code = driver.wait(timeout=PATIENCE_S)
        finally:
            driver.kill()
        console.seek(0)
        text = console.read()
        assert code == 0, text
    assert re.search(r"Learner rank \d died\. Starting again from step_00000[12]; attempts left: 2\.", text), text
    one, two = run(tmp_path / "one", *options), metrics(run_dir)
    assert [row["step"] for row in two] == [0, 1, 2, 3]
    assert (two[1]["fault/learner_restarts"], two[3]["fault/learner_restarts"]) == (0, 1)
    for name in ("reward/mean", "actor/pg_loss", "actor/entropy", "actor/grad_norm", "critic/value_loss", "critic/grad_norm"):
        for step in (1, 2):
            assert two[step][name] == pytest.approx(one[step][name], rel=1e-3, abs=1e-6), (name, step)
    assert two[3]["actor/entropy"] == pytest.approx(one[3]["actor/entropy"], rel=1e-3)

"""wandb, for real and offline: what two attempts of one run leave for ``wandb sync``, read back from their files."""

import contextlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import wandb

from rlframe.config import ConfigError
from rlframe.types import Batch, Trajectory
from tests.support.wandb_file import wandb_files
from trainer.run.job import train
from trainer.settings.compose import compose
from trainer.settings.redact import redact_text, without_secrets
from trainer.watch import wandb_log
from trainer.watch.samples import Sample
from trainer.watch.tracking import Tracker
from trainer.watch.wandb_log import id_file, wandb_mode

SECRET = "hf_" + "a1B2" * 8


class Letters:
    """A tokenizer of single letters."""

    def decode(self, ids):
        return "".join(chr(96 + int(i)) for i in ids)


def sample() -> Sample:
    trajectory = Trajectory(
        tokens=[1, 2, 3, 4],
        action_mask=[False, False, True, True],
        logprobs=[0, 0, -1.0, -2.0],
        head_ids=np.zeros((4, 0)),
        head_logprobs=np.zeros((4, 0)),
        versions=[-1, -1, 4, 5],
        rewards=[0, 0, 0, 0.5],
        finish="stop",
        prompt_id="p7",
    )
    batch = Batch.from_trajectories([trajectory])
    batch.advantages, batch.values = np.array([0, 0, 0.5, 0.25], np.float32), np.array([0, 0, 0.0, 0.5], np.float32)
    return Sample(batch, logprobs=np.array([0, 0, -1.0, -2.0 + np.log(2)], np.float32), entropy=np.zeros(4, np.float32))


def attempt(config, run_dir, resumed_from, steps, fails=False):
    tracker = Tracker(config, run_dir, Letters(), resumed_from)
    with contextlib.suppress(RuntimeError):
        try:
            for step in steps:
                metrics = {"reward/mean": step / 10, "actor/grad_norm": float("nan") if step == 2 else 1.0}
                if step % 2 == 0:
                    metrics["eval/arithmetic/reward"] = [0.1, 0, 0.9, 0, 0.4, 0, 0.6][step]
                tracker.log(step, metrics, sample() if step == 3 else None)
            if fails:
                raise RuntimeError
        finally:
            tracker.close()
    return tracker.wandb_id


@pytest.fixture(scope="module")
def attempts(tmp_path_factory):
    """Crashes after step 1, before any checkpoint, and after step 4; then, from the checkpoint of step 2, steps 3 to 6."""
    run_dir = tmp_path_factory.mktemp("wandb") / "run"
    for folder in ("logs", "rollouts"):
        (run_dir / folder).mkdir(parents=True)
    config = compose(["log.wandb=offline", "log.console=false", "name=twice", f"run_dir={run_dir}", "steps=6"])
    config.rollout.engine_args = {"hf_token": SECRET, "seed_of_kv": 3}
    argv, sys.argv = sys.argv, ["rlframe", "train", f"rollout.engine_args.hf_token={SECRET}"]
    try:
        ids = [attempt(config, run_dir, -1, range(stop), fails=True) for stop in (2, 5)]
        ids.append(attempt(config, run_dir, 2, range(3, 7)))
    finally:
        sys.argv = argv
    wandb.teardown()  # waits for wandb's own process, which writes the files
    assert len(set(ids)) == 1
    return run_dir, ids[0], wandb_files(run_dir)


@pytest.mark.slow
def test_all_attempts_are_one_run_and_its_steps_only_grow(attempts):
    run_dir, run_id, files = attempts
    assert [file.id for file in files] == [run_id] * 3
    assert [step for file in files for step in file.steps] == [0, 1, 2, 3, 4, 5, 6]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6], "the file has each step once, too"
    sent = {row["_step"]: row for file in files for row in file.rows}
    assert [sent[row["step"]]["reward/mean"] for row in rows] == [row["reward/mean"] for row in rows]


@pytest.mark.slow
def test_the_configuration_is_there_and_no_secret_is(attempts):
    _, _, files = attempts
    for file in files:
        assert file.config["name"] == "twice" and file.config["actor"]["optim"]["betas"] == [0.9, 0.95]
        assert file.config["rollout"]["engine_args"] == {"hf_token": "***", "seed_of_kv": 3}
        assert SECRET.encode() not in file.text and not file.arguments


@pytest.mark.slow
def test_sampled_rollouts_are_a_table(attempts):
    run_dir, _, files = attempts
    entry = [row for file in files for row in file.rows][3]["rollouts"]
    assert entry["_type"] == "table-file" and (entry["nrows"], entry["ncols"]) == (1, 11)
    (file,) = (run_dir / "wandb").glob(f"offline-run-*/files/{entry['path']}")
    shown = json.loads(file.read_text())
    row = dict(zip(shown["columns"], shown["data"][0], strict=True))
    assert (row["step"], row["prompt id"], row["prompt"], row["response"]) == (3, "p7", "ab", "cd")
    assert (row["reward"], row["oldest version"], row["advantage"], row["value"]) == (0.5, 4, 0.375, 0.25)
    assert row["ratio"] == pytest.approx(1.5, rel=1e-5), "ratios 1 and 2"


@pytest.mark.slow
def test_the_summary_has_the_last_and_the_best_evaluation_of_all_attempts(attempts):
    _, _, files = attempts
    assert [file.exit_code for file in files] == [1, 1, 0]
    assert files[-1].summary["eval/arithmetic/reward"] == 0.6
    assert files[-1].summary["eval/arithmetic/reward/best"] == 0.9
    assert files[-1].summary["steps"] == 6


def test_a_run_that_failed_before_its_first_checkpoint_leaves_its_place_to_another_one(tmp_path):
    """`rlframe train` may be called again, then, and its steps are not added to those of the run that failed."""
    id_file(tmp_path).parent.mkdir()
    id_file(tmp_path).write_text("a1b2c3d4")
    config = compose([f"run_dir={tmp_path}", "cluster.address=127.0.0.1:1", "rollout=torch"])
    with pytest.raises(ConfigError, match="No Ray cluster answers"):
        train(config)
    assert not id_file(tmp_path).exists() and not (tmp_path / "config.yaml").exists()


def test_what_looks_like_a_secret_is_hidden_and_nothing_else():
    tree = {
        "api_key": "abc",
        "options": {"judge-api-key": "x", "Authorization": "Bearer y", "password": None, "prompt_key": "question"},
        "urls": ["https://me:pw@host/path", "https://host/path"],
        "max_new_tokens": 64,
        "eos_token": "</s>",
        "tokenizer": "byte",
        "note": f"uses {SECRET}",
    }
    hidden = without_secrets(tree)
    assert hidden["api_key"] == hidden["options"]["judge-api-key"] == hidden["options"]["Authorization"] == "***"
    assert hidden["urls"] == ["https://***@host/path", "https://host/path"]
    assert hidden["note"] == "uses ***"
    assert (hidden["max_new_tokens"], hidden["eos_token"], hidden["tokenizer"]) == (64, "</s>", "byte")
    assert (hidden["options"]["password"], hidden["options"]["prompt_key"]) == (None, "question")
    assert redact_text("task.options={api_key: abc, low: 1}") == "task.options={api_key: ***, low: 1}"
    for plain in ("steps=20", "rollout.max_new_tokens=64", "task.reward=mod:fn", "rollout.temperature=0.5_5"):
        assert redact_text(plain) == plain


@pytest.mark.parametrize(
    ("setting", "environment", "key", "mode"),
    [
        ("auto", {}, True, "online"),
        ("auto", {}, False, "offline"),
        ("auto", {"WANDB_MODE": "offline"}, True, "offline"),
        ("auto", {"WANDB_MODE": "dryrun"}, True, "offline"),
        ("auto", {"WANDB_MODE": "disabled"}, True, "disabled"),
        ("auto", {"WANDB_MODE": "online"}, False, "online"),
        ("auto", {"WANDB_MODE": ""}, True, "online"),
        ("online", {"WANDB_MODE": "offline"}, True, "online"),
        ("disabled", {"WANDB_MODE": "online"}, True, "disabled"),
    ],
)
def test_the_environment_decides_where_no_setting_does(setting, environment, key, mode, monkeypatch):
    monkeypatch.setattr(wandb_log, "_has_key", lambda: key)
    assert wandb_mode(setting, environment) == mode


def test_a_mode_that_wandb_does_not_know_is_one_sentence():
    with pytest.raises(ConfigError, match=r"^WANDB_MODE=ofline is not known; choose one of online, offline, disabled\.$"):
        wandb_mode("auto", {"WANDB_MODE": "ofline"})


UNREACHABLE = """
import sys
from pathlib import Path
from trainer.watch import wandb_log
from trainer.watch import wandb_log
from trainer.settings.compose import compose
from trainer.watch.tracking import Tracker
wandb_log.CONNECT_S = 3.0
run_dir = Path(sys.argv[1])
for folder in ("logs", "rollouts"):
    (run_dir / folder).mkdir(parents=True, exist_ok=True)
tracker = Tracker(compose([f"run_dir={run_dir}", "steps=1"]), run_dir, None)
for step in range(2):
    tracker.log(step, {"reward/mean": step / 10})
tracker.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "sentence"),
    [({}, True), ({"WANDB_MODE": "offline"}, False), ({"WANDB_MODE": "disabled"}, False)],
    ids=["no server", "offline", "disabled"],
)
def test_without_a_server_a_run_with_a_key_is_kept_offline(tmp_path, variables, sentence):
    unset = [name for name in os.environ if name.startswith("WANDB_")]
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"WANDB_API_KEY": "0123456789" * 4, "WANDB_BASE_URL": "http://127.0.0.1:9", **variables}
    done = subprocess.run(
        [sys.executable, "-c", UNREACHABLE, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [
        line for line in (done.stdout + done.stderr).splitlines() if not line.startswith(("step ", "wandb: [wandb.login()]"))
    ]
    assert len(said) == sentence and all(line.startswith("wandb cannot be reached (") for line in said), said
    files = wandb_files(tmp_path) if variables.get("WANDB_MODE") != "disabled" else []
    assert [file.steps for file in files] == ([[0, 1]] if variables.get("WANDB_MODE") != "disabled" else [])
    assert not variables or not list((tmp_path / "wandb").glob("run-*"))

"""A user's own prompts and rewards through whole runs: learning data, a reward that fails, and a prompt that is too long."""

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rlframe.config import ConfigError
from rlframe.models import resolve_model
from tests.support.local_run import run
from trainer.cli.dry_run import report
from trainer.run import recovery
from trainer.run.job import read_inputs
from trainer.settings.compose import compose

UNTRAINED = "model.build.warmup_steps=0"
REWARD = """
def right(response, row):
    return float(response == row["answer"])
def fails_in_training(response, row):
    return float("nan") if row["answer"] in open("trained.txt").read().split() else 0.0
def hangs_or_crashes(response, row):
    import os, time
    if row["answer"] in open("trained.txt").read().split():
        os._exit(1) if int(row["answer"]) % 4 else time.sleep(3600)
    return 0.0
"""


ENVIRONMENT = """
from workers.environments.arithmetic import Arithmetic
class Sums(Arithmetic):
    name = "my/sums: v2"
"""


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    """A current directory with data and a module in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    rows = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(30)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own_reward.py").write_text(REWARD)
    (tmp_path / "own_environment.py").write_text(ENVIRONMENT)
    return tmp_path


def task(function="right"):
    return ["task=jsonl", "task.train=prompts.jsonl", f"task.reward=own_reward:{function}", UNTRAINED]


@pytest.mark.slow
def test_a_run_on_a_prompt_file(user_folder):
    rows = run(user_folder / "run", *task(), "steps=2")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "eval/jsonl/reward" in rows[0] and "reward/jsonl/mean" in rows[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "turns"),
    [("countdown", ["task.options.problems=20"]), ("wordle", ["task.options.guesses=2", "rollout.max_model_len=96"])],
)
def test_a_run_on_a_task_of_one_or_several_turns(user_folder, name, turns):
    rows = run(user_folder / "run", f"task={name}", *turns, UNTRAINED, "steps=1", "rollout.max_new_tokens=12")
    assert f"eval/{name}/reward" in rows[0] and f"reward/{name}/mean" in rows[1]
    assert rows[1]["response_length/max"] <= 12 * (2 if name == "wordle" else 1) and math.isfinite(rows[1]["critic/value_loss"])


@pytest.mark.slow
def test_an_environment_of_ones_own_trains_a_critic_and_resumes(user_folder):
    """Its name is the environment's, which is not what ``task.name`` says, and no name of a file."""
    options = ["task.name=own_environment:Sums", UNTRAINED, "steps=1"]
    rows = run(user_folder / "run", *options)
    assert math.isfinite(rows[1]["critic/value_loss"]), "without a critic's update there is none"
    assert [row["step"] for row in run(user_folder / "run", *options, "steps=2", resume=True)] == [0, 1, 2]


@pytest.mark.slow
def test_failing_rewards_are_dropped_or_zero_as_asked(user_folder):
    (user_folder / "trained.txt").write_text(" ".join(str(2 * a) for a in range(10)))
    options = [*task("fails_in_training"), "steps=2", "batch_size=4"]
    rows = run(user_folder / "dropped", *options, "task.on_reward_failure=drop")
    assert rows[-1]["fault/dropped"] > 0 and rows[-1]["step"] == 2
    rows = run(user_folder / "zero", *options, "task.on_reward_failure=zero")
    assert rows[-1]["fault/dropped"] == 0 and rows[-1]["step"] == 2


@pytest.mark.slow
def test_a_reward_that_hangs_or_crashes_never_stops_the_run(user_folder):
    (user_folder / "trained.txt").write_text("4 6 12 14")
    options = [*task("hangs_or_crashes"), "steps=7", "batch_size=4", "task.reward_timeout_s=0.5", "rollout.max_new_tokens=1"]
    rows = run(user_folder / "run", *options, "task.on_reward_failure=drop", "eval.size=2")
    assert rows[-1]["step"] == 7 and rows[-1]["fault/dropped"] > 0


@pytest.mark.slow
def test_a_reward_that_fails_ends_the_run_with_one_line(user_folder):
    """Through the command line, so that Ray's workers must find a module of the current directory, and exit code 1 comes."""
    config = compose([*task("fails_in_training"), "eval.size=8"])
    trained = [problem.payload["row"]["answer"] for problem in read_inputs(config).stream.problems]
    (user_folder / "trained.txt").write_text(" ".join(trained))
    small = ["rollout=torch", "steps=2", "batch_size=8", "eval.size=8", "log.wandb=disabled"]
    ended = subprocess.run(
        [str(Path(sys.executable).parent / "rlframe"), "train", *task("fails_in_training"), *small],
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("rlframe: task.reward=own_reward:fails_in_training failed on line ") and "of prompts.jsonl" in last
    assert "returned nan" in last and "Traceback" not in ended.stdout + ended.stderr
    assert "step 0/2" in ended.stdout, "the held-out prompts were rewarded"


def former(problems):
    """What checkpoints held before they compared rows."""
    digest = hashlib.sha256()
    for p in problems:
        digest.update(f"{p.id}:{len(p.tokens)}:".encode() + p.tokens.tobytes())
    return digest.hexdigest()[:16]


def test_a_checkpoint_from_before_rows_were_compared_resumes_with_the_problems_that_it_had(user_folder):
    """It held out the prompts whose tokens have the smallest digests."""
    job = compose([*task(), "eval.size=8"])
    (user_folder / "all.jsonl").write_text('{"prompt": "x", "answer": "y"}\n')
    everything = read_inputs(compose([*task(), "task.eval=all.jsonl"])).stream.problems
    order = sorted(everything, key=lambda p: hashlib.blake2b(p.tokens.tobytes(), digest_size=16).digest())
    held_out = [p.id for p in order[:8]]
    trained = [p for p in everything if p.id not in held_out]
    folder = user_folder / "step_000003"
    folder.mkdir()
    (folder / "trainer.json").write_text(json.dumps({"prompts": former(trained)}))
    assert recovery.held_out_by_tokens(folder)
    inputs = read_inputs(job, held_out_by_tokens=True)
    recovery.check_prompts(folder, inputs.stream)
    assert [p.id for p in inputs.eval_prompts] == held_out and [p.id for p in inputs.stream.problems] == [p.id for p in trained]
    (folder / "trainer.json").write_text(json.dumps({"prompts": inputs.stream.fingerprint}))
    assert recovery.held_out_by_tokens(folder), "the checkpoints that it writes now"
    recovery.check_prompts(folder, inputs.stream)
    (folder / "trainer.json").write_text(json.dumps({"prompts": former(everything)}))
    with pytest.raises(ConfigError, match=r"have other names or tokens .*step_000003.*start another run from an export"):
        recovery.check_prompts(folder, inputs.stream)


def test_a_file_may_move_but_not_change(user_folder):
    folder = user_folder / "step_000003"
    folder.mkdir()
    (folder / "trainer.json").write_text(
        json.dumps({"prompts": read_inputs(compose([*task(), "eval.size=8"])).stream.fingerprint})
    )
    assert not recovery.held_out_by_tokens(folder)
    lines = (user_folder / "prompts.jsonl").read_text().splitlines(keepends=True)
    moved = [*task(), "eval.size=8", "task.train=moved.jsonl"]
    for text, sentence in (
        ("".join(lines), None),
        ("\n".join(lines), None),
        ("".join(lines[::-1]), "are the same in another order"),
        ("".join(lines[:-1]), "are 21 and were 22"),
    ):
        (user_folder / "moved.jsonl").write_text(text)
        stream = read_inputs(compose(moved)).stream
        if sentence is None:
            recovery.check_prompts(folder, stream)
        else:
            with pytest.raises(ConfigError, match=f"The training prompts {sentence}.* step_000003 was written with"):
                recovery.check_prompts(folder, stream)


def test_a_dry_run_says_what_is_held_out(user_folder):
    (user_folder / "held_out.jsonl").write_text("".join(f'{{"prompt": "{a}", "answer": ""}}\n' for a in range(300)))
    small = ["rollout=torch", *task()]
    said = report(compose([*small, "eval.size=8"]))
    assert "8 held-out problems, 22 to train on\n" in said and "\nEvaluations use 8 of the 30 rows of task.train=" in said
    assert "300 held-out problems, 30 to train on\n" in report(compose([*small, "task.eval=held_out.jsonl"]))
    said = report(compose([*small, "task.eval=held_out.jsonl", "eval.size=256"]))
    assert "Evaluations use 256 of the 300 rows of task.eval=held_out.jsonl (eval.size=256): a random sample" in said


def test_a_prompt_longer_than_the_context_is_refused(user_folder):
    (user_folder / "prompts.jsonl").open("a").write(json.dumps({"prompt": "1" * 64, "answer": "1"}) + "\n")
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:31 has 64 tokens.*rollout\.max_model_len=64"):
        read_inputs(compose([*task(), "eval.size=8"]))


FOREIGN = """
import numpy as np
from workers.environments.arithmetic import Arithmetic
from workers.environments.base import Problem

class Foreign(Arithmetic):
    def __init__(self, task, tokenizer, **kwargs):
        self.tokens = task.options.pop("tokens")
        super().__init__(task, tokenizer, **kwargs)
    def train_prompts(self):
        return [Problem("mine", np.array(self.tokens))]
"""


@pytest.fixture
def larger_tokenizer(user_folder):
    """The tiny model with a tokenizer that has one token more than its embedding has rows; returns folder and token."""
    folder = user_folder / "model"
    shutil.copytree(resolve_model(compose([UNTRAINED]).model), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer.add_tokens([f"<|new_{i}|>" for i in range(size - len(tokenizer) + 1)])
    tokenizer.save_pretrained(folder)
    return folder, tokenizer.convert_ids_to_tokens(size), size


@pytest.mark.parametrize("held_out", [False, True])
def test_a_prompt_with_a_token_that_the_model_does_not_have_is_refused_and_named(user_folder, larger_tokenizer, held_out):
    folder, token, size = larger_tokenizer
    here = "held_out.jsonl" if held_out else "prompts.jsonl"
    (user_folder / "held_out.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    settings = ["task=jsonl", "task.train=prompts.jsonl", "task.reward=own_reward:right", "task.eval=held_out.jsonl"]
    settings += ["model=local", f"model.path={folder}", "rollout=torch", "rollout.max_model_len=64", "rollout.max_new_tokens=8"]
    config = compose([*settings, "eval.size=8"])
    read_inputs(config)
    (user_folder / here).open("a").write(json.dumps({"prompt": f"1{token}", "answer": "1"}) + "\n")
    line = 2 if held_out else 31
    with pytest.raises(ConfigError) as caught:
        report(config)
    assert str(caught.value).startswith(f"line {line} of {here} has the token {size} (the tokenizer's {token!r}), but ")
    assert f"vocabulary has {size} entries" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "named"),
    [("[1,9999]", "the token 9999"), ("[1,-1]", "the token -1"), ("[1.5]", "float64 values"), ("[]", "no tokens")],
)
def test_prompts_of_an_environment_of_ones_own_are_looked_at_alike(user_folder, tokens, named):
    (user_folder / "foreign.py").write_text(FOREIGN)
    with pytest.raises(ConfigError, match=f"The prompt mine has {named}"):
        read_inputs(compose([UNTRAINED, "task.name=foreign:Foreign", f"task.options={{tokens: {tokens}}}"]))


def test_an_end_of_sequence_that_the_model_cannot_write_is_refused(user_folder, larger_tokenizer):
    folder, token, size = larger_tokenizer
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = token
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    model = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(model | {"eos_token_id": None}))
    with pytest.raises(ConfigError, match=rf"The stop token {size} .* beyond the model's vocabulary of {size}"):
        read_inputs(
            compose(
                [
                    "task=countdown",
                    "task.options.problems=9",
                    "model=local",
                    f"model.path={folder}",
                    "rollout.max_model_len=256",
                    "rollout=torch",
                    "eval.size=8",
                ]
            )
        )

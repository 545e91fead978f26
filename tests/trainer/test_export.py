"""After a run: its policy in plain transformers and PEFT, and what `rlframe resume` says before it starts anything."""

import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from rlframe.config import ConfigError
from rlframe.models import resolve_model
from tests.support.local_run import run
from trainer.cli import main
from trainer.cli.export import export
from trainer.run import job as job
from trainer.run.failures import CheckpointError
from trainer.settings.compose import compose, to_yaml

pytestmark = pytest.mark.slow
STEPS, TEMPERATURE = 3, 0.8
OPTIONS = [f"steps={STEPS}", f"rollout.temperature={TEMPERATURE}", "checkpoint.every=1", "log.rollouts_every=1"]


@pytest.fixture(scope="module", params=["lora", "full"])
def finished(request, tmp_path_factory):
    """A run that moved its policy a lot, with a critic beside it; and its base model."""
    run_dir = tmp_path_factory.mktemp("run") / request.param
    options = [f"actor={request.param}", f"critic={request.param}", "actor.optim.lr=1e-2", "critic.optim.lr=1e-2", *OPTIONS]
    run(run_dir, *options)
    config = compose([f"run_dir={run_dir}", "batch_size=8", "eval.size=8", "rollout=torch", *options])
    (run_dir / "config.yaml").write_text(to_yaml(config))
    return request.param, run_dir, resolve_model(config.model)


def largest_difference(model, run_dir, step):
    """Between the log-probabilities of ``model`` and those that the learner had after ``step`` on what it trained on next."""
    worst = 0.0
    rows = [json.loads(line) for line in (run_dir / "rollouts" / f"step_{step + 1:06d}.jsonl").read_text().splitlines()]
    for row in rows:
        ids = torch.tensor([row["tokens"]["id"]])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0].double() / TEMPERATURE, -1)
        for t, theirs in enumerate(row["tokens"]["trainer_logprob"]):
            if theirs is not None:
                worst = max(worst, abs(float(logprobs[t - 1, ids[0, t]]) - theirs))
    return worst


def tensor_names(folder):
    names = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names += list(file.keys())
    return names


def test_a_merged_folder_is_the_trained_policy_in_plain_transformers(finished):
    _, run_dir, base = finished
    folder = export(str(run_dir), step=2, merged=True)
    assert folder == run_dir / "export" / "step_000002-merged"
    untrained = AutoModelForCausalLM.from_pretrained(base)
    assert largest_difference(AutoModelForCausalLM.from_pretrained(folder), run_dir, 2) < 1e-4
    assert largest_difference(untrained, run_dir, 2) > 1e-2, "the policy has moved"
    assert set(tensor_names(folder)) <= set(untrained.state_dict()), "no value head, no adapter"
    assert (folder / "tokenizer_config.json").exists()


def test_an_adapter_folder_is_the_trained_policy_in_plain_peft(finished):
    mode, run_dir, base = finished
    folder = export(str(run_dir), step=2, output=str(run_dir / "adapter"))
    if mode == "full":
        assert not (folder / "adapter_config.json").exists(), "a policy without adapter is written whole"
        return
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    assert largest_difference(model, run_dir, 2) < 1e-4
    names = tensor_names(folder)
    assert names and all(".lora_A." in name or ".lora_B." in name for name in names)


def test_what_cannot_be_exported_is_one_sentence(finished, tmp_path, capsys):
    _, run_dir, _ = finished
    assert main.main(["export", str(run_dir), "--step", "9"]) == 1
    assert capsys.readouterr().err.startswith(f"rlframe: There is no checkpoint of step 9 in {run_dir}")
    with pytest.raises(ConfigError, match="is not a run directory"):
        export(str(tmp_path))
    with pytest.raises(ConfigError, match="exists already"):
        export(str(run_dir), output=str(tmp_path))


def test_resume_says_what_is_wrong_before_it_starts_anything(finished, monkeypatch, capsys):
    _, run_dir, _ = finished
    monkeypatch.setattr(job, "attempt", lambda *arguments: pytest.fail("started"))
    job.resume(str(run_dir), ["eval.every=1"])
    said = capsys.readouterr().out
    assert "changed since step_000003: eval.every: 0 -> 1" in said and f"has done all its steps={STEPS}" in said
    with pytest.raises(ConfigError, match="seed was 0"):
        job.resume(str(run_dir), ["seed=1", "steps=9"])
    with job.occupied(run_dir), pytest.raises(ConfigError, match="Another process is training"):
        job.resume(str(run_dir), ["steps=9"])
    manifest = run_dir / "checkpoints" / "step_000003" / "manifest.json"
    manifest.unlink()
    job.resume(str(run_dir), ["steps=2"])
    assert "step_000003 was skipped: it has no manifest." in capsys.readouterr().out
    for directory in (run_dir / "checkpoints").glob("step_*"):
        (directory / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="Nothing to resume from"):
        job.resume(str(run_dir), ["steps=9"])


def test_other_prompts_than_those_of_the_checkpoint_are_refused():
    from trainer.run.prompts import PromptStream
    from workers.environments.base import Problem

    problems = [Problem(str(i), np.arange(i + 1, dtype=np.int32)) for i in range(3)]
    stream = PromptStream(problems, "env", 0)
    assert stream.fingerprint == PromptStream(list(problems), "env", 7).fingerprint
    for other in (problems[:2], problems[::-1], [*problems[:2], Problem("2", np.arange(4, dtype=np.int32))]):
        assert PromptStream(other, "env", 0).fingerprint != stream.fingerprint

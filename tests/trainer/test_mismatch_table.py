"""examples/mismatch_table: which arms there are, what is read of a run, and ways of computing that must agree in float64."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import yaml
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.mismatch_table import run, where
from rlframe.types import Batch
from trainer.settings.compose import compose

STUDY = yaml.safe_load((run.FOLDER / "study.yaml").read_text())


def test_every_arm_is_a_job_of_its_own(tmp_path):
    run.write_prompts(tmp_path / "prompts.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert all(isinstance(row["prompt"], str) and row["word"] in row["prompt"] for row in rows)
    arms = run.arms_of(STUDY)
    assert len({tuple(overrides) for overrides in arms.values()}) == len(arms) > 12
    job = compose([*STUDY["common"], f"task.train={tmp_path / 'prompts.jsonl'}", *arms["vllm", "bf16", "full", "raw"]])
    assert job.max_staleness == 0, "else the rollout may come from older weights"
    assert job.actor.mode == "full" and not job.task.chat_template
    assert job.model.dtype == job.rollout.dtype == "bfloat16"


def test_the_first_and_the_last_step_of_a_complete_run_are_measured(tmp_path):
    (tmp_path / "config.yaml").write_text("steps: 2\n")
    rows = [{"step": 0}, {"step": 1, run.K3: 1e-9, run.LARGEST: 2e-5}, {"step": 2, run.K3: 3e-3, run.LARGEST: 0.5}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows[:2]))
    assert run.measured(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert run.measured(tmp_path) == {"zero": (1e-9, 2e-5), "trained": (3e-3, 0.5)}


def trajectory(rng: np.random.Generator, length: int, prompt: int):
    sampled = np.arange(length) >= prompt
    return where._trajectory(
        {
            "id": rng.integers(0, 13, length).tolist(),
            "sampled": sampled.tolist(),
            "logprob": [-1.0 if s else None for s in sampled],
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=13, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return str(path)


def test_in_float32_all_ways_of_scoring_a_token_agree(folder):
    rng = np.random.default_rng(0)
    batch = Batch.from_trajectories([trajectory(rng, 9, 3), trajectory(rng, 6, 2), trajectory(rng, 9, 5)])
    model = where.model_of(folder, torch.float32)
    wanted = []
    for t in batch:
        ids = torch.from_numpy(t.tokens).long()[None]
        scores = torch.log_softmax(model.double()(ids).logits[0], -1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        wanted.append(scores[torch.from_numpy(t.action_mask[1:])].detach())
    wanted = torch.cat(wanted).numpy()
    model = where.model_of(folder, torch.float32)
    updated = where.session_of(folder, "float32", updated=True)
    merged = where.model_of(folder, torch.float32, updated.sampler_tensors("full", "float32"))
    assert np.abs(where.trainer(where.session_of(folder, "float32"), batch) - wanted).max() < 1e-5
    assert np.abs(where.token_by_token(model, batch) - wanted).max() < 1e-5
    assert np.abs(where.at_once(model, batch, wide_logits=True) - wanted).max() < 1e-5
    assert np.abs(where.trainer(updated, batch) - where.at_once(merged, batch, wide_logits=False)).max() < 1e-5
    exact, rounded = where.normaliser(model, batch)
    assert 0 < np.abs(exact - rounded).max() < 1e-5 and np.abs(exact - wanted).max() < 1e-5
    assert np.abs(where.trainer(updated, batch) - wanted).max() > 1e-3, "the adapter is not zero"

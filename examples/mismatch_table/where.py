"""Where the mismatch comes from: the same tokens under the same weights, with one thing changed at a time.

python -m examples.mismatch_table.where

Takes the tokens that the first complete run of ``study.yaml`` wrote, scores them under the base model (or under an adapter of
the size that an update leaves) in one process, and prints how far each way of computing is from the other. No engine is
started: what engines do differently is done here by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from examples.mismatch_table.run import FOLDER, ROOT, arms_of
from examples.study import slug
from rlframe.backbone import Backbone
from rlframe.config import ModelConfig
from rlframe.losses.logprobs import LogProbs
from rlframe.models import resolve_model
from rlframe.sessions import Session, SessionSpec
from rlframe.types import Batch, Trajectory
from trainer.watch.samples import read, sampled_steps

UPDATED = 4e-3
"""Entries of the adapter's B after two updates at a learning rate of 2e-3."""
CPU = torch.device("cpu")


def recorded(run: Path) -> Batch:
    """The trajectories of a run's last sample."""
    file = list(sampled_steps(run).values())[-1]
    return Batch.from_trajectories([_trajectory(row["tokens"]) for row in read(file)])


def _trajectory(columns: dict[str, list[Any]]) -> Trajectory:
    mask = np.array(columns["sampled"], bool)
    return Trajectory(
        tokens=np.array(columns["id"]),
        action_mask=mask,
        logprobs=np.array([x or 0.0 for x in columns["logprob"]]),
        head_ids=np.zeros((len(mask), 0)),
        head_logprobs=np.zeros((len(mask), 0)),
        versions=np.where(mask, 0, -1),
        rewards=np.zeros(len(mask)),
        finish="stop",
    )


def trainer(session: Session, batch: Batch, tokens_a_pass: int = 16384) -> np.ndarray:
    """float64[A], as the learner computes them: trajectories packed into one row, logits in float32."""
    scored = session.forward(batch, LogProbs(1.0), tokens_a_pass).per_token["logprobs"].double().numpy()
    return scored[batch.action_mask]


@torch.inference_mode()
def token_by_token(model: Any, batch: Batch) -> np.ndarray:
    """float64[A], as an engine computes them: the prompt at once, then one token a call on cached keys and values."""
    found = []
    for t in batch:
        first = int(np.argmax(t.action_mask))
        ids, cache = torch.from_numpy(t.tokens).long()[None], DynamicCache(config=model.config)
        logits = model(ids[:, :first], past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        for i in range(first, len(t)):
            found.append(torch.log_softmax(logits[0, -1].float(), -1)[ids[0, i]])
            if i + 1 < len(t):
                logits = model(ids[:, i : i + 1], past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return torch.stack(found).double().numpy()


@torch.inference_mode()
def normaliser(model: Any, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Twice float64[A] from the same float32 logits: log-softmax in float64, and torch's own in float32, as engines call it."""
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for t in batch:
        ids = torch.from_numpy(t.tokens).long()[None]
        logits = (model.model(ids, use_cache=False).last_hidden_state[0].float() @ model.lm_head.weight.float().T)[:-1]
        acting = torch.from_numpy(t.action_mask[1:])
        for wide, z in zip(found, (logits.double(), logits), strict=True):
            wide.append(torch.log_softmax(z, -1).gather(1, ids[0, 1:, None])[:, 0][acting].double())
    return torch.cat(found[0]).numpy(), torch.cat(found[1]).numpy()


@torch.inference_mode()
def at_once(model: Any, batch: Batch, wide_logits: bool) -> np.ndarray:
    """float64[A], a trajectory a call; the output projection in float32 (``wide_logits``) or in the model's dtype."""
    found = []
    for t in batch:
        ids = torch.from_numpy(t.tokens).long()[None]
        hidden = model.model(ids, use_cache=False).last_hidden_state[0]
        weight = model.lm_head.weight
        logits = hidden.float() @ weight.float().T if wide_logits else (hidden @ weight.T).float()
        logprobs = torch.log_softmax(logits, -1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        found.append(logprobs[torch.from_numpy(t.action_mask[1:])])
    return torch.cat(found).double().numpy()


def session_of(path: str, dtype: str, updated: bool = False) -> Session:
    """A fresh adapter, or one whose B is as large as updates make it."""
    session = Backbone.load(path, mesh=None, device=CPU, dtype=dtype).create_session("actor", SessionSpec())
    if updated and session.adapter is not None:
        generator = torch.Generator().manual_seed(0)
        for name, factor in session.adapter.factors().items():
            if ".lora_B" in name:
                noise = torch.randn(factor.shape, generator=generator)
                factor.data.copy_(UPDATED * noise)
    return session


def model_of(path: str, dtype: torch.dtype, tensors: dict[str, Tensor] | None = None) -> Any:
    """The base model, with some weights replaced."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval()
    model.load_state_dict(tensors or {}, strict=False)
    return model


def comparisons(path: str, batch: Batch) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """What is compared, and the two results, float64[A] each."""
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        session, model = session_of(path, name), model_of(path, dtype)
        packed, alone = trainer(session, batch), trainer(session, batch, 1)
        yield f"{name}: the trainer twice, all trajectories in one pass", packed, trainer(session, batch)
        yield f"{name}: the trainer, all in one pass or one a pass", packed, alone
        whole = at_once(model, batch, wide_logits=True)
        yield f"{name}: the trainer or transformers, one trajectory a pass", alone, whole
        yield f"{name}: log-softmax of the same logits in float64 or float32", *normaliser(model, batch)
        if dtype != torch.float32:
            yield f"{name}: output projection in float32 or {name}", whole, at_once(model, batch, wide_logits=False)
        yield f"{name}: one trajectory a pass, or token by token", alone, token_by_token(model, batch)
        updated = session_of(path, name, updated=True)
        merged = model_of(path, dtype, updated.sampler_tensors("full", name))
        beside = trainer(updated, batch, 1)
        yield f"{name}: adapter beside the weights or merged, one trajectory a pass", beside, at_once(merged, batch, True)
    exact = at_once(model_of(path, torch.float32), batch, True)
    rounded = {n: t.bfloat16().float() for n, t in model_of(path, torch.float32).state_dict().items()}
    weights_only = at_once(model_of(path, torch.float32, rounded), batch, True)
    yield "float32 arithmetic: weights in float32 or rounded to bfloat16", exact, weights_only
    yield (
        "weights rounded to bfloat16: arithmetic in float32 or bfloat16",
        weights_only,
        at_once(model_of(path, torch.bfloat16), batch, True),
    )


def main() -> None:
    path = resolve_model(ModelConfig(name="smollm2", builder="smollm2"))
    run = ROOT / slug(" ".join(next(iter(arms_of(yaml.safe_load((FOLDER / "study.yaml").read_text()))))))
    batch = recorded(run)
    print(f"{len(batch)} trajectories of {run}, {batch.num_actions} tokens\n")
    print("| compared | K3 | max abs log-ratio | tokens bit-identical |")
    print("|---|---|---|---|")
    for what, a, b in comparisons(path, batch):
        log_ratio = a - b
        k3 = float(np.mean(np.expm1(log_ratio) - log_ratio))
        print(f"| {what} | {k3:.1e} | {np.abs(log_ratio).max():.2g} | {np.mean(log_ratio == 0):.0%} |", flush=True)


if __name__ == "__main__":
    main()

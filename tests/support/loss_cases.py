"""Batches with a known sampler, and dense float64 references that hold full logits, for the tests of the losses.

The references are written from the papers' formulas on the full vocabulary; nothing of `rlframe.losses`,
`rlframe.losses.corrections` or `rlframe.losses.score_centering` takes part in them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlframe import Batch, LMHead, LossInputs, Trajectory


@dataclass
class Case:
    """A batch whose sampler is the trainer plus noise on the logits."""

    batch: Batch
    hidden: Tensor
    """[N, H], row n after token n."""
    weight: Tensor
    """[V, H]"""
    sampler: Tensor
    """float64[N, V], row t: the sampler's log-probabilities for token t (zeros where nothing produced it)."""
    temperature: float

    def inputs(self, **head: object) -> LossInputs:
        return LossInputs(self.hidden, self.batch, LMHead(self.weight, **head))

    def rows(self) -> Tensor:
        return torch.from_numpy(np.flatnonzero(self.batch.action_mask))

    def owners(self) -> Tensor:
        """int64[A], trajectory of every action token."""
        return torch.searchsorted(torch.from_numpy(self.batch.offsets), self.rows(), right=True) - 1


def action_mask(rng: np.random.Generator, length: int) -> np.ndarray:
    """Prompt, then actions with observations between them."""
    mask = rng.random(length) < 0.7
    mask[0] = False
    if length > 1:
        mask[1] = True
    return mask


def make_case(
    seed: int = 0,
    *,
    lengths: tuple[int, ...] = (9, 5, 14),
    vocabulary: int = 37,
    hidden: int = 8,
    k: int = 6,
    noise: float = 0.5,
    sharpness: float = 1.0,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Case:
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocabulary, hidden, generator=generator, dtype=torch.float64) * sharpness
    states = torch.randn(sum(lengths), hidden, generator=generator, dtype=torch.float64)
    weight, states = weight.to(dtype), states.to(dtype)
    logits = states.double() @ weight.double().T
    logits = logits + noise * torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    sampler = torch.zeros_like(logits)
    trajectories, first = [], 0
    for b, length in enumerate(lengths):
        mask = action_mask(rng, length)
        log_q = torch.log_softmax(logits[first : first + length - 1] / temperature, -1)
        sampler[first + 1 : first + length] = log_q
        tokens = rng.integers(0, vocabulary, length)
        logprobs = np.zeros(length)
        head_ids, head_logprobs = np.zeros((length, k), np.int32), np.zeros((length, k))
        for t in np.flatnonzero(mask):
            q = log_q[t - 1]
            tokens[t] = torch.multinomial(q.exp(), 1, generator=generator)
            logprobs[t] = q[tokens[t]]
            top = q.topk(k)
            head_ids[t], head_logprobs[t] = top.indices, top.values
        trajectories.append(
            Trajectory(
                tokens=tokens,
                action_mask=mask,
                logprobs=logprobs,
                head_ids=head_ids,
                head_logprobs=head_logprobs,
                versions=np.where(mask, b, -1),
                rewards=np.where(np.arange(length) == length - 1, float(b % 2), 0.0),
                finish="length" if b % 3 == 1 else "stop",
                prompt_id=f"p{b}",
                index=b,
            )
        )
        first += length
    batch = Batch.from_trajectories(trajectories)
    n = batch.num_tokens
    batch.advantages = np.where(batch.action_mask, rng.normal(size=n), 0).astype(np.float32)
    batch.values = np.where(batch.action_mask, rng.normal(size=n), 0).astype(np.float32)
    batch.returns = np.where(batch.action_mask, rng.normal(size=n), 0).astype(np.float32)
    batch.bootstrap = rng.normal(size=len(batch)).astype(np.float32)
    return Case(batch, states.requires_grad_(), weight, sampler, temperature)


def dense_logprobs(case: Case, hidden: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
    """float64[A, V], the trainer's log-probabilities from full logits."""
    hidden = case.hidden if hidden is None else hidden
    weight = case.weight if weight is None else weight
    return torch.log_softmax(hidden.double()[case.rows() - 1] @ weight.double().T / case.temperature, -1)


def sampled(case: Case, logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log p, log q and the advantage of every action token, float64[A]."""
    rows = case.rows()
    tokens = torch.from_numpy(case.batch.tokens).long()[rows]
    log_p = logprobs.gather(1, tokens[:, None]).squeeze(1)
    log_q = torch.from_numpy(case.batch.logprobs).double()[rows]
    return log_p, log_q, torch.from_numpy(case.batch.advantages).double()[rows]


def gradient(loss: Tensor, *of: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, of))

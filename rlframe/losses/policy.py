"""The policy loss over a `Batch`, as sessions run it; `rlframe.losses.functional` is the same for plain tensors.

See `rlframe.losses.objective` for what it computes and `rlframe.losses.fused` for how.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlframe.alignment import action_rows, trajectory_of
from rlframe.config import AlgorithmConfig, ConfigError
from rlframe.losses.base import LMHead, LossInputs, LossOutputs
from rlframe.losses.fused import FusedOutputs, fused_loss
from rlframe.losses.objective import PolicyObjective, PolicyRules, PolicyTokens
from rlframe.losses.policy_metrics import policy_metrics
from rlframe.losses.score_centering import check_topk
from rlframe.metrics import Metrics
from rlframe.types import Batch
from rlframe.validation import check_finite, check_logprobs, check_rows, check_vocabulary


def run_policy_loss(
    hidden: Tensor, head: LMHead, data: PolicyTokens, rules: PolicyRules, temperature: float
) -> tuple[FusedOutputs, Metrics]:
    """The fused pass over the hidden states [A, H] that produced the tokens of ``data``, and its metrics."""
    data = data.to(torch.float64 if hidden.dtype == torch.float64 else torch.float32)
    out = fused_loss(hidden, head, PolicyObjective(rules, data), temperature)
    return out, policy_metrics(data, out)


class PolicyLoss:
    """The policy loss of an algorithm, as sessions run it.

    The loss is the raw sum over action tokens; divide by the global number of action tokens, those that rejection drops
    included. A micro-batch without action tokens gives a zero loss with zero gradients, since a rank may get none; whoever
    knows the whole batch refuses an empty one (`rlframe.validation.check_batch`).

    Raises:
        ConfigError: the algorithm is not defined, or the temperature is not positive.
    """

    needs = "lm_head"

    def __init__(self, algorithm: AlgorithmConfig, temperature: float = 1.0) -> None:
        if not 0 < temperature < float("inf"):
            raise ConfigError(f"rollout.temperature={temperature} cannot be trained on; it must be above 0 and finite.")
        self.rules = PolicyRules.of(algorithm)
        self.temperature = temperature

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Loss, metrics, and ``logprobs`` and ``entropy`` of every action token.

        Raises:
            ValueError: shapes differ, advantages are missing or not finite, or a head is not what the sampler returned.
        """
        if inputs.lm_head is None:
            raise ValueError("A policy loss needs the lm_head.")
        batch, hidden = inputs.batch, inputs.hidden
        check_rows(batch, len(hidden), "advantages")
        rows, producers = action_rows(batch)
        check_finite(batch, "advantages")
        check_logprobs(batch)
        check_vocabulary(batch, inputs.lm_head.vocabulary())
        if self.rules.centering is not None:
            check_topk(batch, rows)
        device = hidden.device

        def column(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array[rows]).to(device)

        segments = trajectory_of(batch, rows)
        data = PolicyTokens(
            tokens=column(batch.tokens).long(),
            logprobs=column(batch.logprobs),
            advantages=column(batch.advantages),  # type: ignore[arg-type]
            segments=torch.from_numpy(segments).to(device),
            count=len(batch),
            head_ids=column(batch.head_ids) if self.rules.centering else None,
            head_logprobs=column(batch.head_logprobs) if self.rules.centering else None,
            columns={name: torch.from_numpy(array).to(device) for name, array in _read(self.rules.loss, batch, rows, segments)},
        )
        acting = hidden.index_select(0, torch.from_numpy(producers).to(device))
        out, metrics = run_policy_loss(acting, inputs.lm_head, data, self.rules, self.temperature)
        scattered = torch.zeros(2, batch.num_tokens, device=device)
        scattered[:, torch.from_numpy(rows).to(device)] = torch.stack([out.logprobs, out.entropy]).float()
        return LossOutputs(out.loss, metrics, {"logprobs": scattered[0], "entropy": scattered[1]})


def _read(loss: Any, batch: Batch, rows: np.ndarray, segments: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The columns that a loss asks for, at the action tokens ``rows`` of trajectories ``segments``."""
    for name in getattr(loss, "columns", ()):
        if name not in batch.columns:
            raise ValueError(
                f"The loss reads a column {name!r}, which the batch does not have; have the advantage estimator add it with "
                "batch.add, or leave it out of the loss's columns."
            )
        yield name, batch.columns[name][segments if batch.declared()[name].per == "trajectory" else rows]

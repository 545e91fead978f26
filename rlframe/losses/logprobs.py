"""Forward only: log-probabilities and entropy of action tokens under the trainer, for probes and checks."""

from __future__ import annotations

import torch
from torch import Tensor

from rlframe.alignment import action_rows
from rlframe.losses.base import LossInputs, LossOutputs
from rlframe.losses.fused import Afterwards, Slopes, fused_loss
from rlframe.validation import check_rows, check_vocabulary


class _Record:
    """`rlframe.losses.fused.Objective` that keeps log-probabilities and has no loss."""

    whole = False

    head_ids: Tensor | None = None

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def slopes(self, rows: slice, logprobs: Tensor, head_logprobs: Tensor) -> Slopes:
        zero = torch.zeros_like(logprobs)
        return Slopes(zero, None, zero, {})

    def afterwards(self, logprobs: Tensor) -> Afterwards:
        return Afterwards(torch.ones_like(logprobs), None, {})


class LogProbs:
    """``logprobs`` [N] and ``entropy`` [N] of every action token."""

    needs = "lm_head"

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Log-probabilities of a micro-batch, nats, 0 off the mask.

        Raises:
            ValueError: shapes differ, or a token or an entry of a head is outside of the vocabulary.
        """
        if inputs.lm_head is None:
            raise ValueError("Log-probabilities need the lm_head.")
        batch, device = inputs.batch, inputs.hidden.device
        check_rows(batch, len(inputs.hidden))
        rows, producers = action_rows(batch)
        check_vocabulary(batch, inputs.lm_head.vocabulary())
        index = torch.from_numpy(rows).to(device)
        tokens = torch.from_numpy(batch.tokens[rows]).to(device).long()
        with torch.no_grad():
            acting = inputs.hidden.index_select(0, torch.from_numpy(producers).to(device))
            out = fused_loss(acting, inputs.lm_head, _Record(tokens), self.temperature)
        per_token = {}
        for name, column in (("logprobs", out.logprobs), ("entropy", out.entropy)):
            per_token[name] = torch.zeros(batch.num_tokens, device=device)
            per_token[name][index] = column.float()
        return LossOutputs(None, per_token=per_token)

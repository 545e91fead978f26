"""Log-probabilities at the batch's ``head_ids``, which nothing but tests asks for; their columns go the way of the losses."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlframe.alignment import action_rows
from rlframe.losses.base import LossInputs, LossOutputs
from rlframe.losses.fused import Afterwards, Slopes, fused_loss
from rlframe.losses.logprobs import LogProbs


class _Record:
    whole = False

    def __init__(self, tokens: Tensor, head_ids: Tensor) -> None:
        self.tokens, self.head_ids = tokens, head_ids

    def slopes(self, rows: slice, logprobs: Tensor, head_logprobs: Tensor) -> Slopes:
        zero = torch.zeros_like(logprobs)
        return Slopes(zero, None, zero, {"head_logprobs": head_logprobs})

    def afterwards(self, logprobs: Tensor) -> Afterwards:
        return Afterwards(torch.ones_like(logprobs), None, {})


class HeadLogProbs(LogProbs):
    """`LogProbs`, and ``head_logprobs`` [N, k]."""

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        outputs, batch = super().__call__(inputs), inputs.batch
        rows, producers = action_rows(batch)
        ids = np.where(batch.head_logprobs[rows] == -np.inf, 0, batch.head_ids[rows])
        record = _Record(torch.from_numpy(batch.tokens[rows]).long(), torch.from_numpy(ids))
        with torch.no_grad():
            out = fused_loss(inputs.hidden[torch.from_numpy(producers)], inputs.lm_head, record, self.temperature)
        column = torch.zeros(batch.num_tokens, ids.shape[1])
        column[torch.from_numpy(rows)] = out.stats["head_logprobs"].float()
        outputs.per_token["head_logprobs"] = column
        return outputs

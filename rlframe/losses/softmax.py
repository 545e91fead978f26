"""What the losses need of the softmax of a chunk of logits, whole or with the vocabulary sharded over ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlframe.losses.base import LMHead


class Softmax(NamedTuple):
    """A chunk of C tokens, with the columns that were asked for."""

    logprobs: Tensor
    """[C, m], log-probabilities of the ids asked for."""
    entropy: Tensor
    """[C], nats."""
    exp: Tensor
    """[C, V], exp(z - max z), not normalised; the columns of this rank."""
    total: Tensor
    """[C], sum of ``exp`` over the whole vocabulary."""
    columns: Tensor
    """int64[C, m], columns of ``exp`` that hold the ids."""
    here: Tensor | None
    """bool[C, m], whether this rank holds them; None when the vocabulary is whole."""

    def gradient(self, slopes: Tensor) -> Tensor:
        """dL/dz [C, V] in the place of ``exp``, for slopes dL / dlog p [C, m] of the ids.

        dlog p_v / dz = e_v - p, so the softmax enters once, scaled by the sum of the slopes, and the rest is a scatter.
        """
        dz = self.exp.mul_((-slopes.sum(1) / self.total).unsqueeze(1))
        return dz.scatter_add_(1, self.columns, slopes if self.here is None else torch.where(self.here, slopes, 0.0))


def softmax(z: Tensor, ids: Tensor, head: LMHead, exp: Tensor) -> Softmax:
    """Log-probabilities and entropy of a chunk.

    Args:
        z: [C, V] logits of this rank's vocabulary; overwritten.
        ids: int64[C, m], ids in the whole vocabulary.
        head: says which part of the vocabulary this is.
        exp: [C, V] buffer for the result.
    """
    here, columns = None, ids
    if head.group is not None:
        columns = ids - head.vocab_start
        here = (columns >= 0) & (columns < z.shape[1])
        columns = torch.where(here, columns, 0)
    top = z.amax(1, keepdim=True)
    if head.group is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=head.group)
    z -= top
    picked = z.gather(1, columns)
    torch.exp(z, out=exp)
    # H = log sum e^z - sum e^z z / sum e^z, where a logit that the bias masks with -inf counts 0, not 0 * inf.
    z *= exp
    if head.bias is not None:
        z.nan_to_num_(nan=0.0)
    sums = torch.stack([exp.sum(1), z.sum(1)], 1)
    if head.group is not None and here is not None:
        packed = torch.cat([torch.where(here, picked, 0.0), sums], 1)
        dist.all_reduce(packed, group=head.group)
        picked, sums = packed[:, :-2], packed[:, -2:]
    total, weighted = sums.unbind(1)
    log_total = total.log()
    return Softmax(picked - log_total.unsqueeze(1), log_total - weighted / total, exp, total, columns, here)

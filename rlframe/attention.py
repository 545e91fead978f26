"""Attention over one row of concatenated trajectories that costs the sum of their squares, not the square of their sum.

Transformers keeps packed trajectories apart with a mask over the whole row, which computes mostly masked products. Here
trajectories of similar length are gathered into small right-padded batches: under a causal mask no real token can see padding
on its right, so plain causal attention is exact and no mask is needed (unless a sliding window is shorter than a trajectory).
It takes the place of ``sdpa``; flash kernels do the same by themselves, and for the others `rlframe.packing` lays trajectories
out in rows.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "rlframe_segments"
_CLASS_RATIO = 1.25
"""Longest over shortest trajectory that share a padded batch."""
_WIDE_BELOW = 512
"""On a CPU, shorter trajectories attend in float32: torch's bfloat16 kernel takes up to five times as long in the backward
pass there, and gains only as products grow."""


@dataclass(frozen=True)
class _Group:
    """Trajectories of similar length: b of them, padded to L tokens."""

    rows: Tensor
    """int64[b * L], row of the packed order; padding repeats a trajectory's last row."""
    count: int
    length: int


class Segments:
    """How the row of one pass is cut: into trajectories of ``lengths`` (int[B], all positive)."""

    def __init__(self, lengths: np.ndarray, device: torch.device) -> None:
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        kinds = np.floor(np.log(lengths) / math.log(_CLASS_RATIO)).astype(np.int64)
        groups, back, offset = [], np.zeros(int(lengths.sum()), np.int64), 0
        for kind in np.unique(kinds):
            members = np.flatnonzero(kinds == kind)
            longest = int(lengths[members].max())
            steps = np.minimum(np.arange(longest)[None], lengths[members, None] - 1)
            rows = starts[members, None] + steps
            valid = np.arange(longest)[None] < lengths[members, None]
            back[rows[valid]] = offset + np.flatnonzero(valid)
            offset += rows.size
            groups.append(_Group(torch.from_numpy(rows.reshape(-1)).to(device), len(members), longest))
        self._groups = groups
        self._back = torch.from_numpy(back).to(device)
        self._trivial = len(groups) == 1 and bool((back == np.arange(len(back))).all()) and offset == len(back)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None) -> Tensor:
        """Causal attention within each trajectory.

        Args:
            query: [1, heads, N, D].
            key: [1, key heads, N, D], with key heads dividing heads.
            value: [1, key heads, N, D'].
            scale: factor of the products; None for 1 / sqrt(D).
            window: tokens that a token sees, itself included; None for all before it.

        Returns:
            [1, N, heads, D']
        """
        flat = [t[0].transpose(0, 1) for t in (query, key, value)]
        outputs = []
        for group in self._groups:
            parts = [self._gather(t, group) for t in flat]
            if query.device.type == "cpu" and query.element_size() == 2 and group.length < _WIDE_BELOW:
                parts = [part.float() for part in parts]
            mask = None
            if window is not None and window < group.length:
                steps = torch.arange(group.length, device=query.device)
                behind = steps[:, None] - steps[None]
                mask = (behind >= 0) & (behind < window)
            grouped = parts[0].shape[1] != parts[1].shape[1]
            out = scaled_dot_product_attention(
                parts[0], parts[1], parts[2], attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
            )
            outputs.append(out.to(query.dtype).transpose(1, 2).flatten(0, 1))
        packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return (packed if self._trivial else packed.index_select(0, self._back))[None]

    def _gather(self, rows: Tensor, group: _Group) -> Tensor:
        """[N, heads, D] to [b, heads, L, D]."""
        picked = rows if self._trivial else rows.index_select(0, group.rows)
        return picked.unflatten(0, (group.count, group.length)).transpose(1, 2)


_ROW: ContextVar[Segments] = ContextVar("row")
"""How the row of the running pass is cut. Arguments of a model's forward could carry it, but not every architecture passes
unknown arguments on to its attention layers."""


class within:
    """A context, which may be entered again, inside of which attention keeps the trajectories of ``segments`` apart."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments

    def __enter__(self) -> None:
        self._token = _ROW.set(self._segments)

    def __exit__(self, *_: object) -> None:
        _ROW.reset(self._token)


def recomputed() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of the two forwards of a checkpointed block (``context_fn`` of `torch.utils.checkpoint.checkpoint`).

    The second runs in the backward pass, after the pass has left its context and maybe another has begun, on a thread of
    autograd where the model is on an accelerator.
    """
    segments = _ROW.get(None)
    return nullcontext(), nullcontext() if segments is None else within(segments)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every attention layer."""
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if unknown or attention_mask is not None:
        raise NotImplementedError(
            f"Attention over segments has no {unknown or 'attention mask'}; set model.attn_implementation=eager."
        )
    return _ROW.get().attend(query, key, value, scale=scaling, window=sliding_window), None


AttentionInterface.register(NAME, _attention)

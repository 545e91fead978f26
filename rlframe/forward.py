"""Micro-batches of whole trajectories through a model, up to what losses need: the last hidden states and the LM head.

Several trajectories go in one pass, laid out as the attention kernel allows. Whether a model keeps them apart is found out by
`rlframe.exactness`; sharding is known to `rlframe.backbone` only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlframe import attention
from rlframe.context_length import longest_context
from rlframe.losses.base import LMHead
from rlframe.packing import pack


@dataclass(frozen=True)
class FinalLogits:
    """What a model does to the product z of its LM head: logits = c tanh(scale z / c), or scale z."""

    scale: float = 1.0
    softcap: float | None = None
    """c; None without."""


class Body(nn.Module):
    """Body of the model, then whatever consumes hidden states and head. FSDP's root, whose parameters are whole meanwhile."""

    def __init__(self, model: PreTrainedModel, final: FinalLogits) -> None:
        super().__init__()
        self.model, self.final = model, final

    def forward(self, input_ids: Tensor, position_ids: Tensor | None, consume: Callable[[Tensor, LMHead], Any]) -> Any:
        model = self.model
        body = model.base_model if model.base_model is not model else model.model
        positions = {} if position_ids is None else {"position_ids": position_ids}
        output = body(input_ids=input_ids, use_cache=False, **positions)
        return consume(output.last_hidden_state, self._head())

    def _head(self) -> LMHead:
        layer = self.model.get_output_embeddings()
        weight, bias = layer.weight, getattr(layer, "bias", None)
        for key in getattr(layer, "active_adapters", []):
            if key in layer.lora_A:
                weight = weight + layer.get_delta_weight(key)
        return LMHead(weight=weight, bias=bias, softcap=self.final.softcap, scale=self.final.scale)


class PackedForward:
    """Lays trajectories out for ``body`` and runs it."""

    def __init__(self, body: Body, device: torch.device) -> None:
        self.body, self.device = body, device
        model = body.model
        kernel = model.config._attn_implementation
        # Kernels that know several sequences in a row get a single one; ours is told where they begin.
        self._told = kernel == attention.NAME
        self._one_row = self._told or "flash" in kernel
        self._context = longest_context(model.config.get_text_config())
        self._dynamic: list[tuple[Any, str]] = []
        """Rotary embeddings whose frequencies grow with the row, and what precedes the names of their buffers."""
        for module in model.modules():
            kinds = getattr(module, "rope_type", None)
            kinds = {f"{layers}_": kind for layers, kind in kinds.items()} if isinstance(kinds, dict) else {"": kinds}
            self._dynamic += [(module, prefix) for prefix, kind in kinds.items() if "dynamic" in str(kind)]

    def __call__(self, tokens: np.ndarray, lengths: np.ndarray, consume: Callable[[Tensor, LMHead], Any]) -> Any:
        """Run trajectories of ``lengths`` [B] whose ``tokens`` [N] are concatenated.

        Args:
            tokens: int[N].
            lengths: int[B], all positive, adding up to N.
            consume: called with hidden [N, H] and the head.

        Returns:
            What ``consume`` returned.
        """
        for module, prefix in self._dynamic:  # frequencies that grew with a long row would stay for the next, shorter one
            setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq").clone())
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
        if self._one_row:
            starts = np.cumsum(lengths) - lengths
            source = np.arange(len(tokens))[None]
            positions, cells = source - starts.repeat(lengths), None
        else:
            layout = pack(lengths, context=self._context)
            source, positions, cells = layout.source, layout.positions, torch.from_numpy(layout.cells).to(self.device)
        with attention.within(attention.Segments(lengths, self.device)) if self._told else nullcontext():
            return self.body(
                torch.from_numpy(tokens[source].astype("int64")).to(self.device),
                torch.from_numpy(positions).to(self.device),
                lambda hidden, head: consume(hidden[0] if cells is None else hidden.flatten(0, 1)[cells], head),
            )

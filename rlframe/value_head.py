"""The value head: hidden states to values. Losses and the backbone live elsewhere."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rlframe.seeding import uniform_


class ValueHead(nn.Module):
    """A linear map from the last hidden state to one value, in float32, that starts at exactly 0.

    With ``rank`` it is ``Linear(hidden, 1)`` whose base weight is zero and frozen, plus low-rank factors: V = alpha / rank *
    B A h with B = 0 at the start. Without, it is a plain weight that starts at zero.
    """

    def __init__(self, hidden: int, *, rank: int | None, alpha: float = 1.0, device: torch.device | None = None) -> None:
        super().__init__()
        self.scaling = alpha / rank if rank else 1.0
        if rank:
            self.lora_A = nn.Parameter(torch.zeros(rank, hidden, device=device))
            self.lora_B = nn.Parameter(torch.zeros(1, rank, device=device))
        else:
            self.weight = nn.Parameter(torch.zeros(1, hidden, device=device))

    def reset(self, seed: int) -> None:
        """Start again: values of exactly 0, and factors that depend on ``seed`` alone."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name == "lora_A":
                    uniform_(parameter, 1 / math.sqrt(parameter.shape[1]), seed, f"value_head.{name}")
                else:
                    parameter.zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        """Values of hidden states.

        Args:
            hidden: [*, H], any float dtype.

        Returns:
            float32[*]
        """
        hidden = hidden.float()
        if hasattr(self, "weight"):
            return (hidden @ self.weight.T).squeeze(-1)
        return (hidden @ self.lora_A.T @ self.lora_B.T).squeeze(-1) * self.scaling

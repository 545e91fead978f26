"""The value head: hidden states to values. Losses and the backbone live elsewhere."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlframe.precision import full_precision
from rlframe.seeding import uniform_


class _Product(torch.autograd.Function):
    """x W^T for x [*, n] and W [m, n], whose backward pass keeps its precision inside of an autocast, too."""

    @staticmethod
    @full_precision()
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    @once_differentiable
    @full_precision()
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad
        d_weight = grad.flatten(0, -2).T @ x.flatten(0, -2) if wants_weight else None
        return grad @ weight if wants_x else None, d_weight


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
            return _Product.apply(hidden, self.weight).squeeze(-1)
        return _Product.apply(_Product.apply(hidden, self.lora_A), self.lora_B).squeeze(-1) * self.scaling

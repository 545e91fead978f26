"""Random initial values that depend on a seed and a name alone: not on rank, order of creation, or the global generator."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator for one tensor."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def uniform_(tensor: Tensor, bound: float, seed: int, name: str) -> Tensor:
    """Fill with a uniform distribution on [-bound, bound)."""
    values = torch.empty(tensor.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator(seed, name))
    with torch.no_grad():
        return tensor.copy_(values)


def normal_(tensor: Tensor, std: float, seed: int, name: str) -> Tensor:
    """Fill with a normal distribution around 0."""
    values = torch.empty(tensor.shape, dtype=torch.float32).normal_(0.0, std, generator=generator(seed, name))
    with torch.no_grad():
        return tensor.copy_(values)

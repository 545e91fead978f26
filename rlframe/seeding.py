"""Seeds, and random initial values that depend on a seed and a name alone: not on rank, order of creation, or the global
generator.

torch is imported where values are drawn: seeds are also checked and derived by what does without it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SEEDS = 2**32
"""Seeds are below this, which Python, numpy, torch and the engines all take."""


def derive_seed(*parts: int) -> int:
    """A seed in [0, 2**63) from integers; the same on every machine and in every process."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator for one tensor."""
    import torch

    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def uniform_(tensor: Tensor, bound: float, seed: int, name: str) -> Tensor:
    """Fill with a uniform distribution on [-bound, bound)."""
    import torch

    values = torch.empty(tensor.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator(seed, name))
    with torch.no_grad():
        return tensor.copy_(values)


def normal_(tensor: Tensor, std: float, seed: int, name: str) -> Tensor:
    """Fill with a normal distribution around 0."""
    import torch

    values = torch.empty(tensor.shape, dtype=torch.float32).normal_(0.0, std, generator=generator(seed, name))
    with torch.no_grad():
        return tensor.copy_(values)

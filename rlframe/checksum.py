"""A checksum of weights that does not depend on how they are cut, fused or ordered.

An engine may fuse q, k and v into one parameter or pad the vocabulary with zeros; the sum of the bit patterns of all
elements is the same, exactly. It does not see permutations: comparing log-probabilities of a fixed prompt does that.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor


def bit_sum(tensor: Tensor) -> int:
    """Sum of the elements' bit patterns modulo 2**64; zeros (padding) count nothing."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().contiguous().view(width)
    if bits.device.type == "cpu":  # ten times as fast as torch's sum of narrow integers, with the same wrap-around
        return int(bits.numpy().sum(dtype=np.int64)) % 2**64
    return int(bits.sum(dtype=torch.int64)) % 2**64


def weights_checksum(tensors: Iterable[Tensor]) -> str:
    """16 hex digits for a set of tensors, each counted once; -0.0 and 0.0 differ."""
    return f"{sum(bit_sum(t) for t in tensors) % 2**64:016x}"

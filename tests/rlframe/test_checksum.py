"""The checksum of weights against the definition, bit pattern by bit pattern."""

from __future__ import annotations

import pytest
import torch

from rlframe.checksum import bit_sum, weights_checksum


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_bit_sum_is_the_sum_of_the_signed_bit_patterns(dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 33, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    size = tensor.element_size()
    raw = bytes(tensor.view(torch.uint8).flatten().tolist())
    patterns = [int.from_bytes(raw[i : i + size], "little", signed=True) for i in range(0, len(raw), size)]
    assert bit_sum(tensor) == sum(patterns) % 2**64
    assert bit_sum(tensor.T) == bit_sum(tensor), "a view counts as what it shows"
    assert weights_checksum([tensor[:3], torch.zeros(5, dtype=dtype), tensor[3:]]) == weights_checksum([tensor])

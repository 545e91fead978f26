"""How weights cross a process boundary: numpy arrays on the wire, torch tensors at both ends.

numpy has no bfloat16; those tensors travel as the uint16 bit patterns of the same size.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from workers.rollout.engine import WeightUpdate

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The tensor as an array that shares its memory where it is on the CPU; bfloat16 becomes uint16."""
    tensor = tensor.detach().cpu().contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def to_torch(array: np.ndarray, dtype: str) -> Tensor:
    """A tensor of its own (arrays out of Ray's object store are read-only), of torch dtype ``dtype``.

    Raises:
        ValueError: the dtype is not one that weights travel in, or the array has another element size.
    """
    if dtype not in DTYPES:
        raise ValueError(f"Weights cannot travel as {dtype!r}; use one of {', '.join(DTYPES)}.")
    wanted = DTYPES[dtype]
    if array.dtype.itemsize != wanted.itemsize:
        raise ValueError(f"An array of {array.dtype} cannot hold {dtype} weights.")
    return torch.from_numpy(np.array(array)).view(wanted)


def make_update(
    version: int, mode: str, named: Iterable[tuple[str, Tensor]], dtype: str, adapter: dict | None = None
) -> WeightUpdate:
    """An update from named tensors, cast to ``dtype``: what the learner calls."""
    tensors = {name: to_numpy(tensor.detach().to(DTYPES[dtype])) for name, tensor in named}
    return WeightUpdate(version=version, mode=mode, tensors=tensors, dtype=dtype, adapter=adapter)

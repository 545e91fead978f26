"""Weights as they arrive from the learner: numpy arrays on the wire, torch tensors in the engine.

numpy has no bfloat16; two-byte floats travel as their bit patterns.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from workers.rollout.settings import ENGINE_DTYPES

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ENGINE_DTYPES}


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

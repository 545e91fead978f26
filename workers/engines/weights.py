"""Weights as they arrive from the learner: numpy arrays on the wire, torch tensors in the engine.

numpy has no bfloat16; two-byte floats travel as their bit patterns.
"""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit

import numpy as np
import torch
from torch import Tensor

from workers.engines.protocol import Stream, WeightUpdate
from workers.rollout.settings import ENGINE_DTYPES
from workers.settings import Config

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


def streams(config: Config) -> bool:
    """Whether full weights go by a channel of the engine's own (`EngineSpec.send`) instead of Ray's object store."""
    return config.rollout.weight_channel != "ray"


def announce(update: WeightUpdate, address: str) -> tuple[WeightUpdate, dict[str, Tensor]]:
    """``update`` without its tensors, which will be sent from ``address`` (tcp://host:port), and the tensors."""
    where = urlsplit(address)
    dtype = getattr(torch, update.dtype)
    tensors = {name: torch.from_numpy(array).view(dtype) for name, array in update.tensors.items()}
    shapes = [list(tensor.shape) for tensor in tensors.values()]
    stream = Stream(str(where.hostname), int(where.port or 0), list(tensors), shapes)
    return replace(update, tensors={}, stream=stream), tensors

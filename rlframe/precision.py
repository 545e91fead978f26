"""Losses compute in float32 (or float64) from the logits on, whatever a caller's `torch.autocast` says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_DEVICES = ("cpu", "cuda", "xpu")


@contextmanager
def full_precision() -> Iterator[None]:
    """Autocast is off inside; as a context or as a decorator. Costs nothing where it is off already."""
    with ExitStack() as stack:
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield

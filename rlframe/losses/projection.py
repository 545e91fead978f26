"""Hidden states to logits and back, chunk by chunk, in fp32 (fp64 for fp64 inputs) whatever the dtype of the weights.

Knows the output layers of the supported architectures: bias, logit scale, soft cap. See `rlframe.losses.softmax` and
`rlframe.losses.fused` for what happens to the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from rlframe.losses.base import LMHead

CHUNK_BYTES = {"cpu": 32 * 2**20}
"""Logits of one chunk, by device type: on a CPU they should stay near the caches."""
CHUNK_BYTES_ELSEWHERE = 256 * 2**20
"""On other devices a chunk must be large enough to fill the device."""


@contextmanager
def _bfloat16_products() -> Iterator[None]:
    """On a CPU, multiply float32 matrices as bfloat16 and add up in float32, where the processor has instructions for that.

    Exact for operands that were bfloat16 before; others are rounded to it.
    """
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


class Projection:
    """z = logits / temperature for chunks of hidden states, and the gradients that come back."""

    def __init__(self, head: LMHead, hidden: Tensor, temperature: float, wanted: tuple[bool, bool, bool]) -> None:
        """``wanted``: whether hidden, weight and bias require gradients."""
        self.hidden, self.head, self.temperature = hidden, head, temperature
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        # Products of bfloat16 are exact in fp32 and accumulated there, at the speed of tensor cores or AMX tiles. A CPU has no
        # product of bfloat16 matrices with an fp32 result, but one of fp32 copies that hold the same numbers. float16 is
        # computed in fp32: dL/dz of unlikely tokens is below its smallest number, and that of large weights above its largest.
        two_bytes = hidden.dtype == head.weight.dtype == torch.bfloat16
        self.narrow = hidden.is_cuda and two_bytes
        self._narrow_copies = hidden.device.type == "cpu" and two_bytes
        self._arithmetic = _bfloat16_products if self._narrow_copies else nullcontext
        self.weight = head.weight.detach() if self.narrow else head.weight.detach().to(self.dtype)
        self.bias = None if head.bias is None else head.bias.detach().to(self.dtype)
        vocabulary = len(self.weight)
        self.d_hidden = self._zeros(hidden.shape) if wanted[0] else None
        self.d_weight = self._zeros(self.weight.shape) if wanted[1] else None
        self.d_bias = self._zeros((vocabulary,)) if wanted[2] else None
        budget = CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES_ELSEWHERE)
        if self._narrow_copies:  # reading the weight for every chunk weighs more, the faster the arithmetic
            budget *= 2
        self.rows = max(1, min(len(hidden), budget // (vocabulary * self.dtype.itemsize)))
        # One buffer for all chunks: fresh pages for every chunk would cost as much as the arithmetic on them.
        self._z = torch.empty(self.rows, vocabulary, dtype=self.dtype, device=hidden.device)
        self._tanh = torch.empty_like(self._z) if head.softcap else None

    @property
    def trains(self) -> bool:
        """Whether any gradient is wanted."""
        return self.d_hidden is not None or self.trains_head

    @property
    def trains_head(self) -> bool:
        """Whether the gradient of the weight or the bias is wanted."""
        return self.d_weight is not None or self.d_bias is not None

    def logits(self, rows: slice) -> Tensor:
        """z [C, V] of the hidden states ``rows``, in a buffer that the next call overwrites.

        z = softcap(scale (h W^T + b)) / temperature, with softcap(u) = cap tanh(u / cap).
        """
        h = self.hidden[rows]
        z = self._z[: len(h)]
        if self.narrow:
            torch.mm(h, self.weight.T, out_dtype=self.dtype, out=z)
        else:
            with self._arithmetic():
                torch.mm(h.to(self.dtype), self.weight.T, out=z)
        if self.bias is not None:
            z += self.bias
        cap = self.head.softcap
        factor = self.head.scale / (cap or self.temperature)
        if factor != 1:
            z *= factor
        if cap and self._tanh is not None:
            torch.mul(torch.tanh(z, out=self._tanh[: len(h)]), cap / self.temperature, out=z)
        return z

    def accumulate(self, rows: slice, dz: Tensor) -> None:
        """Add the gradients of the chunk ``rows`` whose logits were computed last, given dL/dz [C, V] (overwritten)."""
        h = self.hidden[rows]
        if self._tanh is not None:
            # d softcap(u) / du = 1 - tanh^2(u / cap).
            dz -= torch.square(self._tanh[: len(h)], out=self._tanh[: len(h)]).mul_(dz)
        factor = self.head.scale / self.temperature
        if self.d_bias is not None:
            self.d_bias.add_(dz.sum(0), alpha=factor)
        if self.narrow:
            dz = dz.to(self.weight.dtype)
            if self.d_hidden is not None:
                self.d_hidden[rows] = torch.mm(dz, self.weight, out_dtype=self.dtype).mul_(factor)
            if self.d_weight is not None:
                self.d_weight.add_(torch.mm(dz.T, h, out_dtype=self.dtype), alpha=factor)
            return
        if self.d_hidden is not None:
            if self._narrow_copies:  # it is returned in bfloat16
                product = torch.mm(dz.to(self.hidden.dtype), self.head.weight.detach()).to(self.dtype)
            else:
                product = torch.mm(dz, self.weight)
            self.d_hidden[rows] = product.mul_(factor)
        if self.d_weight is not None:
            with self._arithmetic():
                self.d_weight.addmm_(dz.T, h.to(self.dtype), alpha=factor)

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Gradients of hidden, weight and bias, each in the dtype of what it belongs to.

        Those of float16 stay in float32: a sum over many tokens exceeds 65504 before the caller's factor, such as one over
        their number, brings it back.
        """
        head = self.head
        owners = (self.hidden, head.weight, head.bias)
        found = (self.d_hidden, self.d_weight, self.d_bias)
        return tuple(
            g if g is None or of is None or of.dtype == torch.float16 else g.to(of.dtype)
            for g, of in zip(found, owners, strict=True)
        )

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.hidden.device)

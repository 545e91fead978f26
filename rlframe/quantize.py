"""A sampler that is worse than the trainer, on purpose: weights rounded to a few bits, or with noise, when they are sent.

Engines round weights to serve faster; the policy they sample from is then not the one that is trained. Rounding before the
sync shows the same mismatch on any engine and any hardware: arithmetic stays in the engine's dtype, only the values are those
that the low-precision format can hold. An engine's own quantisation is not here (``rollout.engine_args``).

Linear layers are rounded; embeddings, norms, biases and the output projection are not, as engines do.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from rlframe.config import HEAD_MODULES, QUANTIZED

FP8_MAX = 448.0
"""Largest finite float8_e4m3fn."""
KEPT = ("embed", "wte", *HEAD_MODULES)
"""Parts of a parameter's name that keep it from being rounded."""


def is_linear(name: str, tensor: Tensor) -> bool:
    """Whether a parameter is the weight [out, in] of a linear layer inside a block."""
    return tensor.dim() == 2 and not any(part in name for part in KEPT)


def quantize(weight: Tensor, form: str) -> Tensor:
    """The nearest values that ``form`` holds with one scale for each output channel, in ``weight``'s dtype.

    Args:
        weight: [out, in].
        form: ``int8``, ``int4``, ``int3`` (symmetric: 2**(bits-1) - 1 levels on each side of zero) or ``fp8`` (e4m3, the
            largest value of a channel at 448).

    Raises:
        ValueError: an unknown ``form``.
    """
    if form not in QUANTIZED:
        raise ValueError(f"Weights can be rounded to {', '.join(QUANTIZED)}, not {form!r}.")
    values = weight.float()
    top = values.abs().amax(dim=1, keepdim=True)
    levels = FP8_MAX if form == "fp8" else 2.0 ** (int(form.removeprefix("int")) - 1) - 1
    scale = torch.where(top > 0, top / levels, torch.ones_like(top))
    scaled = values / scale
    rounded = scaled.to(torch.float8_e4m3fn).float() if form == "fp8" else scaled.round()
    return (rounded * scale).to(weight.dtype)


def add_noise(weight: Tensor, scale: float, *, seed: int, version: int, name: str) -> Tensor:
    """``weight`` plus Gaussian noise of ``scale`` times the root mean square of each output channel.

    The noise depends on nothing but ``seed``, ``version`` and ``name``, so a resumed run serves the same weights.
    """
    digest = hashlib.blake2b(f"{seed} {version} {name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
    noise = torch.randn(weight.shape, generator=generator).to(weight.device)
    rms = weight.float().pow(2).mean(dim=1, keepdim=True).sqrt()
    return (weight.float() + scale * rms * noise).to(weight.dtype)


def degrade(
    tensors: dict[str, Tensor], *, form: str | None, noise: float, seed: int, version: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """All weights as a worse sampler holds them: linear layers with noise, then rounded; everything cast to ``dtype``."""
    result = {}
    for name, tensor in tensors.items():
        if is_linear(name, tensor):
            if noise:
                tensor = add_noise(tensor, noise, seed=seed, version=version, name=name)
            if form:
                tensor = quantize(tensor, form)
        result[name] = tensor.to(dtype)
    return result

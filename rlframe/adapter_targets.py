"""Which linear layers an adapter can be added to: determined from their classes and by running a small copy.

PEFT adds ``B A x`` to what a layer returns. That is right only where the layer returns its weight times ``x``, and where the
model calls the layer at all instead of reading its weight. Adapters themselves are `rlframe.lora`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

import torch
from peft import LoraConfig as PeftConfig
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlframe.small_copy import Keyed, NoCopy, first_that_runs

_TOKENS = 48
"""Enough for every expert of a copy to get some."""


def unsupported_layers(model: PreTrainedModel, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Layers that no adapter can be added to, with the reason, which completes a sentence starting with the layer's name.

    Args:
        model: any instance, on any device; only its class and configuration are used.
        layers: path -> linear layer (or what derives from one) of it.
    """
    run = _run_by_text(Keyed.of(model.config, type(model)))
    found = {}
    for path, layer in layers.items():
        if not is_linear(layer):
            found[path] = f"{type(layer).__name__} does more than multiply by its weight, so an adapter cannot be added to it"
        elif run is not None and _kind(path) not in run:
            found[path] = "the model does not run it as a layer on text (it reads its weight, or never uses it)"
        elif not _peft_takes(model, path):
            found[path] = "fused kernels of state-space models go around it"
    return found


def is_linear(module: nn.Module) -> bool:
    """Whether a linear layer, or what derives from one, returns one tensor: a row of outputs for every row of inputs.

    PEFT adds ``B A x`` to what the layer returns. Routers that derive from ``nn.Linear`` return tuples, grouped projections
    take another shape; both would fail in the first forward pass.
    """
    if type(module).forward in (nn.Linear.forward, Conv1D.forward):
        return True
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    outline = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in held.items()}
    weight = outline["weight"]
    wide, narrow = weight.shape
    if isinstance(module, Conv1D):
        wide, narrow = narrow, wide
    rows = 7  # no number of groups or experts that a layer might divide by
    try:
        out = functional_call(module, outline, (torch.empty(rows, narrow, dtype=weight.dtype, device="meta"),))
    except Exception:
        return False
    return isinstance(out, Tensor) and out.shape == (rows, wide)


def _peft_takes(model: PreTrainedModel, path: str) -> bool:
    try:
        _check_lora_target_modules_mamba(PeftConfig(), model, path.rpartition(".")[2])
    except ValueError:
        return False
    return True


def _kind(path: str) -> str:
    """A path without the numbers of layers and experts."""
    return re.sub(r"\b\d+\b", "#", path)


@functools.lru_cache(maxsize=64)
def _run_by_text(keyed: Keyed) -> frozenset[str] | None:
    """Kinds of the linear layers whose ``forward`` a pass over tokens calls, from a small copy; None where none can be run."""

    def build(config: PreTrainedConfig) -> PreTrainedModel:
        torch.manual_seed(0)
        return keyed.kind._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()

    with torch.random.fork_rng(devices=[]):
        try:
            return first_that_runs(keyed.config, build, _called)[2]
        except NoCopy:
            return None


@torch.no_grad()
def _called(model: PreTrainedModel) -> frozenset[str]:
    called: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            module.register_forward_hook(lambda *_, path=path: called.add(_kind(path)))
    vocabulary = model.config.get_text_config().vocab_size
    model(
        input_ids=torch.randint(vocabulary, (1, _TOKENS), generator=torch.Generator().manual_seed(0)),
        use_cache=False,
    )
    return frozenset(called)

"""Setting up a base model: built on no device, sharded by FSDP2, then given memory for this rank's shards only.

Weights are read afterwards, by `rlframe.hf_checkpoint`; `rlframe.backbone` runs the model.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rlframe import attention
from rlframe.config import ConfigError


def read_config(path: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """The configuration in a folder.

    Raises:
        ConfigError: none, or a quantised model.
    """
    if not (path / "config.json").exists():
        raise ConfigError(f"model.path={path} is not a Hugging Face folder: it has no config.json.")
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"{path} holds a quantised model, which cannot be trained here; use its full-precision version.")
    return config


def empty_model(path: Path, dtype: torch.dtype, kernel: str, trust_remote_code: bool) -> PreTrainedModel:
    """The model of a folder without memory (meta device), frozen and in evaluation mode; ``kernel`` as `exactness` found it.

    Raises:
        ConfigError: no config, a quantised model, or an attention implementation that the architecture lacks.
    """
    config = read_config(path, trust_remote_code)
    asked = "sdpa" if kernel == attention.NAME else kernel
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=asked, trust_remote_code=trust_remote_code
            )
    except (ValueError, ImportError) as error:
        reason = str(error).split(". ")[0]
        raise ConfigError(f"model.attn_implementation={asked} cannot be used (try eager): {reason}.") from error
    if kernel == attention.NAME:
        model.set_attn_implementation(kernel)
    model.name_or_path = str(path)
    model.requires_grad_(False)
    return model.eval()


def blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder blocks, in order.

    Raises:
        ConfigError: the architecture does not name them.
    """
    found = named_blocks(model)
    if not found:
        raise ConfigError(f"{type(model).__name__} does not say which of its modules are blocks, so it cannot be sharded.")
    return found


def named_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder blocks, in order; none where the architecture does not name them."""
    names = set(model._no_split_modules or [])
    return [module for module in model.modules() if names & {cls.__name__ for cls in type(module).__mro__}]


def recompute_activations(model: PreTrainedModel) -> None:
    """Let every block run again in the backward pass instead of keeping its activations.

    The block's own ``forward`` is wrapped, so that FSDP's hooks stay outside: they gather the block once for both.
    """
    for block in blocks(model):
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, context_fn=attention.recomputed
        )


def shard(root: nn.Module, model: PreTrainedModel, mesh: DeviceMesh, dtype: torch.dtype, *, trainable: bool) -> None:
    """Apply FSDP2 to every block and to ``root``, which holds the model; ``dtype`` to compute in, gradients add in float32.

    On a single rank, copies of ``trainable`` weights in a narrower ``dtype`` stay from the forward to the backward pass: they
    are an eighth of what weights, gradients and moments take, and casting all weights again costs time. A frozen base would
    double.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    alone = mesh.size() == 1
    keeps_copies = alone and trainable and dtype != torch.float32
    for module in (*blocks(model), root):
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=not keeps_copies)
        if not alone:
            # Sums travel, nothing is averaged; not every backend can scale inside a reduction.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)


def materialise(model: PreTrainedModel, device: torch.device) -> None:
    """Allocate this rank's shards, and fill the buffers that no checkpoint holds (rotary frequencies) as transformers does.

    Tied parameters stay one parameter (``to_empty`` would part them). Buffers are marked first, so that one which nothing fills
    is found instead of being whatever the memory held.

    Raises:
        ConfigError: a buffer is in no checkpoint and nothing computes it.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in made:
                made[id(parameter)] = _allocate(parameter, device)
                made[id(parameter)]._is_hf_initialized = True  # type: ignore[attr-defined]
            module.register_parameter(name, made[id(parameter)])
        for name, buffer in dict(module.named_buffers(recurse=False)).items():
            module._buffers[name] = _marked(buffer, device)
    with torch.random.fork_rng(devices=[]):
        model.initialize_weights()
    for name, buffer in model.named_non_persistent_buffers():
        if buffer.numel() and _is_marked(buffer):
            raise ConfigError(f"{type(model).__name__} has a buffer {name} that no checkpoint holds and nothing computes.")


def _marked(buffer: Tensor, device: torch.device) -> Tensor:
    """A buffer like ``buffer`` that shows where it is not filled: with NaN, the largest integer, a byte that no bool has."""
    if buffer.dtype.is_floating_point or buffer.dtype.is_complex:
        return torch.full_like(buffer, float("nan"), device=device)
    if buffer.dtype == torch.bool:
        return torch.full_like(buffer, _NO_BOOL, dtype=torch.uint8, device=device).view(torch.bool)
    return torch.full_like(buffer, torch.iinfo(buffer.dtype).max, device=device)


_NO_BOOL = 255


def _is_marked(buffer: Tensor) -> bool:
    if buffer.dtype.is_floating_point or buffer.dtype.is_complex:
        return bool(buffer.isnan().any())
    if buffer.dtype == torch.bool:
        return bool((buffer.view(torch.uint8) == _NO_BOOL).any())
    return bool((buffer == torch.iinfo(buffer.dtype).max).any())


def _allocate(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        return nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
    part = torch.empty_like(parameter.to_local(), device=device)
    whole = DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(whole, requires_grad=False)

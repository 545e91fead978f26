"""What runs inside vLLM's worker processes: load weights, and read back what is served.

The class is mixed into vLLM's worker by ``worker_extension_cls`` and called through ``collective_rpc``; its methods are
prefixed, because a name that the worker already has is refused. Nothing here knows the asyncio side
(`workers.engines.vllm.engine`).

On a CPU vLLM normally keeps linear weights only in a packed form private to its kernels: they can be neither loaded into nor
read back, and a tied output head silently goes stale. `serve_plain_weights` keeps every weight the plain parameter that it is
on a GPU, so that one path loads and verifies both.
"""

from __future__ import annotations

from collections.abc import Iterator
from mmap import mmap
from typing import Any

import torch
import vllm.model_executor.layers.utils as layer_utils
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.platforms import current_platform

from rlframe.checksum import bit_sum, weights_checksum
from workers.engines.owner import end_with_owner
from workers.engines.vllm.weight_memory import mapped
from workers.engines.weights import DTYPES

ADAPTER_ID = 1
"""The one adapter slot: requests in flight keep their id, so they continue under the weights that replace it."""

TensorSpec = tuple[str, list[int]]
"""Name and shape of one tensor in a blob."""


def serve_plain_weights() -> None:
    """Multiply by the parameter itself in every linear layer and output head of this (CPU) process.

    vLLM decides it in one function that neither an argument nor an environment variable reaches, and packs (and then empties)
    the weights while it loads the model, before anything of ours is called: so that function is replaced, in this process
    alone.
    """
    packing = layer_utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.is_meta or layer.weight.ndim != 2:
            packing(layer, remove_weight)
        else:
            layer.cpu_linear = torch.nn.functional.linear

    layer_utils.dispatch_cpu_unquantized_gemm = dispatch


if current_platform.is_cpu():
    serve_plain_weights()
end_with_owner()


def tensors_in(buffer: bytearray | mmap, specs: list[TensorSpec], dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors of one dtype that lie one after another in ``buffer``, as views of it."""
    torch_dtype, offset = DTYPES[dtype], 0
    flat = torch.frombuffer(buffer, dtype=torch_dtype)
    for name, shape in specs:
        size = torch.Size(shape).numel()
        yield name, flat[offset : offset + size].view(shape)
        offset += size


def adaptable_modules(adapters: Any) -> set[str]:
    """Names, as in the checkpoint, of the modules that vLLM's adapter manager has a layer for; fused ones by their parts."""
    names: set[str] = set()
    for name in adapters.modules:
        parent, _, leaf = name.rpartition(".")
        names.update(f"{parent}.{part}" for part in adapters.packed_modules_mapping.get(leaf, [leaf]))
    return names


def adapter_slot(adapters: Any) -> Iterator[Tensor]:
    """The factors that the layers multiply by, as they lie in memory now; unused rows of a slot are zero."""
    slot = adapters.lora_index_to_id.index(ADAPTER_ID)
    for module in adapters.modules.values():
        yield from (stack[slot] for stack in (*module.lora_a_stacked, *module.lora_b_stacked))


class WeightExtension:
    """Mixed into vLLM's worker; `model_runner` is the worker's own."""

    model_runner: Any

    def rlframe_load(self, memory: str, specs: list[TensorSpec], dtype: str, last: bool) -> tuple[list[str], dict[str, str]]:
        """Copy tensors with Hugging Face names from the rollout worker's `WeightMemory` into the model.

        Returns:
            The engine's names of the parameters written and, with ``last``, the sum of bit patterns (hex) of every parameter
            of the model as it then lies in memory.

        Raises:
            ValueError: the engine computes in another dtype (copying would round, and no checksum would agree).
        """
        if self.model_runner.model_config.dtype != DTYPES[dtype]:
            raise ValueError(f"The engine serves {self.model_runner.model_config.dtype}, the weight update is {dtype}.")
        model = self.model_runner.get_model()
        written = sorted(model.load_weights(tensors_in(mapped(memory), specs, dtype)))
        return written, self.rlframe_sums() if last else {}

    def rlframe_sums(self) -> dict[str, str]:
        """The sum of bit patterns (hex) of every parameter of the model as it now lies in memory."""
        return {name: f"{bit_sum(p):x}" for name, p in self.model_runner.get_model().named_parameters()}

    def rlframe_parameters(self) -> list[str]:
        """The engine's names of all parameters, tied ones once."""
        return sorted(name for name, _ in self.model_runner.get_model().named_parameters())

    def rlframe_load_adapter(self, blob: bytes, specs: list[TensorSpec], dtype: str, config: dict[str, Any]) -> str:
        """Replace the served adapter, and return the checksum of its tensors.

        Raises:
            ValueError: the adapter has tensors for no module of the model.
            RuntimeError: what the layers hold afterwards is not what was sent.
        """
        manager = self.model_runner.lora_manager
        adapters = manager._adapter_manager
        tensors = dict(tensors_in(bytearray(blob), specs, dtype))
        checksum = weights_checksum(tensors.values())
        lora = LoRAModel.from_lora_tensors(
            ADAPTER_ID, tensors, PEFTHelper.from_dict(config), device="cpu", dtype=manager.lora_config.lora_dtype
        )
        if unknown := sorted(lora.loras.keys() - adaptable_modules(adapters)):
            raise ValueError(f"The adapter has tensors for modules that the engine cannot adapt: {unknown[:3]}.")
        # vLLM folds the scaling into B, in place, when an adapter is added.
        placed = weights_checksum(t for w in lora.loras.values() for t in (w.lora_a, w.lora_b * w.scaling))
        adapters.remove_adapter(ADAPTER_ID)
        adapters.add_adapter(lora)
        adapters.activate_adapter(ADAPTER_ID)
        sharded = self.model_runner.vllm_config.parallel_config.tensor_parallel_size > 1
        if not sharded and weights_checksum(adapter_slot(adapters)) != placed:
            raise RuntimeError("The engine's layers do not hold the adapter that was sent.")
        return checksum

"""Full weights from the learner's first rank straight to the GPUs of vLLM engines, by vLLM's own weight transfer over NCCL.

A communicator lives for one transfer: rollout workers come and go, and the next one is made of those that are there. Both
ends are here. It needs GPUs on both sides, which `trainer.settings.checks` asks for before anything starts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from workers.settings import Config

if TYPE_CHECKING:
    from workers.engines.protocol import WeightUpdate


@dataclass(frozen=True)
class Stream:
    """Where the tensors of a weight update come from when they do not travel with it."""

    address: str
    """Host of the learner's first rank."""
    port: int
    """Port of the rendezvous there."""
    names: list[str]
    """Hugging Face parameter names, in the order in which they are sent."""
    shapes: list[list[int]]
    """Of each."""
    first_rank: int = 1
    """Rank of the engine's first GPU in the communicator; the learner is rank 0."""
    ranks: int = 2
    """The learner and all GPUs of all engines."""


def streams(config: Config) -> bool:
    """Whether weights go over NCCL."""
    return config.rollout.weight_channel == "nccl"


def announce(update: WeightUpdate, address: str) -> tuple[WeightUpdate, dict[str, Tensor]]:
    """``update`` without its tensors, which will be sent from ``address`` (tcp://host:port), and the tensors."""
    where = urlsplit(address)
    dtype = getattr(torch, update.dtype)
    tensors = {name: torch.from_numpy(array).view(dtype) for name, array in update.tensors.items()}
    shapes = [list(tensor.shape) for tensor in tensors.values()]
    stream = Stream(str(where.hostname), int(where.port or 0), list(tensors), shapes)
    return replace(update, tensors={}, stream=stream), tensors


def send(tensors: dict[str, Tensor], stream: Stream, ranks: int) -> None:
    """Broadcast ``tensors`` to the engines that wait at ``stream``; returns when all have them.

    Args:
        tensors: of the update, in the order of ``stream.names``, in host or device memory.
        stream: as announced to the engines.
        ranks: the learner and all GPUs of all engines that take part.
    """
    from vllm.distributed.weight_transfer.nccl_common import trainer_init
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    where = {"master_address": stream.address, "master_port": stream.port, "world_size": ranks}
    communicator = trainer_init(where)
    device = torch.device("cuda", torch.accelerator.current_device_index())
    try:
        packed_nccl_broadcast_producer(
            iterator=iter(tensors.items()), group=communicator, src=0, post_iter_func=lambda item: item[1].to(device)
        )
        torch.accelerator.synchronize()
    finally:
        communicator.destroy()


async def receive(llm: Any, stream: Stream, dtype: str) -> None:
    """Have the (paused) engine ``llm``, an ``AsyncLLM``, load what `send` sends."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

    init = {
        "master_address": stream.address,
        "master_port": stream.port,
        "rank_offset": stream.first_rank,
        "world_size": stream.ranks,
        "packed": True,
    }
    names = {"names": stream.names, "dtype_names": [dtype] * len(stream.names), "shapes": stream.shapes}
    await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init))
    try:
        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info=names))
        await llm.finish_weight_update()
    finally:
        await llm.shutdown_weight_transfer_engine()

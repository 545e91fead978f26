"""Full weights from the learner's first rank straight to the GPUs of vLLM engines, by vLLM's own weight transfer over NCCL.

A communicator lives for one transfer: rollout workers come and go, so each transfer uses those that are up. Both
ends are here. It needs GPUs on both sides, which `workers.engines.checks` asks for before anything starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workers.engines.protocol import Stream


def send(tensors: Mapping[str, Tensor], stream: Stream, ranks: int) -> None:
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

"""Weights over NCCL, as far as a machine without GPUs can tell: what is announced, and that vLLM understands the requests."""

import asyncio

import numpy as np
import pytest
import torch

from workers.engines.protocol import WeightUpdate
from workers.engines.vllm.nccl import receive
from workers.engines.weights import announce

ARRAYS = {"embed": np.arange(6, dtype=np.uint16).reshape(2, 3), "head": np.ones((4,), np.uint16)}


def test_an_announced_update_says_what_will_come_and_keeps_the_bits():
    update, tensors = announce(WeightUpdate(7, "full", ARRAYS, "bfloat16"), "tcp://10.0.0.1:4711")
    assert update.tensors == {} and (update.version, update.dtype) == (7, "bfloat16")
    assert (update.stream.address, update.stream.port) == ("10.0.0.1", 4711)
    assert (update.stream.names, update.stream.shapes) == (["embed", "head"], [[2, 3], [4]])
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.bfloat16 and (tensor.view(torch.uint16).numpy() == ARRAYS[name]).all()


@pytest.mark.slow
def test_the_requests_are_those_that_vllm_reads():
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo
    from vllm.v1.engine.async_llm import AsyncLLM

    calls = []

    class Recorded:
        """Takes what `AsyncLLM` takes, and nothing else."""

        def __getattr__(self, name):
            assert asyncio.iscoroutinefunction(getattr(AsyncLLM, name))

            async def call(*requests):
                calls.append((name, *requests))

            return call

    update, _ = announce(WeightUpdate(7, "full", ARRAYS, "bfloat16"), "tcp://10.0.0.1:4711")
    asyncio.run(receive(Recorded(), update.stream, update.dtype))
    assert [name for name, *_ in calls] == [
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "shutdown_weight_transfer_engine",
    ]
    init = NCCLWeightTransferInitInfo(**calls[0][1].init_info)
    assert (init.master_port, init.rank_offset, init.world_size, init.packed) == (4711, 1, 2, True)
    info = NCCLWeightTransferUpdateInfo(**calls[2][1].update_info)
    assert info.dtype_names == ["bfloat16", "bfloat16"] and info.shapes == [[2, 3], [4]]

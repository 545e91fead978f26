"""The SGLang server that a rollout worker owns: started, watched and ended here.

The client is `workers.engines.sglang.engine`; the process runs `workers.engines.sglang.server`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from transformers import PretrainedConfig

from workers.engines.owner import OWNER_VARIABLE
from workers.engines.sglang.wire import server_flags

HOST = "127.0.0.1"
SPARE_TOKENS = 8
"""SGLang holds back a few tokens of its context and cuts a request that would need them, without an error."""
CPU_CACHE_BYTES = 2**30
"""Key-value cache of an engine on a CPU, where SGLang would otherwise take most of the memory."""
CPU_ARGUMENTS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "lora_backend": "torch_native",
    "disable_overlap_schedule": True,
}
"""What runs without SGLang's own CPU kernels."""


class ServerProcess:
    """`workers.engines.sglang.server` and its children, in a process group of their own.

    Args:
        arguments: names of SGLang's ``ServerArgs`` to values, without the address.
        threads: CPU threads of each of its processes.
        on_cpu: serve on the CPU.
    """

    def __init__(self, arguments: dict[str, Any], *, threads: int, on_cpu: bool) -> None:
        port = free_port()
        self.url = f"http://{HOST}:{port}"
        flags = server_flags({"host": HOST, "port": port, **arguments})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "workers.engines.sglang.server", *flags],
            env=environment(on_cpu, threads) | {OWNER_VARIABLE: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Process id of the server, which is its group's, too."""
        return self._process.pid

    def ended(self) -> bool:
        """Whether the server is gone."""
        return self._process.poll() is not None

    def stop(self) -> None:
        """End the whole group at once; the server has nothing to save."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def environment(on_cpu: bool, threads: int) -> dict[str, str]:
    """The server's environment variables; one that the user has set keeps its value."""
    defaults = {
        "HF_HUB_OFFLINE": "1",
        # For `SPARE_TOKENS`: the context may be longer than the positions that the model's config names.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if on_cpu:
        defaults |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(threads), "TORCHDYNAMO_DISABLE": "1"}
    return defaults | dict(os.environ)


def cpu_arguments(config: PretrainedConfig, itemsize: int, max_model_len: int) -> dict[str, Any]:
    """SGLang's arguments for a CPU: `CPU_ARGUMENTS` and room for `CPU_CACHE_BYTES` of keys and values, or for one request."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * heads * width * itemsize
    tokens = max(CPU_CACHE_BYTES // token_bytes, 2 * (max_model_len + SPARE_TOKENS))
    return CPU_ARGUMENTS | {"max_total_tokens": int(tokens)}


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]

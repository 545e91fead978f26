"""The parent's side of a reward process: starting, messaging and ending one. See `workers.rewards.pool` for the calls.

Both sides write frames to a socket pair: the number of the call (8 bytes), the length of what follows (4 bytes), JSON. An
answer carries the number of its call, so that nothing else that arrives on the socket is taken for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.environments.settings import TaskConfig

ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""Reward processes order sets and hash strings the same way in every process and run."""
CHILD = Path(__file__).with_name("child.py")
GRACE_S = 10.0
"""An orphan ends this long after the time limit of its import or its last call, even if that never returns."""
HEADER = struct.Struct(">QI")
"""Number of the call (0: the answer to being started), bytes of JSON."""
MAX_MB = 64
"""Largest request and largest answer."""
EXIT_S = 5.0
"""How long a process that has closed its socket may take to say how it ended."""


class RewardFailed(Exception):
    """One call gave no number; the message completes "... failed: "."""


@dataclass
class Child:
    """One process and the socket to it."""

    task: TaskConfig
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    calls: int = 0
    """Calls sent so far."""

    def ready(self) -> bool:
        """Whether it still runs and listens."""
        return self.process.poll() is None and not self.reader.at_eof()

    async def ask(self, request: bytes) -> dict[str, Any]:
        """One call; after a failure the process cannot be asked again.

        Raises:
            RewardFailed: it ended, or what it answered is not the answer to this call.
        """
        self.calls += 1
        with contextlib.suppress(OSError):  # then there is no answer to be read either
            self.writer.write(HEADER.pack(self.calls, len(request)) + request)
            await self.writer.drain()
        return await self.reply()

    async def reply(self) -> dict[str, Any]:
        """The answer to the last call, or to being started."""
        try:
            length = length_of(await self.reader.readexactly(HEADER.size), self.calls)
            return parse(await self.reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self.process.wait, EXIT_S)
            raise RewardFailed(exit_reason(self.process, self.task)) from None

    def kill(self) -> None:
        """End the process and all that it started."""
        self.writer.close()
        end(self.process)


def spawn(task: TaskConfig, reward: str, quiet: bool = False) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process; its own session, so that a Ctrl-C for the run does not reach it and its children die with it.

    Args:
        task: limits of time and memory.
        reward: ``module:function``.
        quiet: throw away what it prints.
    """
    ours, theirs = socket.socketpair()
    arguments = {
        "fd": theirs.fileno(),
        "reward": reward,
        "path": [os.path.abspath(entry) for entry in sys.path],
        "memory_mb": task.reward_memory_mb,
        "startup_s": task.reward_startup_timeout_s + GRACE_S,
        "alarm_s": task.reward_timeout_s + GRACE_S,
    }
    output = subprocess.DEVNULL if quiet else None
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-u", str(CHILD), json.dumps(arguments)],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        raise
    return process, ours


def read_handshake(connection: socket.socket, limit_s: float) -> dict[str, Any]:
    """The answer to being started, outside of an event loop.

    Raises:
        TimeoutError: it did not come in time.
        EOFError: the process closed the socket.
        RewardFailed: the message is not an answer.
    """
    deadline = time.monotonic() + limit_s

    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                more = connection.recv(count - len(data))
            except ConnectionError:
                more = b""
            if not more:
                raise EOFError
            data += more
        return data

    return parse(exactly(length_of(exactly(HEADER.size), 0)))


def length_of(header: bytes, call: int) -> int:
    """Bytes of the answer to ``call`` that ``header`` announces.

    Raises:
        RewardFailed: the header is invalid.
    """
    number, length = HEADER.unpack(header)
    if number != call:
        raise RewardFailed("its process sent something other than the answer to this call")
    if length > MAX_MB * 2**20:
        raise RewardFailed(f"its process answered with more than {MAX_MB} MiB")
    return int(length)


def parse(data: bytes) -> dict[str, Any]:
    """The JSON object of an answer.

    Raises:
        RewardFailed: it is not one.
    """
    try:
        message = json.loads(data.decode())
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise RewardFailed("what its process answered is not a JSON object")
    return message


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def exit_reason(process: subprocess.Popen[bytes], task: TaskConfig) -> str:
    """Why a process has stopped answering, in words."""
    code = process.poll()
    if code is None:
        return "it closed the connection of its process"
    memory = f"; task.reward_memory_mb={task.reward_memory_mb} may be too low" if task.reward_memory_mb else ""
    named = {-int(number): number.name for number in signal.Signals}
    how = f"exit code {code}" if code >= 0 else f"signal {named.get(code, -code)}"
    return f"it ended its process ({how}{memory})"

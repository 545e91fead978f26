"""Reward functions of the user, each call in a process that can be killed: a hang, a crash or a leak costs one rollout.

`RewardPool` keeps a few processes (`workers.reward_child`) and speaks JSON with them over socket pairs. What a failure means
for the run (``task.on_reward_failure``) is decided by the environment, not here.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlframe.config import ConfigError, TaskConfig

BUILT_IN = {"math": ("workers.math_reward:math_reward", "math-verify", "math")}
"""Name of a reward of ours -> where it is, the package that it needs, the extra that installs it."""
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""Reward processes order sets and hash strings the same way in every process and run."""
CHILD = Path(__file__).with_name("reward_child.py")
STARTUP_S = 60.0
"""Longest time that importing the user's module may take."""
GRACE_S = 10.0
"""An orphan ends this long after the time limit of its last call, even if the call never returns."""
MAX_REPLY = 2**20


class RewardFailed(Exception):
    """One call gave no number; the message completes "... failed: "."""


@dataclass
class Score:
    """What a reward function returned."""

    value: float
    extras: dict[str, float] = field(default_factory=dict)
    """The other numbers of a returned dict."""


def check_reward(task: TaskConfig) -> bool:
    """Import the reward function in a process of its own, as the pool will; returns whether it is called as verl does.

    Raises:
        ConfigError: it cannot be imported or called; one sentence that says what is missing.
    """
    if task.reward in BUILT_IN:
        _, package, extra = BUILT_IN[task.reward]
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            raise ConfigError(f"task.reward={task.reward} needs the package {package}: pip install 'rlframe[{extra}]'.")
    elif ":" not in (task.reward or ""):
        raise ConfigError(
            f"task.reward={task.reward} is not module:function, such as task.reward=my_module:reward_fn, "
            f"nor a reward of ours ({', '.join(BUILT_IN)})."
        )
    process, connection = _spawn(task, quiet=True)
    try:
        connection.settimeout(STARTUP_S)
        with connection, connection.makefile("r", encoding="utf-8") as stream:
            line = stream.readline()
    except TimeoutError:
        raise ConfigError(f"task.reward={task.reward}: importing it took longer than {STARTUP_S:.0f} s.") from None
    finally:
        _kill(process)
        process.wait()
    if not line:
        raise ConfigError(f"task.reward={task.reward}: importing it ended the process ({_cause(process, task)}).")
    reply = json.loads(line)
    if "error" in reply:
        raise ConfigError(reply["error"])
    return bool(reply["verl"])


class RewardPool:
    """Runs ``task.reward`` in at most ``task.reward_workers`` processes, which are started when they are first needed."""

    def __init__(self, task: TaskConfig) -> None:
        self.task = task
        self._places = asyncio.Semaphore(task.reward_workers)
        self._idle: list[_Child] = []

    async def score(self, response: str, row: dict[str, Any]) -> Score:
        """The reward of one response.

        A call that is cancelled, hangs or crashes ends its process; the next call gets a new one.

        Raises:
            RewardFailed: no number within ``task.reward_timeout_s``.
        """
        request = json.dumps({"response": response, "row": row}, default=str)
        async with self._places:
            child = self._idle.pop() if self._idle else await self._start()
            try:
                async with asyncio.timeout(self.task.reward_timeout_s):
                    reply = await child.ask(request)
            except TimeoutError:
                child.kill()
                raise RewardFailed(f"it took longer than task.reward_timeout_s={self.task.reward_timeout_s:g}") from None
            except BaseException:
                child.kill()
                raise
            if reply.get("end"):
                child.kill()
            else:
                self._idle.append(child)
        if "error" in reply:
            raise RewardFailed(reply["error"])
        return Score(reply["score"], reply["extras"])

    async def _start(self) -> _Child:
        process, connection = _spawn(self.task)
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=MAX_REPLY)
        child = _Child(self.task, process, reader, writer)
        try:
            async with asyncio.timeout(STARTUP_S):
                reply = await child.reply()
            if "error" in reply:
                raise RewardFailed(reply["error"])
        except TimeoutError:
            child.kill()
            raise RewardFailed(f"importing it took longer than {STARTUP_S:.0f} s") from None
        except BaseException:
            child.kill()
            raise
        return child

    def close(self) -> None:
        """End the processes that run no call; a call that is cancelled ends its own."""
        while self._idle:
            self._idle.pop().kill()


@dataclass
class _Child:
    """One process and the socket to it."""

    task: TaskConfig
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, request: str) -> dict[str, Any]:
        """One call."""
        self.writer.write(request.encode() + b"\n")
        return await self.reply()

    async def reply(self) -> dict[str, Any]:
        """The next line."""
        try:
            await self.writer.drain()
            line = await self.reader.readline()
        except ConnectionError:
            line = b""
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self.process.wait, 5)
            raise RewardFailed(f"it ended its process ({_cause(self.process, self.task)})")
        return json.loads(line)

    def kill(self) -> None:
        """End the process and all that it started."""
        self.writer.close()
        _kill(self.process)
        self.process.wait()


def _spawn(task: TaskConfig, quiet: bool = False) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process; its own session, so that a Ctrl-C for the run does not reach it and its children die with it."""
    ours, theirs = socket.socketpair()
    arguments = {
        "fd": theirs.fileno(),
        "reward": BUILT_IN[task.reward][0] if task.reward in BUILT_IN else task.reward,
        "path": [os.path.abspath(entry) for entry in sys.path],
        "memory_mb": task.reward_memory_mb,
        "alarm_s": task.reward_timeout_s + GRACE_S,
    }
    output = subprocess.DEVNULL if quiet else None
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", str(CHILD), json.dumps(arguments)],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return process, ours


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _cause(process: subprocess.Popen[bytes], task: TaskConfig) -> str:
    """How a process ended, in words."""
    code = process.poll()
    memory = f"; task.reward_memory_mb={task.reward_memory_mb} may be too low" if task.reward_memory_mb else ""
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}{memory}"
    return f"exit code {code}{memory}"

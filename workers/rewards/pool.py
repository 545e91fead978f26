"""Reward functions of the user, each call in a process that can be killed: a hang, a crash or a leak costs one rollout.

`RewardPool` keeps a few processes (`workers.rewards.process`) and sends them calls. Any failure of a call is
`RewardFailed`; the environment decides what that means for the run (``task.on_reward_failure``).
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np

from rlframe.config import ConfigError
from workers.environments.settings import TaskConfig
from workers.rewards.process import MAX_MB, Child, RewardFailed, end, exit_reason, read_handshake, spawn

BUILT_IN = {"math": ("workers.rewards.math_reward:math_reward", "math-verify", "math")}
"""Name of a built-in reward -> its location, the package that it needs, the extra that installs it."""
MAX_EXTRAS = 32
"""Most numbers that are kept in addition to a score."""
MAX_NAME = 64
"""Characters of their names that are kept."""


@dataclass
class Score:
    """What a reward function returned."""

    value: float
    """Finite, also as float32."""
    extras: dict[str, float] = field(default_factory=dict)
    """The other finite numbers of a returned dict, the first `MAX_EXTRAS` of them."""


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
    process, connection = spawn(task, _function(task), quiet=True)
    try:
        with connection:
            reply = read_handshake(connection, task.reward_startup_timeout_s)
    except TimeoutError:
        raise ConfigError(f"task.reward={task.reward}: {_slow_import(task)}.") from None
    except EOFError:
        end(process)
        raise ConfigError(f"task.reward={task.reward}: importing it failed: {exit_reason(process, task)}.") from None
    except RewardFailed as error:
        raise ConfigError(f"task.reward={task.reward}: importing it failed: {error}.") from None
    finally:
        end(process)
    if "error" in reply:
        raise ConfigError(_printable(str(reply["error"])))
    return bool(reply.get("verl"))


class RewardPool:
    """Runs ``task.reward`` in at most ``task.reward_workers`` processes, which are started when they are first needed."""

    def __init__(self, task: TaskConfig) -> None:
        self.task = task
        self._places = asyncio.Semaphore(task.reward_workers)
        self._idle: list[Child] = []

    async def score(self, response: str, row: dict[str, Any]) -> Score:
        """The reward of one response.

        A call that is cancelled, hangs, crashes or sends garbage ends its process; the next call gets a new one.

        Args:
            response: what the policy wrote.
            row: further arguments of the function; values that JSON has no type for arrive as text.

        Raises:
            RewardFailed: no number within ``task.reward_timeout_s``, for whatever reason.
        """
        try:
            request = write_request(response, row)
            async with self._places:
                reply = await self._call(request)
            return read_score(reply)
        except RewardFailed:
            raise
        except Exception as error:  # no process or socket left on this machine, for one
            raise RewardFailed(_printable(f"{type(error).__name__}: {error}")) from error

    async def _call(self, request: bytes) -> dict[str, Any]:
        child = await self._take()
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
        return reply

    async def _take(self) -> Child:
        """A process that is ready; one that has ended since its last call costs the next call nothing."""
        while self._idle:
            child = self._idle.pop()
            if child.ready():
                return child
            child.kill()
        return await self._start()

    async def _start(self) -> Child:
        process, connection = spawn(self.task, _function(self.task))
        try:
            reader, writer = await asyncio.open_unix_connection(sock=connection)
        except BaseException:
            connection.close()
            end(process)
            raise
        child = Child(self.task, process, reader, writer)
        try:
            async with asyncio.timeout(self.task.reward_startup_timeout_s):
                reply = await child.reply()
            if "error" in reply:
                raise RewardFailed(_printable(str(reply["error"])).removesuffix("."))
        except TimeoutError:
            child.kill()
            raise RewardFailed(_slow_import(self.task)) from None
        except BaseException:
            child.kill()
            raise
        return child

    def close(self) -> None:
        """End the processes that run no call; a call that is cancelled ends its own."""
        while self._idle:
            self._idle.pop().kill()


def write_request(response: str, row: dict[str, Any]) -> bytes:
    """A call as JSON.

    Raises:
        RewardFailed: JSON cannot hold the row, or it is too large.
    """
    try:
        request = json.dumps({"response": response, "row": row}, default=str).encode()
    except Exception as error:  # too deep, circular, keys of another type, an integer of 5000 digits, a __str__ that raises
        raise RewardFailed(_printable(f"its row cannot be written as JSON ({type(error).__name__}: {error})")) from None
    if len(request) > MAX_MB * 2**20:
        raise RewardFailed(f"response and row take {len(request) / 2**20:.0f} MiB as JSON, more than {MAX_MB}")
    return request


def read_score(reply: dict[str, Any]) -> Score:
    """The score in an answer.

    Raises:
        RewardFailed: there is none that a trajectory can hold (float32, finite); or the answer is a reason for that.
    """
    if "error" in reply:
        raise RewardFailed(_printable(str(reply["error"])))
    value, extras = reply.get("score"), reply.get("extras")
    if not _is_number(value) or not isinstance(extras, dict):
        raise RewardFailed("what its process answered is not a score")
    with np.errstate(over="ignore"):
        held = float(np.float32(value))
    if not math.isfinite(value):
        raise RewardFailed(f"it returned {value}, which is not a finite number")
    if not math.isfinite(held):
        raise RewardFailed(f"it returned {value:g}, which is not finite as float32")
    kept = ((_printable(name)[:MAX_NAME], float(x)) for name, x in extras.items() if _is_number(x) and math.isfinite(x))
    return Score(float(value), dict(list(kept)[:MAX_EXTRAS]))


def _is_number(value: Any) -> TypeGuard[float]:
    """Whether ``value`` is one in JSON, and fits a float."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**1023)


def _printable(text: str) -> str:
    """``text`` on one line and without what no file or terminal takes, such as half of a surrogate pair."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _slow_import(task: TaskConfig) -> str:
    return f"importing it took longer than task.reward_startup_timeout_s={task.reward_startup_timeout_s:g}"


def _function(task: TaskConfig) -> str:
    return BUILT_IN[task.reward][0] if task.reward in BUILT_IN else str(task.reward)

"""The process that runs a user's reward function, started by `workers.rewards.pool` as a script of its own.

Standard library only, so that it starts in milliseconds. It reads calls from a socket and answers each: first whether the
function can be used, then what it returned. The parent (`workers.rewards.process`) handles frames,
time limits, restarts and policy, and decides what counts as a reward.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import math
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

HEADER = struct.Struct(">QI")
"""As the parent's: number of the call, bytes of JSON."""
MAX_TEXT = 1000
"""Characters of a reason."""
VERL = "solution_str"
"""A function with a parameter of this name is called as verl calls ``compute_score``."""


class Refused(Exception):
    """The function cannot be used; the message is one sentence."""


def load(path: str) -> Callable[..., Any]:
    """The function ``module:function``.

    Raises:
        Refused: the module or function does not exist, the import fails, or the parameters do not fit.
    """
    name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise Refused(
                f"task.reward={path}: there is no module {error.name}, neither in the current directory nor installed."
            ) from None
        raise Refused(f"task.reward={path}: importing {name} failed: {describe(error)}.") from None
    except BaseException as error:
        raise Refused(f"task.reward={path}: importing {name} failed: {describe(error)}.") from None
    function = getattr(module, attribute, None)
    where = getattr(module, "__file__", None) or name
    if function is None:
        near = difflib.get_close_matches(attribute, [n for n in vars(module) if not n.startswith("_")], n=1, cutoff=0.0)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise Refused(f"task.reward={path}: {where} has no {attribute}{hint}")
    if not callable(function):
        raise Refused(f"task.reward={path}: {attribute} in {where} is not a function.")
    check_parameters(function, path)
    return function


def check_parameters(function: Callable[..., Any], path: str) -> None:
    """Refuse a function that can be called in neither way."""
    try:
        signature = inspect.signature(function)
        bind = signature.bind if VERL not in signature.parameters else None
        if bind:
            bind("response", {})
        else:
            signature.bind(**verl_arguments(signature, "response", {}))
    except (TypeError, ValueError):
        takes = str(signature) if "signature" in locals() else "unknown parameters"
        raise Refused(
            f"task.reward={path} takes {takes}, but a reward function is called as f(response, row), or as "
            "f(data_source=, solution_str=, ground_truth=, extra_info=) if it has a parameter solution_str."
        ) from None


def verl_arguments(signature: inspect.Signature, response: str, row: dict[str, Any]) -> dict[str, Any]:
    """The arguments that verl would pass, as far as the function takes them."""
    given = {
        "data_source": row.get("data_source"),
        VERL: response,
        "ground_truth": (row.get("reward_model") or {}).get("ground_truth"),
        "extra_info": row.get("extra_info"),
    }
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    return {name: value for name, value in given.items() if takes_all or name in signature.parameters}


def describe(error: BaseException) -> str:
    """Type, message and the line of the user's code, on one line."""
    try:
        message = " ".join(str(error).split())
    except BaseException:  # __str__ is the user's code
        message = "(its message cannot be shown)"
    message = message if len(message) <= MAX_TEXT else message[:MAX_TEXT] + "..."
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames and frames[-1].filename != __file__ else ""
    return f"{type(error).__name__}: {message}{place}"


def answer_for(value: Any) -> dict[str, Any]:
    """The answer for what the function returned: ``score`` with the other numbers of a dict, or ``error``."""
    extras: dict[str, float] = {}
    if isinstance(value, dict):
        if "score" not in value:
            keys = ", ".join(map(str, value)) or "none"
            return {"error": f"it returned a dict without 'score' (keys: {keys:.200})"}
        numbers = ((key, number(other)) for key, other in value.items() if key != "score")
        extras = {str(key)[:MAX_TEXT]: other for key, other in numbers if other is not None}
        value = value["score"]
    score = number(value)
    if score is None:
        return {"error": f"it returned {type(value).__name__} {value!r:.60}, which is not a number"}
    return {"score": score, "extras": extras}


def number(value: Any) -> float | None:
    """A number of any type (a bool, numpy's, torch's, a fraction) as a float, infinite where it is too large; else None."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None


class Caller:
    """Calls the function; coroutines run on one event loop, so that resources kept open between calls stay usable."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        signature = inspect.signature(function)
        self.signature = signature if VERL in signature.parameters else None
        self.runner: Any = None

    def __call__(self, request: bytes) -> dict[str, Any]:
        """The answer for one call, whatever the function does."""
        try:
            given = json.loads(request)
            return answer_for(self.result(given["response"], given["row"]))
        except MemoryError:
            return {"error": "it ran out of memory (task.reward_memory_mb)", "end": True}
        except BaseException as error:
            return {"error": f"it raised {describe(error)}"}

    def result(self, response: str, row: dict[str, Any]) -> Any:
        """What the function returns."""
        if self.signature:
            value = self.function(**verl_arguments(self.signature, response, row))
        else:
            value = self.function(response, row)
        return self.wait(value) if inspect.isawaitable(value) else value

    def wait(self, awaitable: Any) -> Any:
        """Run a coroutine to its end."""
        import asyncio

        async def result() -> Any:
            return await awaitable

        self.runner = self.runner or asyncio.Runner()
        return self.runner.run(result())


def serve(fd: int, reward: str, path: list[str], memory_mb: int | None, startup_s: float, alarm_s: float) -> None:
    """Answer calls until the parent closes the socket.

    An import that takes ``startup_s`` or a call that takes ``alarm_s`` ends the process, parent or no parent.
    """
    own = os.getpid()
    sys.path.extend(entry for entry in path if entry not in sys.path)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends the process, whatever it is doing
    if memory_mb is not None:
        limit = memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)
    os.register_at_fork(after_in_child=connection.close)
    stream = connection.makefile("rb")

    def answer(call: int, message: dict[str, Any]) -> None:
        if os.getpid() != own:  # the user's code has forked, and the copy came back from it, too
            os._exit(0)
        data = json.dumps(message).encode()
        connection.sendall(HEADER.pack(call, len(data)) + data)

    signal.setitimer(signal.ITIMER_REAL, startup_s)
    try:
        caller = Caller(load(reward))
    except Refused as refused:
        answer(0, {"error": str(refused)})
        return
    signal.setitimer(signal.ITIMER_REAL, 0)
    answer(0, {"verl": caller.signature is not None})
    while len(header := stream.read(HEADER.size)) == HEADER.size:
        call, length = HEADER.unpack(header)
        signal.setitimer(signal.ITIMER_REAL, alarm_s)
        reply = caller(stream.read(length))
        signal.setitimer(signal.ITIMER_REAL, 0)
        answer(call, reply)
        if reply.get("end"):
            return


def main() -> None:
    """Serve, then end at once: threads that the user's code has left behind would keep the process."""
    code = 1
    try:
        serve(**json.loads(sys.argv[1]))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()

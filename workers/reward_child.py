"""The process that runs a user's reward function, started by `workers.rewards` as a script of its own.

Standard library only, so that it starts in milliseconds. It reads one JSON object a line from a socket and answers with one:
first whether the function can be used, then a score for every call. Time limits, restarts and policy are the parent's.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import math
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

VERL = "solution_str"
"""A function with a parameter of this name is called as verl calls ``compute_score``."""


class Refused(Exception):
    """The function cannot be used; the message is one sentence."""


def load(path: str) -> Callable[..., Any]:
    """The function ``module:function``.

    Raises:
        Refused: no such module, it fails while it is imported, no such function in it, or parameters of another kind.
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
    """What verl would pass; only what the function takes."""
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
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames and frames[-1].filename != __file__ else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def score_of(value: Any) -> dict[str, Any]:
    """The answer for what the function returned: ``score`` with the other numbers of a dict, or ``error``."""
    extras: dict[str, float] = {}
    if isinstance(value, dict):
        if "score" not in value:
            return {"error": f"it returned a dict without 'score' (keys: {', '.join(map(str, value)) or 'none'})"}
        extras = {str(k): float(v) for k, v in value.items() if k != "score" and isinstance(v, int | float)}
        value = value["score"]
    try:
        if not hasattr(value, "__float__"):
            raise TypeError
        score = float(value)
    except (TypeError, ValueError):
        return {"error": f"it returned {type(value).__name__} {value!r:.60}, which is not a number"}
    if not math.isfinite(score):
        return {"error": f"it returned {score}, which is not a finite number"}
    return {"score": score, "extras": {name: number for name, number in extras.items() if math.isfinite(number)}}


class Caller:
    """Calls the function; coroutines run on one event loop, so that what a user keeps open between calls stays usable."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        signature = inspect.signature(function)
        self.signature = signature if VERL in signature.parameters else None
        self.runner: Any = None

    def __call__(self, response: str, row: dict[str, Any]) -> dict[str, Any]:
        """The answer for one call."""
        try:
            if self.signature:
                value = self.function(**verl_arguments(self.signature, response, row))
            else:
                value = self.function(response, row)
            return score_of(self.wait(value) if inspect.isawaitable(value) else value)
        except MemoryError:
            return {"error": "it ran out of memory (task.reward_memory_mb)", "end": True}
        except BaseException as error:
            return {"error": f"it raised {describe(error)}"}

    def wait(self, awaitable: Any) -> Any:
        """Run a coroutine to its end."""
        import asyncio

        async def result() -> Any:
            return await awaitable

        self.runner = self.runner or asyncio.Runner()
        return self.runner.run(result())


def serve(fd: int, reward: str, path: list[str], memory_mb: int | None, alarm_s: float) -> None:
    """Answer calls until the parent closes the socket; a call that takes ``alarm_s`` ends the process, parent or no parent."""
    sys.path.extend(entry for entry in path if entry not in sys.path)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends the process, whatever it is doing
    if memory_mb is not None:
        limit = memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with socket.socket(fileno=fd) as connection, connection.makefile("rw", encoding="utf-8") as stream:

        def answer(message: dict[str, Any]) -> None:
            stream.write(json.dumps(message) + "\n")
            stream.flush()

        try:
            caller = Caller(load(reward))
        except Refused as refused:
            answer({"error": str(refused)})
            return
        answer({"verl": caller.signature is not None})
        for line in stream:
            signal.setitimer(signal.ITIMER_REAL, alarm_s)
            request = json.loads(line)
            reply = caller(request["response"], request["row"])
            answer(reply)
            signal.setitimer(signal.ITIMER_REAL, 0)
            if reply.get("end"):
                return


if __name__ == "__main__":
    serve(**json.loads(sys.argv[1]))

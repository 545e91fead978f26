"""One queue for everything that the ranks do: the calls of one model in the client's order, the models in turn.

A client numbers its calls from 1. They may arrive in any order; a call waits until all before it are here. The SDK cuts a big
batch into chunks and sends the first of them last, so chunks that wait for it when it comes are one call: they run together,
and take effect all or none.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from trainer.server.errors import UserError
from trainer.server.futures import Future

MAX_WAITING = 4096
"""Calls of one model that may be here before their turn."""


@dataclass
class Call:
    """One call, or the chunks of one."""

    kind: str
    """For merging and for messages."""
    futures: list[Future]
    run: Callable[[list[Any]], Awaitable[list[Any]]]
    """Takes the payloads of all chunks and returns their results."""
    payloads: list[Any]
    merges: Any = None
    """Chunks with equal values (not None) may be one call."""


@dataclass
class Line:
    """The calls of one model."""

    next_seq: int = 1
    waiting: dict[int, Call] = field(default_factory=dict)
    ready: deque[Call] = field(default_factory=deque)


class Scheduler:
    """Runs calls one at a time; models take turns."""

    def __init__(self) -> None:
        self._turns: deque[Line] = deque()
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.stopping = False

    def submit(self, line: Line, call: Call, seq: int | None) -> None:
        """Put a call in its place.

        Args:
            line: of its model.
            call: with one chunk.
            seq: the client's number; None: after all that are ready.

        Raises:
            UserError: too many calls wait for an earlier one.
        """
        if self.stopping:
            raise UserError("The server is stopping; ask again when it is back.", status=503)
        if seq is None:
            self._ready(line, call)
            return
        if seq > line.next_seq:
            if len(line.waiting) >= MAX_WAITING:
                raise UserError(f"seq_id={seq} waits for seq_id={line.next_seq}, as do {MAX_WAITING} others; send that first.")
            line.waiting[seq] = call
            return
        line.next_seq += 1
        while (after := line.waiting.pop(line.next_seq, None)) is not None:
            line.next_seq += 1
            if call.merges is None or after.merges != call.merges:
                self._ready(line, call)
                call = after
            else:
                call.futures += after.futures
                call.payloads += after.payloads
        self._ready(line, call)

    def _ready(self, line: Line, call: Call) -> None:
        if not line.ready:
            self._turns.append(line)
        line.ready.append(call)
        self._idle.clear()
        self._work.set()

    async def run(self) -> None:
        """Run calls forever; a call that fails sets the failure on its futures."""
        while True:
            await self._work.wait()
            if not self._turns:
                self._work.clear()
                self._idle.set()
                continue
            line = self._turns.popleft()
            call = line.ready.popleft()
            if line.ready:
                self._turns.append(line)
            await _execute(call)

    async def idle(self) -> None:
        """Return when every call that could run has run."""
        await self._idle.wait()

    async def drain(self) -> None:
        """Take no more calls, and run those that can."""
        self.stopping = True
        await self.idle()


async def _execute(call: Call) -> None:
    try:
        results = await call.run(call.payloads)
    except Exception as error:
        for future in call.futures:
            future.fail(error)
        return
    for future, result in zip(call.futures, results, strict=True):
        future.succeed(result)

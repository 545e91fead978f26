"""Results that clients fetch later. A request id is derived from the request, so that a repeated request has the same id."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from trainer.server.errors import UserError, explain

FETCHED_S = 60.0
"""How long a result is kept after its client fetched it, in case the answer was lost."""
WAIT_S = 25.0
"""How long a poll waits; the SDK gives up a poll after 45 s."""


@dataclass
class Future:
    """One request whose result is fetched later."""

    id: str
    user: str
    kind: str = ""
    """The kind of request."""
    json: dict[str, Any] | None = None
    """The result or the failure, as JSON."""
    proto: bytes | None = None
    """The result, as protobuf."""
    finished: float | None = None
    """When the result was ready, monotonic seconds."""
    fetched: float | None = None
    """When the client first fetched it."""
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def succeed(self, result: dict[str, Any] | bytes) -> None:
        """Set the result; the first one stays."""
        if not self.done.is_set():
            self.json, self.proto = (None, result) if isinstance(result, bytes) else (result, None)
            self._finish()

    def fail(self, error: BaseException) -> None:
        """Set a failure; the first answer stays."""
        if not self.done.is_set():
            self.json = explain(error, self.id)
            self._finish()

    def _finish(self) -> None:
        self.finished = time.monotonic()
        self.done.set()


class Futures:
    """All requests that have not been forgotten."""

    def __init__(self, keep_s: float) -> None:
        """``keep_s``: how long a result is kept after it was ready."""
        self._keep_s = keep_s
        self._all: dict[str, Future] = {}

    def create(self, id: str, user: str, kind: str = "") -> Future:
        """A new future, or the one that a repeated request already has.

        Raises:
            UserError: the id belongs to a request of another kind.
        """
        future = self._all.setdefault(id, Future(id, user, kind))
        if future.kind != kind:
            raise UserError(f"Request {id} was a {future.kind}; a {kind} needs a seq_id of its own.")
        return future

    def known(self, id: str) -> bool:
        """Whether there is such a request, running or finished."""
        return id in self._all

    def drop(self, future: Future) -> None:
        """Forget a request."""
        self._all.pop(future.id, None)

    def check(self, id: str, user: str) -> Future:
        """The request of ``user``.

        Raises:
            UserError: (410) there is none, or no longer.
        """
        future = self._all.get(id)
        if future is None or future.user != user:
            raise UserError(f"There is no result of request {id}; it has expired or never existed.", status=410)
        return future

    async def wait(self, id: str, user: str) -> Future | None:
        """The finished future, or None if it is still running after a while.

        Raises:
            UserError: (410) there is none, or no longer.
        """
        future = self.check(id, user)
        try:
            async with asyncio.timeout(WAIT_S):
                await future.done.wait()
        except TimeoutError:
            return None
        future.fetched = future.fetched or time.monotonic()
        return future

    def sweep(self) -> None:
        """Forget expired results."""
        now = time.monotonic()
        for future in list(self._all.values()):
            over = future.finished is not None and now - future.finished > self._keep_s
            if over or (future.fetched is not None and now - future.fetched > FETCHED_S):
                self.drop(future)

"""What every loop of the controller waits for, since when, and what happens when nothing moves any more.

The watchdog knows loops by name and by what they say; it knows no rollouts and no learner.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.run.failures import RunFailed


class Stuck(RunFailed):
    """Nothing moved for too long; the message is one sentence that says what is waited for, and where the dump is."""


@dataclass(eq=False)
class _Wait:
    """One wait of one loop."""

    what: str
    because: Callable[[], str] | None
    progress: Callable[[], Any]
    began: float = field(default_factory=lambda: time.monotonic())

    def __post_init__(self) -> None:
        self.moved, self.seen = self.began, self.progress()

    def look(self) -> None:
        """Notice progress."""
        if (now := self.progress()) != self.seen:
            self.moved, self.seen = time.monotonic(), now

    @property
    def still(self) -> float:
        """Seconds without progress."""
        return time.monotonic() - self.moved

    def __str__(self) -> str:
        because = self.because() if self.because else ""
        since = "" if self.moved == self.began else f", {self.still:.0f} s of them without progress"
        return f"{time.monotonic() - self.began:.0f} s for {self.what}{since}{because and ': '}{because}"


class Watchdog:
    """Watches one loop, ``learn``, on which all others have to work; see `watch`.

    Args:
        limit_s: longest time without progress of what the loop waits for, seconds.
        dump_file: where the dump goes.
        say: takes a line for the console.
        on_wait: takes a loop's name and what it waits for, whenever that changes.
    """

    def __init__(
        self,
        limit_s: float,
        dump_file: Path,
        say: Callable[[str], None],
        on_wait: Callable[[str, str], None] = lambda loop, what: None,
    ) -> None:
        self.limit_s, self.dump_file, self.say, self._on_wait = limit_s, dump_file, say, on_wait
        self._waiting: dict[str, _Wait] = {}

    def waits(
        self,
        loop: str,
        what: str,
        because: Callable[[], str] | None = None,
        progress: Callable[[], Any] = lambda: None,
    ) -> None:
        """``loop`` waits for ``what`` from now on.

        Args:
            loop: its name.
            what: what it waits for; another wait is progress.
            because: says, when asked, what that depends on (a clause).
            progress: gives another value when what is waited for has come nearer.
        """
        self._waiting[loop] = _Wait(what, because, progress)
        self._on_wait(loop, what)

    async def watch(self) -> None:
        """Warn once when what ``learn`` waits for has not moved for half the limit, and fail with a dump after all of it.

        Raises:
            Stuck: the limit is reached.
        """
        warned: _Wait | None = None
        while True:
            await asyncio.sleep(min(1.0, self.limit_s / 10))
            wait = self._waiting.get("learn")
            if wait is None:
                continue
            wait.look()
            if wait.still <= self.limit_s / 2:
                continue
            if wait is not warned:
                warned = wait
                limit = f"cluster.watchdog_s={self.limit_s:g}"
                self.say(f"The learner has waited {wait}. After {limit} without progress the run ends.")
            if wait.still > self.limit_s:
                self._write_dump()
                raise Stuck(f"The learner has waited {wait}. What every loop and task waits for is in {self.dump_file}.")

    def _write_dump(self) -> None:
        """Every loop, and where every task of this process stands, from its outermost coroutine to what it awaits."""
        lines = [f"{loop} has waited {wait}" for loop, wait in sorted(self._waiting.items())]
        for task in sorted(asyncio.all_tasks(), key=lambda task: task.get_name()):
            lines += ["", task.get_name(), *_stack(task.get_coro())]
        self.dump_file.write_text("\n".join(lines) + "\n")


def _stack(awaited: Any) -> Iterator[str]:
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None)
        if frame is None:
            yield f"  {awaited!r}"
            return
        yield f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        awaited = awaited.cr_await

"""``events.jsonl``: what every loop, worker, engine and learner phase did, one line each, with its begin and end.

    {"row": "learner", "what": "train_actor", "begin": 1764.25, "end": 1765.5, "step": 7, "version": 6, "tokens": 4096}

``begin`` and ``end`` are seconds since the epoch, by the clock of the machine where it happened. ``row`` is who did it:
``controller/<loop>``, ``learner``, ``rollout/<n>`` (episodes; several at once) or ``engine/<n>`` (pauses for new weights). All
else depends on ``what``. The file is a log of time and not of steps: a step that a resumed run repeats is in it twice.

Lines are written by a thread of their own, so that callers do not wait for the disk. See
`trainer.watch.timeline` for the reader.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from workers.events import Event

FLUSH_S = 0.5
"""Seconds between two writes."""


class EventLog:
    """Appends events to a file; every method returns at once and may be called from any thread.

    Args:
        path: the file; None: events are dropped.
        limit_mb: the file does not grow beyond so many MiB; then one last event says so.
    """

    def __init__(self, path: Path | None, limit_mb: float = float("inf")) -> None:
        self._path, self._left = path, limit_mb * 2**20
        self._queue: SimpleQueue[Event | None] = SimpleQueue()
        self._open: dict[str, tuple[str, float]] = {}
        self._thread: threading.Thread | None = None
        if path is not None:
            self._left -= path.stat().st_size if path.exists() else 0
            self._thread = threading.Thread(target=self._write, name="events", daemon=True)
            self._thread.start()

    def add(self, event: Event) -> None:
        """Record something that has ended."""
        if self._thread is not None:
            self._queue.put(event)

    def extend(self, events: Iterable[Event]) -> None:
        """Record several."""
        for event in events:
            self.add(event)

    @contextmanager
    def span(self, row: str, what: str, **details: Any) -> Iterator[dict[str, Any]]:
        """Record what happens inside; details that are known only later may be added to the dictionary that it gives."""
        begin = time.time()
        try:
            yield details
        finally:
            self.add(Event(row, what, begin, time.time(), details))

    def now(self, row: str, what: str) -> None:
        """``row`` does ``what`` from now on; what it did until now has ended."""
        moment = time.time()
        before = self._open.get(row)
        if before is not None:
            self.add(Event(row, before[0], before[1], moment, {}))
        self._open[row] = (what, moment)

    def close(self) -> None:
        """End the spans that are open and write everything; later events are dropped."""
        for row in list(self._open):
            what, begin = self._open.pop(row)
            self.add(Event(row, what, begin, time.time(), {}))
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _write(self) -> None:
        assert self._path is not None
        with self._path.open("a", encoding="utf-8") as file:
            ended = False
            while not ended:
                batch = [self._queue.get()]
                time.sleep(0 if batch[0] is None else FLUSH_S)
                while True:
                    try:
                        batch.append(self._queue.get_nowait())
                    except Empty:
                        break
                ended = None in batch
                file.write("".join(self._lines([event for event in batch if event is not None])))
                file.flush()

    def _lines(self, events: list[Event]) -> Iterator[str]:
        for event in events:
            if self._left <= 0:
                return
            line = _line(event)
            self._left -= len(line)
            yield line
            if self._left <= 0:
                yield _line(Event(event.row, "the log of events is full", event.end, event.end, {}))


def _line(event: Event) -> str:
    row = {"row": event.row, "what": event.what, "begin": round(event.begin, 6), "end": round(event.end, 6)}
    return json.dumps({**row, **event.details}) + "\n"


def read_events(path: Path) -> Iterator[Event]:
    """The events of a file, in the order in which they ended; a line that was torn by a crash is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                fields = json.loads(line)
                yield Event(fields.pop("row"), fields.pop("what"), fields.pop("begin"), fields.pop("end"), fields)
            except (ValueError, KeyError, AttributeError):
                continue

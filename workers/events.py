"""What took time: one line of a run's log of events (`trainer.watch.events`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Event(NamedTuple):
    """Something that took time."""

    row: str
    """Who did it."""
    what: str
    """What was done."""
    begin: float
    """Seconds since the epoch."""
    end: float
    """Seconds since the epoch."""
    details: Mapping[str, Any]
    """JSON-like: ``step``, ``slot``, ``version``, ``tokens``."""

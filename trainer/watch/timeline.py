"""A run's `trainer.watch.events` as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open, and as shares of time.

The trace is Chrome's "Trace Event Format": complete events ("X", microseconds) and the names of their rows ("M").
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from rlframe.config import ConfigError
from trainer.watch.events import read_events
from workers.events import Event

GROUPS = ("controller", "learner", "rollout", "engine")
"""First part of a row's name, in the order of the trace."""


def write_timeline(run_dir: Path, output: Path) -> int:
    """Write the trace of a run to ``output``; returns its number of events.

    Raises:
        ConfigError: the run has no events.
    """
    path = run_dir / "events.jsonl"
    events = list(read_events(path)) if path.exists() else []
    if not events:
        raise ConfigError(f"{path} has no events; they are written from the first step on, unless log.events=false.")
    output.write_text(json.dumps({"traceEvents": trace(events), "displayTimeUnit": "ms"}))
    return len(events)


def trace(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Trace events; time starts at the first begin. Things that one row does at once lie on lanes of their own."""
    rows: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        rows[event.row].append(event)
    start = min(event.begin for row in rows.values() for event in row)
    written: list[dict[str, Any]] = []
    lane = 0
    for name in sorted(rows, key=_order):
        group = name.split("/")[0]
        process = GROUPS.index(group) if group in GROUPS else len(GROUPS)
        placed = _lanes(rows[name])
        for offset in range(max(placed) + 1):
            label = name if not offset else f"{name} ({offset + 1})"
            written.append({"ph": "M", "name": "thread_name", "pid": process, "tid": lane + offset, "args": {"name": label}})
        for event, place in zip(sorted(rows[name], key=lambda e: e.begin), placed, strict=True):
            written.append(
                {
                    "ph": "X",
                    "name": event.what,
                    "pid": process,
                    "tid": lane + place,
                    "ts": (event.begin - start) * 1e6,
                    "dur": (event.end - event.begin) * 1e6,
                    "args": event.details,
                }
            )
        lane += max(placed) + 1
    names = [{"ph": "M", "name": "process_name", "pid": i, "args": {"name": group}} for i, group in enumerate(GROUPS)]
    return names + written


def _order(row: str) -> tuple[int, str, int, str]:
    """Groups in their order, then by name, numbers by size."""
    group, _, rest = row.partition("/")
    return (GROUPS.index(group) if group in GROUPS else len(GROUPS), group, int(rest) if rest.isdigit() else -1, rest)


def _lanes(events: list[Event]) -> list[int]:
    """Lane of every event in order of begin: the lowest that is free."""
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    lanes = []
    for event in sorted(events, key=lambda e: e.begin):
        while busy and busy[0][0] <= event.begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (event.end, lane))
        lanes.append(lane)
    return lanes


def busy_fractions(events: Iterable[Event], bins: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """How busy every row was over time.

    Returns:
        float64[bins + 1], edges of equal bins over all events, seconds since the epoch; and for each row float64[bins], the
        share of a bin in which the row did something (at least one thing).
    """
    rows: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        rows[event.row].append((event.begin, event.end))
    edges = np.linspace(min(b for r in rows.values() for b, _ in r), max(e for r in rows.values() for _, e in r), bins + 1)
    shares = {}
    for name, spans in rows.items():
        begins, ends = np.array(_union(spans)).T
        before = np.concatenate([[0.0], np.cumsum(ends - begins)])  # seconds busy before each span
        started = np.searchsorted(begins, edges)  # spans that begin before each edge, of which the last may continue after it
        beyond = np.maximum(np.concatenate([[edges[0]], ends])[started] - edges, 0)
        width = np.diff(edges)
        shares[name] = np.divide(np.diff(before[started] - beyond), width, out=np.zeros(bins), where=width > 0)
    return edges, shares


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans without overlaps, in order."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged

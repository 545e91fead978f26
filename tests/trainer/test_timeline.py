"""The log of events, and what is made of it: a trace with lanes, shares of time."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time

import numpy as np
import pytest

from rlframe.config import ConfigError
from tests.support.local_run import run
from trainer.cli.main import main
from trainer.watch.events import EventLog, read_events
from trainer.watch.loop_lag import EVERY_S, LoopLag
from trainer.watch.timeline import busy_fractions, trace
from workers.events import Event


def test_events_of_several_threads_are_whole_lines(tmp_path) -> None:
    log = EventLog(tmp_path / "events.jsonl")

    def work(row: int) -> None:
        for i in range(500):
            log.add(Event(f"rollout/{row}", "episode", i, i + 0.5, {"slot": i}))

    threads = [threading.Thread(target=work, args=(row,)) for row in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    events = list(read_events(tmp_path / "events.jsonl"))
    assert sorted((e.row, e.details["slot"]) for e in events) == sorted(
        (f"rollout/{r}", i) for r in range(4) for i in range(500)
    )


def test_a_row_that_does_something_else_has_ended_what_it_did(tmp_path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.now("controller/learn", "waits for a batch")
    log.now("controller/learn", "the actor's update")
    with log.span("learner", "train_actor", step=3) as details:
        time.sleep(0.01)
        details["tokens"] = 7
    log.close()
    first, second, third = sorted(read_events(tmp_path / "events.jsonl"), key=lambda e: (e.row, e.begin))
    assert (first.what, second.what) == ("waits for a batch", "the actor's update")
    assert first.end == pytest.approx(second.begin, abs=1e-5) and second.end >= third.end
    assert third.details == {"step": 3, "tokens": 7} and third.end - third.begin >= 0.01


def test_a_resumed_run_appends_and_a_torn_line_is_left_out(tmp_path) -> None:
    path = tmp_path / "events.jsonl"
    for i in range(2):
        log = EventLog(path)
        log.add(Event("learner", "values", i, i + 1, {}))
        log.close()
    with path.open("a") as file:
        file.write('{"row": "learner", "wh')
    assert [e.begin for e in read_events(path)] == [0, 1]


def test_the_file_does_not_grow_beyond_its_limit_and_says_so(tmp_path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, limit_mb=0.01)
    for i in range(1000):
        log.add(Event("learner", "values", i, i + 1, {}))
    log.close()
    assert 0.01 * 2**20 <= path.stat().st_size < 0.011 * 2**20
    assert list(read_events(path))[-1].what == "the log of events is full"


def test_things_at_once_lie_on_lanes_that_never_overlap() -> None:
    generator = np.random.default_rng(0)
    begins = generator.uniform(0, 10, 200)
    events = [Event("rollout/0", "episode", b, b + d, {}) for b, d in zip(begins, generator.exponential(1, 200), strict=True)]
    events += [
        Event("rollout/10", "episode", 0.0, 1.0, {}),
        Event("rollout/2", "episode", 0.0, 1.0, {}),
        Event("learner", "values", 1.0, 2.0, {}),
    ]
    written = trace(events)
    spans = [e for e in written if e["ph"] == "X"]
    assert len(spans) == 203 and min(e["ts"] for e in spans) == 0
    lanes: dict[int, list[tuple[float, float]]] = {}
    for e in spans:
        lanes.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    for lane in lanes.values():
        lane.sort()
        assert all(a[1] <= b[0] + 1e-3 for a, b in itertools.pairwise(lane))
    # As many lanes as things at once, at most.
    most = max(sum(b <= e.begin < b + d for b, d in ((x.begin, x.end - x.begin) for x in events[:200])) for e in events[:200])
    names = [e["args"]["name"] for e in written if e["name"] == "thread_name"]
    assert len([n for n in names if n.startswith("rollout/0")]) == most
    assert [n for n in names if "(" not in n] == ["learner", "rollout/0", "rollout/2", "rollout/10"]


def test_shares_of_time_are_those_of_a_fine_grid() -> None:
    generator = np.random.default_rng(1)
    begins = generator.uniform(0, 10, 60)
    events = [Event("rollout/0", "episode", b, b + d, {}) for b, d in zip(begins, generator.exponential(0.05, 60), strict=True)]
    events.append(Event("learner", "values", 0.0, 10.5, {}))
    edges, shares = busy_fractions(events, 7)
    grid = np.linspace(edges[0], edges[-1], 70001)[:-1] + (edges[-1] - edges[0]) / 140000
    busy = np.any([(e.begin <= grid) & (grid < e.end) for e in events[:-1]], axis=0)
    assert shares["rollout/0"] == pytest.approx(busy.reshape(7, -1).mean(1), abs=1e-3)
    assert shares["learner"][:6] == pytest.approx(np.ones(6))


def test_the_command_writes_a_trace(tmp_path, capsys) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.add(Event("learner", "values", 100.0, 101.5, {"step": 1}))
    log.close()
    assert main(["timeline", str(tmp_path)]) == 0
    assert "1 events" in capsys.readouterr().out
    (span,) = [e for e in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert (span["ts"], span["dur"], span["args"]) == (0, 1.5e6, {"step": 1})


def test_a_run_without_events_is_a_sentence(tmp_path) -> None:
    with pytest.raises(ConfigError, match="has no events"):
        from trainer.watch.timeline import write_timeline

        write_timeline(tmp_path, tmp_path / "out.json")


def test_a_blocked_loop_is_late() -> None:
    async def main() -> tuple[dict[str, float], dict[str, float]]:
        lag = LoopLag()
        task = asyncio.create_task(lag.watch())
        await asyncio.sleep(0)
        time.sleep(EVERY_S + 0.3)
        await asyncio.sleep(EVERY_S)
        task.cancel()
        return lag.metrics(), lag.metrics()

    late, nothing = asyncio.run(main())
    assert late["controller/loop_lag_max"] >= 0.3 > late["controller/loop_lag_mean"] / 2 and nothing == {}


@pytest.mark.slow
def test_a_run_records_every_episode_phase_and_sync(tmp_path) -> None:
    rows = run(tmp_path, "steps=3", "rollout.workers=2")
    events = list(read_events(tmp_path / "events.jsonl"))
    assert all(event.end >= event.begin for event in events)
    episodes = [event for event in events if event.what == "episode"]
    slots = [event.details["slot"] for event in episodes]
    assert len(set(slots)) == len(slots) >= 3 * 8 and {event.row for event in episodes} == {"rollout/0", "rollout/1"}
    assert all(event.details["tokens"] >= 1 and event.details["finish"] in ("stop", "length") for event in episodes)
    for row in rows[1:]:  # the phases of a step are its timers
        phases = {e.what: e.end - e.begin for e in events if e.row == "learner" and e.details["step"] == row["step"]}
        for name in ("values", "train_critic", "train_actor", "weight_sync"):
            assert phases[name] == pytest.approx(row[f"time/{name}"], abs=0.02)
    versions = [e.details["version"] for e in events if e.row == "engine/0"]
    assert versions == sorted(versions) and set(versions) == {0, 1, 2, 3}
    assert {e.row for e in events if e.row.startswith("controller/")} == {
        f"controller/{loop}" for loop in ("learn", "issue", "collect_0", "collect_1")
    }
    run(tmp_path / "without", "steps=1", "log.events=false")
    assert not (tmp_path / "without" / "events.jsonl").exists()

"""What admission and `reorder_window` do to staleness and speed, on a virtual clock with the buffer and the rule that runs use.

    python -m benchmarks.staleness             # the cases of docs/concepts.md: a few minutes
    python -m benchmarks.staleness --sizes     # 64 to 1024 prompts, bounds of 1 to 8

Rollouts take 60 s on average: fixed, lognormal (sigma 0.8), or heavy (Pareto with exponent 1.5, cut at 20 times the shortest).
A step of training takes a fixed time, give or take 5 %. Engines can end so many batches while one is trained on ("sampling"),
in one of two ways:

- queue: so many rollouts run at once, each as fast as alone; the others wait in order;
- shared: all run at once, and where they are more than that, each is slower by as much.

Printed are, over the last two thirds of each run and the mean of the seeds:

- longest: seconds of the longest of a batch's rollouts alone, over those of a step of training; in strict order a batch waits
  for it;
- full: seconds a step and mean versions from start to training (`off_policy/mean`) with `admission=full`;
- fresh: the same with `admission=fresh`, seconds as a ratio to full's; `begin` is that ratio for the first `BEGIN` steps;
- lengths: mean and 90 % quantile of the times of trained rollouts over those of the admitted ones, fresh; below 1, short
  answers would be favoured.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean as mean

from trainer.run.admission import Admission
from trainer.run.buffer import Buffer

STEPS, BEGIN, SEEDS, MEAN_S, SIGMA, EXPONENT, CUT = 150, 20, 2, 60.0, 0.8, 1.5, 20.0


@dataclass(frozen=True)
class Case:
    """What a run is like."""

    prompts: int
    max_staleness: int
    window: int
    train_s: float
    """Seconds that a step of training takes."""
    speed: float
    """Batches that the engines end while one is trained on."""
    lengths: str
    """fixed, lognormal or heavy."""
    engine: str
    """queue or shared."""

    @property
    def at_once(self) -> int:
        """Rollouts that run at full speed together."""
        return max(round(self.speed * self.prompts * MEAN_S / self.train_s), 1)

    def seconds(self, chance: random.Random) -> float:
        """How long a rollout takes alone."""
        if self.lengths == "lognormal":
            return chance.lognormvariate(math.log(MEAN_S) - SIGMA**2 / 2, SIGMA)
        if self.lengths == "heavy":
            whole = EXPONENT / (EXPONENT - 1)
            average = whole - CUT ** (1 - EXPONENT) / (EXPONENT - 1)  # of min(x, CUT): 1 + integral of x**-EXPONENT over 1..CUT
            return MEAN_S / average * min(chance.paretovariate(EXPONENT), CUT)
        return MEAN_S


class Engines:
    """Rollouts on a virtual clock. ``served`` is the work that a rollout running all the time has had, in seconds alone."""

    def __init__(self, case: Case, buffer: Buffer[float, None]) -> None:
        self.case, self.buffer = case, buffer
        self.now, self.served, self.version = 0.0, 0.0, 0
        self.queue: deque[tuple[int, float]] = deque()
        self.running: list[tuple[float, int]] = []
        self.started: dict[int, int] = {}

    @property
    def rate(self) -> float:
        """Seconds of work that each running rollout gets in a second."""
        return min(1.0, self.case.at_once / max(len(self.running), 1))

    @property
    def next_end(self) -> float:
        """When the next rollout ends."""
        return self.now + (self.running[0][0] - self.served) / self.rate

    def start(self) -> None:
        """Begin what waits and fits."""
        while self.queue and (self.case.engine == "shared" or len(self.running) < self.case.at_once):
            slot, lasts = self.queue.popleft()
            heapq.heappush(self.running, (self.served + lasts, slot))
            self.started[slot] = self.version

    def until(self, moment: float) -> None:
        """Let time pass."""
        while self.running and (end := self.next_end) <= moment:
            self.now = end
            self.served, slot = heapq.heappop(self.running)
            self.buffer.finish(slot, None)
            self.start()
        self.served += (moment - self.now) * self.rate
        self.now = moment


@dataclass
class Outcome:
    """What a simulated run did after its first third."""

    seconds: float = 0.0
    begin: float = 0.0
    """When step `BEGIN` was done."""
    staleness: list[int] = field(default_factory=list)
    trained: list[float] = field(default_factory=list)
    admitted: list[float] = field(default_factory=list)


async def simulate(case: Case, full: bool, seed: int) -> Outcome:
    """Run `STEPS` steps."""
    buffer: Buffer[float, None] = Buffer(case.prompts, case.max_staleness, case.window)
    admission = Admission(case.prompts, buffer.capacity, full)
    engines, outcome = Engines(case, buffer), Outcome()
    lengths, noise = random.Random(seed), random.Random(seed + 1000)

    def admit(limit: int) -> None:
        buffer.limit = limit
        for _ in range(buffer.free):
            lasts = case.seconds(lengths)
            outcome.admitted.append(lasts)
            engines.queue.append((buffer.put(lasts), lasts))
        engines.start()

    admit(admission.limit)
    for step in range(STEPS):
        asked, ready = engines.now, buffer.ready
        taking = asyncio.create_task(buffer.take())
        await asyncio.sleep(0)
        while not taking.done():
            engines.until(engines.next_end)
            await asyncio.sleep(0)
        admit(admission.took(asked, engines.now, ready))
        if step == BEGIN:
            outcome.begin = engines.now
        if step == STEPS // 3:
            begin, outcome.admitted = engines.now, []
        if step >= STEPS // 3:
            outcome.staleness += [engines.version - engines.started[slot.number] for slot in taking.result()]
            outcome.trained += [slot.prompt for slot in taking.result()]
        engines.until(engines.now + case.train_s * noise.uniform(0.95, 1.05))
        engines.version += 1
        buffer.release()
        admit(admission.limit)
    outcome.seconds = (engines.now - begin) / (STEPS - STEPS // 3)
    return outcome


def cases() -> Iterator[Case]:
    """The table of docs/concepts.md and what lies around it."""
    for window in (0, 512):
        for engine in ("queue", "shared"):
            for train_s, speed in ((120.0, 0.5), (120.0, 1.0), (120.0, 2.0), (480.0, 1.2), (480.0, 2.0), (960.0, 2.0)):
                for lengths in ("fixed", "lognormal", "heavy"):
                    yield Case(256, 4, window, train_s, speed, lengths, engine)


def sizes() -> Iterator[Case]:
    """Other numbers of prompts and other bounds."""
    for prompts, max_staleness in ((64, 4), (1024, 4), (256, 1), (256, 2), (256, 8)):
        for train_s, speed in ((120.0, 0.5), (480.0, 2.0), (960.0, 2.0)):
            yield Case(prompts, max_staleness, 0, train_s, speed, "lognormal", "shared")


def longest(case: Case) -> float:
    """Mean of the longest rollout of a batch."""
    chance = random.Random(0)
    return mean(max(case.seconds(chance) for _ in range(case.prompts)) for _ in range(20))


def quantile(values: list[float], share: float) -> float:
    """The ``share`` quantile."""
    return sorted(values)[int(share * (len(values) - 1))]


def row(case: Case) -> str:
    """A row of the table."""
    full, fresh = ([asyncio.run(simulate(case, kind, seed)) for seed in range(SEEDS)] for kind in (True, False))
    stale = [mean([mean(run.staleness) for run in runs]) for runs in (full, fresh)]
    seconds = [mean(run.seconds for run in runs) for runs in (full, fresh)]
    begin = mean(run.begin for run in fresh) / mean(run.begin for run in full)
    trained, admitted = ([x for run in fresh for x in getattr(run, name)] for name in ("trained", "admitted"))
    shares = mean(trained) / mean(admitted), quantile(trained, 0.9) / quantile(admitted, 0.9)
    return (
        f"{case.prompts:7d} {case.max_staleness:5d} {case.window:6d} {case.train_s:7.0f} {case.speed:8.1f} {case.engine:>6} "
        f"{case.lengths:>9} {longest(case) / case.train_s:7.2f} | {seconds[0]:6.1f} {stale[0]:5.2f} | "
        f"{seconds[1] / seconds[0]:5.3f} {stale[1]:5.2f} {begin:5.2f} | {shares[0]:4.2f} {shares[1]:4.2f}"
    )


def main() -> None:
    """Print a row for every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", action="store_true", help="other numbers of prompts and other bounds")
    print("prompts bound window train s sampling engine   lengths longest |   full stale | fresh stale begin | lengths")
    for case in sizes() if parser.parse_args().sizes else cases():
        print(row(case), flush=True)


if __name__ == "__main__":
    main()

"""What `reorder_window` and the speed of sampling do to staleness, on a virtual clock with the buffer that runs use.

    python -m benchmarks.staleness

Rollouts take lognormal times, 60 s on average; their lengths grow with their times. The engines run at most so many at once, in
the order of admission, and each as fast as alone; a step of training takes a fixed time. Printed are

- s/step: seconds a step;
- stale: versions from a rollout's start to its training, as `off_policy/mean` counts them: mean, largest, and means of the
  shortest and the longest tenth of the rollouts. Counted from admission, the mean is `max_staleness` - window / prompts at any
  speed: all slots are in use, and a step of P prompts frees P of them;
- time: mean time of a trained rollout over that of an admitted one, in the first batch and after the first third of the run
  (below 1: short answers are trained on more often than admitted).

The last row of each case gets its staleness by a lower `max_staleness` instead of a window.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, field
from statistics import fmean as mean

from trainer.run.buffer import Buffer

PROMPTS, STALENESS, STEPS, MEAN_S = 256, 4, 120, 60.0
SHAPES = ((STALENESS, 0.0), (STALENESS, 0.5), (STALENESS, 0.75), (1, 0.0))
"""`max_staleness`, and the window as a share of the largest."""


@dataclass(frozen=True)
class Case:
    """What a run is like."""

    train_s: float
    """Seconds that a step of training takes."""
    speed: float | None
    """Batches that the engines end while one is trained on; None: all prompts in flight run at once."""
    sigma: float
    """Spread of the logarithm of a rollout's time."""

    def __str__(self) -> str:
        return f"{self.train_s:7.0f}  {self.speed or 'no limit':>8}  {self.sigma:5.1f}"


CASES = (
    *(Case(120.0, speed, 0.8) for speed in (0.5, 0.9, 1.1, 2.0)),
    *(Case(train_s, None, 0.8) for train_s in (15.0, 60.0, 120.0, 480.0)),
    *(Case(train_s, None, 0.3) for train_s in (15.0, 60.0, 120.0, 480.0)),
)


@dataclass
class Outcome:
    """What a simulated run did after its first third."""

    seconds: float = 0.0
    staleness: list[int] = field(default_factory=list)
    trained: list[float] = field(default_factory=list)
    admitted: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    """Times of the very first batch."""


async def simulate(case: Case, max_staleness: int, window: int) -> Outcome:
    """Run `STEPS` steps."""
    buffer: Buffer[float, None] = Buffer(PROMPTS, max_staleness, window)
    at_once = round(case.speed * PROMPTS * MEAN_S / case.train_s) if case.speed else buffer.capacity
    chance, outcome = random.Random(0), Outcome()
    queue: deque[tuple[int, float]] = deque()
    started: dict[int, int] = {}
    running: list[tuple[float, int]] = []
    now, version, begin = 0.0, 0, 0.0

    def start(moment: float) -> None:
        while queue and len(running) < at_once:
            slot, lasts = queue.popleft()
            heapq.heappush(running, (moment + lasts, slot))
            started[slot] = version

    def admit() -> None:
        for _ in range(buffer.free):
            lasts = chance.lognormvariate(math.log(MEAN_S) - case.sigma**2 / 2, case.sigma)
            outcome.admitted.append(lasts)
            queue.append((buffer.put(lasts), lasts))
        start(now)

    def finish_until(moment: float) -> None:
        while running and running[0][0] <= moment:
            end, slot = heapq.heappop(running)
            buffer.finish(slot, None)
            start(end)

    admit()
    for step in range(STEPS):
        taking = asyncio.create_task(buffer.take())
        await asyncio.sleep(0)
        while not taking.done():
            now = max(now, running[0][0])
            finish_until(now)
            await asyncio.sleep(0)
        if step == 0:
            outcome.first = [slot.prompt for slot in taking.result()]
        if step == STEPS // 3:
            begin, outcome.admitted = now, []
        if step >= STEPS // 3:
            outcome.staleness += [version - started[slot.number] for slot in taking.result()]
            outcome.trained += [slot.prompt for slot in taking.result()]
        finish_until(now + case.train_s)
        now, version = now + case.train_s, version + 1
        buffer.release()
        admit()
    outcome.seconds = (now - begin) / (STEPS - STEPS // 3)
    return outcome


def main() -> None:
    """Print a row for every case and window."""
    print("train s  sampling  sigma  max_staleness  window  s/step  stale mean  max  shortest  longest  time first  later")
    for case in CASES:
        for max_staleness, share in SHAPES:
            window = int(share * max_staleness * PROMPTS)
            run = asyncio.run(simulate(case, max_staleness, window))
            by_time = [stale for _, stale in sorted(zip(run.trained, run.staleness, strict=True))]
            tenth = len(by_time) // 10
            print(
                f"{case}  {max_staleness:13d}  {window:6d}  {run.seconds:6.1f}  {mean(by_time):10.2f}  {max(by_time):3d}  "
                f"{mean(by_time[:tenth]):8.2f}  {mean(by_time[-tenth:]):7.2f}  {mean(run.first) / MEAN_S:10.2f}  "
                f"{mean(run.trained) / mean(run.admitted):5.2f}"
            )


if __name__ == "__main__":
    main()

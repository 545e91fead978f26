"""What `reorder_window` and the speed of sampling do to staleness, on a virtual clock with the buffer that runs use.

    python -m benchmarks.staleness

Rollouts take lognormal times (sigma 0.8) on engines that run all prompts in flight at once; their lengths grow with their
times. A step of training takes a fixed time. Printed for every ratio of the two: seconds a step, staleness of what was trained,
and the mean time of a trained rollout over that of a sampled one (below 1: short answers are trained more often than sampled).
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from dataclasses import dataclass, field

from trainer.run.buffer import Buffer

PROMPTS, STALENESS, STEPS, SIGMA, MEAN_S = 256, 4, 60, 0.8, 60.0
TRAIN_S = (15.0, 30.0, 60.0, 120.0)


@dataclass
class Outcome:
    """What a simulated run did, the first third left out."""

    seconds: float = 0.0
    staleness: list[int] = field(default_factory=list)
    trained: list[float] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)


async def simulate(window: int, train_s: float) -> Outcome:
    """Run `STEPS` steps with ``window``."""
    buffer: Buffer[tuple[int, float], None] = Buffer(PROMPTS, STALENESS, window)
    chance, outcome = random.Random(0), Outcome()
    ends: list[tuple[float, int]] = []
    now, version, begin = 0.0, 0, 0.0

    def admit() -> None:
        for _ in range(buffer.free):
            lasts = chance.lognormvariate(math.log(MEAN_S) - SIGMA**2 / 2, SIGMA)
            outcome.sampled.append(lasts)
            heapq.heappush(ends, (now + lasts, buffer.put((version, lasts))))

    def finish_until(moment: float) -> None:
        while ends and ends[0][0] <= moment:
            buffer.finish(heapq.heappop(ends)[1], None)

    admit()
    for step in range(STEPS):
        taking = asyncio.create_task(buffer.take())
        await asyncio.sleep(0)
        while not taking.done():
            now = max(now, ends[0][0])
            finish_until(now)
            await asyncio.sleep(0)
        if step == STEPS // 3:
            begin, outcome.sampled = now, []
        if step >= STEPS // 3:
            outcome.staleness += [version - slot.prompt[0] for slot in taking.result()]
            outcome.trained += [slot.prompt[1] for slot in taking.result()]
        finish_until(now + train_s)
        now, version = now + train_s, version + 1
        buffer.release()
        admit()
    outcome.seconds = (now - begin) / (STEPS - STEPS // 3)
    return outcome


def main() -> None:
    """Print a row for every time of training and window."""
    print("train s  window  s/step  stale mean  max  trained/sampled time")
    for train_s in TRAIN_S:
        for share in (0.0, 0.25, 0.5, 0.75):
            window = int(share * STALENESS * PROMPTS)
            run = asyncio.run(simulate(window, train_s))
            mean = sum(run.staleness) / len(run.staleness)
            bias = sum(run.trained) / len(run.trained) / (sum(run.sampled) / len(run.sampled))
            print(f"{train_s:7.0f}  {window:6d}  {run.seconds:6.1f}  {mean:10.2f}  {max(run.staleness):3d}  {bias:20.2f}")


if __name__ == "__main__":
    main()

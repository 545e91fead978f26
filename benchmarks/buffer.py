"""CPU seconds that the buffer takes for a step, and how they grow with its prompts.

    python -m benchmarks.buffer

Every finished rollout is an event of its own, and the learner waits in `take` meanwhile, as in a run.
"""

from __future__ import annotations

import asyncio
import random
import time

from trainer.run.buffer import Buffer

SIZES = (256, 512, 1024, 2048)
STEPS = 5
STALENESS = 4


async def seconds_a_step(prompts: int) -> float:
    """CPU seconds of one step of ``prompts`` slots that finish in a random order."""
    buffer: Buffer[int, int] = Buffer(prompts, STALENESS)
    order = random.Random(0)
    waiting: list[int] = []
    begin = time.process_time()
    for _ in range(STEPS):
        taking = asyncio.create_task(buffer.take())
        while not taking.done():
            waiting += [buffer.put(0) for _ in range(buffer.free)]
            i = order.randrange(len(waiting))
            waiting[i], waiting[-1] = waiting[-1], waiting[i]
            buffer.finish(waiting.pop(), 0)
            await asyncio.sleep(0)
        buffer.release()
    return (time.process_time() - begin) / STEPS


def main() -> None:
    """Print a row a size."""
    before = None
    for prompts in SIZES:
        spent = asyncio.run(seconds_a_step(prompts))
        growth = f"   x{spent / before:.2f} for twice the prompts" if before else ""
        print(f"{prompts:5d} prompts  {spent:.4f} s a step{growth}")
        before = spent


if __name__ == "__main__":
    main()

"""CPU time that the buffer takes for a step and for a finished rollout, and how it grows with its prompts.

    python -m benchmarks.buffer

Every finished rollout is an event of its own, and the learner waits in `take` meanwhile, as in a run.
"""

from __future__ import annotations

import asyncio
import random
import time

from trainer.run.buffer import Buffer

SIZES = (256, 512, 1024, 2048, 20_000)
"""The last one makes 100,000 slots."""
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
    for prompts in SIZES:
        spent = asyncio.run(seconds_a_step(prompts))
        slots = prompts * (STALENESS + 1)
        print(f"{prompts:6d} prompts  {slots:7d} slots  {spent:.4f} s a step  {1e6 * spent / prompts:5.1f} us a rollout")


if __name__ == "__main__":
    main()

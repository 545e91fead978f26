"""How late the controller's event loop runs what is due: while it is late, nothing is admitted, collected or synced."""

from __future__ import annotations

import asyncio

EVERY_S = 0.1
"""Seconds between two looks."""


class LoopLag:
    """Measures how much longer than asked a short sleep takes."""

    def __init__(self) -> None:
        self._late: list[float] = []

    async def watch(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + EVERY_S
            await asyncio.sleep(EVERY_S)
            self._late.append(max(loop.time() - due, 0.0))

    def metrics(self) -> dict[str, float]:
        """``controller/loop_lag_{mean,max}`` since the last call, seconds; nothing where there was no time to look."""
        late, self._late = self._late, []
        return {"controller/loop_lag_mean": sum(late) / len(late), "controller/loop_lag_max": max(late)} if late else {}

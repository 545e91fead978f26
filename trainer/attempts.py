"""Attempts of a run: what ends one, whether another may follow from the last checkpoint, and how one is taken down."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError

from rlframe.config import Config, ConfigError
from trainer import recovery
from trainer.checkpoints import Checkpoints
from trainer.failures import RunFailed, WorkerDied
from workers.rollout.supervision import WorkerLost

if TYPE_CHECKING:
    from trainer.controller import Controller
    from trainer.tracking import Tracker


def repeat(
    config: Config,
    checkpoints: Checkpoints,
    checkpoint: Path | None,
    attempt: Callable[[Path | None, int], Coroutine[Any, Any, None]],
) -> None:
    """Run ``attempt(checkpoint, restarts)``; when a process of it dies, again from the newest checkpoint.

    Args:
        config: ``checkpoint.max_failures`` bounds the repetitions.
        checkpoints: of this run.
        checkpoint: where the first attempt goes on; None: at the start.
        attempt: trains to the end of the run; ``restarts`` counts the attempts of this run that died before.

    Raises:
        RunFailed: processes died too often, or the run cannot go on for another reason.
    """
    restarts = recovery.read_state(checkpoint)["faults"].get("learner_restarts", 0) if checkpoint else 0
    limit = config.checkpoint.max_failures
    for left in range(limit, -1, -1):
        try:
            return asyncio.run(attempt(checkpoint, restarts))
        except WorkerDied as error:
            if not left:
                raise RunFailed(f"{error} No attempt is left of checkpoint.max_failures={limit}.") from None
            checkpoint, _ = checkpoints.newest()
            restarts += 1
            print(f"{error} Starting again from {checkpoint.name if checkpoint else 'step 0'}; attempts left: {left - 1}.")


async def explain(error: BaseException, controller: Controller | None) -> BaseException:
    """What ended an attempt: `WorkerDied` if a process is gone that the run cannot replace, else the cause in ``error``.

    A rank that lost its peer in a collective may be heard before the death of the peer is, so the ranks are asked.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, RunFailed | ConfigError):
        return error
    dead = await controller.learner.dead() if controller else []
    if dead:
        return WorkerDied(f"Learner rank {dead[0]} died.")
    if isinstance(error, RayActorError | WorkerLost):
        return WorkerDied(f"A process of the run died: {str(error).splitlines()[0]}")
    return error


async def close(controller: Controller) -> None:
    """End the workers in order, within a time limit; a checkpoint that is being written is finished first, if it can be."""
    with contextlib.suppress(Exception):
        await asyncio.wait_for(controller.checkpoints.settle(), 60)
    groups: set[Any] = {controller.rollouts, controller.evaluators, controller.learner}
    with contextlib.suppress(Exception):
        await asyncio.wait_for(asyncio.gather(*(group.close() for group in groups)), 20)


def on_signal(tracker: Tracker, task: asyncio.Task[None], controller: Controller | None = None) -> None:
    """SIGTERM and Ctrl-C: the first one finishes the step and saves, if there is a controller; any other ends ``task`` now."""
    stopping = controller is None

    def stop() -> None:
        nonlocal stopping
        if stopping or controller is None:
            task.cancel()
            return
        stopping = True
        controller.stop()
        tracker.say("stopping; a checkpoint is written (once more to leave without it)")

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)

"""Attempts of a run: what ends one, what is saved then, whether another may follow, and how one is shut down."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError

from rlframe.config import ConfigError
from trainer.run import recovery
from trainer.run.checkpoints import Checkpoints, step_of
from trainer.run.failures import LearnerDied, RunFailed, WorkerDied
from trainer.settings.config import Config
from workers.process import SIGNALS
from workers.supervised import StartFailed, WorkerLost, first_line

if TYPE_CHECKING:
    from trainer.run.controller import Controller
    from trainer.watch.tracking import Tracker

SAVE_S = 300.0
"""Longest time that saving after a fault may take; ``cluster.watchdog_s`` if that is less."""


def repeat(
    config: Config, checkpoints: Checkpoints, checkpoint: Path | None, attempt: Callable[[Path | None, int], None]
) -> None:
    """Run ``attempt(checkpoint, restarts)``; when a process of it dies, again from the newest checkpoint.

    Args:
        config: ``checkpoint.max_failures`` bounds the attempts that may die with no new checkpoint between them.
        checkpoints: of this run.
        checkpoint: where the first attempt continues; None: at the start.
        attempt: trains to the end of the run; ``restarts`` counts the attempts of this run that died before.

    Raises:
        RunFailed: processes died too often, or the run cannot continue for another reason.
    """
    restarts = recovery.read_state(checkpoint)["faults"].get("learner_restarts", 0) if checkpoint else 0
    left = limit = config.checkpoint.max_failures
    while True:
        try:
            return attempt(checkpoint, restarts)
        except WorkerDied as error:
            before, (checkpoint, _) = checkpoint, checkpoints.newest()
            if checkpoint is not None and (before is None or step_of(checkpoint) > step_of(before)):
                left = limit
            if not left:
                raise RunFailed(f"{error} No attempt is left of checkpoint.max_failures={limit}.") from None
            left -= 1
            restarts += 1
            print(f"{error} Starting again from {checkpoint.name if checkpoint else 'step 0'}; attempts left: {left}.")


async def conclude(error: BaseException, controller: Controller | None) -> BaseException:
    """What ended an attempt, as `explain` says, after what was learned has been saved; the message says so."""
    cause = await explain(error, controller)
    if controller is None or not controller.tracker.has_steps or isinstance(cause, LearnerDied | ConfigError):
        return cause
    saved, sentence = await save_learned(controller)
    if not isinstance(cause, RunFailed):
        cause.add_note(sentence)
    elif not (saved and isinstance(cause, WorkerDied)):
        cause = type(cause)(f"{cause} {sentence}")
    return cause


async def save_learned(run: Controller) -> tuple[bool, str]:
    """Save what was learned if it is whole, within a time limit; returns whether that worked, and a sentence about it."""
    resume = f"`rlframe resume {run.config.run_dir}`"
    if run.phase is recovery.Phase.UPDATING:
        return (
            False,
            f"This came in the middle of the update of step {run.step}; {resume} starts from the checkpoint before it.",
        )
    limit = min(SAVE_S, run.config.cluster.watchdog_s)
    try:
        async with asyncio.timeout(limit):
            if run.row is not None:
                run.log(run.row)
            await run.save()
            await run.checkpoints.settle()
    except TimeoutError:
        return False, f"What was learned since the last checkpoint could not be saved within {limit:g} s."
    except Exception as error:
        return False, f"What was learned since the last checkpoint could not be saved: {first_line(error)}."
    return True, f"What was learned is saved; {resume} continues after step {run.step_done}."


async def explain(error: BaseException, controller: Controller | None) -> BaseException:
    """What ended an attempt: `WorkerDied` if a process is gone that the run cannot replace, else the cause in ``error``.

    A rank that lost its peer in a collective may be heard before the death of the peer is, so the ranks are asked.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, StartFailed):
        return RunFailed(str(error))
    if isinstance(error, ConfigError) or (isinstance(error, RunFailed) and not isinstance(error, WorkerDied)):
        return error
    dead = await controller.learner.dead() if controller else []
    if dead:
        return LearnerDied(f"Learner rank {dead[0]} died.")
    if isinstance(error, RayActorError | WorkerLost):
        return WorkerDied(f"A process of the run died: {first_line(error)}.")
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
    for number in SIGNALS:
        loop.add_signal_handler(number, stop)

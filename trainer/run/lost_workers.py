"""What the controller does when a rollout worker is lost: the others get its prompts, and it comes back under verified weights.

When a worker counts as lost, and how another actor takes its place, is in `workers.supervised`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.run.failures import RunFailed
from workers.faults import Fault
from workers.supervised import WorkerLost

if TYPE_CHECKING:
    from trainer.run.controller import Controller


async def replace(run: Controller, worker: int, failure: WorkerLost) -> bool:
    """Re-issue the prompts of a lost worker, start it again, and let prompts go to it when it serves the current weights.

    Where a piece of an episode was handed in, its prompt is not issued again: the rest is dropped and counted.

    Args:
        run: the run.
        worker: number of the worker.
        failure: why it is lost.

    Returns:
        False if the run continues without it. Otherwise it is back; if it is lost again meanwhile, `collect` says so.

    Raises:
        RunFailed: no worker is left, or the new one does not serve the weights that were sent.
    """
    # Before anything is awaited: what waits for a slot must not be sent to the actor that comes after the lost one.
    waiting, run.continuations = run.continuations, [rest for rest in run.continuations if rest.worker != worker]
    run.faults.counts["lost_rests"] += len(waiting) - len(run.continuations)
    reissued, given_up, rests = await run.rollouts.reissue(worker)
    rollouts = run.config.algorithm.rollouts_per_prompt
    run.faults.counts["lost_rests"] += len(rests)
    for slot in rests:
        run.buffer.drop(slot)
    run.faults.counts["reissued"] += reissued * rollouts
    for slot in given_up:
        reason = f"every worker that had it was lost, most recently because: {failure}"
        run.drop(slot, [Fault(failure.kind, reason)] * rollouts)

    def say(failure: WorkerLost) -> None:
        run.tracker.say(f"{failure} It is started again; {reissued} prompts are sent again.")
        run.faults.counts["worker_restarts"] += 1
        run.waits(f"collect_{worker}", "its worker to start again")

    async def ready(worker: int) -> None:
        async with run.policy:
            await run.sync_weights([worker])

    last = await run.rollouts.restart_until_ready(worker, ready, say)
    if last is None:
        return True
    limit = f"rollout.max_restarts={run.config.rollout.max_restarts}"
    if all(other.gone for other in run.rollouts.workers):
        raise RunFailed(f"No rollout worker is left, each having used up {limit}. {last}")
    run.tracker.say(f"{last} It has used up {limit}; the run continues without it.")
    return False

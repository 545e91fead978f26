"""Held-out problems: who answers them, what is measured, and how many may fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.run.failures import RunFailed
from trainer.watch.step_metrics import eval_metrics
from workers.environments.registry import ENVIRONMENTS
from workers.rollout.worker import Evaluation
from workers.supervised import WorkerLost

if TYPE_CHECKING:
    from trainer.run.controller import Controller


async def evaluate(run: Controller) -> dict[str, float]:
    """``eval/*`` of the policy, over the episodes that succeeded.

    Raises:
        RunFailed: more than ``eval.max_failed`` of them failed, or one in a way that ends the run.
    """
    run.waits("learn", "the evaluation", run.evaluators.state, run.evaluators.progress)
    sampling = run.sampling(temperature=run.config.eval.temperature)
    apart = run.evaluators is not run.rollouts
    while True:
        if apart:
            await run.evaluators.revive()
            await run.push(run.evaluators, [0], exact=True)
            await run.evaluators.admit([0])
        try:
            return _measure(run, await run.evaluators.evaluate(run.eval_prompts, sampling, wait=not apart))
        except WorkerLost as failure:
            run.tracker.say(f"{failure} The evaluation is done again.")


def _measure(run: Controller, evaluation: Evaluation) -> dict[str, float]:
    failed, limit = len(evaluation.faults), run.config.eval.max_failed
    for prompt, fault in evaluation.faults:
        run.tracker.note(f"a held-out episode failed ({fault.kind}, prompt {prompt!r}): {fault.reason}")
        if fault.fatal:
            raise RunFailed(fault.reason)
    share = failed / len(run.eval_prompts)
    if share > limit or evaluation.batch is None:
        prompt, fault = evaluation.faults[0]
        raise RunFailed(
            f"{failed} of {len(run.eval_prompts)} held-out episodes failed, more than eval.max_failed={limit:g} of them, the "
            f"first ({fault.kind}, prompt {prompt!r}) because: {fault.reason.rstrip('.')}."
        )
    name = run.config.task.name
    if name not in ENVIRONMENTS:  # an import path; the environment has a name
        name = run.eval_prompts[0].env
    return eval_metrics(evaluation.batch, name) | {f"eval/{name}/failed": share}

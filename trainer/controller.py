"""prompts -> rollouts -> buffer -> values -> skip-observation GAE -> K critic updates -> actor update -> weight sync -> log.

                      +----------------------- rollouts.submit(prompts) <----------- buffer.put(prompt)
                      v                                                                  ^
    RolloutGroup: n workers, one engine each                                   stream.take(buffer.free)
                      |                                                                  ^
                      +--> rollouts.collect() --> buffer.finish(slot, batch)   buffer.release()
                                                        |                                ^
                                                  buffer.take()                 rollouts.update_weights(update)
                                                        v                                ^
    LearnerGroup: values -> compute_advantages -> update_critic x K -> update_actor -> weight_update(version)

issue     consumes free slots; produces prompts in flight; waits for a free slot; unblocked by `buffer.release`, `buffer.drop`.
collect   one per worker; consumes ended episodes; produces finished slots; waits for the worker; unblocked by an episode's end.
learn     consumes the oldest batch of finished slots; produces policy versions and metrics; waits for the slowest rollout of
          that batch; unblocked by `buffer.finish`.
watch     consumes what every loop says it waits for; ends the run with a dump when a step takes longer than
          ``cluster.watchdog_s``.

``max_staleness`` is the buffer's capacity and nothing else (the bound is proved in `trainer.buffer`); 0 is the synchronous
case of the same code. No formula, no engine and no file format lives here.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from rlframe.advantages import RunningMean, compute_advantages
from rlframe.config import Config, serves_other_weights
from rlframe.types import Batch, Prompt
from trainer import recovery
from trainer.buffer import Buffer, Slot, State
from trainer.data import PromptStream
from trainer.metrics import Timers, eval_metrics, rollout_metrics, staleness_metrics
from trainer.served import checksum_fault, probe_fault
from trainer.tracking import Tracker
from workers.environments.base import FatalRewardError
from workers.group import LearnerGroup
from workers.rollout.engine import SamplingParams
from workers.rollout.group import RolloutGroup


class RunFailed(RuntimeError):
    """The run cannot go on; the message says why in one sentence."""


@dataclass
class Controller:
    """One attempt of a run: everything that the loops share."""

    config: Config
    stream: PromptStream
    eval_prompts: list[Prompt]
    stop_token_ids: tuple[int, ...]
    head_size: int
    sync_mode: str
    rollouts: RolloutGroup
    learner: LearnerGroup
    tracker: Tracker
    checkpoints: recovery.Checkpoints
    step: int = 0
    version: int = 0
    stop_requested: bool = False
    faults: dict[str, int] = field(default_factory=lambda: {"dropped": 0, "timeouts": 0})
    waiting: dict[str, tuple[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        per_prompt = self.config.algorithm.rollouts_per_prompt
        self.buffer: Buffer[Prompt, Batch] = Buffer(self.config.batch_size // per_prompt, self.config.max_staleness)
        self.running_mean = RunningMean(self.config.algorithm.running_mean_decay)
        self.failures_in_a_row = 0
        self.syncs = 0

    async def run(self) -> None:
        """Train from ``self.step`` to ``config.steps``; returns early, with a checkpoint, when a stop is requested."""
        await self.sync_weights()
        if self.step == 0:
            self.tracker.log(0, await self.evaluate())
        async with asyncio.TaskGroup() as loops:
            background = [loops.create_task(self.issue()), loops.create_task(self.watch())]
            background += [loops.create_task(self.collect(i)) for i in range(len(self.rollouts.workers))]
            await self.learn()
            for task in background:
                task.cancel()

    async def issue(self) -> None:
        """Admit prompts as slots become free."""
        restored = self.buffer.slots(State.ISSUED)
        if restored:
            await self.submit([slot.prompt for slot in restored], [slot.number for slot in restored])
        while True:
            self.waits("issue", "a free slot")
            await self.buffer.wait_free()
            prompts = self.stream.take(self.buffer.free)
            await self.submit(prompts, [self.buffer.put(prompt) for prompt in prompts])

    async def submit(self, prompts: list[Prompt], slots: list[int]) -> None:
        """Send prompts to the rollout workers."""
        self.waits("issue", "a rollout worker to accept prompts")
        await self.rollouts.submit(prompts, slots, self.config.algorithm.rollouts_per_prompt, self.sampling())

    async def collect(self, worker: int) -> None:
        """Bring finished episodes home."""
        while True:
            self.waits(f"collect_{worker}", "a rollout to finish")
            collected = await self.rollouts.collect(worker)
            if collected.fatal:
                raise RunFailed(collected.fatal)
            for slot, batch in collected.by_slot():
                self.failures_in_a_row = 0
                self.buffer.finish(slot, batch)
            for slot, reason in collected.failures:
                self.drop(slot, reason)

    def drop(self, slot: int, reason: str) -> None:
        """A prompt gave no trajectory: free its slot and count it; when nothing succeeds any more, end the run."""
        self.buffer.drop(slot)
        self.faults["dropped"] += 1
        self.faults["timeouts"] += "time" in reason
        self.failures_in_a_row += 1
        self.tracker.note(f"dropped a rollout: {reason}")
        if self.failures_in_a_row >= max(self.buffer.capacity, 8):
            raise RunFailed(f"{self.failures_in_a_row} rollouts in a row failed, the last one because: {reason}")

    async def learn(self) -> None:
        """The method, step by step."""
        while self.step < self.config.steps and not self.stop_requested:
            await self.train_step()
            self.waits("learn", "logging, evaluation and checkpoint")
            done = self.step == self.config.steps or self.stop_requested
            if self.due(self.config.checkpoint.every) or done:
                await self.save()

    async def train_step(self) -> None:
        """One step; every number in ``timers`` is a metric."""
        timers, algorithm = Timers(), self.config.algorithm
        self.step += 1
        actor_rests = self.step <= self.config.critic.warmup_steps and algorithm.advantage == "gae"

        # 1. the oldest batch of rollouts
        self.waits("learn", "the oldest batch of rollouts")
        with timers("wait_for_batch"):
            slots = await self.buffer.take()
        batch = join(slots)
        metrics = {**rollout_metrics(batch), **staleness_metrics(batch, self.version)}

        # 2. values
        if algorithm.advantage == "gae":
            self.waits("learn", "the critic's values")
            with timers("values"):
                batch.values, batch.bootstrap = await self.learner.values(self.learner.share(batch))

        # 3. advantages and returns
        compute_advantages(batch, algorithm, self.running_mean)
        shared = self.learner.share(batch)

        # 4. K critic updates
        if algorithm.advantage == "gae":
            self.waits("learn", "the critic's updates")
            with timers("train_critic"):
                for _ in range(self.config.critic.updates_per_step):
                    critic_metrics = await self.learner.update_critic(shared)
            metrics |= critic_metrics.compute()

        # 5. actor update
        if not actor_rests:
            self.waits("learn", "the actor's update")
            with timers("train_actor"):
                metrics |= (await self.learner.update_actor(shared)).compute()
            self.version += 1

        # 6. weight sync, after which the slots of this batch are free
        if not actor_rests:
            self.waits("learn", "the rollout workers to take new weights")
            with timers("weight_sync"):
                await self.sync_weights()
        self.buffer.release()

        # 7. evaluation and log
        if self.due(self.config.eval.every) or self.step == self.config.steps:
            with timers("eval"):
                metrics |= await self.evaluate()
        metrics |= timers.compute(batch, await self.rollouts.stats()) | self.counters()
        self.tracker.log(self.step, metrics, batch=batch)

    async def sync_weights(self) -> None:
        """Push the actor's weights to every engine and check that each serves exactly them."""
        rollout = self.config.rollout
        update, expected = await self.learner.weight_update(self.version, self.sync_mode, rollout.dtype)
        fault = checksum_fault(await self.rollouts.update_weights(update), expected, self.version)
        probed = rollout.probe_every and self.syncs % rollout.probe_every == 0 and not serves_other_weights(rollout)
        if not fault and probed:
            prompt = self.eval_prompts[0].tokens
            completions = await self.rollouts.probe(prompt, self.head_size)
            fault = await probe_fault(completions, prompt, self.learner, rollout.temperature, rollout.probe_tolerance)
        if fault:
            raise RunFailed(fault)
        self.syncs += 1

    async def evaluate(self) -> dict[str, float]:
        """Held-out reward under the weights now served."""
        self.waits("learn", "the evaluation")
        sampling = self.sampling(temperature=self.config.eval.temperature)
        try:
            batch = await self.rollouts.evaluate(self.eval_prompts, sampling)
        except FatalRewardError as error:
            raise RunFailed(str(error)) from None
        return eval_metrics(batch, self.config.task.name)

    async def save(self) -> None:
        """Write a checkpoint of everything that the next step depends on."""
        self.waits("learn", "the checkpoint")
        await self.checkpoints.save(self.step, self.learner, recovery.snapshot(self))

    async def watch(self) -> None:
        """Fail with a dump when a step takes too long."""
        limit = self.config.cluster.watchdog_s
        while True:
            await asyncio.sleep(min(1.0, limit / 10))
            _, since = self.waiting.get("learn", ("", time.monotonic()))
            if time.monotonic() - since > limit:
                raise RunFailed(f"Nothing moved for {limit:.0f} s (cluster.watchdog_s). Waiting: {self.dump()}")

    def waits(self, loop: str, what: str) -> None:
        """Record what a loop waits for, from now."""
        self.waiting[loop] = (what, time.monotonic())

    def dump(self) -> str:
        """Which loop waits for what, for how long."""
        now = time.monotonic()
        return "; ".join(f"{loop} for {what} ({now - since:.0f} s)" for loop, (what, since) in sorted(self.waiting.items()))

    def sampling(self, temperature: float | None = None) -> SamplingParams:
        """How rollouts are sampled; an evaluation (its own temperature) needs no heads."""
        rollout = self.config.rollout
        training = temperature is None
        return SamplingParams(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature if temperature is None else temperature,
            top_p=rollout.top_p if training else 1.0,
            top_k=rollout.top_k if training else 0,
            logprobs=self.head_size if training else 0,
            stop_token_ids=self.stop_token_ids,
        )

    def due(self, every: int) -> bool:
        """Whether something that happens ``every`` so many steps happens now (0: never)."""
        return every > 0 and self.step % every == 0

    def counters(self) -> dict[str, float]:
        """Faults so far, slots in use, data seen, policy version."""
        return {
            **{f"fault/{name}": float(count) for name, count in self.faults.items()},
            "off_policy/in_flight": float(self.buffer.occupied),
            "off_policy/dropped": float(self.buffer.dropped),
            "data/epoch": self.stream.epoch,
            "version": float(self.version),
        }


def join(slots: list[Slot[Prompt, Batch]]) -> Batch:
    """The trajectories of the taken slots, in their order."""
    return Batch.concat([slot.result for slot in slots if slot.result is not None])

"""prompts -> rollouts -> buffer -> values -> advantages -> K critic updates -> actor update -> weight sync -> log.

                      +----------------------- rollouts.submit(prompts) <----------- buffer.put(prompt)
                      v                                                                  ^
    RolloutGroup: n workers, one engine each                                   stream.take(buffer.free)
                      |                                                                  ^
                      +--> rollouts.collect() --> buffer.finish(slot, batch)   buffer.release()
                                                        |                                ^
                                                  buffer.take()                 rollouts.update_weights(update)
                                                        v                                ^
    LearnerGroup: values -> compute_advantages -> update_critic x K -> update_actor -> weight_update(version)

issue     consumes free slots; produces prompts in flight, and before them the rest of episodes that were cut; waits for a
          free slot; unblocked by `buffer.release`, `buffer.drop` and a higher `buffer.limit` (`trainer.run.admission`).
collect   one per worker; consumes ended episodes; produces finished slots; waits for the worker; unblocked by an episode's end.
          When the worker is lost: re-issues its prompts, starts it again, and lets prompts go to it when it serves the current
          weights; waits for the learner to be between two policies.
learn     consumes the oldest batch of finished slots; produces policy versions and metrics; waits for the slowest rollout of
          that batch; unblocked by `buffer.finish`, and by `stop`.
watch     consumes what every loop says it waits for; ends the run with a dump when what `learn` waits for makes no progress
          for ``cluster.watchdog_s``.

``max_staleness`` is the buffer's capacity and nothing else (the bound is proved in `trainer.run.buffer`), of which
`trainer.run.admission` uses less where that costs no time; 0 is the synchronous case of the same code. A fault in `collect`
ends the run once the update in work has ended, so that what was learned can be saved (`trainer.run.attempts`); what each kind
of fault does is in `trainer.run.faults`. No formula, no engine and no file format lives here; `trainer.run.lost_workers` brings
lost workers back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass
from typing import cast

from rlframe.advantages import compute_advantages, make_estimator
from rlframe.types import Batch, Prompt
from trainer.run import lost_workers, recovery
from trainer.run.admission import Admission
from trainer.run.buffer import Buffer, State
from trainer.run.checkpoints import Checkpoints
from trainer.run.evaluation import evaluate
from trainer.run.failures import RunFailed, WorkerDied
from trainer.run.faults import Faults
from trainer.run.prompts import PromptStream
from trainer.run.recovery import Phase
from trainer.run.served_weights import checksum_fault, probe_fault
from trainer.run.watchdog import Watchdog
from trainer.settings.config import Config
from trainer.watch.loop_lag import LoopLag
from trainer.watch.samples import Sample, choose
from trainer.watch.step_metrics import Timers, rollout_metrics, staleness_metrics
from trainer.watch.tracking import Tracker
from workers.engines.protocol import SamplingParams
from workers.engines.weights import streams
from workers.events import Event
from workers.faults import Fault
from workers.learner.group import LearnerGroup
from workers.rollout.group import Continuation, RolloutGroup
from workers.rollout.settings import serves_other_weights
from workers.supervised import WorkerLost


@dataclass
class Controller:
    """One attempt of a run: everything that the loops share."""

    config: Config
    stream: PromptStream
    eval_prompts: list[Prompt]
    head_size: int
    sync_mode: str
    rollouts: RolloutGroup
    evaluators: RolloutGroup
    learner: LearnerGroup
    tracker: Tracker
    checkpoints: Checkpoints
    step: int = 0
    version: int = 0
    resumed: bool = False

    def __post_init__(self) -> None:
        config = self.config
        prompts_per_step = config.batch_size // config.algorithm.rollouts_per_prompt
        self.buffer: Buffer[Prompt | Continuation, Batch] = Buffer(
            prompts_per_step, config.max_staleness, config.reorder_window
        )
        self.admission = Admission(prompts_per_step, self.buffer.capacity, full=config.admission == "full")
        self.buffer.limit = self.admission.limit
        self.faults = Faults(self.buffer.capacity, config.algorithm.rollouts_per_prompt, self.tracker.note)
        self.estimator = make_estimator(config.algorithm)
        self.estimator_before = deepcopy(self.estimator.state_dict())
        """State of the advantage estimator before the batch in work."""
        dump_file, events = self.tracker.run_dir / "logs" / "stuck.txt", self.tracker.events
        on_wait = lambda loop, what: events.now(f"controller/{loop}", what)  # noqa: E731
        self.watchdog = Watchdog(config.cluster.watchdog_s, dump_file, self.tracker.say, on_wait)
        self.waits, self.lag = self.watchdog.waits, LoopLag()
        self.continuations: list[Continuation] = []
        """Episodes that were cut and wait for a slot."""
        self.policy = asyncio.Lock()
        """Held while the actor's weights are not those of ``version``, or are not yet served."""
        self.learning = asyncio.Lock()
        """Held while a batch is learned from, until its policy is served."""
        self.phase = Phase.BETWEEN
        self.row: dict[str, float] | None = None
        """Metrics of a step that is learned and not yet logged."""
        self.syncs = 0
        self.served = ""

    async def run(self) -> None:
        """Train from ``self.step`` to ``config.steps``; returns early, with a checkpoint, when a stop is requested."""
        workers = range(len(self.rollouts.workers))
        async with asyncio.TaskGroup() as loops:
            background = [loops.create_task(self.collect(i)) for i in workers]
            background += [loops.create_task(self.watchdog.watch()), loops.create_task(self.lag.watch())]
            self.waits("learn", "the rollout workers to take the first weights", self.rollouts.state)
            async with self.policy:
                await self.sync_weights(workers)
            if not self.resumed:
                self.tracker.log(0, await evaluate(self))
            background.append(loops.create_task(self.issue()))
            await self.learn()
            for task in background:
                task.cancel()

    def stop(self) -> None:
        """Leave as soon as the step in work, if there is one, is done; a checkpoint is written first."""
        self.buffer.close()

    async def issue(self) -> None:
        """Admit prompts as slots become free, as many as `admission` lets be in use."""
        restored = self.buffer.slots(State.ISSUED)
        if restored:
            await self.submit([cast(Prompt, slot.prompt) for slot in restored], [slot.number for slot in restored])
        while True:
            self.waits("issue", "a free slot")
            await self.buffer.wait_free()
            await self.resume_episodes()
            prompts = self.stream.take(self.buffer.free)
            await self.submit(prompts, [self.buffer.put(prompt) for prompt in prompts])

    async def resume_episodes(self) -> None:
        """Admit what waits of episodes that were cut, in the order of their last pieces, as far as slots are free."""
        waiting = sorted(self.continuations, key=lambda continuation: continuation.before)
        admitted, self.continuations = waiting[: self.buffer.free], waiting[self.buffer.free :]
        if admitted:
            slots = [self.buffer.put(continuation) for continuation in admitted]
            self.waits("issue", "the rollout workers to continue episodes", self.rollouts.state)
            await self.rollouts.resume(admitted, slots)

    async def submit(self, prompts: list[Prompt], slots: list[int]) -> None:
        """Send prompts to the rollout workers."""
        self.waits("issue", "the rollout workers to accept prompts", self.rollouts.state)
        await self.rollouts.submit(prompts, slots, self.config.algorithm.rollouts_per_prompt, self.sampling())

    async def collect(self, worker: int) -> None:
        """Put finished episodes into the buffer, and bring a lost worker back."""
        try:
            await self._collect(worker)
        except RunFailed:
            async with self.learning:
                raise

    async def _collect(self, worker: int) -> None:
        self.waits(f"collect_{worker}", "a rollout to finish")
        while True:
            try:
                collected = await self.rollouts.collect(worker)
            except WorkerLost as failure:
                if not await lost_workers.replace(self, worker, failure):
                    return
                self.waits(f"collect_{worker}", "a rollout to finish")
                continue
            if collected.fatal:
                raise RunFailed(collected.fatal.reason)
            for slot, batch in collected.by_slot():
                self.buffer.finish(slot, batch)
                if not batch.last.all():
                    self.continuations.append(Continuation(worker, slot, int(batch.indices[0])))
            self.faults.succeeded(collected)
            self.tracker.events.extend(collected.events)
            for slot, faults in collected.failures:
                self.drop(slot, faults)
            if collected.slots or collected.failures:
                self.waits(f"collect_{worker}", "a rollout to finish")

    def drop(self, slot: int, faults: list[Fault]) -> None:
        """A prompt gave no trajectory: free its slot and count why; when nothing succeeds any more, end the run."""
        self.buffer.drop(slot)
        self.faults.dropped(faults)

    async def learn(self) -> None:
        """The method, step by step."""
        while self.step < self.config.steps and await self.train_step():
            self.waits("learn", "logging, evaluation and checkpoint")
            if self.due(self.config.checkpoint.every) and self.step < self.config.steps:
                await self.save()
            await self.checkpoints.check()
        await self.save()
        await self.checkpoints.settle()

    async def train_step(self) -> bool:
        """One step, if there is no request to stop; every number in ``timers`` is a metric."""
        timers, critic = Timers(self.record_phase), self.estimator.needs_critic

        # 1. the oldest batch of rollouts
        self.waits("learn", "the oldest batch of rollouts", self.rollouts.state, self.rollouts.progress)
        asked, ready = time.monotonic(), self.buffer.ready
        with timers("wait_for_batch"):
            slots = await self.buffer.take()
        if not slots:
            return False
        self.buffer.limit = self.admission.took(asked, time.monotonic(), ready)
        self.step, self.phase, self.estimator_before = self.step + 1, Phase.TAKEN, deepcopy(self.estimator.state_dict())
        actor_rests = critic and self.step <= self.config.critic.warmup_steps
        batch = Batch.concat([slot.result for slot in slots if slot.result is not None])
        shared = self.learner.put_columns(batch)
        metrics = {**rollout_metrics(batch), **staleness_metrics(batch, self.version)}

        # 2. values
        if critic:
            self.waits("learn", "the critic's values")
            with timers("values"):
                batch.values, batch.bootstrap = await self.learner.values(shared)

        # 3. advantages and returns
        compute_advantages(batch, self.estimator)

        # 4. what people will see of this batch
        with timers("sample"):
            sample = await self.sample(batch)

        async with self.learning:
            # 5. K critic updates
            self.phase = Phase.UPDATING
            if critic:
                with timers("train_critic"):
                    for _ in range(self.config.critic.updates_per_step):
                        self.waits("learn", "an update of the critic")
                        critic_metrics = await self.learner.update_critic(shared)
                metrics |= critic_metrics.compute()

            # 6. actor update, and weight sync, after which the slots of this batch are free
            if actor_rests:
                self.phase, self.row = Phase.BETWEEN, metrics
            else:
                async with self.policy:
                    self.waits("learn", "the actor's update")
                    with timers("train_actor"):
                        metrics |= (await self.learner.update_actor(shared)).compute()
                    self.version += 1
                    self.phase, self.row = Phase.BETWEEN, metrics
                    self.waits("learn", "the rollout workers to take new weights", self.rollouts.state)
                    with timers("weight_sync"):
                        await self.sync_weights(self.rollouts.up())
        self.buffer.release()

        # 7. evaluation and log
        if self.due(self.config.eval.every) or self.step == self.config.steps:
            with timers("eval"):
                metrics |= await evaluate(self)
        metrics |= timers.compute(batch, await self.rollouts.stats()) | self.checkpoints.timings()
        self.log(metrics, sample)
        return True

    def record_phase(self, name: str, begin: float, end: float) -> None:
        """A part of a step goes into the log of events, but for the wait, in which the learner does nothing."""
        if name != "wait_for_batch":
            self.tracker.events.add(Event("learner", name, begin, end, {"step": self.step, "version": self.version}))

    def log(self, metrics: dict[str, float], sample: Sample | None = None) -> None:
        """Record the step that is done."""
        self.row = None
        self.tracker.log(self.step, metrics | self.counters(), sample)

    async def sample(self, batch: Batch) -> Sample | None:
        """Now and then, a few trajectories with the log-probabilities of the policy that is about to learn from them."""
        if not (self.due(self.config.log.rollouts_every) and self.config.log.rollouts_count):
            return None
        self.waits("learn", "the policy's view of a sample of rollouts")
        chosen = choose(batch, self.config.log.rollouts_count)
        ours = await self.learner.logprobs(self.learner.put(chosen), self.config.rollout.temperature)
        return Sample(chosen, ours["logprobs"], ours["entropy"])

    async def sync_weights(self, workers: Collection[int]) -> None:
        """Push the actor's weights to ``workers``, check that each serves exactly them, and let prompts go to it.

        Workers that are lost on the way are left to `collect`.
        """
        rollout = self.config.rollout
        probed = rollout.probe_every and self.syncs % rollout.probe_every == 0 and not serves_other_weights(rollout)
        self.served = await self.push(self.rollouts, workers)
        if probed:
            prompt = self.eval_prompts[0].tokens
            completions = await self.rollouts.probe(prompt, self.head_size, workers)
            fault = await probe_fault(completions, prompt, self.learner, rollout.temperature, rollout.probe_tolerance)
            if fault:
                raise RunFailed(fault)
        await self.rollouts.admit(workers)
        self.syncs += 1
        self.tracker.note(f"version {self.version} is served with checksum {self.served}")

    async def push(self, engines: RolloutGroup, workers: Collection[int], exact: bool = False) -> str:
        """Have ``workers`` hold the actor's weights (``exact``: not rounded either) and compare; returns their checksum."""
        update, expected = await self.learner.weight_update(self.version, self.sync_mode, self.config.rollout.dtype, exact)
        loading = asyncio.ensure_future(engines.update_weights(update, workers))
        if streams(self.config):
            await self.send(len(workers))
        fault = checksum_fault(await loading, expected, self.version)
        if fault:
            raise RunFailed(fault)
        return expected

    async def send(self, places: int) -> None:
        """The learner's part of a transfer over NCCL; nobody can leave one half-way, so a lost worker ends the attempt."""
        try:
            async with asyncio.timeout(self.config.rollout.timeout_s):
                await self.learner.send_weights(places)
        except TimeoutError:
            raise WorkerDied("A transfer of weights over NCCL took longer than rollout.timeout_s.") from None

    async def save(self) -> None:
        """Begin a checkpoint of everything that the next step depends on; it is written beside the next steps."""
        self.waits("learn", "the checkpoint")
        score = self.tracker.last_score
        measured = score[1] if score and score[0] == self.step_done else None
        await self.checkpoints.save(self.step_done, self.learner, recovery.snapshot(self), measured)

    @property
    def step_done(self) -> int:
        """The last step that was learned."""
        return self.step - (self.phase is Phase.TAKEN)

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
        )

    def due(self, every: int) -> bool:
        """Whether something that happens ``every`` so many steps happens now (0: never)."""
        return every > 0 and self.step % every == 0

    def counters(self) -> dict[str, float]:
        """Faults so far, slots in use, data seen, policy version."""
        return {
            **{f"fault/{name}": float(count) for name, count in self.faults.counts.items()},
            "off_policy/in_flight": float(self.buffer.occupied),
            "off_policy/in_flight_limit": float(self.buffer.limit),
            "off_policy/dropped": float(self.buffer.dropped),
            "data/epoch": self.stream.epoch,
            "version": float(self.version),
            **self.lag.metrics(),
        }

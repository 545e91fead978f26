"""From a composed config to a finished run: what is checked and started, in which order, and what is cleaned up.

Everything that a user can get wrong is found before Ray starts, everything that the cluster lacks before engines start.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError
from transformers import AutoConfig, AutoTokenizer

from rlframe.checks import check
from rlframe.config import Config, ConfigError, serves_other_weights
from rlframe.files import replace
from rlframe.models import resolve_model
from rlframe.types import Prompt
from trainer import drift, recovery
from trainer.checkpoints import Checkpoints, step_of
from trainer.compose import load_yaml, to_yaml
from trainer.controller import Controller
from trainer.data import PromptStream, as_prompt
from trainer.failures import RunFailed, WorkerDied
from trainer.placement import plan
from trainer.tracking import Tracker
from workers.environments import make_environment
from workers.environments.base import Environment
from workers.group import LearnerGroup
from workers.process import find_modules_in
from workers.rollout.group import RolloutGroup


@dataclass
class Inputs:
    """What a run reads before anything starts."""

    model_path: str
    tokenizer: Any
    environment: Environment
    stream: PromptStream
    eval_prompts: list[Prompt]
    vocab_size: int


def train(config: Config) -> Path:
    """Run a job from its first step; returns the run directory.

    Raises:
        ConfigError: a setting is refused, or the run directory holds another run.
        RunFailed: the run cannot go on.
    """
    check(config)
    run_dir = Path(config.run_dir).absolute()
    if (run_dir / "config.yaml").exists():
        raise ConfigError(
            f"{run_dir} holds a run already: `rlframe resume {config.run_dir}` goes on with it, another name=... starts afresh."
        )
    inputs = read_inputs(config)
    checkpoints = Checkpoints(run_dir, config.checkpoint)
    with occupied(run_dir):
        try:
            replace(run_dir / "config.yaml", to_yaml(config))
            run_attempts(config, inputs, run_dir, checkpoints, None)
        except BaseException:
            if not any(checkpoints.root.iterdir()):
                (run_dir / "config.yaml").unlink(missing_ok=True)
            raise
    return run_dir


def resume(run: str, overrides: list[str]) -> Path:
    """Go on with the run in directory ``run`` from its newest good checkpoint, or from the start if it has none yet.

    Raises:
        ConfigError: a setting is refused, or differs from the checkpoint's and must not.
        RunFailed: the run cannot go on, or no checkpoint can be used.
    """
    run_dir = Path(run).absolute()
    if not (run_dir / "config.yaml").exists():
        raise ConfigError(f"{run_dir} is not a run directory: it has no config.yaml.")
    config = load_yaml(run_dir / "config.yaml", overrides)
    config.run_dir = run
    check(config)
    with occupied(run_dir):
        checkpoints = Checkpoints(run_dir, config.checkpoint)
        checkpoint, skipped = checkpoints.newest()
        print("\n".join(skipped) or "", end="\n" * bool(skipped))
        if checkpoint is None:
            print(f"{run_dir} has no checkpoint yet; it starts at step 0.")
        else:
            for line in drift.changes(load_yaml(checkpoint / "config.yaml"), config):
                print(f"changed since {checkpoint.name}: {line}")
            step = step_of(checkpoint)
            if step >= config.steps:
                print(f"{run_dir} has done all its steps={config.steps}; give a larger number to go on.")
                return run_dir
        inputs = read_inputs(config)
        if checkpoint is not None:
            recovery.check_prompts(checkpoint, inputs.stream)
        replace(run_dir / "config.yaml", to_yaml(config))
        run_attempts(config, inputs, run_dir, checkpoints, checkpoint)
    return run_dir


@contextlib.contextmanager
def occupied(run_dir: Path) -> Iterator[None]:
    """Make the folders of a run and keep other drivers out of them; the lock goes with the process, however it ends.

    Raises:
        ConfigError: another driver is at work there.
    """
    for folder in ("logs", "rollouts", "checkpoints"):
        (run_dir / folder).mkdir(parents=True, exist_ok=True)
    with (run_dir / "logs" / "driver.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"Another process is training in {run_dir}; wait for it, or stop it.") from None
        yield


def run_attempts(config: Config, inputs: Inputs, run_dir: Path, checkpoints: Checkpoints, checkpoint: Path | None) -> None:
    """Train from ``checkpoint`` (None: from the start); when a process of the run dies, again from the newest one.

    Raises:
        RunFailed: processes died more than ``checkpoint.max_failures`` times, or the run cannot go on for another reason.
    """
    restarts = recovery.read_state(checkpoint)["faults"].get("learner_restarts", 0) if checkpoint else 0
    for left in range(config.checkpoint.max_failures, -1, -1):
        try:
            return asyncio.run(attempt(config, inputs, run_dir, checkpoint, restarts))
        except WorkerDied as error:
            if not left:
                raise RunFailed(
                    f"{error} That was more than checkpoint.max_failures={config.checkpoint.max_failures}."
                ) from None
            checkpoint, _ = checkpoints.newest()
            restarts += 1
            print(f"{error} Starting again from {checkpoint.name if checkpoint else 'step 0'} ({left - 1} more times at most).")


def read_inputs(config: Config) -> Inputs:
    """Find the model, the tokenizer and the prompts, or raise ConfigError."""
    model_path = resolve_model(config.model)
    trust = config.model.trust_remote_code
    find_modules_in(os.getcwd())
    tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust)
    environment = make_environment(config.task, tokenizer, seed=config.seed, eval_size=config.eval.size)
    stream = PromptStream(environment.train_prompts(), environment.name, config.seed)
    held_out = environment.eval_prompts()[: config.eval.size]
    for problem in (*environment.train_prompts(), *held_out):
        if len(problem.tokens) >= config.rollout.max_model_len:
            raise ConfigError(
                f"The prompt {problem.id} has {len(problem.tokens)} tokens, which leaves no room for an answer in "
                f"rollout.max_model_len={config.rollout.max_model_len}; raise it or leave the prompt out."
            )
    eval_prompts = [as_prompt(problem, i, environment.name) for i, problem in enumerate(held_out)]
    vocab_size = AutoConfig.from_pretrained(model_path, trust_remote_code=trust).get_text_config().vocab_size
    return Inputs(model_path, tokenizer, environment, stream, eval_prompts, vocab_size)


async def attempt(config: Config, inputs: Inputs, run_dir: Path, checkpoint: Path | None, restarts: int = 0) -> None:
    """Start the cluster's part, train, and take it down again, whatever happens.

    Args:
        config: the job.
        inputs: what it reads.
        run_dir: where it writes.
        checkpoint: where it goes on; None: at the start.
        restarts: attempts of this run that died before.

    Raises:
        WorkerDied: another attempt may succeed.
    """
    placement = plan(config)
    state = recovery.read_state(checkpoint) if checkpoint else {"step": None, "wandb_id": None}
    start_ray(config, placement.cpus)
    tracker = Tracker(config, run_dir, inputs.tokenizer, state["step"], state["wandb_id"])
    controller: Controller | None = None
    try:
        placement.check_cluster(ray.cluster_resources())
        tracker.say(f"{config.name}: {config.model.name} on {config.task.name}, {run_dir}")
        inputs.stream.position = 0
        controller = await start_workers(config, inputs, run_dir, tracker)
        if checkpoint:
            await controller.learner.load(str(checkpoint))
            recovery.restore(controller, checkpoint)
            tracker.say(f"resumed after step {controller.step} from {checkpoint}")
        controller.faults["learner_restarts"] = restarts
        on_signal(controller)
        await controller.run()
    except Exception as error:
        raise await explain(first(error), controller) from None
    finally:
        if controller is not None:
            await close(controller)
        tracker.close()
        ray.shutdown()


async def explain(error: BaseException, controller: Controller | None) -> BaseException:
    """What ended an attempt: `WorkerDied` if a learner rank is gone, whoever noticed first, else ``error`` itself."""
    if isinstance(error, RayActorError):
        return WorkerDied(f"A process of the run died: {str(error).splitlines()[0]}")
    if controller is not None and not isinstance(error, RunFailed | ConfigError):
        dead = await controller.learner.dead()
        if dead:
            return WorkerDied(f"Learner rank {dead[0]} died.")
    return error


async def close(controller: Controller) -> None:
    """End the workers in order, within a time limit; a checkpoint that is being written is finished first, if it can be."""
    with contextlib.suppress(Exception):
        await asyncio.wait_for(controller.checkpoints.settle(), 60)
    groups: set[Any] = {controller.rollouts, controller.evaluators, controller.learner}
    with contextlib.suppress(Exception):
        await asyncio.wait_for(asyncio.gather(*(g.close() for g in groups)), 20)


async def start_workers(config: Config, inputs: Inputs, run_dir: Path, tracker: Tracker) -> Controller:
    """Start engines and learner ranks side by side and hand them to a controller."""
    logs = str(run_dir / "logs")
    rollouts = evaluators = RolloutGroup.launch(config, inputs.model_path, logs)
    if serves_other_weights(config.rollout):
        (run_dir / "logs" / "evaluation").mkdir(exist_ok=True)
        evaluators = RolloutGroup.launch(evaluator_config(config), inputs.model_path, f"{logs}/evaluation")
    learner = LearnerGroup.launch(config, inputs.model_path, logs)
    limit = config.cluster.startup_timeout_s
    groups: set[Any] = {rollouts, evaluators, learner}
    await asyncio.wait_for(asyncio.gather(*(group.start() for group in groups)), limit)
    return make_controller(config, inputs, run_dir, rollouts, evaluators, learner, tracker)


def evaluator_config(config: Config) -> Config:
    """The engine that answers held-out problems under the actor's own weights, where the rollout workers serve others."""
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, workers=1, quantize=None, weight_noise=0.0))


def make_controller(
    config: Config,
    inputs: Inputs,
    run_dir: Path,
    rollouts: RolloutGroup,
    evaluators: RolloutGroup,
    learner: LearnerGroup,
    tracker: Tracker,
) -> Controller:
    """The controller of a job whose workers have started."""
    return Controller(
        config=config,
        stream=inputs.stream,
        eval_prompts=inputs.eval_prompts,
        stop_token_ids=tuple(inputs.environment.stop_token_ids),
        head_size=min(config.rollout.head_size, inputs.vocab_size) if config.algorithm.score_centering else 0,
        sync_mode=sync_mode(config),
        rollouts=rollouts,
        evaluators=evaluators,
        learner=learner,
        tracker=tracker,
        checkpoints=Checkpoints(run_dir, config.checkpoint),
    )


def sync_mode(config: Config) -> str:
    """How weights travel: as configured, or by what the actor trains and the engines are to serve."""
    if config.rollout.weight_sync != "auto":
        return config.rollout.weight_sync
    return "full" if config.actor.mode == "full" or serves_other_weights(config.rollout) else "merged"


def start_ray(config: Config, cpus: float) -> None:
    """Join the cluster of ``cluster.address``, or start a local head (its CPUs are logical: as many as the job asks for)."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 starves engine and learner beside anything else that runs
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning", "configure_logging": True}
    if config.cluster.address is None:
        local = max(cpus, os.cpu_count() or 1)
        ray.init(address="local", num_cpus=math.ceil(local), include_dashboard=False, **common)
    else:
        ray.init(address=config.cluster.address, **common)


def on_signal(controller: Controller) -> None:
    """SIGTERM and the first Ctrl-C: finish the step, save, leave."""

    def stop() -> None:
        controller.stop()
        controller.tracker.say("stopping; a checkpoint is written")

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


def first(error: BaseException) -> BaseException:
    """The one exception inside nested groups that ended a run."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

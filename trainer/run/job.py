"""From a composed config to a finished run: what is checked and started, in which order, and what is cleaned up.

Everything that a user can get wrong is found before the run joins Ray, everything that the cluster lacks before engines start.
A head of its own starts beside these checks (`trainer.cluster.head`), and a refusal takes it down.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from rlframe.config import ConfigError
from rlframe.context_length import check_context
from rlframe.files import replace
from rlframe.models import resolve_model
from rlframe.types import Prompt
from trainer.cluster.folders import check_run_dir, new_run_dir
from trainer.cluster.head import RayHeadFailed, prestarted_head
from trainer.cluster.placement import plan
from trainer.cluster.preflight import check_machine
from trainer.cluster.ray_cluster import reserve_pools, start_ray, stopping_ray
from trainer.run import attempts, config_changes, recovery
from trainer.run.checkpoints import Checkpoints, step_of
from trainer.run.controller import Controller
from trainer.run.failures import RunFailed
from trainer.run.prompts import PromptStream, as_prompt
from trainer.settings.checks import check
from trainer.settings.compose import load_yaml, resumed, to_yaml
from trainer.settings.config import Config
from trainer.watch.tracking import Tracker, has_steps
from trainer.watch.wandb_log import id_file
from workers.engines.checks import weight_sync_mode
from workers.environments.base import Environment
from workers.environments.checks import check_problems
from workers.environments.registry import make_environment
from workers.environments.task_checks import eval_size
from workers.learner.group import LearnerGroup
from workers.learner.roles import critic_names
from workers.learner.sessions import check_sessions
from workers.pools import Pool
from workers.process import find_modules_in, interruptible
from workers.rollout.group import RolloutGroup
from workers.rollout.settings import serves_other_weights
from workers.supervised import StartFailed, started


@dataclass
class Inputs:
    """What a run reads before anything starts."""

    model_path: str
    tokenizer: Any
    environment: Environment
    stream: PromptStream
    eval_prompts: list[Prompt]
    vocab_size: int
    notes: list[str] = dataclasses.field(default_factory=list)
    """What the user should know of the data and the adapters."""


def train(config: Config) -> Path:
    """Run a job from its first step; returns the run directory.

    Raises:
        ConfigError: a setting is refused, or the run directory holds another run.
        RunFailed: the run cannot continue.
    """
    check(config)
    run_dir = new_run_dir(config.run_dir)
    interruptible()
    inputs = read_inputs(config)
    checkpoints = Checkpoints(run_dir, config.checkpoint)
    with occupied(run_dir):
        try:
            replace(run_dir / "config.yaml", to_yaml(config))
            attempts.repeat(config, checkpoints, None, partial(attempt, config, inputs, run_dir))
        except BaseException:
            if not (has_steps(run_dir) or any(checkpoints.root.iterdir())):  # nothing was made that a resume could continue
                for path in (run_dir / "config.yaml", id_file(run_dir)):
                    path.unlink(missing_ok=True)
            raise
    return run_dir


def resume(run: str, overrides: list[str]) -> Path:
    """Go on with the run in directory ``run`` from its newest good checkpoint, or from the start if it has none yet.

    Raises:
        ConfigError: a setting is refused, or differs from the checkpoint's and must not.
        RunFailed: the run cannot continue, or no checkpoint can be used.
    """
    check_run_dir(run)
    run_dir = Path(run).absolute()
    if not (run_dir / "config.yaml").exists():
        raise ConfigError(f"{run_dir} is not a run directory: it has no config.yaml.")
    config = resumed(run, overrides)
    interruptible()
    with occupied(run_dir):
        checkpoints = Checkpoints(run_dir, config.checkpoint)
        checkpoint, skipped = checkpoints.newest()
        for sentence in skipped:
            print(sentence)
        if checkpoint is None:
            print(f"{run_dir} has no checkpoint yet; it starts at step 0.")
        else:
            for line in config_changes.changes(load_yaml(checkpoint / "config.yaml"), config):
                print(f"changed since {checkpoint.name}: {line}")
            if step_of(checkpoint) >= config.steps:
                print(f"{run_dir} has done all its steps={config.steps}; give a larger number to continue.")
                return run_dir
        check_machine(config)
        with prestarted_head(plan(config)):
            inputs = read_inputs(config, checkpoint is not None and recovery.held_out_by_tokens(checkpoint))
            if checkpoint is not None:
                recovery.check_prompts(checkpoint, inputs.stream)
            replace(run_dir / "config.yaml", to_yaml(config))
            attempts.repeat(config, checkpoints, checkpoint, partial(attempt, config, inputs, run_dir))
    return run_dir


@contextlib.contextmanager
def occupied(run_dir: Path) -> Iterator[None]:
    """Make the folders of a run and keep other drivers out of them; the lock goes with the process, however it ends.

    Raises:
        ConfigError: another driver is at work there, or it cannot be written.
    """
    try:
        for folder in ("logs", "rollouts", "checkpoints"):
            (run_dir / folder).mkdir(parents=True, exist_ok=True)
        (run_dir / "logs" / "driver.lock").touch()
    except OSError as error:
        raise ConfigError(f"run_dir={run_dir} cannot be written: {error.strerror} ({error.filename}).") from None
    with (run_dir / "logs" / "driver.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"Another process is training in {run_dir}; wait for it, or stop it.") from None
        yield


def read_inputs(config: Config, held_out_by_tokens: bool = False) -> Inputs:
    """Find the model, the tokenizer and the prompts, or raise ConfigError; see `Environment` for ``held_out_by_tokens``."""
    check_machine(config)
    model_path = resolve_model(config.model)
    adapters = check_sessions(config, model_path)
    trust = config.model.trust_remote_code
    text_config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust).get_text_config()
    check_context(config.rollout.max_model_len, text_config)
    find_modules_in(os.getcwd())
    tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust)
    size = eval_size(config)
    environment = make_environment(config.task, tokenizer, seed=config.seed, eval_size=size)
    environment.held_out_by_tokens = held_out_by_tokens
    stream = PromptStream(environment.train_prompts(), environment.name, config.seed)
    stream.held_out_by_tokens = held_out_by_tokens
    held_out = environment.eval_prompts()[:size]
    notes = [*adapters, *environment.notes]
    if len(environment.eval_prompts()) > len(held_out):
        notes.append(f"{environment.name} has {len(environment.eval_prompts())} held-out problems: the first {size} are used.")
    problems = (*environment.train_prompts(), *held_out)
    check_problems(problems, environment.stop_token_ids, text_config.vocab_size, tokenizer)
    for problem in problems:
        if len(problem.tokens) >= config.rollout.max_model_len:
            raise ConfigError(
                f"The prompt {problem.id} has {len(problem.tokens)} tokens, which leaves no room for an answer in "
                f"rollout.max_model_len={config.rollout.max_model_len}; raise it or leave the prompt out."
            )
    if config.rollout.max_new_tokens < environment.answer_tokens:
        raise ConfigError(
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}, but an answer of task={config.task.name} takes up to "
            f"{environment.answer_tokens} tokens; raise it."
        )
    eval_prompts = [as_prompt(problem, i, environment.name) for i, problem in enumerate(held_out)]
    return Inputs(model_path, tokenizer, environment, stream, eval_prompts, text_config.vocab_size, notes)


def attempt(config: Config, inputs: Inputs, run_dir: Path, checkpoint: Path | None, restarts: int = 0) -> None:
    """Start the cluster's part, train, and take it down again, whatever happens.

    What blocks comes first, outside of an event loop, where a signal ends it at once.

    Args:
        config: the job.
        inputs: what it reads.
        run_dir: where it writes.
        checkpoint: where it continues; None: at the start.
        restarts: attempts of this run that died before.

    Raises:
        WorkerDied: another attempt may succeed.
    """
    interruptible()
    placement = plan(config)
    state: dict[str, Any] = recovery.read_state(checkpoint) if checkpoint else {"step": -1, "wandb_id": None}
    tracker: Tracker | None = None
    try:
        start_ray(placement, run_dir / "logs" / "ray.log")
        interruptible()
        tracker = Tracker(config, run_dir, inputs.tokenizer, state["step"], state["wandb_id"])
        pools = reserve_pools(placement, config.cluster.startup_timeout_s, tracker.say)
        asyncio.run(work(config, inputs, run_dir, checkpoint, restarts, tracker, pools))
    except RayHeadFailed as error:
        raise RunFailed(str(error)) from None
    except SystemExit:  # of Ray's own handler of SIGTERM, while Ray starts
        raise KeyboardInterrupt from None
    finally:
        interruptible()
        with stopping_ray():
            if tracker is not None:
                tracker.close()


async def work(
    config: Config,
    inputs: Inputs,
    run_dir: Path,
    checkpoint: Path | None,
    restarts: int,
    tracker: Tracker,
    pools: dict[str, Pool],
) -> None:
    """Start engines and ranks in ``pools``, train, and end them again; the rest is as in `attempt`."""
    controller: Controller | None = None
    task = asyncio.current_task()
    assert task is not None
    attempts.on_signal(tracker, task)
    try:
        tracker.say(f"{config.name}: {config.model.name} on {config.task.name}, {run_dir}")
        for note in inputs.notes:
            tracker.say(note)
        inputs.stream.position, inputs.stream.returned = 0, []
        controller = await start_workers(config, inputs, run_dir, tracker, pools)
        tracker.note("engines and learner are up")
        if checkpoint:
            await controller.learner.load(str(checkpoint))
            recovery.restore(controller, checkpoint)
            tracker.say(f"resumed after step {controller.step} from {checkpoint}")
        controller.faults.counts["learner_restarts"] = restarts
        attempts.on_signal(tracker, task, controller)
        await controller.run()
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except Exception as error:
        raise await attempts.conclude(error, controller) from None
    finally:
        if controller is not None:
            await attempts.close(controller)


async def start_workers(config: Config, inputs: Inputs, run_dir: Path, tracker: Tracker, pools: dict[str, Pool]) -> Controller:
    """Start engines and learner ranks side by side, each in its pool, and hand them to a controller."""
    logs = str(run_dir / "logs")
    rollouts = evaluators = RolloutGroup.launch(config, inputs.model_path, logs, pools["rollout"])
    if serves_other_weights(config.rollout):
        (run_dir / "logs" / "evaluation").mkdir(exist_ok=True)
        evaluators = RolloutGroup.launch(
            evaluator_config(config),
            inputs.model_path,
            f"{logs}/evaluation",
            pools["rollout"].starting_at(config.rollout.workers),
        )
    learner = LearnerGroup.launch(config, inputs.model_path, logs, pools["learner"], critic_names(config))
    limit = config.cluster.startup_timeout_s
    starts = [group.start() for group in {rollouts, evaluators}]
    starts.append(started("The learner", f"{logs}/learner_*.log", learner.start()))
    try:
        async with asyncio.timeout(limit):
            await asyncio.gather(*starts)
    except TimeoutError:
        raise StartFailed(
            f"Engines and learner did not start within cluster.startup_timeout_s={limit:g}; see {logs}."
        ) from None
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
        head_size=min(config.rollout.head_size, inputs.vocab_size) if config.algorithm.score_centering else 0,
        sync_mode=weight_sync_mode(config),
        rollouts=rollouts,
        evaluators=evaluators,
        learner=learner,
        tracker=tracker,
        checkpoints=Checkpoints(run_dir, config.checkpoint),
    )

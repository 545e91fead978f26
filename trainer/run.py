"""From a composed config to a finished run: what is checked and started, in which order, and what is cleaned up.

Everything that a user can get wrong is found before Ray starts, everything that the cluster lacks before engines start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from transformers import AutoConfig, AutoTokenizer

from rlframe.checks import check
from rlframe.config import Config, ConfigError, serves_other_weights
from rlframe.models import resolve_model
from rlframe.types import Prompt
from trainer import recovery
from trainer.compose import config_hash, load_yaml, to_yaml
from trainer.controller import Controller
from trainer.data import PromptStream, as_prompt
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
    """
    check(config)
    run_dir = Path(config.run_dir).absolute()
    if (run_dir / "config.yaml").exists():
        raise ConfigError(
            f"{run_dir} holds a run already: `rlframe resume {config.run_dir}` goes on with it, another name=... starts afresh."
        )
    inputs = read_inputs(config)
    for folder in ("logs", "rollouts", "checkpoints"):
        (run_dir / folder).mkdir(parents=True, exist_ok=True)
    try:
        (run_dir / "config.yaml").write_text(to_yaml(config))
        asyncio.run(attempt(config, inputs, run_dir, None))
    except BaseException:
        if not any((run_dir / "checkpoints").iterdir()):
            (run_dir / "config.yaml").unlink(missing_ok=True)
        raise
    return run_dir


def resume(run: str, overrides: list[str]) -> Path:
    """Go on with the run in directory ``run`` from its newest good checkpoint."""
    run_dir = Path(run).absolute()
    if not (run_dir / "config.yaml").exists():
        raise ConfigError(f"{run_dir} is not a run directory: it has no config.yaml.")
    config = load_yaml(run_dir / "config.yaml", overrides)
    check(config)
    inputs = read_inputs(config)
    checkpoints = recovery.Checkpoints(run_dir, config.checkpoint.keep_last, config_hash(config))
    directory, skipped = checkpoints.newest()
    for sentence in skipped:
        print(sentence)
    asyncio.run(attempt(config, inputs, run_dir, directory))
    return run_dir


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


async def attempt(config: Config, inputs: Inputs, run_dir: Path, checkpoint: Path | None) -> None:
    """Start the cluster's part, train, and take it down again, whatever happens."""
    placement = plan(config)
    step, wandb_id = 0, None
    if checkpoint:
        state = recovery.read_state(checkpoint)
        step, wandb_id = state["step"], state["wandb_id"]
    start_ray(config, placement.cpus)
    tracker = Tracker(config, run_dir, inputs.tokenizer, step, wandb_id)
    try:
        placement.check_cluster(ray.cluster_resources())
        tracker.say(f"{config.name}: {config.model.name} on {config.task.name}, {run_dir}")
        controller = await start_workers(config, inputs, run_dir, tracker)
        if checkpoint:
            await controller.learner.load(str(checkpoint))
            recovery.restore(controller, checkpoint)
            tracker.say(f"resumed after step {step} from {checkpoint}")
        on_signal(controller)
        try:
            await controller.run()
        except* Exception as group:
            raise first(group) from None
        finally:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(asyncio.gather(controller.rollouts.close(), controller.learner.close()), 20)
    finally:
        tracker.close()
        ray.shutdown()


async def start_workers(config: Config, inputs: Inputs, run_dir: Path, tracker: Tracker) -> Controller:
    """Start engines and learner ranks side by side and hand them to a controller."""
    logs = str(run_dir / "logs")
    rollouts = RolloutGroup.launch(config, inputs.model_path, logs)
    learner = LearnerGroup.launch(config, inputs.model_path, logs)
    limit = config.cluster.startup_timeout_s
    await asyncio.wait_for(asyncio.gather(rollouts.start(), learner.start()), limit)
    return make_controller(config, inputs, run_dir, rollouts, learner, tracker)


def make_controller(
    config: Config, inputs: Inputs, run_dir: Path, rollouts: RolloutGroup, learner: LearnerGroup, tracker: Tracker
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
        learner=learner,
        tracker=tracker,
        checkpoints=recovery.Checkpoints(run_dir, config.checkpoint.keep_last, config_hash(config)),
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
        ray.init(address="local", num_cpus=int(-(-local // 1)), include_dashboard=False, **common)
    else:
        ray.init(address=config.cluster.address, **common)


def on_signal(controller: Controller) -> None:
    """SIGTERM and the first Ctrl-C: finish the step, save, leave."""

    def stop() -> None:
        controller.stop_requested = True
        controller.tracker.say("stopping after this step; a checkpoint is written")

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


def first(group: BaseExceptionGroup[Exception]) -> BaseException:
    """The one exception inside nested groups that ended a run."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

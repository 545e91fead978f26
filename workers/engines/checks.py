"""Checks of the configuration, and of the machine, for the engine that it names; one sentence for each refusal.

An engine's `EngineSpec` declares its capabilities and refusals; no engine is known by name here.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec

from rlframe.config import ConfigError
from rlframe.config.validate import nearest
from workers.engines.arguments import fits
from workers.engines.registry import ENGINES, engine_spec
from workers.engines.spec import refuse
from workers.rollout.settings import RolloutConfig, serves_other_weights
from workers.settings import Config


def check_engine(config: Config) -> None:
    """Refuse an unknown engine and settings that the chosen one does not support; part of the checks of a job.

    Raises:
        ConfigError: one sentence that names the settings and says what to change.
    """
    rollout, spec = config.rollout, engine_spec(config.rollout.engine)
    chosen = f"rollout.engine={rollout.engine}"
    refuse(
        rollout.dtype not in spec.dtypes,
        f"rollout.dtype={rollout.dtype} is not served by {chosen}; choose one of {', '.join(spec.dtypes)}.",
    )
    mode = weight_sync_mode(config)
    refuse(
        mode not in spec.weight_syncs,
        f"{chosen} does not load weights of rollout.weight_sync={mode}; choose one of {', '.join(spec.weight_syncs)}, or "
        "another rollout.engine.",
    )
    refuse(
        rollout.tensor_parallel_size > 1 and not spec.tensor_parallel,
        f"rollout.tensor_parallel_size={rollout.tensor_parallel_size} is not defined for {chosen}; set it to 1.",
    )
    _check_channel(config)
    for name in rollout.engine_args:
        refuse(name in spec.owned, f"rollout.engine_args.{name} would overrule what {spec.owned.get(name)}; leave it out.")
    spec.check(config)


def _check_channel(config: Config) -> None:
    """Refuse a weight channel that the engine does not support, or that nothing would use."""
    rollout, off = config.rollout, "set rollout.weight_channel=ray"
    on = f"rollout.weight_channel={rollout.weight_channel}"
    having = [name for name in ENGINES if rollout.weight_channel in engine_spec(name).weight_channels]
    spec = engine_spec(rollout.engine)
    if rollout.weight_channel not in spec.weight_channels:
        known = dict.fromkeys(channel for name in ENGINES for channel in engine_spec(name).weight_channels)
        refuse(not having, f"{on} is not known; choose one of {', '.join(known)}.")
        names = " and ".join(having)
        raise ConfigError(f"{on} is that of {names}, and rollout.engine={rollout.engine} does not have it; {off}.")
    if rollout.weight_channel == "ray":
        return
    refuse(
        config.actor.mode != "full" and not serves_other_weights(rollout),
        f"{on} sends full weights, and actor.mode={config.actor.mode} changes only some; {off}.",
    )
    refuse(
        not (rollout.gpus and config.actor.gpus),
        f"{on} goes from GPU to GPU, with actor.gpus={config.actor.gpus:g} and rollout.gpus={rollout.gpus:g}; {off}.",
    )


def weight_sync_mode(config: Config) -> str:
    """How weights travel: as configured, or by what the actor trains and the engines are to serve."""
    if config.rollout.weight_sync != "auto":
        return config.rollout.weight_sync
    return "full" if config.actor.mode == "full" or serves_other_weights(config.rollout) else "merged"


def unused_by_engine(rollout: RolloutConfig) -> list[tuple[bool, str, Collection[str]]]:
    """Whether, why and which settings have no effect with this engine: those of the others."""
    spec, reason = engine_spec(rollout.engine), f"with rollout.engine={rollout.engine}"
    others = {key for name in ENGINES for key in engine_spec(name).settings} - set(spec.settings)
    return [
        (bool(others), reason, sorted(others)),
        (not spec.takes_arguments, f"{reason}, which takes no arguments", ("rollout.engine_args",)),
    ]


def check_installed(rollout: RolloutConfig) -> None:
    """Refuse an engine whose package is not installed here; for the machine that the engine will run on.

    Raises:
        ConfigError: one sentence that says what to install.
    """
    spec = engine_spec(rollout.engine)
    package = spec.needed(rollout)
    refuse(
        package is not None and find_spec(package) is None,
        f"rollout.engine={rollout.engine} needs the package {package}, which is not installed here; {spec.install}.",
    )


def check_arguments(rollout: RolloutConfig) -> None:
    """Compare ``rollout.engine_args`` with the arguments that the engine installed here declares; nothing where it is not here.

    Raises:
        ConfigError: an unknown argument, or a value of another type.
    """
    arguments = engine_spec(rollout.engine).arguments() if rollout.engine_args else None
    if arguments is None:
        return
    for name, value in rollout.engine_args.items():
        key = f"rollout.engine_args.{name}"
        if name not in arguments:
            near = nearest(name, arguments)
            raise ConfigError(f"{key} is not an argument of rollout.engine={rollout.engine}; did you mean {near}?")
        refuse(
            not fits(value, arguments[name]),
            f"{key}={value} is of another type than rollout.engine={rollout.engine} takes there: {arguments[name]}.",
        )

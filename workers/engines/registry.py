"""The engines by the name that ``rollout.engine`` gives them: a new one is its folder and a line here.

An engine outside of this repository needs no line: ``rollout.engine=my_package:ENGINE`` names its `EngineSpec`. See
`workers.engines.protocol` for what an engine must implement. No engine is imported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlframe.config import ConfigError
from rlframe.plugins import load
from workers.engines.spec import EngineSpec
from workers.settings import Config

if TYPE_CHECKING:
    from workers.engines.adapters import AdapterEngine
    from workers.engines.protocol import Engine

ENGINES = {
    "vllm": "workers.engines.vllm.spec:ENGINE",
    "sglang": "workers.engines.sglang.spec:ENGINE",
    "torch": "workers.engines.torch.spec:ENGINE",
}
"""Name -> where its `EngineSpec` is."""


def engine_spec(name: str) -> EngineSpec:
    """The `EngineSpec` of ``rollout.engine=name``: one of `ENGINES`, or a custom ``module:object``.

    Raises:
        ConfigError: the name is unknown, or the path does not name an `EngineSpec`.
    """
    path = ENGINES.get(name, name)
    if ":" not in path:
        raise ConfigError(
            f"rollout.engine={name} is not known; choose one of {', '.join(ENGINES)}, or module:ENGINE of your own."
        )
    spec = load("rollout.engine", path)
    if not isinstance(spec, EngineSpec):
        raise ConfigError(
            f"rollout.engine={name} is a {type(spec).__name__}; it must be an object of a class derived from "
            "workers.engines.spec.EngineSpec."
        )
    return spec


def make_engine(config: Config, model_path: str, index: int) -> Engine:
    """The engine of rollout worker ``index``, not started; see `EngineSpec.make`.

    Raises:
        ConfigError: ``rollout.engine`` is not known.
    """
    return engine_spec(config.rollout.engine).make(config, model_path, index)


def make_adapter_engine(config: Config, model_path: str, index: int) -> AdapterEngine:
    """The engine of sampler ``index`` of the server, not started; see `EngineSpec.make_adapter_engine`.

    Raises:
        ConfigError: ``rollout.engine`` is not known, or has no adapters at run time.
    """
    check_serves_adapters(config)
    return engine_spec(config.rollout.engine).make_adapter_engine(config, model_path, index)


def check_serves_adapters(config: Config) -> None:
    """Refuse an engine that serves one policy only; for ``rlframe serve``.

    Raises:
        ConfigError: one sentence that names those that serve many.
    """
    if not engine_spec(config.rollout.engine).serves_adapters:
        able = " or ".join(name for name in ENGINES if engine_spec(name).serves_adapters)
        raise ConfigError(f"rollout.engine={config.rollout.engine} cannot serve adapters at run time; choose {able}.")

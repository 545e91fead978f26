"""``rlframe train --dry-run``: what a job would be, where it would run and what memory it would need. Starts nothing."""

from __future__ import annotations

from rlframe.config import Config
from trainer.compose import to_yaml
from trainer.memory import estimate, read_shape
from trainer.placement import plan
from trainer.run import read_inputs


def report(config: Config) -> str:
    """The resolved configuration (YAML), the placement, what the adapters are on, and the memory estimate.

    The model, the tokenizer and the prompts are looked at as a run would: a built-in model that is not in the cache yet is
    built.

    Raises:
        ConfigError: the model or the task's data cannot be used, or this machine has too few GPUs.
    """
    placement = plan(config)
    inputs = read_inputs(config)
    shape = read_shape(inputs.model_path, config.model.trust_remote_code)
    parts = (
        ("configuration", to_yaml(config).rstrip()),
        ("placement", placement.describe()),
        ("adapters", "\n".join(inputs.adapters) or "none"),
        (f"memory, estimated for {shape.parameters:,} parameters", estimate(config, placement, shape)),
    )
    return "\n\n".join(f"# {title}\n{text}" for title, text in parts)

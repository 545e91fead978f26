"""``rlframe train --dry-run``: what a job would be, where it would run and what memory it would need. Starts nothing."""

from __future__ import annotations

from rlframe.config import Config
from rlframe.models import resolve_model
from trainer.compose import to_yaml
from trainer.memory import estimate, read_shape
from trainer.placement import plan


def report(config: Config) -> str:
    """The resolved configuration (YAML), the placement and the memory estimate.

    A built-in model that is not in the cache yet is built first: its config.json is needed.

    Raises:
        ConfigError: the model cannot be found, or this machine has too few GPUs.
    """
    placement = plan(config)
    shape = read_shape(resolve_model(config.model), config.model.trust_remote_code)
    parts = (
        ("configuration", to_yaml(config).rstrip()),
        ("placement", placement.describe()),
        (f"memory, estimated for {shape.parameters:,} parameters", estimate(config, placement, shape)),
    )
    return "\n\n".join(f"# {title}\n{text}" for title, text in parts)

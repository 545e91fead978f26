"""``rlframe train --dry-run``: the resolved job, its placement and its memory estimate. Starts nothing."""

from __future__ import annotations

from trainer.cluster.folders import check_run_dir
from trainer.cluster.memory import estimate, read_shape
from trainer.cluster.placement import plan
from trainer.run.job import read_inputs
from trainer.settings.compose import to_yaml
from trainer.settings.config import Config


def report(config: Config) -> str:
    """Held-out prompts, layers with adapters, the resolved configuration (YAML), the placement and the memory estimate.

    The model, the tokenizer and the prompts are looked at as a run would: a built-in model that is not in the cache yet is
    built.

    Raises:
        ConfigError: the model or the task's data cannot be used, or this machine has too few GPUs.
    """
    check_run_dir(config.run_dir)
    placement = plan(config)
    inputs = read_inputs(config)
    shape = read_shape(inputs.model_path, config.model.trust_remote_code)
    held_out = f"{len(inputs.eval_prompts)} held-out problems, {len(inputs.stream.problems)} to train on"
    parts = (
        ("configuration", to_yaml(config).rstrip()),
        ("placement", placement.describe()),
        (f"memory, estimated for {shape.parameters:,} parameters", estimate(config, placement, shape)),
    )
    data = "\n".join([held_out, *inputs.notes])
    return "\n\n".join([data, *(f"# {title}\n{text}" for title, text in parts)])

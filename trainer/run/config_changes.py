"""What may differ between the configuration of a checkpoint and that of the command that continues from it, key by key.

Everything that is not refused here is allowed, and named when the run resumes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rlframe.config import ConfigError
from trainer.settings.config import Config
from trainer.settings.redact import without_secrets

_BASE = "the adapters in the checkpoint belong to the base model that the run began with"
_SESSIONS = "the sessions in the checkpoint have other parameters"
_STREAM = "it decides which prompts there are and in which order, so some would be trained on twice and others never"
_BUFFER = "trajectories that wait in the checkpoint were sampled under the old value"

REFUSED: dict[str, str] = {
    "seed": _STREAM,
    "algorithm.rollouts_per_prompt": "prompts that wait in the checkpoint were sampled that often",
    "algorithm.advantage": "the checkpoint holds the critics or baselines of that advantage alone",
    "algorithm.score_centering": "trajectories that wait in the checkpoint have heads for it, or none",
    "model.builder": _BASE,
    "model.build": _BASE,
    "model.dtype": "the weights in the checkpoint were trained in that precision",
    "task.name": _STREAM,
    "task.options": _STREAM,
    "task.prompt_key": _STREAM,
    "task.chat_template": _STREAM,
    "task.tools_key": _STREAM,
    "task.last_assistant": _STREAM,
    "eval.size": "it decides which prompts are held out from training",
    "rollout.head_size": _BUFFER,
    "rollout.temperature": _BUFFER,
    "rollout.top_p": _BUFFER,
    "rollout.top_k": _BUFFER,
    "actor.mode": _SESSIONS,
    "actor.lora": _SESSIONS,
    "critic.mode": _SESSIONS,
    "critic.lora": _SESSIONS,
    "critic.ensemble": _SESSIONS,
}
"""Keys, or sections, and why a change of them is refused."""


def changes(saved: Config, wanted: Config) -> list[str]:
    """Every setting that differs, as ``key: old -> new``.

    ``run_dir`` is left out: a run may be moved. ``model.path`` and ``task.train`` may change, too: the base model and the
    rows are compared themselves when they are loaded. What ``batch_size``, ``max_staleness`` and ``reorder_window`` leave no
    room for is sampled again (`trainer.run.recovery.restore`).

    Raises:
        ConfigError: one of them must not change; one sentence that says why.
    """
    old, new = _flat(saved), _flat(wanted)
    different = {key: (old[key], new[key]) for key in old if old[key] != new[key] and key != "run_dir"}
    for key, (before, now) in different.items():
        reason = next((why for name, why in REFUSED.items() if key == name or key.startswith(f"{name}.")), None)
        if reason:
            raise ConfigError(
                f"{key} was {before} when the checkpoint was written and is {now} now, but {reason}; leave it as it was, "
                "or start another run."
            )
    return [f"{key}: {before} -> {now}" for key, (before, now) in different.items()]


def _flat(section: Any, prefix: str = "") -> dict[str, Any]:
    """Settings by dotted key, as ``config.yaml`` has them: without secrets; a free-form dictionary is one value."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        key = prefix + field.name
        flat |= _flat(value, f"{key}.") if dataclasses.is_dataclass(value) else {key: without_secrets(value)}
    return flat

"""Builds the specs of the learner's sessions from the configuration, and checks them against the model without loading it."""

from __future__ import annotations

from rlframe.backbone import Backbone
from rlframe.sessions import SessionSpec
from workers.learner.roles import critic_names
from workers.settings import Config


def actor_spec(config: Config) -> SessionSpec:
    """The policy."""
    actor = config.actor
    return SessionSpec(
        kind=actor.mode,
        lora=actor.lora if actor.mode == "lora" else None,
        value_head=False,
        frozen_patterns=list(actor.frozen_patterns),
        optim=actor.optim,
        seed=config.seed,
    )


def critic_spec(config: Config, i: int) -> SessionSpec:
    """Critic number ``i`` of `critic_names`; each has factors of its own."""
    critic = config.critic
    return SessionSpec(
        kind=critic.mode,
        lora=critic.lora if critic.mode == "lora" else None,
        value_head=True,
        frozen_patterns=list(critic.frozen_patterns),
        optim=critic.optim,
        seed=config.seed + 1 + i,
    )


def check_sessions(config: Config, model_path: str) -> list[str]:
    """Create actor and critic on an outline of the model: whatever would fail on the ranks fails here, before Ray starts.

    Returns:
        Sentences: on how much of the model each adapter is, and a kernel that was not checked.

    Raises:
        ConfigError: a quantised model, LoRA targets or frozen patterns that name nothing in it, or ones that it cannot have.
    """
    roles = {"actor": actor_spec(config)} | ({"critic": critic_spec(config, 0)} if critic_names(config) else {})
    notes: list[str] = []
    for role, spec in roles.items():
        outline = Backbone.outline(
            model_path,
            trainable=spec.kind == "full",
            attn_implementation=config.model.attn_implementation,
            trust_remote_code=config.model.trust_remote_code,
        )
        notes += [note for note in outline.notes if note not in notes]
        session = outline.create_session(role, spec)
        if session.adapter is not None:
            notes.append(session.adapter.coverage(outline.model).describe(role))
    return notes

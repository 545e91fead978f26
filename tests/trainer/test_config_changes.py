"""What a command may change in a resumed run, and what it must not."""

import dataclasses

import pytest

from rlframe.config import ConfigError
from trainer.run.config_changes import REFUSED, changes
from trainer.settings.compose import compose
from trainer.settings.config import Config
from trainer.settings.overrides import settings

SAVED = ["seed=1", "batch_size=16", "max_staleness=2"]


def test_allowed_changes_are_named_with_both_values():
    saved = compose(SAVED)
    named = changes(saved, compose([*SAVED, "steps=7", "actor.optim.lr=1e-5", "eval.every=3", "actor.ranks=2"]))
    assert named == ["steps: 100 -> 7", "actor.ranks: 1 -> 2", f"actor.optim.lr: {saved.actor.optim.lr} -> 1e-05", named[-1]]
    assert named[-1] == "eval.every: 20 -> 3"
    assert changes(compose(SAVED), compose(SAVED)) == []
    assert changes(compose(SAVED), compose([*SAVED, "run_dir=elsewhere"])) == [], "a run may be moved"
    for override in ("batch_size: 16 -> 8", "max_staleness: 2 -> 1", "reorder_window: 0 -> 4"):
        key, _, value = override.replace(": ", " ").replace(" -> ", " ").split()
        assert changes(compose(SAVED), compose([*SAVED, f"{key}={value}"])) == [override], "what does not fit is sampled again"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("seed=2", "seed was 1 when the checkpoint was written and is 2 now, but it decides which prompts there are"),
        (
            "algorithm.rollouts_per_prompt=2",
            "algorithm.rollouts_per_prompt was 1 .* is 2 now, but prompts that wait in the checkpoint were sampled that often",
        ),
        ("actor=full", "actor.mode was lora .* is full now, but the sessions in the checkpoint have other parameters"),
        ("critic.lora.rank=4", "critic.lora.rank was .* is 4 now"),
        ("model.build.hidden_size=128", "model.build was .* but the adapters in the checkpoint belong to the base model"),
        ("rollout.temperature=0.5", "rollout.temperature was 1.0 .* were sampled under the old value"),
        ("task=countdown", "task.name was arithmetic"),
    ],
)
def test_a_change_that_would_not_fit_the_checkpoint_is_refused_in_one_sentence(override, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        changes(compose(SAVED), compose([*SAVED, override]))
    assert str(caught.value).endswith("leave it as it was, or start another run.") and "\n" not in str(caught.value)


def test_every_rule_names_a_setting():
    assert set(REFUSED) <= set(settings())
    assert all(dataclasses.is_dataclass(Config()) and reason for reason in REFUSED.values())

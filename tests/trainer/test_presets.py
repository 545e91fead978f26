"""Every preset composes, passes the checks, and means what its name means."""

import functools

import pytest

from rlframe.config import ConfigError
from trainer.settings.compose import compose
from trainer.settings.config import Config
from trainer.settings.presets import as_markdown, as_text, presets

TIS, ICEPOP = 2.0, [0.5, 5.0]
BAND = [0.999, 1.001]

# name -> (policy_loss, rollout_is, its threshold, rollout_rs, its threshold, score_centering), from verl's definitions.
VERL = {
    "bypass_pg": ("reinforce", None, None, None, None, False),
    "bypass_pg_token_tis": ("reinforce", "token", TIS, None, None, False),
    "bypass_pg_token_icepop": ("reinforce", "token", ICEPOP, None, None, False),
    "bypass_pg_sc": ("reinforce", None, None, None, None, True),
    "bypass_pg_token_tis_sc": ("reinforce", "token", TIS, None, None, True),
    "bypass_pg_token_icepop_sc": ("reinforce", "token", ICEPOP, None, None, True),
    "bypass_pg_is": ("reinforce", "sequence", TIS, None, None, False),
    "bypass_pg_geo_rs": ("reinforce", None, None, "seq_mean_k1", BAND, False),
    "bypass_pg_geo_rs_seq_tis": ("reinforce", "sequence", TIS, "seq_mean_k1", BAND, False),
    "bypass_pg_geo_rs_token_tis": ("reinforce", "token", TIS, "seq_mean_k1", BAND, False),
    "bypass_ppo_clip": ("ppo_clip", None, None, None, None, False),
    "bypass_ppo_clip_geo_rs": ("ppo_clip", None, None, "seq_mean_k1", BAND, False),
    "bypass_ppo_clip_k3_rs": ("ppo_clip", None, None, "seq_mean_k3", 0.01, False),
}
OURS = {
    "sao": ("dis", 0.3, 5.0, "gae", 1, False),
    "sao_coding": ("dis", 0.8, 3.0, "gae", 1, False),
    "sao_sc": ("dis", 0.3, 5.0, "gae", 1, True),
    "grpo": ("ppo_clip", 0.2, 0.2, "group", 8, False),
    "grpo_dis": ("dis", 0.3, 5.0, "group", 8, False),
    "gspo": ("gspo", 0.0003, 0.0004, "group", 8, False),
}


@functools.cache
def composed(name: str) -> Config:
    return compose([f"algorithm={name}"])


def test_no_promised_preset_is_missing():
    assert {*VERL, *OURS} <= set(presets())


@pytest.mark.parametrize("name", VERL)
def test_a_preset_keeps_the_meaning_that_verl_gave_its_name(name):
    loss, rollout_is, is_threshold, rollout_rs, rs_threshold, centred = VERL[name]
    a = composed(name).algorithm
    assert (a.policy_loss, a.rollout_is, a.rollout_rs, a.score_centering) == (loss, rollout_is, rollout_rs, centred)
    assert a.rollout_rs_threshold == rs_threshold
    assert rollout_is is None or a.rollout_is_threshold == is_threshold
    assert (a.advantage, a.rollouts_per_prompt) == ("gae", 1)


@pytest.mark.parametrize("name", OURS)
def test_a_preset_of_ours_is_the_documented_point(name):
    config = composed(name)
    a = config.algorithm
    assert (a.policy_loss, a.clip_low, a.clip_high, a.advantage, a.rollouts_per_prompt, a.score_centering) == OURS[name]
    assert a.rollout_is is None and a.rollout_rs is None
    if a.advantage == "gae":
        assert (a.gamma, a.lambda_critic, a.lambda_policy, a.lambda_alpha) == (1.0, 1.0, "adaptive", 1.5)
        assert config.critic.updates_per_step == 2
        assert (config.critic.frozen_patterns, config.critic.warmup_steps) == (["all-attention"], 10)


def test_an_sao_run_that_is_shorter_than_its_value_pretraining_is_refused():
    with pytest.raises(ConfigError, match=r"critic\.warmup_steps=10 leaves the actor no step with steps=10"):
        compose(["algorithm=sao", "steps=10"])
    assert compose(["algorithm=sao", "steps=3", "critic.warmup_steps=0"]).steps == 3


def test_the_table_names_what_a_preset_sets_outside_of_the_algorithm():
    assert presets()["sao"]["critic.frozen_patterns"] == "[all-attention]"
    row = next(line for line in as_markdown().splitlines() if line.startswith("| `sao` "))
    assert "`clip_high=5.0`" in row and "`critic.frozen_patterns=[all-attention]`, `critic.warmup_steps=10`" in row


@pytest.mark.parametrize("name", presets())
def test_every_preset_composes_and_says_what_it_is(name):
    config = composed(name)
    assert config.algorithm.description and "\n" not in config.algorithm.description
    assert config.rollout.head_size >= 1


@pytest.mark.parametrize("name", ["bypass_pg_token_icepop_sc", "grpo_dis", "sao"])
def test_presets_compose_with_another_model_and_engine(name):
    config = compose([f"algorithm={name}", "model=smollm2", "rollout=torch"])
    assert (config.model.name, config.rollout.engine) == ("smollm2", "torch")
    assert config.algorithm == composed(name).algorithm


def test_the_list_has_one_line_a_preset_and_the_table_one_row():
    lines = as_text().splitlines()
    assert [line.split()[0] for line in lines[: len(presets())]] == sorted(presets())
    assert [row.split("`")[1] for row in as_markdown().splitlines() if row.startswith("| `")] == sorted(presets())

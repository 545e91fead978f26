"""The library's settings and their checks, without a job around them."""

from dataclasses import dataclass, field

import pytest

from rlframe import AlgorithmConfig, ConfigError, LoraConfig, ModelConfig, OptimConfig
from rlframe.advantages.registry import check_advantage
from rlframe.config.algorithm import parse_threshold
from rlframe.config.lora import check_lora
from rlframe.config.model import check_model
from rlframe.config.optim import check_optim
from rlframe.config.validate import above, at_least, between, check_fields, choice
from rlframe.losses.checks import check_algorithm


@pytest.mark.parametrize(
    ("check", "sentence"),
    [
        (lambda: check_optim(OptimConfig(lr=-1.0)), "optim.lr=-1.0 is out of range; it must be at least 0."),
        (
            lambda: check_optim(OptimConfig(schedule="linear", total_steps=5, warmup_steps=5), "actor.optim"),
            "actor.optim.total_steps=5 is out of range; it must be above actor.optim.warmup_steps=5.",
        ),
        (lambda: check_lora(LoraConfig(rank=0)), "lora.rank=0 is out of range; it must be at least 1."),
        (
            lambda: check_lora(LoraConfig(targets=["lm_head"]), "critic.lora", value_head=True),
            "critic.lora.targets names lm_head, but the critic has a value head in its place; leave it out.",
        ),
        (
            lambda: check_model(ModelConfig(path="x", dtype="float16")),
            "model.dtype=float16 is not known; choose one of float32, bfloat16.",
        ),
        (
            lambda: check_algorithm(AlgorithmConfig(clip_low=-0.5)),
            "algorithm.clip_low=-0.5 is out of range; it must be at least 0.",
        ),
        (
            lambda: check_algorithm(AlgorithmConfig(rollout_is="tokens")),
            "algorithm.rollout_is=tokens is not known; choose one of token, sequence, null.",
        ),
        (
            lambda: check_advantage(AlgorithmConfig(advantage="mean")),
            "algorithm.advantage=mean is not known; choose one of gae, running_mean, group, none, or module:Class of your own.",
        ),
    ],
)
def test_a_section_is_refused_by_its_own_check(check, sentence):
    with pytest.raises(ConfigError) as caught:
        check()
    assert str(caught.value) == sentence


def test_the_defaults_pass():
    check_optim(OptimConfig())
    check_lora(LoraConfig())
    check_lora(LoraConfig(targets=[], target_parameters=["mlp.experts.gate_up_proj"]))
    check_model(ModelConfig(path="x"))
    check_algorithm(AlgorithmConfig())
    check_advantage(AlgorithmConfig())


@dataclass
class Section:
    whole: int = field(default=1, metadata=at_least(1))
    positive: float | None = field(default=None, metadata=above(0, optional=True))
    share: float = field(default=0.5, metadata=between(0, 1))
    name: str | None = field(default=None, metadata=choice(("a", "b"), optional=True))
    free: float = -1.0


@pytest.mark.parametrize("good", [{}, {"whole": 7}, {"positive": 1e-9}, {"share": 0}, {"share": 1}, {"name": "a"}, {"free": 9}])
def test_a_rule_lets_its_range_pass(good):
    check_fields(Section(**good), "s")


@pytest.mark.parametrize(
    ("bad", "end"),
    [
        ({"whole": 0}, "at least 1."),
        ({"whole": float("nan")}, "at least 1."),
        ({"whole": "many"}, "at least 1."),
        ({"whole": None}, "at least 1."),
        ({"positive": 0.0}, "above 0, or null."),
        ({"positive": float("nan")}, "above 0, or null."),
        ({"share": -0.01}, "between 0 and 1."),
        ({"share": 1.01}, "between 0 and 1."),
        ({"name": "c"}, "choose one of a, b, null."),
    ],
)
def test_a_rule_refuses_everything_else(bad, end):
    ((name, value),) = bad.items()
    with pytest.raises(ConfigError) as caught:
        check_fields(Section(**bad), "s")
    message = str(caught.value)
    assert message.startswith(f"s.{name}={value} is ") and message.endswith(end)


@pytest.mark.parametrize(
    ("value", "bounds"),
    [(2.0, (None, 2.0)), ("2", (None, 2.0)), ([0.5, 5.0], (0.5, 5.0)), ([0, 3], (0.0, 3.0)), ("0.5_5.0", (0.5, 5.0))],
)
def test_a_threshold_is_a_number_or_a_band(value, bounds):
    assert parse_threshold(value, "x") == bounds

"""The list of metrics: names and patterns, and how it is asked."""

import pytest

from rlframe.config import ConfigError
from trainer.watch import glossary
from trainer.watch.report import SECTIONS


def test_an_exact_name_wins_over_a_pattern_and_a_pattern_stands_for_any_task():
    assert glossary.find("reward/mean").pattern == "reward/mean"
    assert glossary.find("reward/countdown/mean").pattern == "reward/*/mean"
    assert glossary.find("eval/my_task/reward").pattern == "eval/*/reward"
    assert glossary.find("critic/nonsense") is None and glossary.meaning("critic/nonsense") == ""


def test_no_name_is_listed_twice_and_each_is_one_line():
    names = [metric.pattern for metric in glossary.metrics()]
    assert len(names) == len(set(names)) > 60
    assert all(metric.meaning and "\n" not in metric.meaning + metric.bad for metric in glossary.metrics())


def test_what_a_report_shows_first_is_explained():
    assert all(glossary.find(name) for names in SECTIONS.values() for name in names)


def test_a_part_of_a_name_shows_its_advice_and_an_unknown_one_is_answered():
    assert "updates_per_step" in glossary.as_text("explained_variance")
    assert "updates_per_step" not in glossary.as_text()
    assert glossary.as_text("eval/arithmetic/reward").startswith("eval/*/reward")
    with pytest.raises(ConfigError, match="did you mean critic/value_loss"):
        glossary.as_text("critic/valueloss")

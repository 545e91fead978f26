"""The list of settings, and the pages of the documentation that are written by a command."""

from pathlib import Path

import pytest

from rlframe.config import ConfigError
from trainer.settings import presets, reference
from trainer.settings.config import Config
from trainer.settings.overrides import settings as keys
from trainer.watch import glossary

DOCS = Path(__file__).parents[2] / "docs"


def test_every_setting_of_the_schema_is_listed_with_its_default_and_meaning():
    listed = {setting.key: setting for setting in reference.settings()}
    sections = {"model", "task", "algorithm", "rollout", "actor", "critic", "cluster", "eval", "checkpoint", "log", "server"}
    assert set(listed) == set(keys()) - sections - {"actor.lora", "actor.optim", "critic.lora", "critic.optim"}
    assert all(setting.meaning for setting in listed.values())
    assert listed["critic.optim.lr"].default == str(Config().critic.optim.lr) != listed["actor.optim.lr"].default
    assert listed["task.chat_template"].default == "null"


def test_one_section_is_shown_and_an_unknown_one_is_answered():
    lines = reference.as_text("critic.optim").splitlines()
    assert lines and all(line.startswith("critic.optim.") for line in lines)
    with pytest.raises(ConfigError, match="did you mean critic"):
        reference.as_text("critc")


@pytest.mark.parametrize(
    ("page", "written"),
    [("settings.md", reference.as_markdown), ("presets.md", presets.as_markdown), ("metrics.md", glossary.as_markdown)],
)
def test_the_documentation_is_what_make_docs_writes(page, written):
    assert (DOCS / page).read_text() == written() + "\n", "run `make docs`"

"""A rank, whose current directory is not the user's, finds the policy loss that the driver found there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rlframe.config import AlgorithmConfig, ConfigError
from trainer.settings.config import Config
from workers.learner.actor import Actor
from workers.learner.rank import LearnerRank

MINE = """
class Mine:
    def __call__(self, logprobs, sampler_logprobs, advantages):
        return -advantages * logprobs
"""


def test_a_rank_imports_the_loss_from_the_drivers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user, elsewhere = tmp_path / "user", tmp_path / "elsewhere"
    for folder in (user, elsewhere):
        folder.mkdir()
    (user / "loss_of_the_user.py").write_text(MINE)
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    session: Any = None
    config = Config(algorithm=AlgorithmConfig(policy_loss="loss_of_the_user:Mine"))
    with pytest.raises(ConfigError, match="cannot be imported"):
        Actor(session, config)
    LearnerRank(config, "", 0, None, user_folder=str(user))
    assert Actor(session, config).loss.rules.loss.level == "token"

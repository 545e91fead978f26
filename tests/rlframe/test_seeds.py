"""Which seeds a job and a built model take."""

import random

import numpy as np
import pytest
import torch

from rlframe.config import ConfigError, ModelConfig
from rlframe.models import resolve_model
from rlframe.seeding import SEEDS
from trainer.settings.checks import check
from trainer.settings.config import Config


def test_the_largest_seed_is_the_largest_that_everything_takes():
    for take in (np.random.RandomState, random.seed, torch.Generator().manual_seed):
        take(SEEDS - 1)
    with pytest.raises(ValueError, match="between 0 and 2"):
        np.random.RandomState(SEEDS)


@pytest.mark.parametrize("seed", [-1, SEEDS, 2**63, 2**64])
def test_a_seed_out_of_range_names_its_setting(seed, tmp_path):
    config = Config(seed=seed)
    config.model.builder = "tiny"
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert f"seed={seed} " in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        resolve_model(ModelConfig(name="tiny", builder="tiny", build={"seed": seed}), tmp_path)
    assert f"model.build.seed={seed} " in str(caught.value)


def test_the_largest_seed_works(tmp_path):
    config = Config(seed=SEEDS - 1)
    config.model.builder = "tiny"
    check(config)
    resolve_model(ModelConfig(name="tiny", builder="tiny", build={"seed": SEEDS - 1, "warmup_steps": 0}), tmp_path)

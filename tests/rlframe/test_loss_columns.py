"""A column that an estimator adds and a loss reads, beside the closed form."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rlframe import AlgorithmConfig, LMHead, LossInputs, PolicyLoss
from rlframe.advantages import compute_advantages, make_estimator
from tests.support.loss_cases import make_case

MINE = """
import numpy as np
from rlframe.advantages import Estimator, per_token, total_rewards


class Weighed(Estimator):
    def __init__(self, algorithm):
        pass

    def __call__(self, batch):
        batch.add("novelty", np.arange(batch.num_tokens) / 7)
        batch.add("difficulty", np.arange(1.0, len(batch) + 1), per="trajectory")
        rewards = total_rewards(batch)
        return per_token(batch, rewards), per_token(batch, rewards)


class Tilted:
    columns = ("novelty", "difficulty")

    def __call__(self, logprobs, sampler_logprobs, advantages, novelty, difficulty):
        return -advantages * difficulty * logprobs + novelty * logprobs


class TiltedAnswers(Tilted):
    level = "sequence"

    def __call__(self, logprobs, sampler_logprobs, advantages, sequences, novelty, difficulty):
        return super().__call__(logprobs, sampler_logprobs, advantages, novelty, difficulty)
"""


@pytest.mark.parametrize("name", ["Tilted", "TiltedAnswers"])
def test_a_loss_reads_what_an_estimator_added(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tilted.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tilted", raising=False)
    algorithm = AlgorithmConfig(policy_loss=f"tilted:{name}", advantage="tilted:Weighed")
    case = make_case()
    batch, loss = case.batch, PolicyLoss(algorithm)
    inputs = LossInputs(case.hidden, batch, LMHead(case.weight))
    with pytest.raises(ValueError, match="reads a column 'novelty', which the batch does not have"):
        loss(inputs)
    compute_advantages(batch, make_estimator(algorithm))
    (whole,) = batch.micro_batches(10**6)
    out = loss(LossInputs(case.hidden, whole, LMHead(case.weight)))
    rows = np.flatnonzero(batch.action_mask)
    of = np.repeat(np.arange(len(batch)), batch.lengths)[rows]
    log_p = out.per_token["logprobs"].double().numpy()[rows]
    wanted = (-batch.advantages[rows].astype(np.float64) * (of + 1) * log_p + rows / 7 * log_p).sum()
    assert out.loss is not None
    torch.testing.assert_close(out.loss.double().item(), wanted, rtol=1e-5, atol=1e-5)

"""Losses of a user's own, by import path: what they compute, and which are refused."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from rlframe import AlgorithmConfig, ConfigError, PolicyLoss
from rlframe.losses.custom import checked_loss
from rlframe.losses.registry import POLICY_LOSSES, make_policy_loss
from tests.support.loss_cases import dense_logprobs, gradient, make_case, sampled
from trainer.settings.unused import unused

MINE = '''
from dataclasses import dataclass
import torch
from rlframe.losses.base import TokenTerms

@dataclass(frozen=True)
class Bounded:
    """-A sg[min(r, most)] log p."""
    most: float = 1.1
    def __call__(self, logprobs, sampler_logprobs, advantages):
        return -advantages * (logprobs - sampler_logprobs).exp().clamp(max=self.most).detach() * logprobs

@dataclass(frozen=True)
class Geometric:
    """-s A, s the geometric mean ratio of the trajectory, live: its gradient reaches every token."""
    level = "sequence"
    def __call__(self, logprobs, sampler_logprobs, advantages, sequences):
        return -sequences.spread(sequences.mean(logprobs - sampler_logprobs).exp()) * advantages

class Wrong:
    def __call__(self, logprobs, sampler_logprobs, advantages):
        return TokenTerms(-advantages * logprobs, advantages)
class WrongByDifferences(Wrong):
    def __call__(self, logprobs, sampler_logprobs, advantages):
        return TokenTerms((-advantages * logprobs).detach(), advantages)
class Right:
    def __call__(self, logprobs, sampler_logprobs, advantages):
        return TokenTerms((-advantages * logprobs ** 2).detach(), (-2 * advantages * logprobs).detach())
class Summed:
    def __call__(self, logprobs, sampler_logprobs, advantages):
        return -(advantages * logprobs).mean()
class Mixed:
    def __call__(self, logprobs, sampler_logprobs, advantages):
        return -(advantages - advantages.mean()) * logprobs
class MixedTrajectories:
    level = "sequence"
    def __call__(self, logprobs, sampler_logprobs, advantages, sequences):
        return -(logprobs - logprobs.mean()) * advantages
class Constant:
    def __call__(self, logprobs, sampler_logprobs, advantages):
        return -advantages * logprobs.detach()
class Infinite:
    def __call__(self, logprobs, sampler_logprobs, advantages):
        return logprobs / 0
class Crashing:
    def __call__(self, logprobs, sampler_logprobs, advantages):
        raise KeyError("no such key")
class NotATensor:
    def __call__(self, logprobs, sampler_logprobs, advantages):
        return 1.0
class Levelled(Right):
    level = "batch"
class FewArguments:
    def __call__(self, logprobs):
        return logprobs
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a module of losses in it; nothing else puts it on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    (tmp_path / "my_losses.py").write_text(textwrap.dedent(MINE))
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("trains_head", [False, True])
@pytest.mark.parametrize("name", ["Bounded", "Geometric"])
def test_a_loss_and_its_gradient_are_those_of_the_formula(name: str, trains_head: bool) -> None:
    case = make_case(2, lengths=(9, 5, 14), noise=0.3)
    case.weight.requires_grad_(trains_head)
    args = {"most": 1.05} if name == "Bounded" else {}
    out = PolicyLoss(AlgorithmConfig(policy_loss=f"my_losses:{name}", loss_args=args))(case.inputs())
    log_p, log_q, a = sampled(case, dense_logprobs(case))
    if name == "Bounded":
        expected = -(a * (log_p - log_q).exp().clamp(max=1.05).detach() * log_p).sum()
    else:
        own = [case.owners() == b for b in range(3)]
        expected = -torch.stack([(log_p - log_q)[o].mean().exp() * a[o].sum() for o in own]).sum()
    torch.testing.assert_close(out.loss, expected, rtol=1e-6, atol=1e-8)
    trained = [case.hidden, case.weight] if trains_head else [case.hidden]
    for got, want in zip(gradient(out.loss, *trained), gradient(expected, *trained), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
    assert "actor/clip_fraction" not in out.metrics.compute()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Wrong", r"returns slope 1\.3 where the derivative of its loss is -1\.3|slope .* where the derivative"),
        ("WrongByDifferences", "slope .* where the derivative of its loss"),
        ("Summed", r"a loss of shape \(\) for 6 tokens; it must be \(6,\)"),
        ("Mixed", "gives a token another loss with other tokens present than alone"),
        ("MixedTrajectories", "gives a trajectory another loss with other tokens present"),
        ("Constant", "does not depend on the trainer's log-probabilities"),
        ("Infinite", "not finite"),
        ("Crashing", "failed on a trial with six tokens: KeyError: 'no such key'"),
        ("NotATensor", "returns a float"),
        ("Levelled", "level='batch'; it must be 'token' or 'sequence'"),
        ("FewArguments", "failed on a trial with six tokens: TypeError"),
        ("Absent", r"my_losses\.py has no 'Absent'"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused_in_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        PolicyLoss(AlgorithmConfig(policy_loss=f"my_losses:{name}"))
    message = str(refused.value)
    assert f"algorithm.policy_loss=my_losses:{name}" in message and "\n" not in message and message.endswith(".")


@pytest.mark.usefixtures("folder")
def test_a_slope_without_a_graph_is_compared_with_differences() -> None:
    make_policy_loss(AlgorithmConfig(policy_loss="my_losses:Right"))


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        (AlgorithmConfig(policy_loss="nowhere:Loss"), "policy_loss=nowhere:Loss cannot be imported: ModuleNotFoundError"),
        (AlgorithmConfig(policy_loss="broken:Loss"), r"cannot be imported: SyntaxError"),
        (AlgorithmConfig(policy_loss="diss"), "or module:Class of your own"),
        (AlgorithmConfig(policy_loss="my_losses:Bounded", loss_args={"mots": 2}), "has mots, .* it takes most"),
        (AlgorithmConfig(policy_loss="my_losses:Geometric", loss_args={"most": 2}), "it takes no settings of its own"),
        (AlgorithmConfig(policy_loss="dis", loss_args={"lower": 0.5}), "loss_args has lower, .*dis does not take"),
        (AlgorithmConfig(policy_loss="my_losses:Bounded", loss_args={"most": "x"}), "failed on a trial"),
        (AlgorithmConfig(policy_loss="my_losses:Bounded", score_centering=True), "Bounded has none; choose"),
        (AlgorithmConfig(policy_loss="my_losses:Geometric", score_centering=True), "by its whole trajectory; choose"),
    ],
)
def test_what_cannot_be_found_or_made_is_refused(folder: Path, algorithm: AlgorithmConfig, sentence: str) -> None:
    (folder / "broken.py").write_text("def (")
    with pytest.raises(ConfigError, match=sentence):
        PolicyLoss(algorithm)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_that_is_built_in_stands_the_trial(name: str) -> None:
    """Slopes are the derivatives of the losses, whatever is detached, and centerings are the weights that are applied."""
    loss = make_policy_loss(AlgorithmConfig(policy_loss=name, clip_dual=1.3 if name == "ppo_clip" else None))
    checked_loss(loss, name)
    assert loss.level == ("sequence" if name == "gspo" else "token")


def test_a_false_centering_is_refused() -> None:
    class Lying(POLICY_LOSSES["dis"]):
        centering = POLICY_LOSSES["cispo"](0.9, 1.1).rule

    with pytest.raises(ConfigError, match="has a centering f, but its slope is not -A f"):
        checked_loss(Lying(0.1, 9.0), "mine:Lying")


def test_dro_takes_its_strength_from_loss_args() -> None:
    loss = make_policy_loss(AlgorithmConfig(policy_loss="dro", loss_args={"beta": 0.5}))
    assert asdict(loss) == {"beta": 0.5}  # type: ignore[call-overload]


def test_clip_settings_that_a_loss_does_not_read_are_named_as_without_effect() -> None:
    from trainer.settings.config import Config

    def without_effect(loss: str) -> set[str]:
        return {key[15:] for key in unused(Config(algorithm=AlgorithmConfig(policy_loss=loss))) if "clip_" in key[:20]}

    assert without_effect("ppo_clip") == set()
    assert without_effect("dis") == without_effect("gspo") == {"dual"}
    assert without_effect("reinforce") == without_effect("dro") == {"low", "high", "dual"}

"""What is wrong with a batch is said with the trajectory and the field, before anything is computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlframe import (
    AlgorithmConfig,
    Batch,
    LMHead,
    LogProbs,
    LossInputs,
    PolicyLoss,
    Trajectory,
    ValueLoss,
    check_batch,
    compute_advantages,
    make_estimator,
    policy_loss,
    value_loss,
)
from tests.support.head_logprobs import HeadLogProbs
from tests.support.loss_cases import Case, make_case

POLICY = PolicyLoss(AlgorithmConfig())


def fields(length: int = 6, **changes) -> dict:
    """Arguments of a good trajectory, changed."""
    mask = np.arange(length) >= 3
    good = {
        "tokens": np.arange(length),
        "action_mask": mask,
        "logprobs": np.where(mask, -1.0, 0.0),
        "head_ids": np.zeros((length, 0)),
        "head_logprobs": np.zeros((length, 0)),
        "versions": np.where(mask, 0, -1),
        "rewards": np.zeros(length),
        "finish": "stop",
        "prompt_id": "sum-7",
        "index": 12,
    }
    return {**good, **changes}


@pytest.mark.parametrize("name", ["tokens", "action_mask", "logprobs", "versions", "rewards", "head_ids", "head_logprobs"])
def test_lengths_that_differ(name: str) -> None:
    """Case 9: lists that lost step after an abort and resume."""
    short, blamed = fields()[name][:-1], "action_mask" if name == "tokens" else name
    with pytest.raises(ValueError, match=rf"'sum-7' \(index 12\).*{blamed} has shape"):
        Trajectory(**fields(**{name: short}))


@pytest.mark.parametrize("missing", [None, np.nan, np.inf, -np.inf])
def test_a_missing_logprob_is_never_a_number(missing) -> None:
    """Case 7."""
    logprobs = [0.0, 0.0, 0.0, -1.0, missing, -1.0]
    with pytest.raises(ValueError, match=r"'sum-7' \(index 12\).*logprobs"):
        Trajectory(**fields(logprobs=logprobs))
    assert len(Trajectory(**fields(logprobs=[missing, missing, 0.0, -1.0, -1.0, -1.0])))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"logprobs": [0, 0, 0, -1, 0.3, -1]}, "logprobs has a positive value"),
        ({"rewards": [0, 0, 0, 0, 0, np.nan]}, "rewards"),
        ({"finish": "eos"}, "finish is 'eos'"),
        ({"action_mask": np.ones(6, bool)}, "first token is an action"),
        ({"logprobs": np.zeros((6, 1))}, "logprobs has shape"),
    ],
)
def test_trajectories_that_cannot_be(changes: dict, field: str) -> None:
    with pytest.raises(ValueError, match=rf"'sum-7' \(index 12\).*{field}"):
        Trajectory(**fields(**changes))


def test_an_empty_batch_and_one_without_actions() -> None:
    with pytest.raises(ValueError, match="at least one trajectory"):
        Batch.from_trajectories([])
    silent = Batch.from_trajectories([Trajectory(**fields(action_mask=np.zeros(6, bool)))])
    for refuse in (check_batch, lambda batch: compute_advantages(batch, make_estimator(AlgorithmConfig(advantage="none")))):
        with pytest.raises(ValueError, match="no action token: action_mask is False everywhere"):
            refuse(silent)
        with pytest.raises(ValueError, match="no trajectories"):
            refuse(silent.select([]))
    with pytest.raises(ValueError, match="at least one action token"):
        nothing = torch.zeros(0)
        policy_loss(torch.zeros(0, 4), torch.zeros(5, 4), nothing.long(), nothing, nothing, AlgorithmConfig())


@pytest.mark.parametrize("name", ["advantages", "logprobs"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_on_action_tokens(name: str, value: float) -> None:
    case = make_case()
    row = int(case.rows()[-1])
    getattr(case.batch, name)[row] = value
    with pytest.raises(ValueError, match=rf"prompt 'p2' \(index 2\), token {row - 14}: {name} is not finite"):
        POLICY(case.inputs())


def test_returns_that_are_not_finite() -> None:
    case = make_case()
    case.batch.returns[int(case.rows()[0])] = np.nan
    with pytest.raises(ValueError, match=r"prompt 'p0' \(index 0\), token 1: returns is not finite"):
        ValueLoss()(LossInputs(case.hidden, case.batch, value_head=lambda h: h.sum(-1)))


@pytest.mark.parametrize("loss", [POLICY, PolicyLoss(AlgorithmConfig(score_centering=True)), HeadLogProbs()])
def test_nothing_on_masked_rows_has_an_influence(loss) -> None:
    clean, dirty = make_case(3), make_case(3)
    off = ~dirty.batch.action_mask
    for name in ("logprobs", "advantages", "values", "returns", "head_logprobs"):
        getattr(dirty.batch, name)[off] = np.nan
    dirty.batch.head_ids[off] = dirty.batch.tokens[off] = 10**6
    idle = np.setdiff1d(np.arange(len(off)), dirty.rows().numpy() - 1)
    dirty.hidden.data[idle] = torch.nan
    a, b = loss(clean.inputs()), loss(dirty.inputs())
    assert all(torch.equal(a.per_token[name], b.per_token[name]) for name in a.per_token)
    assert a.metrics.compute() == b.metrics.compute()
    if a.loss is not None:
        assert torch.equal(a.loss, b.loss)
        b.loss.backward()
        assert (dirty.hidden.grad[idle] == 0).all() and dirty.hidden.grad.isfinite().all()


def broken(case: Case, **changes) -> LossInputs:
    return LossInputs(case.hidden, case.batch.with_columns(**changes), LMHead(case.weight))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"advantages": None}, "no advantages"),
        ({"advantages": np.zeros((1, 28), np.float32)}, r"advantages has shape \(1, 28\)"),
        ({"logprobs": np.zeros(27, np.float32)}, r"logprobs has shape \(27,\)"),
        ({"action_mask": np.zeros(29, bool)}, r"action_mask has shape \(29,\)"),
        ({"head_ids": np.zeros((3, 6), np.int32)}, r"head_ids has shape \(3, 6\)"),
        ({"head_logprobs": np.zeros((28, 5), np.float32)}, r"head_logprobs has shape \(28, 5\)"),
        ({"tokens": np.full(28, 37, np.int32)}, "'p0'.*tokens has 37, but the vocabulary has 37"),
        ({"action_mask": np.ones(28, bool)}, "'p0'.*first token is an action"),
    ],
)
def test_arrays_of_the_wrong_shape(changes: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        POLICY(broken(make_case(), **changes))


def test_hidden_states_that_do_not_fit() -> None:
    case = make_case()
    with pytest.raises(ValueError, match="hidden has 27 rows, but the batch has 28 tokens"):
        POLICY(LossInputs(case.hidden[:-1], case.batch, LMHead(case.weight)))
    with pytest.raises(ValueError, match=r"must be \[A, H\] and \[V, H\]"):
        POLICY(LossInputs(case.hidden[:, :-1], case.batch, LMHead(case.weight)))


def test_the_functional_form_says_which_argument_is_wrong() -> None:
    """Case 29: a (1, A) advantage would broadcast."""
    good = {
        "hidden": torch.randn(3, 4),
        "lm_head": torch.randn(5, 4),
        "tokens": torch.tensor([0, 4, 2]),
        "logprobs": -torch.ones(3),
        "advantages": torch.ones(3),
        "algorithm": AlgorithmConfig(),
    }
    assert policy_loss(**good).loss.isfinite()
    for changes, sentence in (
        ({"advantages": torch.ones(1, 3)}, r"advantages has shape \(1, 3\)"),
        ({"logprobs": torch.ones(1)}, r"logprobs has shape \(1,\)"),
        ({"logprobs": torch.tensor([0.0, torch.nan, 0.0])}, "logprobs is not finite at token 1"),
        ({"tokens": torch.tensor([0, 5, 2])}, "outside of the vocabulary of 5"),
        ({"hidden": torch.randn(2, 4)}, "2 hidden states"),
        ({"algorithm": AlgorithmConfig(score_centering=True)}, "needs head_ids"),
        ({"head_ids": torch.zeros(3, 2).long(), "head_logprobs": torch.zeros(3, 1)}, "must both have shape"),
        ({"tokens": torch.tensor([0.0, 4.0, 2.0])}, "tokens must be whole numbers"),
        ({"tokens": torch.tensor([0, -1, 2])}, r"outside of the vocabulary of 5 at token 1 \(trajectory 0\)"),
        ({"logprobs": torch.tensor([-1.0, 0.1, -1.0])}, r"positive value at token 1 \(trajectory 0\)"),
        ({"advantages": torch.tensor([1.0, 1.0, torch.inf])}, "advantages is not finite at token 2"),
        ({"segments": torch.tensor([0.0, 0.0, 0.5])}, "segments must be whole numbers"),
        ({"segments": torch.tensor([0, 3, 2])}, r"segments go down, or begin below 0, at token 2 \(trajectory 2\)"),
        ({"segments": torch.tensor([-1, 0, 0])}, r"segments go down, or begin below 0, at token 0 \(trajectory -1\)"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
    ):
        with pytest.raises(ValueError, match=sentence):
            policy_loss(**{**good, **changes})


HEADS = {"head_ids": torch.tensor([[0, 1], [3, 4], [1, 2]]), "head_logprobs": torch.log(torch.tensor([[0.5, 0.3]] * 3))}
NAN, PADDED = float("nan"), -float("inf")


@pytest.mark.parametrize(
    ("name", "row", "entries", "sentence"),
    [
        ("head_ids", 1, [3, 3], "twice in head_ids"),
        ("head_ids", 1, [3, 5], "outside of the vocabulary of 5 in head_ids"),
        ("head_ids", 1, [-1, 3], "below 0 in head_ids"),
        ("head_logprobs", 1, [-0.5, NAN], "no log-probability"),
        ("head_logprobs", 1, [0.2, -3.0], "no log-probability"),
        ("head_logprobs", 1, [-0.1, -0.2], "sum to more than 1"),
        ("head_logprobs", 1, [PADDED, PADDED], "has no head"),
        ("head_logprobs", 0, [-2.0, -3.0], "another log-probability in head_logprobs than in logprobs"),
    ],
)
def test_heads_that_cannot_be_the_samplers_name_their_token(name: str, row: int, entries: list, sentence: str) -> None:
    """A duplicate alone makes the gradient wrong by four orders of magnitude."""
    good = {
        "hidden": torch.randn(3, 4),
        "lm_head": torch.randn(5, 4),
        "tokens": torch.tensor([0, 2, 0]),
        "logprobs": torch.log(torch.tensor([0.5, 0.1, 0.2])),
        "advantages": torch.ones(3),
        "algorithm": AlgorithmConfig(score_centering=True),
        "segments": torch.tensor([0, 1, 1]),
        **HEADS,
    }
    assert policy_loss(**good).loss.isfinite()
    padded = good["head_logprobs"].clone()
    padded[:, 1] = PADDED
    ids = good["head_ids"].clone()
    ids[:, 1] = -1  # whatever padded entries hold
    assert policy_loss(**{**good, "head_ids": ids, "head_logprobs": padded}).loss.isfinite()
    damaged = good[name].clone()
    damaged[row] = torch.tensor(entries)
    with pytest.raises(ValueError, match=rf"Token {row} \(trajectory {min(row, 1)}\) .*{sentence}"):
        policy_loss(**{**good, name: damaged})


@pytest.mark.parametrize("loss", [PolicyLoss(AlgorithmConfig(score_centering=True)), HeadLogProbs()])
def test_ids_outside_of_the_vocabulary_name_their_trajectory(loss) -> None:
    for name, value in (("tokens", 37), ("tokens", -1), ("head_ids", 37), ("head_ids", -2)):
        case = make_case(4)
        row = int(case.rows()[-1])
        getattr(case.batch, name)[row] = value
        with pytest.raises(ValueError, match=rf"'p2' \(index 2\), token {row - 14}: {name} has {value}"):
            loss(case.inputs())


def test_a_batch_whose_numbers_cannot_be_names_the_trajectory() -> None:
    case = make_case(5)
    row = int(case.rows()[-1])
    case.batch.logprobs[row] = 0.5
    with pytest.raises(ValueError, match=rf"'p2' \(index 2\), token {row - 14}: logprobs has the positive value 0.5"):
        POLICY(case.inputs())
    for offsets, sentence in (
        ([0, 14, 9, 28], r"'p1' \(index 1\): offsets go down from 14 to 9"),
        ([1, 9, 14, 28], "begins at 0"),
    ):
        case = make_case(5)
        case.batch.offsets = np.array(offsets)
        for loss in (POLICY, LogProbs()):
            with pytest.raises(ValueError, match=sentence):
                loss(case.inputs())
        with pytest.raises(ValueError, match=sentence):
            ValueLoss()(LossInputs(case.hidden, case.batch, value_head=lambda h: h.sum(-1)))
        with pytest.raises(ValueError, match=sentence):
            compute_advantages(case.batch, make_estimator(AlgorithmConfig()))


def test_values_and_returns_of_the_functional_form_are_finite() -> None:
    for name in ("values", "returns", "old_values"):
        good = {"values": torch.zeros(3), "returns": torch.ones(3), "old_values": torch.zeros(3), "clip_range": 0.2}
        good[name] = torch.tensor([0.0, 0.0, torch.nan])
        with pytest.raises(ValueError, match=f"{name} is not finite at token 2"):
            value_loss(**good)

"""Episodes in pieces, in closed form: every trajectory of a toy is enumerated, so expectations carry no sampling noise.

The episodes are cut by the product's `LiveEpisode` and their advantages come from its `GAE`; the expectation of the policy
gradient over all trajectories, and the true values, are computed here, in float64.
"""

import asyncio
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

from rlframe.advantages.gae import GAE, _final_values, _gae, skip_observation_gae
from rlframe.config import AlgorithmConfig
from rlframe.types import Batch, Prompt
from workers.engines.protocol import Completion, SamplingParams
from workers.environments.base import StepResult
from workers.rollout.episode import LiveEpisode

VOCABULARY, LONGEST, STOP = 3, 4, 2
GAMMA = 0.9
RNG = np.random.default_rng(0)
CONTEXTS = [c for n in range(LONGEST) for c in product(range(VOCABULARY), repeat=n) if STOP not in c]
LOGITS = {context: RNG.normal(size=VOCABULARY) for context in CONTEXTS}
EPISODES = [(*c, t) for c in CONTEXTS for t in range(VOCABULARY) if t == STOP or len(c) + 1 == LONGEST]
# Sums of eighths are exact in float32, in which rewards travel.
REWARD = {episode: float(RNG.integers(-8, 9)) / 8 for episode in EPISODES}
TURN_REWARD, OBSERVATION = 0.25, 7
"""What the environment answers to every turn but the last."""


def probabilities(context):
    weights = np.exp(LOGITS[context] - LOGITS[context].max())
    return weights / weights.sum()


@dataclass
class Replay:
    """An engine that samples a given episode, at most as many tokens as it is asked for."""

    episode: tuple
    at: int = 0

    async def generate(self, tokens, params):
        ids = self.episode[self.at : self.at + params.max_new_tokens]
        ends = ids[-1] == STOP
        self.at += len(ids)
        n = len(ids)
        return Completion(
            ids=np.array(ids, np.int32),
            logprobs=np.full(n, -1, np.float32),
            head_ids=np.zeros((n, 0), np.int32),
            head_logprobs=np.zeros((n, 0), np.float32),
            versions=np.zeros(n, np.int32),
            finish="stop" if ends else "length",
        )


@dataclass
class Toy:
    """Turns of ``turn`` tokens; the episode ends with the stop token, or is ended by the environment at `LONGEST`."""

    episode_tokens: tuple
    said: int = 0
    stop_token_ids = (STOP,)
    max_turns = LONGEST

    def episode(self, prompt):
        return self

    async def step(self, action, finish):
        assert action.tolist() == list(self.episode_tokens[self.said : self.said + len(action)]), "the whole turn, in order"
        self.said += len(action)
        if self.said == len(self.episode_tokens):
            return StepResult(REWARD[self.episode_tokens], True)
        return StepResult(TURN_REWARD, False, np.array([OBSERVATION], np.int32))


def pieces_of(episode, cut, turn):
    """What the learner gets of an episode when it is cut every ``cut`` tokens (None: never)."""
    prompt = Prompt("toy", 0, np.array([9], np.int32), "toy")
    room = len(prompt.tokens) + LONGEST + (LONGEST - 1) // turn  # an observation between two turns
    params = SamplingParams(max_new_tokens=turn)
    live = LiveEpisode(Replay(episode), Toy(episode), prompt, params, max_model_len=room, segment_tokens=cut)

    async def all_of_it():
        pieces = [await live.advance()]
        while not pieces[-1].last:
            pieces.append(await live.advance())
        return pieces

    return asyncio.run(all_of_it())


def true_values(turn):
    """V of every context, by backward induction."""
    values = {}
    for context in sorted(CONTEXTS, key=len, reverse=True):
        values[context] = 0.0
        for token, p in enumerate(probabilities(context)):
            after = (*context, token)
            if after in LOGITS:
                paid = TURN_REWARD if len(after) % turn == 0 else 0.0
                values[context] += p * (paid + GAMMA * values[after])
            else:
                values[context] += p * REWARD[after]
    return values


def gradient(cut, lam, turn, values):
    """Expected policy gradient [contexts, V] where episodes are cut every ``cut`` tokens, and what a cut should add to it.

    The second one is gamma^n (V - V_true) at the next cut, n tokens later, for every action before a cut.
    """
    total, bias = (np.zeros((len(CONTEXTS), VOCABULARY)) for _ in range(2))
    truth = true_values(turn)
    for episode in EPISODES:
        contexts = [episode[:i] for i in range(len(episode))]
        probability = np.prod([probabilities(c)[token] for c, token in zip(contexts, episode, strict=True)])
        pieces = pieces_of(episode, cut, turn)
        ends = np.cumsum([piece.action_mask.sum() for piece in pieces])
        advantages = advantages_of(pieces, lam, [values[c] for c in contexts], [values.get(episode[:end], 0.0) for end in ends])
        for i, (context, token) in enumerate(zip(contexts, episode, strict=True)):
            score = probability * (np.eye(VOCABULARY)[token] - probabilities(context))
            total[CONTEXTS.index(context)] += score * advantages[i]
            end = ends[np.searchsorted(ends, i, side="right")]
            if end < len(episode):
                bias[CONTEXTS.index(context)] += score * GAMMA ** (end - i) * (values[episode[:end]] - truth[episode[:end]])
    return total, bias


def advantages_of(pieces, lam, values, finals):
    """float64[A] of all actions of an episode; the product rounds to float32 what it computes in float64."""
    batch = Batch.from_trajectories(pieces)
    rows = np.flatnonzero(batch.action_mask)
    batch.values = np.zeros(batch.num_tokens)
    batch.values[rows], batch.bootstrap = values, np.array(finals)
    exact, decay = np.zeros(batch.num_tokens), np.full(len(batch), GAMMA * lam)
    _gae(exact, batch.action_mask, batch.values, batch.rewards, batch.offsets, _final_values(batch), GAMMA, decay)
    np.testing.assert_allclose(skip_observation_gae(batch, GAMMA, lam), exact, rtol=1e-6, atol=1e-6)
    return exact[rows]


CUTS = [1, 2, 3]
TURNS = [LONGEST, 2]


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_with_the_true_values_no_cut_changes_the_expected_gradient(turn, lam):
    whole, _ = gradient(None, lam, turn, true_values(turn))
    assert np.abs(whole).max() > 1e-3
    for cut in CUTS:
        np.testing.assert_allclose(gradient(cut, lam, turn, true_values(turn))[0], whole, atol=1e-10, rtol=0)


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("cut", CUTS)
def test_with_wrong_values_a_cut_adds_the_discounted_error_at_the_cut(turn, cut):
    rng = np.random.default_rng(1)
    wrong = {context: value + rng.normal() for context, value in true_values(turn).items()}
    whole, none = gradient(None, 1.0, turn, wrong)
    np.testing.assert_allclose(whole, gradient(None, 1.0, turn, true_values(turn))[0], atol=1e-10, rtol=0)
    total, bias = gradient(cut, 1.0, turn, wrong)
    assert not none.any() and np.abs(bias).max() > 1e-3
    np.testing.assert_allclose(total - whole, bias, atol=1e-10, rtol=0)


@pytest.mark.parametrize("turn", [LONGEST, 3, 2, 1])
@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_pieces_have_every_token_and_every_reward_once(turn, cut):
    for episode in EPISODES:
        (whole,), pieces = pieces_of(episode, None, turn), pieces_of(episode, cut, turn)
        counts = [int(piece.action_mask.sum()) for piece in pieces]
        assert counts == [cut] * (len(pieces) - 1) + [len(episode) - cut * (len(pieces) - 1)] and counts[-1] > 0
        assert [piece.piece for piece in pieces] == list(range(len(pieces)))
        assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert [piece.actions_before for piece in pieces] == [cut * i for i in range(len(pieces))]
        assert [piece.reward_before for piece in pieces] == [sum(p.reward for p in pieces[:i]) for i in range(len(pieces))]
        assert [piece.finish for piece in pieces] == ["length"] * (len(pieces) - 1) + [whole.finish]
        at = 0
        for piece in pieces:
            now = len(piece)
            np.testing.assert_array_equal(piece.tokens, whole.tokens[:now])
            assert not piece.action_mask[:at].any() and (piece.versions[:at] == -1).all() and not piece.rewards[:at].any()
            np.testing.assert_array_equal(piece.action_mask[at:], whole.action_mask[at:now])
            np.testing.assert_array_equal(piece.rewards[at:], whole.rewards[at:now])
            at = now
        assert at == len(whole)


def test_the_adaptive_lambda_counts_the_tokens_of_earlier_pieces():
    algorithm = AlgorithmConfig(advantage="gae", lambda_policy="adaptive", gamma=1.0)
    (whole,), pieces = pieces_of((0, 1, 0, 1), None, LONGEST), pieces_of((0, 1, 0, 1), 3, LONGEST)
    batch = Batch.from_trajectories([pieces[1], whole])
    batch.values, batch.bootstrap = np.zeros(batch.num_tokens), np.array([0.5, 0.5])
    given, _ = GAE(algorithm)(batch)
    lam = 1 - 1 / (algorithm.lambda_alpha * 4)
    np.testing.assert_allclose(given, skip_observation_gae(batch, 1.0, np.array([lam, lam])))

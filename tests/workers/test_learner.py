"""The roles of a learner rank: who shares a backbone, how several critics combine, what an update moves."""

import socket
from copy import deepcopy
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

from rlframe.advantages import compute_advantages, make_estimator
from rlframe.config import AlgorithmConfig
from rlframe.models import resolve_model
from rlframe.types import Batch, Trajectory
from trainer.settings.compose import compose
from workers.learner import rank as learner_module
from workers.learner.rank import LearnerRank
from workers.learner.roles import critic_names

pytestmark = pytest.mark.slow


def trajectory(index, env, length, finish="stop"):
    rng = np.random.default_rng(index)
    mask = np.arange(length) >= 3
    return Trajectory(
        tokens=rng.integers(5, 30, length),
        action_mask=mask,
        logprobs=np.where(mask, -2.0, 0.0),
        head_ids=np.zeros((length, 0)),
        head_logprobs=np.zeros((length, 0)),
        versions=np.where(mask, 0, -1),
        rewards=np.where(np.arange(length) == length - 1, 1.0, 0.0),
        finish=finish,
        index=index,
        env=env,
    )


BATCH = Batch.from_trajectories([trajectory(0, "arithmetic", 7), trajectory(1, "other", 9), trajectory(2, "arithmetic", 6)])
BATCH.returns = np.ones(BATCH.num_tokens, np.float32)
BATCH.advantages = np.where(BATCH.action_mask, 1.0, 0.0).astype(np.float32)
for array in vars(BATCH).values():
    if isinstance(array, np.ndarray):
        array.flags.writeable = False  # as a rank gets it


@pytest.fixture
def rank(monkeypatch):
    """Build a rank from overrides; its process group goes when the next one is built, or the test ends."""
    monkeypatch.setattr(learner_module, "_node_ip", lambda: "127.0.0.1")
    built = []

    def build(*overrides):
        while built:
            built.pop().close()
        config = compose(["algorithm=bypass_pg_token_tis", *overrides])
        learner = LearnerRank(config, resolve_model(config.model), 0, None, critic_names(config))
        built.append(learner)
        learner.start(learner.rendezvous())
        return learner

    yield build
    for learner in built:
        learner.close()


def test_the_port_where_ranks_meet_is_held_from_when_it_is_named(monkeypatch):
    """Between its name and the group another process could take a port that is only looked for."""
    monkeypatch.setattr(learner_module, "_node_ip", lambda: "127.0.0.1")
    config = compose(["model.build.warmup_steps=0"])
    ranks = [LearnerRank(config, resolve_model(config.model), 0, None) for _ in range(2)]
    ports = {urlsplit(rank.rendezvous()).port for rank in ranks}
    assert len(ports) == 2
    for port in ports:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))


def own_values(learner, name):
    """Values of one critic alone."""
    critic, sessions = learner.critic, learner.critic.sessions
    critic.sessions = {name: sessions[name]}
    values, _ = learner.values(BATCH)
    critic.sessions = sessions
    return values


@pytest.mark.parametrize(
    ("actor", "critic", "shared"),
    [("lora", "lora", True), ("full", "lora", False), ("full", "full", False), ("lora", "full", False)],
)
def test_critics_share_the_backbone_of_a_lora_actor_only(rank, actor, critic, shared):
    learner = rank(f"actor={actor}", f"critic={critic}")
    backbones = {id(session.backbone) for session in learner._sessions().values()}
    assert (len(backbones) == 1) == shared


def test_a_fresh_critic_predicts_exactly_zero(rank):
    values, bootstrap = rank().values(BATCH)
    assert values.shape == (BATCH.num_tokens,) and bootstrap.shape == (len(BATCH),)
    assert not values.any() and not bootstrap.any()


def test_an_ensemble_gives_the_mean_of_its_members(rank):
    learner = rank("critic.ensemble=3", "critic.optim.warmup_steps=0", "critic.optim.lr=1e-2")
    batch = deepcopy(BATCH)
    batch.values, batch.bootstrap = learner.values(batch)
    for _ in range(3):
        learner.update_critic(batch)
    members = [own_values(learner, name) for name in learner.critic.sessions]
    assert np.abs(members[0] - members[1]).max() > 1e-6, "members start from different factors"
    np.testing.assert_allclose(learner.values(batch)[0], np.mean(members, axis=0), atol=1e-6)


def test_a_cut_trajectory_is_worth_what_the_critics_say_after_its_last_token(rank):
    """Without rewards every return is the bootstrap; that is the value before a token which would have come next."""
    learner = rank("critic.ensemble=2", "critic.optim.warmup_steps=0", "critic.optim.lr=1e-2")
    learner.update_critic(BATCH)
    cut = trajectory(3, "arithmetic", 8, finish="length")
    longer = trajectory(3, "arithmetic", 9)
    longer.tokens[:8] = cut.tokens
    cut.rewards[:] = 0
    batch, ended = (Batch.from_trajectories([cut, trajectory(4, "arithmetic", 6, finish=f)]) for f in ("stop", "length"))
    ended.rewards[:] = 0
    batch.rewards[:] = 0
    after = learner.values(Batch.from_trajectories([longer]))[0][8]
    for each, second in ((batch, False), (ended, True)):
        each.values, each.bootstrap = learner.values(each)
        compute_advantages(each, make_estimator(AlgorithmConfig(gamma=1.0, lambda_critic=1.0)))
        assert abs(after) > 1e-3
        np.testing.assert_allclose(each.returns[3:8], after, atol=1e-6)
        np.testing.assert_allclose(each.returns[8:][3:], each.bootstrap[1] if second else 0, atol=1e-6)


def test_an_actor_update_leaves_the_critic_and_the_base_alone(rank):
    learner = rank("actor=lora", "actor.optim.lr=1e-2")
    critic = {n: p.detach().clone() for n, p in learner.critic.sessions["critic_0"].named_parameters()}
    base = {n: p.detach().clone() for n, p in learner.actor.session.backbone.parameters()}
    before = {n: p.detach().clone() for n, p in learner.actor.session.named_parameters()}
    learner.update_actor(BATCH)
    assert any(not torch.equal(p, before[n]) for n, p in learner.actor.session.named_parameters())
    assert all(torch.equal(p, critic[n]) for n, p in learner.critic.sessions["critic_0"].named_parameters())
    assert all(torch.equal(p, base[n]) for n, p in learner.actor.session.backbone.parameters())


def test_the_checksum_is_that_of_the_merged_model(rank):
    learner = rank("actor=lora", "actor.optim.lr=1e-2")
    _, before = learner.weight_update(0, "merged", "float32")
    learner.update_actor(BATCH)
    update, after = learner.weight_update(1, "merged", "float32")
    assert after != before and update.version == 1
    full, _ = learner.weight_update(1, "merged", "bfloat16")
    assert all(array.dtype == np.uint16 for array in full.tensors.values())

"""What of a batch goes into the object store, for whom, and that nothing writes into what comes out of it."""

import pickle

import numpy as np
import pytest
import torch

from rlframe.advantages import compute_advantages, make_estimator
from rlframe.config import AlgorithmConfig
from rlframe.losses.base import LMHead, LossInputs
from rlframe.losses.logprobs import LogProbs
from rlframe.losses.policy import PolicyLoss
from rlframe.losses.targets import Targets, make_loss
from rlframe.losses.value import ValueLoss, ValuePrediction
from rlframe.types import Batch, Trajectory
from workers.learner.shared import SharedBatch

K, HIDDEN, VOCABULARY = 16, 4, 50


def rollouts(count=6, length=20, k=K):
    rng = np.random.default_rng(0)
    mask = np.arange(length) >= 4
    logits = torch.randn(count, length, VOCABULARY, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    top = logits.topk(k)
    trajectories = []
    for i in range(count):
        tokens = rng.integers(0, VOCABULARY, length)
        trajectories.append(
            Trajectory(
                tokens=tokens,
                action_mask=mask,
                logprobs=logits[i, np.arange(length), tokens].numpy(),
                head_ids=top.indices[i].numpy(),
                head_logprobs=top.values[i].numpy(),
                versions=np.where(mask, 0, -1),
                rewards=np.where(np.arange(length) == length - 1, i % 2, 0.0),
                finish="length" if i == 1 else "stop",
                index=i,
                env="env",
                metadata={"difficulty": i},
            )
        )
    return Batch.from_trajectories(trajectories)


class Store:
    """An object store that counts: what goes in is pickled, what comes out has read-only arrays, as Ray's has."""

    def __init__(self):
        self.objects, self.bytes = [], []

    def put(self, value):
        buffers = []
        data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        copies = [bytes(buffer.raw()) for buffer in buffers]
        self.objects.append((data, copies))
        self.bytes.append(len(data) + sum(map(len, copies)))
        return len(self.objects) - 1

    def get(self, references):
        return [pickle.loads(self.objects[i][0], buffers=self.objects[i][1]) for i in references]


def step(batch, store):
    """The calls of one training step in the controller's order; what each role reads in each of them."""
    shared = SharedBatch(batch, store.put)
    seen = [("critic", shared.parts("critic"))]
    batch.values = np.zeros(batch.num_tokens, np.float32)
    batch.bootstrap = np.zeros(len(batch), np.float32)
    compute_advantages(batch, make_estimator(AlgorithmConfig()))
    seen += [("critic", shared.parts("critic")), ("critic", shared.parts("critic")), ("actor", shared.parts("actor"))]
    return [(role, Batch.union(store.get(parts))) for role, parts in seen]


def test_every_column_is_put_once_and_goes_only_to_those_who_read_it():
    batch, store = rollouts(), Store()
    seen = step(batch, store)
    first, second, third, actor = (view for _, view in seen)
    assert set(first.columns) == {"tokens", "action_mask", "prompt_ids", "indices"}
    assert set(second.columns) == set(third.columns) == {*first.columns, "values", "returns"}
    assert set(actor.columns) == set(batch.columns) - {
        "values",
        "returns",
        "bootstrap",
        "piece",
        "last",
        "actions_before",
        "reward_before",
    }
    for view in (second, actor):
        for name, column in view.columns.items():
            np.testing.assert_array_equal(column, batch.columns[name])
    arrays = [batch.columns[name] for name in batch.columns if name != "bootstrap"]
    payload = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
    assert payload <= sum(store.bytes) < payload + 4096, "no array goes in twice"
    heads = batch.head_ids.nbytes + batch.head_logprobs.nbytes
    critic_reads = sum(array.nbytes for array in second.columns.values() if isinstance(array, np.ndarray))
    assert critic_reads < heads / 4


def test_a_column_that_was_replaced_is_put_again():
    batch, store = rollouts(), Store()
    shared = SharedBatch(batch, store.put)
    for value in (1.0, 2.0):
        batch.advantages = np.full(batch.num_tokens, value, np.float32)
        assert Batch.union(store.get(shared.parts("actor"))).advantages[0] == value


def test_a_column_of_ones_own_reaches_the_actor_and_is_cut_with_the_batch():
    batch, store = rollouts(), Store()
    shared = SharedBatch(batch, store.put)
    batch.add("novelty", np.arange(batch.num_tokens, dtype=np.float32))
    batch.add("difficulty", np.array([m["difficulty"] for m in batch.metadata]), per="trajectory")
    assert "novelty" not in Batch.union(store.get(shared.parts("critic"))).columns
    seen = Batch.union(store.get(shared.parts("actor")))
    last = seen.shard(1, 2).micro_batches(20)[-1]
    np.testing.assert_array_equal(last.columns["novelty"], np.arange(100, 120))
    assert last.columns["difficulty"].tolist() == [5]
    with pytest.raises(ValueError, match="a column 'rewards' of its own"):
        batch.add("rewards", np.zeros(batch.num_tokens))
    with pytest.raises(ValueError, match="'short' has 3 rows, but the batch has 6"):
        batch.add("short", np.zeros(3), per="trajectory")
    with pytest.raises(TypeError, match="no column 'reward'"):
        batch.with_columns(reward=np.zeros(batch.num_tokens))


@pytest.mark.filterwarnings("error")  # torch warns where it is given memory that it must not write into
def test_no_loss_and_no_estimator_writes_into_what_ray_gives():
    whole = rollouts()
    store = Store()
    (*_, (_, critic), (_, actor)) = step(whole, store)
    head = LMHead(torch.randn(VOCABULARY, HIDDEN, requires_grad=True))
    centred = AlgorithmConfig(policy_loss="dis", score_centering=True)
    for batch, losses in (
        (actor, (LogProbs(), PolicyLoss(centred))),
        (critic, (ValuePrediction(), ValueLoss(clip_range=0.2))),
    ):
        assert not any(c.flags.writeable for c in batch.columns.values() if isinstance(c, np.ndarray))
        for part in (batch, *batch.shard(0, 1).micro_batches(30)):
            hidden = torch.randn(part.num_tokens, HIDDEN, requires_grad=True)
            for loss in losses:
                loss(LossInputs(hidden, part, lm_head=head, value_head=lambda h: h.sum(-1)))
    (frozen,) = store.get([store.put(whole)])
    for name in ("gae", "running_mean", "group", "none"):
        compute_advantages(frozen, make_estimator(AlgorithmConfig(advantage=name)))


@pytest.mark.filterwarnings("error")
def test_targets_of_the_server_are_cut_and_never_written_into():
    store, rng = Store(), np.random.default_rng(0)
    targets = Targets(
        np.array([0, 3, 7]),
        tokens=rng.integers(0, VOCABULARY, 7).astype(np.int32),
        target_tokens=rng.integers(0, VOCABULARY, (7, 1)),
        weights=np.ones((7, 1), np.float32),
    )
    (frozen,) = store.get([store.put(targets)])
    head, hidden = LMHead(torch.randn(VOCABULARY, HIDDEN)), torch.randn(7, HIDDEN)
    want = (hidden @ head.weight.T).log_softmax(-1)[torch.arange(7), torch.from_numpy(targets.target_tokens[:, 0])]
    for rows, part in zip((slice(0, 3), slice(3, 7)), frozen.micro_batches(4), strict=True):
        out = make_loss("cross_entropy", {})(LossInputs(hidden[rows], part, lm_head=head))
        torch.testing.assert_close(out.per_token["logprobs"][:, 0], want[rows])

"""Losses, log-probabilities and parameters over HTTP equal a plain torch and peft loop."""

import numpy as np
import pytest
import torch
from tinker import types

from tests.support.server_data import ADAM, datum, exported, factors, parameters, policy_data, supervised_data, without
from tests.support.server_reference import LOSSES, Reference

CONFIGS = [(name, None) for name in LOSSES] + [
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.01}),
    ("cispo", {"clip_low_threshold": 0.3, "clip_high_threshold": 0.9}),
    ("dis", {"clip_low_threshold": 0.1, "clip_high_threshold": 1.5}),
    ("dro", {"beta": 0.7}),
]


def close(ours, theirs, tolerance=2e-5):
    torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs), rtol=tolerance, atol=tolerance)


def same_factors(ours, theirs, tolerance=2e-5):
    assert ours.keys() == theirs.keys()
    for name in ours:
        close(ours[name], theirs[name], tolerance)


@pytest.mark.parametrize(("name", "config"), CONFIGS)
def test_two_steps_of_every_loss_equal_a_plain_loop(server, client, name, config):
    model = client.create_lora_training_client("tiny", rank=4, seed=3).result()
    reference = Reference(server.base.path, exported(server, model, "start"))
    for step in range(2):
        data = supervised_data(step) if name == "cross_entropy" else policy_data(step)
        result = model.forward_backward(data, name, config).result()
        loss, size, logprobs = reference.forward_backward(data, name, config)
        assert result.metrics["loss:sum"] == pytest.approx(loss, abs=2e-5 * size)
        for output, expected in zip(result.loss_fn_outputs, logprobs, strict=True):
            close(output["logprobs"].to_torch(), expected)
        params = ADAM.model_copy(update={"grad_clip_norm": 0.0 if step else 5.0})
        model.optim_step(params).result()
        reference.step(params)
    same_factors(factors(server, model, "end"), reference.factors())


def test_several_targets_per_position_equal_a_plain_loop(server, client):
    model = client.create_lora_training_client("tiny", rank=4, seed=4).result()
    reference = Reference(server.base.path, exported(server, model, "start"))
    data = [*supervised_data(1, targets=3), *supervised_data(2), *supervised_data(3, targets=2)]
    result = model.forward_backward(data, "cross_entropy").result()
    loss, size, logprobs = reference.forward_backward(data, "cross_entropy")
    assert result.metrics["loss:sum"] == pytest.approx(loss, abs=2e-5 * size)
    for output, expected in zip(result.loss_fn_outputs, logprobs, strict=True):
        assert output["logprobs"].shape == list(expected.shape)
        close(output["logprobs"].to_torch(), expected)
    model.optim_step(ADAM).result()
    reference.step(ADAM)
    same_factors(factors(server, model, "end"), reference.factors())


def test_sparse_targets_are_the_dense_ones(client):
    model = client.create_lora_training_client("tiny", rank=2, seed=4).result()
    targets = torch.zeros(8, 16, dtype=torch.int64)
    weights = torch.zeros(8, 16)
    targets[2, 3], weights[2, 3], targets[7, 0], weights[7, 0] = 9, 1.5, 11, -2.0
    inputs = types.ModelInput.from_ints(list(range(8)))
    sparse = types.Datum(inputs, {"target_tokens": targets, "weights": weights})
    assert sparse.loss_fn_inputs["weights"].sparse_crow_indices is not None
    full = types.Datum(inputs, {"target_tokens": targets.numpy(), "weights": weights.numpy()})
    one, other = (model.forward([d], "cross_entropy").result() for d in (sparse, full))
    assert one.metrics == other.metrics and one.metrics["loss:sum"] != 0


def test_custom_loss_equals_autograd_through_the_whole_model(server, client):
    model = client.create_lora_training_client("tiny", rank=4, seed=5).result()
    reference = Reference(server.base.path, exported(server, model, "start"))
    data = without(policy_data(1), "logprobs", "advantages")

    def loss_fn(data, logprobs):
        loss = sum((lp.exp() - 0.3).square().sum() for lp in logprobs)
        return loss, {"entropy": float(-sum(lp.sum() for lp in logprobs))}

    result = model.forward_backward_custom(data, loss_fn).result()
    loss, metrics = loss_fn(data, [reference.logprobs(d) for d in data])
    loss.backward()
    assert result.metrics["loss:sum"] == pytest.approx(float(loss), rel=2e-5)
    assert result.metrics["entropy"] == pytest.approx(metrics["entropy"], rel=2e-5)
    model.optim_step(ADAM).result()
    reference.step(ADAM)
    same_factors(factors(server, model, "end"), reference.factors())


def test_gradients_add_up_over_calls_and_forward_adds_none(server, client):
    model = client.create_lora_training_client("tiny", rank=4, seed=6).result()
    reference = Reference(server.base.path, exported(server, model, "start"))
    for seed in (1, 2):
        model.forward_backward(policy_data(seed), "ppo").result()
        reference.forward_backward(policy_data(seed), "ppo")
        model.forward(policy_data(9), "ppo").result()
    model.optim_step(ADAM).result()
    reference.step(ADAM)
    same_factors(factors(server, model, "end"), reference.factors())


def test_chunks_in_any_order_are_one_batch(server, client):
    """The SDK cuts 30 data into chunks of at most 4, and sends the first one last."""
    holder = client.holder
    holder._client_config = holder.get_client_config().model_copy(update={"fwdbwd_max_chunk_len": 4})
    model = client.create_lora_training_client("tiny", rank=4, seed=7).result()
    reference = Reference(server.base.path, exported(server, model, "start"))
    data = supervised_data(3, count=30)
    result = model.forward_backward(data, "cross_entropy").result()
    loss, size, logprobs = reference.forward_backward(data, "cross_entropy")
    assert result.metrics["loss:sum"] == pytest.approx(loss, abs=2e-5 * size)
    assert len(result.loss_fn_outputs) == 30
    for output, expected in zip(result.loss_fn_outputs, logprobs, strict=True):
        close(output["logprobs"].to_torch(), expected)
    model.optim_step(ADAM).result()
    reference.step(ADAM)
    same_factors(factors(server, model, "end"), reference.factors())


def test_a_weight_of_zero_hides_whatever_stands_there(client):
    model = client.create_lora_training_client("tiny", rank=2, seed=8).result()
    tokens, targets = [3, 4, 5], np.array([4, 5, 6])
    good = {"logprobs": np.array([-1, -2, -3.0], np.float32), "advantages": np.array([1, 0.5, -1.0], np.float32)}
    weights = np.array([1, 0, 1], np.float32)
    bad = {name: np.where(weights == 0, np.nan, column).astype(np.float32) for name, column in good.items()}
    with_nan = model.forward([datum(tokens, target_tokens=targets, weights=weights, **bad)], "ppo").result()
    plain = model.forward([datum(tokens, target_tokens=targets, weights=weights, **good)], "ppo").result()
    assert with_nan.metrics == plain.metrics and np.isfinite(plain.metrics["loss:sum"])


@pytest.mark.parametrize("flag", ["train_attn", "train_mlp"])
def test_layers_that_do_not_train_have_no_adapter(server, client, flag):
    part = {"train_attn": "self_attn", "train_mlp": "mlp"}[flag]
    model = client.create_lora_training_client("tiny", rank=2, seed=1, **{flag: False}).result()
    names = parameters(server, model)
    assert names and not any(part in name for name in names)


def test_a_larger_rank_after_a_smaller_one_works(client):
    for rank in (1, 16, 64):
        model = client.create_lora_training_client("tiny", rank=rank, seed=1).result()
        model.forward_backward(supervised_data(1), "cross_entropy").result()
        model.optim_step(ADAM).result()
        assert model.get_info().lora_rank == rank

"""Numbered calls run once, in order, whatever the network does to them."""

import numpy as np
import pytest
import torch
from tinker import RequestFailedError

from tests.support.raw_client import Wire
from tests.support.server_data import ADAM, datum, parameters, supervised_data
from trainer.server.errors import UserError
from trainer.server.futures import Futures


@pytest.fixture
def wire(server):
    return Wire(server)


def new_model(client, seed=1):
    return client.create_lora_training_client("tiny", rank=4, seed=seed).result()


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def after_one_step(server, client, *batches):
    """Parameters of a model that took these batches in order, and one step."""
    model = new_model(client)
    for batch in batches:
        model.forward_backward(batch, "cross_entropy").result()
    model.optim_step(ADAM).result()
    return parameters(server, model)


def test_calls_that_arrive_too_early_wait_for_those_before(server, client, wire):
    expected = after_one_step(server, client, supervised_data(1))
    model = new_model(client)
    step = wire.optim_step(model, 2)
    saved = wire.post("save_weights", model_id=model.model_id, seq_id=3, path="third").json()["request_id"]
    first = wire.forward_backward(model, 1, supervised_data(1))
    for request in (first, step, saved):
        assert wire.result(request).status_code == 200
    same(parameters(server, model), expected)


def test_a_repeated_call_has_the_same_answer_and_no_second_effect(server, client, wire):
    expected = after_one_step(server, client, supervised_data(1))
    model = new_model(client)
    requests = [wire.forward_backward(model, 1, supervised_data(1)) for _ in range(3)]
    answers = [wire.result(request).content for request in requests]
    assert len(set(requests)) == 1 and len(set(answers)) == 1
    steps = [wire.optim_step(model, 2) for _ in range(2)]
    assert wire.result(steps[0]).json() == wire.result(steps[1]).json()
    wire.forward_backward(model, 1, supervised_data(1))
    assert wire.result(wire.optim_step(model, 2)).json() == wire.result(steps[0]).json()
    same(parameters(server, model), expected)


def test_a_number_belongs_to_one_kind_of_call(client, wire):
    model = new_model(client)
    wire.result(wire.forward_backward(model, 1, supervised_data(1)))
    answer = wire.post("save_weights", model_id=model.model_id, seq_id=1, path="x")
    assert answer.status_code == 400 and "seq_id" in answer.json()["error"]


def test_a_repeated_creation_is_one_model(server, client, wire):
    body = {"session_id": client.holder.get_session_id(), "model_seq_id": 77, "base_model": "tiny"}
    ids = {wire.post("create_model", **body, lora_config={"rank": 2}).json()["request_id"] for _ in range(3)}
    assert len(ids) == 1 and wire.result(ids.pop()).json()["model_id"].endswith(":train:77")


def test_a_bad_chunk_takes_its_whole_call_down_and_leaves_no_gradient(server, client, wire):
    model = new_model(client)
    bad = [datum([1, 2, 3], target_tokens=[4, 5])]
    late = [wire.forward_backward(model, 3, supervised_data(3)), wire.forward_backward(model, 2, bad)]
    first = wire.forward_backward(model, 1, supervised_data(1))
    for request in (first, *late):
        assert "target_tokens" in wire.failure(request)
    assert "no gradient" in wire.failure(wire.optim_step(model, 4))
    assert all(t.gradient is None for t in server.session(model).trainables)


def test_a_failed_call_leaves_the_gradients_before_it_alone(server, client):
    expected = after_one_step(server, client, supervised_data(1), supervised_data(2))
    model = new_model(client)
    model.forward_backward(supervised_data(1), "cross_entropy").result()
    with pytest.raises(RequestFailedError, match="target_tokens"):
        model.forward_backward([datum([1, 2, 3], target_tokens=[4, 5])], "cross_entropy").result()
    model.forward_backward(supervised_data(2), "cross_entropy").result()
    model.optim_step(ADAM).result()
    same(parameters(server, model), expected)


def test_a_client_that_disappears_in_the_middle_of_a_batch_leaves_no_gradient(server, client, wire):
    model = new_model(client)
    wire.forward_backward(model, 2, supervised_data(2))
    wire.forward_backward(model, 3, supervised_data(3))
    other = new_model(client, seed=2)
    other.forward_backward(supervised_data(1), "cross_entropy").result()  # the line has moved on
    assert all(t.gradient is None for t in server.session(model).trainables)
    assert all(t.gradient is not None for t in server.session(other).trainables)


def test_a_step_without_gradient_moves_nothing(server, client):
    model = new_model(client)
    model.forward_backward(supervised_data(1), "cross_entropy").result()
    model.optim_step(ADAM).result()
    before = parameters(server, model)
    with pytest.raises(RequestFailedError, match="no gradient"):
        model.optim_step(ADAM).result()
    same(parameters(server, model), before)


def test_a_step_of_one_model_leaves_the_others_alone(server, client):
    one, other = new_model(client), new_model(client, seed=2)
    expected = after_one_step(server, client, supervised_data(1))
    one.forward_backward(supervised_data(1), "cross_entropy").result()
    other.forward_backward(supervised_data(2), "cross_entropy").result()
    before = parameters(server, one)
    other.optim_step(ADAM).result()
    same(parameters(server, one), before)
    one.optim_step(ADAM).result()
    same(parameters(server, one), expected)


def test_a_gradient_that_is_not_finite_moves_nothing(server, client):
    model = new_model(client)
    before = parameters(server, model)
    huge = [datum([1, 2, 3], target_tokens=[4, 5, 6], weights=np.full(3, 3e38, np.float32))]
    model.forward_backward(huge, "cross_entropy").result()
    assert model.optim_step(ADAM).result().metrics["skipped"] == 1
    same(parameters(server, model), before)


def test_results_are_kept_for_a_while_and_then_gone():
    futures = Futures(keep_s=-1.0)
    running, finished = futures.create("a", "alice"), futures.create("b", "alice")
    finished.succeed({})
    futures.sweep()
    assert futures.check("a", "alice") is running
    with pytest.raises(UserError) as gone:
        futures.check("b", "alice")
    assert gone.value.status == 410

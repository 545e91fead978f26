"""Saving, loading, listing and deleting: training continues from a state as if it had never stopped."""

import pytest
import tinker
import torch
from tinker import RequestFailedError

from tests.support.server_data import ADAM, exported, factors, parameters, supervised_data
from tests.support.server_reference import Reference


def new_model(client, **options):
    return client.create_lora_training_client("tiny", **{"rank": 4, "seed": 1, **options}).result()


def train(model, *seeds):
    for seed in seeds:
        model.forward_backward(supervised_data(seed), "cross_entropy").result()
        model.optim_step(ADAM).result()


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_going_on_from_a_state_with_its_optimiser_equals_never_stopping(server, client):
    model = new_model(client)
    train(model, 1, 2)
    path = model.save_state("two").result().path
    train(model, 3, 4)
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    train(resumed, 3, 4)
    same(parameters(server, resumed), parameters(server, model))


def test_without_its_optimiser_the_moments_start_again(server, client):
    model = new_model(client)
    train(model, 1, 2)
    path = model.save_state("two").result().path
    resumed = client.create_training_client_from_state(path).result()
    same(parameters(server, resumed), parameters(server, model))
    reference = Reference(server.base.path, exported(server, model, "two"))
    train(resumed, 3)
    reference.forward_backward(supervised_data(3), "cross_entropy")
    reference.step(ADAM)
    for name, factor in factors(server, resumed, "three").items():
        torch.testing.assert_close(factor, reference.factors()[name], rtol=2e-5, atol=2e-5)


def test_a_state_can_be_loaded_into_a_model_that_exists(server, client):
    model, other = new_model(client), new_model(client, seed=2)
    train(model, 1)
    path = model.save_state("one").result().path
    train(other, 2)
    other.forward_backward(supervised_data(9), "cross_entropy").result()  # this gradient belongs to the old weights
    other.load_state_with_optimizer(path).result()
    with pytest.raises(RequestFailedError, match="no gradient"):
        other.optim_step(ADAM).result()
    train(model, 3)
    train(other, 3)
    same(parameters(server, other), parameters(server, model))
    with pytest.raises(RequestFailedError, match="rank=4"):
        new_model(client, rank=8).load_state(path).result()


def test_a_saved_model_is_what_it_was(server, client):
    model = new_model(client, rank=3, train_attn=False)
    path = model.save_state("s", user_metadata={"note": "x"}).result().path
    resumed = client.create_training_client_from_state(path).result()
    assert resumed.get_info().lora_rank == 3
    info = server.rest().get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank, info.train_attn, info.train_mlp) == ("tiny", 3, False, True)
    assert info.train_unembed is False, "the tiny model ties its head, so there is nothing to train"


def test_checkpoints_are_listed_and_deleted(server, client):
    rest = server.rest()
    model = new_model(client)
    state = model.save_state("state", user_metadata={"step": "7"}).result().path
    sampler = model.save_weights_for_sampler("sampler", ttl_seconds=7200).result().path
    listed = rest.list_checkpoints(model.model_id).result().checkpoints
    assert [(c.checkpoint_id, c.checkpoint_type, c.tinker_path) for c in listed] == [
        ("weights/state", "training", state),
        ("sampler_weights/sampler", "sampler", sampler),
    ]
    assert listed[0].user_metadata == {"step": "7"} and listed[0].expires_at is None and listed[1].expires_at is not None
    assert listed[0].size_bytes > listed[1].size_bytes > 0
    run = rest.get_training_run(model.model_id).result()
    assert (run.base_model, run.lora_rank, run.last_checkpoint.tinker_path) == ("tiny", 4, state)
    assert model.model_id in [r.training_run_id for r in rest.list_training_runs(limit=1000).result().training_runs]
    assert state in [c.tinker_path for c in rest.list_user_checkpoints(limit=1000).result().checkpoints]
    rest.set_checkpoint_ttl_from_tinker_path(state, 3600).result()
    assert rest.list_checkpoints(model.model_id).result().checkpoints[0].expires_at is not None
    rest.delete_checkpoint_from_tinker_path(state).result()
    assert [c.tinker_path for c in rest.list_checkpoints(model.model_id).result().checkpoints] == [sampler]
    with pytest.raises(tinker.NotFoundError):
        client.create_training_client_from_state(state).result()


def test_a_name_is_taken_until_it_is_to_be_overwritten(server, client):
    model = new_model(client)
    model.save_state("same").result()
    train(model, 1)
    with pytest.raises(RequestFailedError, match="is taken"):
        model.save_state("same").result()
    path = model.save_state("same", overwrite=True).result().path
    resumed = client.create_training_client_from_state(path).result()
    same(parameters(server, resumed), parameters(server, model))


def test_weights_can_be_copied(server, client):
    model = new_model(client)
    train(model, 1)
    path = model.save_state("mine").result().path
    copy = server.rest().copy_weights(path, "any-project").result()
    assert copy != path
    server.rest().delete_checkpoint_from_tinker_path(path).result()
    resumed = client.create_training_client_from_state(copy).result()
    same(parameters(server, resumed), parameters(server, model))


def test_weights_whose_time_is_over_are_gone(server, client):
    model = new_model(client)
    path = model.save_state("short", ttl_seconds=3600).result().path
    checkpoint = server.service.store.checkpoints(server.service.store.run(model.model_id, "alice"))[0]
    checkpoint.expires = 1.0
    server.service.store.update(checkpoint)
    server.run(server.service.sweep())
    with pytest.raises(tinker.NotFoundError):
        client.create_training_client_from_state(path).result()

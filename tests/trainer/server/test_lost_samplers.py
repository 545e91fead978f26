"""Samplers of a server are lost: others answer with the same weights, and without any the server trains on and says so."""

import pytest
import tinker
import torch
from tinker import types

from tests.support.local_ray import kill
from tests.support.local_server import LocalServer
from tests.support.raw_client import Wire
from tests.support.server_data import ADAM, exported, supervised_data
from tests.support.server_reference import Reference

PROMPT = [5, 9, 3, 12, 7]


def take_away(server):
    """Kill the actors that are there now."""

    async def now():
        for worker in server.service.samplers.workers:
            kill(worker._actor)

    server.run(now())


def assert_samples_of(model, sampler):
    params = types.SamplingParams(max_tokens=6, temperature=1.0, stop=[])
    for sequence in sampler.sample(types.ModelInput.from_ints(PROMPT), 4, params).result().sequences:
        with torch.no_grad():
            rows = torch.log_softmax(model(input_ids=torch.tensor([PROMPT + sequence.tokens])).logits[0], -1)
        expected = rows[len(PROMPT) - 1 : -1].gather(1, torch.tensor(sequence.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sequence.logprobs), expected, rtol=2e-5, atol=2e-5)


def test_samplers_come_back_under_the_weights_of_living_clients_until_none_may_start_again(tmp_path):
    server = LocalServer(tmp_path, "rollout.workers=2", "rollout.max_restarts=1")
    client = server.client()
    model = client.create_lora_training_client("tiny", rank=4, seed=1).result()
    model.forward_backward(supervised_data(1), "cross_entropy").result()
    model.optim_step(ADAM.model_copy(update={"learning_rate": 0.3})).result()
    sampler = model.save_weights_and_get_sampling_client().result()
    reference = Reference(server.base.path, exported(server, model, "now")).model
    assert_samples_of(reference, sampler)
    take_away(server)
    assert_samples_of(reference, sampler)
    assert len(server.samplers) == 4, "each was started again once"
    take_away(server)
    said = "No sampler is left, each having used up rollout.max_restarts=1; training continues, sampling needs the server"
    with pytest.raises(tinker.RequestFailedError, match=said) as failure:
        sampler.sample(types.ModelInput.from_ints(PROMPT), 1, types.SamplingParams(max_tokens=2)).result()
    assert failure.value.category is types.RequestErrorCategory.Server
    ready = Wire(server, key="").http.get("/readyz")
    assert ready.status_code == 503 and said in ready.json()["status"]
    model.forward_backward(supervised_data(2), "cross_entropy").result()
    assert model.optim_step(ADAM).result().metrics
    client.close("success").result()
    server.stop()

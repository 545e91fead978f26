"""Clients at once: what each gets is bit-identical to what it would get alone."""

from concurrent.futures import ThreadPoolExecutor

import torch
from tinker import types

from tests.support.local_server import ALICE, BOB
from tests.support.server_data import ADAM, parameters, policy_data, supervised_data

CLIENTS, STEPS = 8, 2


def work(server, number):
    """Policies and critics, of two users, with other batches, losses and ranks each; nobody waits between calls."""
    client = server.client(ALICE if number % 2 else BOB)
    model = client.create_lora_training_client("tiny", rank=2 + number, seed=number).result()
    loss = ("cross_entropy", "ppo", "value_loss", "dro")[number % 4]
    futures = []
    for step in range(STEPS):
        data = supervised_data(number + step) if loss == "cross_entropy" else policy_data(number + step)
        if loss == "value_loss":
            data = [types.Datum(d.model_input, {"returns": d.loss_fn_inputs["advantages"]}) for d in data]
        futures.append(model.forward_backward(data, loss))
        futures.append(model.forward(data, loss))
        model.optim_step(ADAM)
    outputs = [output for future in futures for output in future.result().loss_fn_outputs]
    metrics = [future.result().metrics for future in futures]
    model.forward(data, loss).result()
    found = parameters(server, model), [{k: v.to_numpy() for k, v in output.items()} for output in outputs], metrics
    client.close("success").result()
    return found


def test_clients_interleave_exactly(server):
    alone = [work(server, number) for number in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as threads:
        together = list(threads.map(lambda number: work(server, number), range(CLIENTS)))
    for (ours, our_outputs, our_metrics), (theirs, their_outputs, their_metrics) in zip(together, alone, strict=True):
        assert ours.keys() == theirs.keys() and our_metrics == their_metrics
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        for one, other in zip(our_outputs, their_outputs, strict=True):
            assert all((one[key] == other[key]).all() for key in one)

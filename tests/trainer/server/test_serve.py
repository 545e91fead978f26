"""``rlframe serve`` as a user starts it: Ray, two FSDP ranks, vLLM with adapters of several policies, SIGTERM."""

import os
import signal
import subprocess
import sys

import pytest
import tinker
import torch
from tinker import types

from tests.support.server_data import ADAM, supervised_data
from tests.support.server_reference import Reference
from trainer.server import paths
from trainer.server.store import Store

PROMPT = [5, 9, 3, 12, 7]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(folder, url, key, process) of a running server."""
    folder = tmp_path_factory.mktemp("serve")
    command = [sys.executable, "-m", "trainer.cli.main", "serve", f"run_dir={folder}", "server.port=0", "actor.ranks=2"]
    command += ["rollout=vllm", "server.max_rank=8", "server.max_loras=2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "RAY_ADDRESS": ""})
    url = None
    for line in process.stdout:
        if line.startswith("serving "):
            url = line.split()[-1]
        if line.startswith("the API key"):
            break
    yield folder, url, (folder / "api_key").read_text().strip(), process
    if process.poll() is None:
        process.kill()
    process.wait()


def logprobs(model, tokens):
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=torch.tensor([tokens])).logits[0], -1)


@pytest.mark.slow
def test_policies_train_over_ranks_and_vllm_serves_each(served):
    folder, url, key, process = served
    assert url, "the server did not start; its output is above"
    client = tinker.ServiceClient(base_url=url, api_key=key)
    store, policies = Store(folder / "state"), []
    base = tinker.RestClient(base_url=url, api_key=key).get_server_capabilities().result().supported_models[0].model_name
    for seed in range(3):
        model = client.create_lora_training_client(base, rank=2 + seed, seed=seed).result()
        tiny = model.get_info().model_data.tokenizer_id
        start = model.save_weights_for_sampler("start").result().path
        reference = Reference(tiny, store.folder(paths.parse(start)))
        for step in range(2):
            data = supervised_data(seed + step)
            result = model.forward_backward(data, "cross_entropy").result()
            loss, size, expected = reference.forward_backward(data, "cross_entropy")
            assert result.metrics["loss:sum"] == pytest.approx(loss, abs=2e-5 * size)
            for output, theirs in zip(result.loss_fn_outputs, expected, strict=True):
                torch.testing.assert_close(output["logprobs"].to_torch(), theirs, rtol=5e-5, atol=5e-5)
            params = ADAM.model_copy(update={"learning_rate": 0.1})
            model.optim_step(params).result()
            reference.step(params)
        served_now = store.folder(paths.parse(model.save_weights_for_sampler("end").result().path))
        policies.append((model.save_weights_and_get_sampling_client().result(), Reference(tiny, served_now).model))
    params = types.SamplingParams(max_tokens=6, temperature=1.0, stop=[])
    prompt = types.ModelInput.from_ints(PROMPT)
    futures = [(model, sampler.sample(prompt, 2, params, True, 3)) for _ in range(2) for sampler, model in policies]
    for model, future in futures:
        answer = future.result()
        for sequence in answer.sequences:
            rows = logprobs(model, PROMPT + sequence.tokens)
            theirs = rows[4:-1].gather(1, torch.tensor(sequence.tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(sequence.logprobs), theirs, rtol=1e-4, atol=1e-4)
        theirs = rows[:4].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.prompt_logprobs[1:]), theirs, rtol=1e-4, atol=1e-4)
        assert [token for token, _ in answer.topk_prompt_logprobs[4]] == rows[3].topk(3).indices.tolist()
    critic = client.create_lora_training_client(base, rank=2, seed=9).result()
    values = critic.forward(supervised_data(1), "value_prediction").result().loss_fn_outputs
    assert all((output["state_values"].to_torch() == 0).all() for output in values)
    process.send_signal(signal.SIGTERM)
    assert process.wait(600) == 0
    assert store.asleep(critic.model_id).joinpath("replicated.safetensors").exists()

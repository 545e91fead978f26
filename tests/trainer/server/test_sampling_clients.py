"""Samples and log-probabilities come from the weights that the client named, and are those of transformers and peft."""

import time

import numpy as np
import pytest
import tinker
import torch
from tinker import RequestFailedError, types
from transformers import AutoModelForCausalLM

from tests.support.server_data import ADAM, VOCAB, exported, supervised_data
from tests.support.server_reference import Reference

PROMPT = [5, 9, 3, 12, 7]


def prompt(tokens=PROMPT):
    return types.ModelInput.from_ints(list(tokens))


@pytest.fixture(scope="module")
def policies(server):
    """Three trained policies: a sampling client and a reference each."""
    client = server.client()
    made = []
    for seed in range(3):
        model = client.create_lora_training_client("tiny", rank=2 + seed, seed=seed).result()
        model.forward_backward(supervised_data(seed), "cross_entropy").result()
        model.optim_step(ADAM.model_copy(update={"learning_rate": 0.3})).result()
        sampler = model.save_weights_and_get_sampling_client().result()
        made.append((sampler, Reference(server.base.path, exported(server, model, "now")).model))
    yield made
    client.close("success").result()


@pytest.fixture(scope="module")
def base(server):
    return AutoModelForCausalLM.from_pretrained(server.base.path, dtype=torch.float32)


def logprobs_of(model, tokens, temperature=1.0):
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=torch.tensor([list(tokens)])).logits[0] / temperature, -1)


def test_every_client_samples_from_its_own_weights(client, policies, base):
    plain = client.create_sampling_client(base_model="tiny").result()
    served = [*policies, (plain, base)]
    params = types.SamplingParams(max_tokens=6, temperature=0.7, stop=[])
    futures = [sampler.sample(prompt(), 3, params) for _ in range(2) for sampler, _ in served]
    for future, (_, model) in zip(futures, 2 * served, strict=True):
        for sequence in future.result().sequences:
            assert len(sequence.tokens) == 6 and sequence.stop_reason == "length"
            rows = logprobs_of(model, PROMPT + sequence.tokens, 0.7)[len(PROMPT) - 1 : -1]
            expected = rows.gather(1, torch.tensor(sequence.tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(sequence.logprobs), expected, rtol=2e-5, atol=2e-5)


def test_prompts_are_scored(policies):
    sampler, model = policies[1]
    targets = torch.full((4, 2), -1, dtype=torch.int64)
    targets[1, 0], targets[3, 1] = 8, 2
    answer = sampler.sample(
        prompt(),
        1,
        types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=4,
        target_prompt_logprobs=types.TensorData.from_torch_sparse(targets, pad_value=-1),
        prompt_alt_tokens_k=5,
    ).result()
    rows = logprobs_of(model, PROMPT + answer.sequences[0].tokens)
    expected = rows[:4].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    assert answer.prompt_logprobs[0] is None
    torch.testing.assert_close(torch.tensor(answer.prompt_logprobs[1:]), expected, rtol=2e-5, atol=2e-5)
    best = rows[:4].topk(3)
    for position in range(1, 5):
        ids, values = zip(*answer.topk_prompt_logprobs[position], strict=True)
        assert list(ids) == best.indices[position - 1].tolist()
        np.testing.assert_allclose(values, best.values[position - 1], rtol=2e-5, atol=2e-5)
    ids, values = zip(*answer.sequences[0].topk_logprobs[0], strict=True)
    assert list(ids) == rows[4].topk(4).indices.tolist()
    np.testing.assert_allclose(values, rows[4].topk(4).values, rtol=2e-5, atol=2e-5)
    scored = answer.target_prompt_logprobs.to_torch()
    wanted = torch.where(targets < 0, 0.0, rows[:4].gather(1, targets.clamp(min=0)))
    torch.testing.assert_close(scored, wanted, rtol=2e-5, atol=2e-5)
    drawn, theirs = answer.prompt_alt_tokens.tokens.to_torch(), answer.prompt_alt_tokens.logprobs.to_torch()
    assert drawn.shape == (4, 5)
    torch.testing.assert_close(theirs, rows[:4].gather(1, drawn), rtol=2e-5, atol=2e-5)
    partly = sampler.compute_logprobs(prompt(), prompt_logprobs_last_n=2).result()
    assert partly[:3] == [None] * 3 and partly[3:] == answer.prompt_logprobs[3:]


def test_a_seed_repeats_samples_that_differ_among_each_other(policies):
    sampler, _ = policies[0]

    def drawn(seed, temperature=5.0):
        params = types.SamplingParams(max_tokens=12, seed=seed, temperature=temperature, stop=[])
        return [s.tokens for s in sampler.sample(prompt(), 4, params).result().sequences]

    first = drawn(11)
    assert drawn(11) == first and drawn(12) != first
    assert len({tuple(tokens) for tokens in first}) == 4
    assert len({tuple(tokens) for tokens in drawn(11, temperature=0)}) == 1


def test_a_sample_ends_where_the_client_says(server, policies):
    sampler, model = policies[2]
    greedy = sampler.sample(prompt(), 1, types.SamplingParams(max_tokens=20, temperature=0, stop=[])).result().sequences[0]
    expected = []
    for _ in range(20):
        expected.append(int(logprobs_of(model, PROMPT + expected)[-1].argmax()))
    assert greedy.tokens == expected and greedy.stop_reason == "length"
    stop = expected[3]
    end = expected.index(stop) + 1

    def ends(stop):
        params = types.SamplingParams(max_tokens=20, temperature=0, stop=stop)
        return sampler.sample(prompt(), 1, params).result().sequences[0]

    by_token = ends([stop])
    assert by_token.tokens == expected[:end] and by_token.stop_reason == "stop" and len(by_token.logprobs) == end
    text = server.base.tokenizer.decode(expected[:5])
    by_text = ends([text[-2:]])
    assert by_text.stop_reason == "stop"
    decoded = server.base.tokenizer.decode(by_text.tokens)
    assert decoded.endswith(text[-2:]) and text[-2:] not in decoded[:-1]


def test_the_end_of_text_ends_a_sample_unless_told_otherwise(server, client):
    plain = client.create_sampling_client(base_model="tiny").result()
    tokens = server.base.tokenizer("1+5=").input_ids
    answer = plain.sample(prompt(tokens), 1, types.SamplingParams(max_tokens=8, temperature=0)).result().sequences[0]
    assert answer.stop_reason == "stop" and answer.tokens[-1] in server.base.eos and len(answer.tokens) < 8
    on = plain.sample(prompt(tokens), 1, types.SamplingParams(max_tokens=8, temperature=0, stop=[])).result().sequences[0]
    assert len(on.tokens) == 8 and on.tokens[: len(answer.tokens)] == answer.tokens


def test_later_training_does_not_reach_an_older_sampler(client):
    model = client.create_lora_training_client("tiny", rank=2, seed=9).result()
    before = model.save_weights_and_get_sampling_client().result()
    old = before.compute_logprobs(prompt()).result()
    model.forward_backward(supervised_data(1), "cross_entropy").result()
    model.optim_step(types.AdamParams(learning_rate=0.1)).result()
    after = model.save_weights_and_get_sampling_client().result()
    assert before.compute_logprobs(prompt()).result() == old
    assert np.abs(np.array(after.compute_logprobs(prompt()).result()[1:]) - np.array(old[1:])).max() > 1e-3


def test_a_sampler_knows_where_it_comes_from(server, client):
    model = client.create_lora_training_client("tiny", rank=2, seed=9).result()
    path = model.save_weights_for_sampler("named").result().path
    sampler = client.create_sampling_client(model_path=path).result()
    found = server.rest().get_sampler(sampler._sampling_session_id).result()
    assert (found.base_model, found.model_path) == ("tiny", path) and sampler.get_base_model() == "tiny"
    assert sampler.compute_logprobs(prompt()).result()[0] is None
    server.rest().delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises((tinker.NotFoundError, RequestFailedError)):
        sampler.compute_logprobs(prompt()).result()


def test_samples_on_their_way_finish_before_their_weights_go(server, client):
    model = client.create_lora_training_client("tiny", rank=2, seed=9).result()
    path = model.save_weights_for_sampler("going").result().path
    sampler = client.create_sampling_client(model_path=path).result()
    params = types.SamplingParams(max_tokens=40, stop=[])
    futures = [sampler.sample(prompt(), 2, params) for _ in range(4)]
    while not all(server.service.futures.known(f"{sampler._sampling_session_id}:{i}") for i in range(4)):
        time.sleep(0.01)
    server.rest().delete_checkpoint_from_tinker_path(path).result()
    assert all(len(sequence.tokens) == 40 for future in futures for sequence in future.result().sequences)


@pytest.mark.parametrize(
    ("what", "params"),
    [
        ("temperature", {"temperature": -1}),
        ("top_p", {"top_p": 0}),
        ("max_tokens", {"max_tokens": 0}),
        ("stop", {"stop": [VOCAB]}),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(policies, what, params):
    with pytest.raises(RequestFailedError, match=what):
        policies[0][0].sample(prompt(), 1, types.SamplingParams(**params)).result()

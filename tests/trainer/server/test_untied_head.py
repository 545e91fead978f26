"""A model with an LM head of its own: ``train_unembed``, the SDK's default, trains it, and a value loss leaves it alone."""

import pytest
import torch
from tinker import types
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlframe.config import ModelConfig
from rlframe.models import resolve_model
from tests.support.local_server import LocalServer
from tests.support.server_data import ADAM, exported, factors, parameters, policy_data, supervised_data
from tests.support.server_reference import Reference


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untied")
    tiny = resolve_model(ModelConfig(name="tiny", builder="tiny"))
    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    server = LocalServer(tmp_path_factory.mktemp("server"), f"model.path={folder}", "rollout.max_model_len=512")
    yield server
    server.stop()


def test_the_head_trains_and_is_sampled_from(untied):
    client = untied.client()
    model = client.create_lora_training_client("local", rank=4, seed=1).result()
    reference = Reference(untied.base.path, exported(untied, model, "start"))
    for step in range(2):
        model.forward_backward(supervised_data(step), "cross_entropy").result()
        reference.forward_backward(supervised_data(step), "cross_entropy")
        model.optim_step(ADAM).result()
        reference.step(ADAM)
    ours, theirs = factors(untied, model, "end"), reference.factors()
    assert ours.keys() == theirs.keys() and any("lm_head" in name for name in ours)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=2e-5, atol=2e-5)
    tokens = [5, 9, 3, 12, 7]
    scored = model.save_weights_and_get_sampling_client().result().compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    with torch.no_grad():
        rows = torch.log_softmax(reference.model(input_ids=torch.tensor([tokens])).logits[0, :-1], -1)
    expected = rows.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(scored[1:]), expected, rtol=2e-5, atol=2e-5)
    info = untied.rest().get_weights_info_by_tinker_path(model.save_state("s").result().path).result()
    assert info.train_unembed
    client.close("success").result()


def test_a_value_loss_leaves_the_heads_adapter_alone_and_its_state_loads(untied):
    client = untied.client()
    critic = client.create_lora_training_client("local", rank=4, seed=1).result()
    before = parameters(untied, critic)
    data = [types.Datum(d.model_input, {"returns": d.loss_fn_inputs["advantages"]}) for d in policy_data(1)]
    for _ in range(2):
        critic.forward_backward(data, "value_loss").result()
        critic.optim_step(ADAM).result()
    after = parameters(untied, critic)
    assert {name for name in before if torch.equal(before[name], after[name])} == {n for n in before if "lm_head" in n} != set()
    resumed = client.create_training_client_from_state(critic.save_state("s").result().path).result()
    restored = parameters(untied, resumed)
    assert all(torch.equal(restored[name], after[name]) for name in after)
    client.close("success").result()


def test_without_train_unembed_the_head_has_no_adapter(untied):
    client = untied.client()
    model = client.create_lora_training_client("local", rank=4, seed=1, train_unembed=False).result()
    assert not any("lm_head" in name for name in parameters(untied, model))
    only = client.create_lora_training_client("local", rank=4, train_attn=False, train_mlp=False).result()
    assert all("lm_head" in name for name in parameters(untied, only))
    client.close("success").result()

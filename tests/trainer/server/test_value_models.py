"""A critic is one more training client: values, value loss and what is saved, against a plain peft model with a linear head."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tinker import RequestFailedError

from tests.support.server_data import ADAM, VOCAB, datum, exported, parameters, policy_data
from tests.support.server_reference import Reference
from trainer.server import paths


def new_critic(client, **options):
    return client.create_lora_training_client("tiny", **{"rank": 4, "seed": 1, **options}).result()


def value_data(seed, count=5, longest=12, **fixed):
    """Weights are an action mask; some returns are 0."""
    rng = np.random.default_rng(seed)
    data = []
    for _ in range(count):
        length = int(rng.integers(2, longest))
        inputs = {
            "returns": rng.integers(-1, 2, length).astype(np.float32),
            "weights": (rng.random(length) < 0.7).astype(np.float32),
            **{name: np.full(length, value, np.float32) for name, value in fixed.items()},
        }
        data.append(datum(rng.integers(0, VOCAB, length), **inputs))
    return data


def predict(critic, data):
    outputs = critic.forward(data, "value_prediction").result().loss_fn_outputs
    return [output["state_values"].to_torch() for output in outputs]


class ValueReference(Reference):
    """V = alpha / rank B A h on the adapted model's last hidden state."""

    def __init__(self, server, critic, name):
        super().__init__(server.base.path, exported(server, critic, name))
        head = {k: p.detach().clone() for k, p in server.session(critic).named_parameters() if k.startswith("value_head.")}
        self.a, self.b = (torch.nn.Parameter(head[f"value_head.lora_{part}"]) for part in "AB")
        self.scale = server.config.server.lora_alpha / critic.get_info().lora_rank
        self.trained = [*(p for p in self.model.parameters() if p.requires_grad), self.a, self.b]
        self.adam = torch.optim.AdamW(self.trained, foreach=False)

    def values(self, datum):
        tokens = torch.tensor([datum.model_input.to_ints()])
        hidden = self.model.base_model.model.model(input_ids=tokens).last_hidden_state[0]
        return (hidden @ self.a.T @ self.b.T)[:, 0] * self.scale

    def value_step(self, data, vf_coef=1.0, clip_range=None):
        total = 0.0
        for d in data:
            inputs = {key: value.to_torch() for key, value in d.loss_fn_inputs.items()}
            values = self.values(d)
            errors = (values - inputs["returns"]).square()
            if clip_range is not None:
                old = inputs["old_values"]
                bounded = old + (values - old).clamp(-clip_range, clip_range)
                errors = torch.maximum(errors, (bounded - inputs["returns"]).square())
            loss = 0.5 * vf_coef * (inputs["weights"] * errors).sum()
            loss.backward()
            total += float(loss.detach())
        for group in self.adam.param_groups:
            group.update(lr=ADAM.learning_rate, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps, weight_decay=ADAM.weight_decay)
        self.adam.step()
        self.adam.zero_grad()
        return total


def test_a_fresh_critic_says_exactly_zero_everywhere(client):
    critic = new_critic(client)
    data = policy_data(1)
    for d, values in zip(data, predict(critic, data), strict=True):
        assert values.shape == (d.model_input.length,) and (values == 0).all()


@pytest.mark.parametrize(("vf_coef", "clip_range"), [(1.0, None), (0.5, 0.05)])
def test_value_steps_equal_a_plain_loop(server, client, vf_coef, clip_range):
    critic = new_critic(client)
    predict(critic, value_data(0))  # gives it its head
    reference = ValueReference(server, critic, "start")
    config = {"vf_coef": vf_coef, **({} if clip_range is None else {"clip_range": clip_range})}
    for step in range(3):
        data = value_data(step, **({} if clip_range is None else {"old_values": 0.1}))
        result = critic.forward_backward(data, "value_loss", config).result()
        expected = [reference.values(d).detach() for d in data]
        for output, values in zip(result.loss_fn_outputs, expected, strict=True):
            torch.testing.assert_close(output["state_values"].to_torch(), values, rtol=2e-5, atol=2e-5)
        assert result.metrics["loss:sum"] == pytest.approx(reference.value_step(data, vf_coef, clip_range), rel=2e-5)
        critic.optim_step(ADAM).result()
    for values, d in zip(predict(critic, data), data, strict=True):
        torch.testing.assert_close(values, reference.values(d).detach(), rtol=1e-4, atol=1e-4)
    ours = parameters(server, critic)
    torch.testing.assert_close(ours["value_head.lora_B"], reference.b.detach(), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(ours["value_head.lora_A"], reference.a.detach(), rtol=2e-5, atol=2e-5)
    assert ours["value_head.lora_B"].abs().max() > 0


def test_moments_travel_as_sums(client):
    critic = new_critic(client)
    data = value_data(3)
    critic.forward_backward(data, "value_loss").result()
    critic.optim_step(ADAM).result()
    values = torch.cat(predict(critic, data)).double().numpy()
    mask = np.concatenate([d.loss_fn_inputs["weights"].to_numpy() for d in data]) != 0
    returns = np.concatenate([d.loss_fn_inputs["returns"].to_numpy() for d in data]).astype(np.float64)
    parts = [critic.forward(part, "value_loss").result().metrics for part in (data[:2], data[2:])]
    sums = {key: sum(part[key] for part in parts) for key in parts[0]}
    n = sums["value_count:sum"]
    assert n == mask.sum()
    variance = sums["return_sq:sum"] / n - (sums["return_sum:sum"] / n) ** 2
    left = sums["residual_sq:sum"] / n - (sums["residual_sum:sum"] / n) ** 2
    expected = 1 - np.var((returns - values)[mask]) / np.var(returns[mask])
    assert 1 - left / variance == pytest.approx(expected, abs=1e-5)


def test_weights_mask_and_returns_of_zero_do_not(client):
    critic = new_critic(client)
    critic.forward_backward(value_data(1), "value_loss").result()
    critic.optim_step(ADAM).result()
    tokens = [3, 4, 5]
    values = predict(critic, [datum(tokens)])[0].numpy()
    everything = critic.forward([datum(tokens, returns=np.zeros(3, np.float32))], "value_loss").result()
    assert everything.metrics["loss:sum"] == pytest.approx(0.5 * float((values**2).sum()), rel=1e-5)
    masked = datum(tokens, returns=np.array([np.nan, 0, np.nan], np.float32), weights=np.array([0, 1, 0], np.float32))
    one = critic.forward([masked], "value_loss").result()
    assert one.metrics["loss:sum"] == pytest.approx(0.5 * float(values[1] ** 2), rel=1e-5)


def test_frozen_modules_move_by_exactly_zero(server, client):
    critic = new_critic(client, user_metadata={"frozen_module_patterns": "self_attn, value_head.lora_A"})
    predict(critic, value_data(0))
    before = parameters(server, critic)
    for step in range(3):
        critic.forward_backward(value_data(step), "value_loss").result()
        critic.optim_step(ADAM).result()
    for name, parameter in parameters(server, critic).items():
        frozen = "self_attn" in name or name == "value_head.lora_A"
        assert torch.equal(parameter, before[name]) == frozen, name


def test_the_official_way_to_freeze_attention_leaves_no_factors_there(server, client):
    critic = new_critic(client, train_attn=False)
    critic.forward_backward(value_data(1), "value_loss").result()
    assert not any("self_attn" in name for name in parameters(server, critic))


def test_states_hold_the_head_and_adapters_never_do(server, client):
    critic = new_critic(client)
    for step in range(2):
        critic.forward_backward(value_data(step), "value_loss").result()
        critic.optim_step(ADAM).result()
    adapter = load_file(exported(server, critic, "adapter") / "adapter_model.safetensors")
    assert adapter and not any("value" in name for name in adapter)
    path = critic.save_state("state").result().path
    state = load_file(server.service.store.folder(paths.parse(path)) / "replicated.safetensors")
    assert {"weight/value_head.lora_A", "exp_avg/value_head.lora_B"} <= state.keys()
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    for one, other in zip(predict(critic, value_data(5)), predict(resumed, value_data(5)), strict=True):
        assert torch.equal(one, other) and one.abs().max() > 0
    for each in (critic, resumed):
        each.forward_backward(value_data(6), "value_loss").result()
        each.optim_step(ADAM).result()
    ours, theirs = parameters(server, critic), parameters(server, resumed)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_policy_and_critic_share_one_base_and_do_not_meet(server, client):
    alone = new_critic(client)
    for step in range(2):
        alone.forward_backward(value_data(step), "value_loss").result()
        alone.optim_step(ADAM).result()
    policy, critic = new_critic(client, seed=5), new_critic(client)
    for step in range(2):
        policy.forward_backward(policy_data(step), "ppo").result()
        critic.forward_backward(value_data(step), "value_loss").result()
        policy.optim_step(ADAM).result()
        critic.optim_step(ADAM).result()
    ours, theirs = parameters(server, critic), parameters(server, alone)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert server.session(policy).backbone is server.session(critic).backbone
    assert server.session(policy).value_head is None


def test_a_prediction_has_no_gradient(client):
    with pytest.raises(RequestFailedError, match=r"call forward\(\)"):
        new_critic(client).forward_backward(policy_data(1), "value_prediction").result()


def test_clipping_needs_old_values(client):
    with pytest.raises(RequestFailedError, match="old_values"):
        new_critic(client).forward_backward(value_data(1), "value_loss", {"clip_range": 0.2}).result()

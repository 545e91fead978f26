"""What a user would write without a server: transformers, peft, torch.optim and the losses as they are defined."""

import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.utils import set_peft_model_state_dict
from safetensors.torch import load_file
from tinker import types
from transformers import AutoModelForCausalLM

LOSSES = {
    "cross_entropy": lambda lp, d, c: -(d["weights"] * lp),
    "importance_sampling": lambda lp, d, c: -(torch.exp(lp - d["logprobs"]) * d["advantages"]),
    "ppo": lambda lp, d, c: (
        -torch.minimum(
            torch.exp(lp - d["logprobs"]) * d["advantages"],
            torch.exp(lp - d["logprobs"]).clamp(c.get("clip_low_threshold", 0.8), c.get("clip_high_threshold", 1.2))
            * d["advantages"],
        )
    ),
    "cispo": lambda lp, d, c: (
        -(
            torch.exp(lp - d["logprobs"]).clamp(c.get("clip_low_threshold", 0.0), c.get("clip_high_threshold", 4.0)).detach()
            * lp
            * d["advantages"]
        )
    ),
    "dis": lambda lp, d, c: -(_band(torch.exp(lp - d["logprobs"]).detach(), c) * lp * d["advantages"]),
    "dro": lambda lp, d, c: -(lp * d["advantages"] - 0.5 * c.get("beta", 0.05) * (lp - d["logprobs"]) ** 2),
}


def _band(r, c):
    inside = (r > c.get("clip_low_threshold", 0.7)) & (r < c.get("clip_high_threshold", 6.0))
    return torch.where(inside, r, torch.zeros_like(r))


class Reference:
    """A peft model and its optimiser, begun from an exported adapter."""

    def __init__(self, base: str, adapter: Path):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
        config = LoraConfig(**json.loads((adapter / "adapter_config.json").read_text()))
        config.inference_mode = False
        self.model = get_peft_model(model, config).eval()
        missing = set_peft_model_state_dict(self.model, load_file(adapter / "adapter_model.safetensors"))
        assert not missing.unexpected_keys
        self.optimizer = None

    def logprobs(self, datum: types.Datum) -> torch.Tensor:
        tokens = torch.tensor([datum.model_input.to_ints()])
        targets = datum.loss_fn_inputs["target_tokens"].to_torch()
        logits = self.model(input_ids=tokens).logits[0]
        return torch.log_softmax(logits, -1).gather(1, targets.reshape(len(targets), -1)).reshape(targets.shape)

    def forward_backward(self, data, name, config=None):
        """Accumulate the gradient; the summed loss, the sum of its terms' sizes, and the log-probabilities of every datum."""
        total, size, logprobs = 0.0, 0.0, []
        for datum in data:
            inputs = {key: value.to_torch() for key, value in datum.loss_fn_inputs.items()}
            lp = self.logprobs(datum)
            terms = LOSSES[name](lp, inputs, config or {})
            terms.sum().backward()
            total, size = total + float(terms.detach().sum()), size + float(terms.detach().abs().sum())
            logprobs.append(lp.detach())
        return total, size, logprobs

    def step(self, params: types.AdamParams):
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if params.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(trained, params.grad_clip_norm)
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(trained, foreach=False)
        for group in self.optimizer.param_groups:
            group.update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
        self.optimizer.step()
        self.optimizer.zero_grad()

    def factors(self) -> dict[str, torch.Tensor]:
        return {
            name: tensor.clone() for name, tensor in get_peft_model_state_dict(self.model, save_embedding_layers=False).items()
        }

"""Tiny models, batches, losses and dense float64 references for the tests of sessions.

The references use plain transformers modules one trajectory at a time, with the adapter folded into the weights by formulas
written here; nothing of `rlframe.sessions`, FSDP or PEFT takes part in them.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from rlframe.backbone import Backbone
from rlframe.config import LoraConfig, OptimConfig
from rlframe.losses.base import LossInputs, LossOutputs
from rlframe.metrics import Metrics
from rlframe.sessions import Session, SessionSpec
from rlframe.types import Batch, Trajectory

VOCAB = 61
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CPU = torch.device("cpu")


def write_models(root: Path) -> dict[str, str]:
    """A dense model with tied embeddings, one without, and a mixture of experts."""
    configs = {
        "tied": Qwen3Config(**SHAPE, tie_word_embeddings=True),
        "untied": Qwen3Config(**SHAPE, tie_word_embeddings=False),
        "moe": Qwen3MoeConfig(**SHAPE, **MOE, tie_word_embeddings=False),
    }
    for i, (name, config) in enumerate(configs.items()):
        torch.manual_seed(i)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.1)
        model.save_pretrained(root / name)
    return {name: str(root / name) for name in configs}


def trajectory(rng: np.random.Generator, length: int) -> Trajectory:
    mask = rng.random(length) < 0.7
    mask[0] = False
    return Trajectory(
        tokens=rng.integers(0, VOCAB, length),
        action_mask=mask,
        logprobs=-np.ones(length),
        head_ids=np.zeros((length, 0)),
        head_logprobs=np.zeros((length, 0)),
        versions=np.zeros(length),
        rewards=np.zeros(length),
        finish="stop",
    )


def make_batch(lengths: list[int] = (9, 5, 14, 2, 7, 11), seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    batch = Batch.from_trajectories([trajectory(rng, n) for n in lengths])
    batch.advantages = rng.normal(size=batch.num_tokens).astype(np.float32)
    batch.returns = rng.normal(size=batch.num_tokens).astype(np.float32)
    return batch


def _shifted(rows: Tensor, starts: np.ndarray) -> Tensor:
    """Row t of the result is row t - 1: what produced token t. First rows are meaningless (never actions)."""
    return torch.cat([rows[:1], rows[:-1]])


class Policy:
    """-sum A log p over action tokens."""

    needs = "lm_head"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        batch = inputs.batch
        mask = torch.from_numpy(batch.action_mask)
        logits = (inputs.hidden @ inputs.lm_head.weight.T).float()
        tokens = torch.from_numpy(batch.tokens.astype("int64"))
        logprobs = _shifted(logits, batch.offsets).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        logprobs = torch.where(mask, logprobs, 0)
        metrics = Metrics()
        metrics.mean("logprob", float(logprobs.detach().sum()), batch.num_actions)
        loss = -(logprobs * torch.from_numpy(batch.advantages)).sum()
        return LossOutputs(loss=loss, metrics=metrics, per_token={"logprobs": logprobs.detach()})


class Value:
    """0.5 sum (V - R)^2 over action tokens."""

    needs = "value_head"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        batch = inputs.batch
        mask = torch.from_numpy(batch.action_mask)
        values = torch.where(mask, _shifted(inputs.value_head(inputs.hidden), batch.offsets), 0)
        loss = 0.5 * (torch.where(mask, values - torch.from_numpy(batch.returns), 0) ** 2).sum()
        return LossOutputs(loss=loss, per_token={"values": values.detach()}, per_trajectory={"ends": torch.ones(len(batch))})


class FailsOn(Policy):
    """Fails when the micro-batch holds a trajectory of this length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        if self.length in inputs.batch.lengths:
            raise KeyError("planted failure")
        return super().__call__(inputs)


def spec(value_head: bool = False, seed: int = 0, kind: str = "lora", lora: dict | None = None, **changes) -> SessionSpec:
    optim = OptimConfig(**{"lr": 1e-2, "weight_decay": 0.1, "warmup_steps": 3, **changes.pop("optim", {})})
    return SessionSpec(
        kind=kind,
        lora=LoraConfig(**{"rank": 4, "alpha": 8.0, **(lora or {})}),
        value_head=value_head,
        seed=seed,
        optim=optim,
        **changes,
    )


def load(path: str, mesh: DeviceMesh | None, **options) -> Backbone:
    return Backbone.load(path, mesh=mesh, device=CPU, **options)


def shard(batch: Batch, backbone: Backbone) -> Batch:
    return batch.shard(backbone.ranks.rank, backbone.ranks.size)


def randomise(session: Session, seed: int = 3) -> None:
    """Random values for every whole parameter of an adapter session, the same on every rank."""
    for t in session.trainables:
        generator = torch.Generator().manual_seed(seed + len(t.name) + int.from_bytes(t.name.encode()[-8:], "little") % 997)
        t.master.copy_(torch.empty(t.master.shape).normal_(0, 0.3, generator=generator))
        t.publish()


def whole(session: Session, tensor: Tensor, parameter: Tensor) -> Tensor:
    """A rank's part of a parameter-shaped tensor put together over the ranks."""
    if not isinstance(parameter, DTensor):
        return tensor.clone()
    return DTensor.from_local(
        tensor, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    ).full_tensor()


def gradients(session: Session) -> dict[str, Tensor]:
    """The accumulated gradient summed over the ranks, whole."""
    found = {}
    for t in session.trainables:
        gradient = torch.zeros_like(t.master) if t.gradient is None else t.gradient.clone()
        if t.sharded:
            gradient = whole(session, gradient, t.parameter)
        elif session.backbone.ranks.size > 1:
            dist.all_reduce(gradient, group=session.backbone.ranks.group)
        found[t.name] = gradient
    return found


def state(session: Session) -> dict[str, Tensor]:
    """Everything that must continue bit-equal: masters and moments, whole."""
    found = {"steps": torch.tensor(session.steps)}
    for t in session.trainables:
        found[t.name] = whole(session, t.master, t.parameter)
        if t.step is not None:
            exp_avg, exp_avg_sq, step = t.moments()
            found[f"{t.name}:m"] = whole(session, exp_avg, t.parameter)
            found[f"{t.name}:v"] = whole(session, exp_avg_sq, t.parameter)
            found[f"{t.name}:step"] = step.clone()
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def base(backbone: Backbone) -> dict[str, Tensor]:
    return {name: backbone.whole(parameter).clone() for name, parameter in backbone.parameters()}


# ---------------------------------------------------------------------------------------------------- dense references


def fold(weights: dict[str, Tensor], factors: dict[str, Tensor], scaling: float) -> dict[str, Tensor]:
    """Base weights plus scaling * B A; for stacked experts PEFT keeps A as [E * r, in] and B as [out, r * E]."""
    folded = dict(weights)
    for name, a in factors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        b = factors[name.replace(".lora_A.", ".lora_B.")]
        module = name.removesuffix(".lora_A.weight")
        bare = module.replace(".base_layer", "")
        if f"{bare}.weight" in weights:
            folded[f"{bare}.weight"] = weights[f"{bare}.weight"] + scaling * b @ a
            continue
        # PEFT nests the wrappers of one experts module: the output side tells which of the two weights this is.
        target = next(n for n in ("gate_up_proj", "down_proj") if weights[f"{bare}.{n}"].shape[1] == b.shape[0])
        weight = weights[f"{bare}.{target}"]
        experts = weight.shape[0]
        stacked = torch.einsum("ore,eri->eoi", b.reshape(b.shape[0], -1, experts), a.reshape(experts, -1, a.shape[1]))
        folded[f"{bare}.{target}"] = weight + scaling * stacked
    return folded


@functools.cache
def dense_model(path: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")


def dense_hidden(path: str, weights: dict[str, Tensor], batch: Batch) -> tuple[list[Tensor], Tensor]:
    """Last hidden state of each trajectory alone, and the LM head, in float64."""
    model = dense_model(path)
    inner = {name.removeprefix("model."): w for name, w in weights.items() if name.startswith("model.")}
    hidden = []
    for t in batch:
        ids = torch.from_numpy(t.tokens.astype("int64"))[None]
        output = functional_call(model.model, inner, kwargs={"input_ids": ids, "use_cache": False})
        hidden.append(output.last_hidden_state[0])
    return hidden, weights.get("lm_head.weight", weights["model.embed_tokens.weight"])


def dense_weights(path: str) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in dense_model(path).named_parameters()}


def dense_reference(path: str, session: Session, batch: Batch, *, value: bool) -> tuple[dict[str, Tensor], Tensor] | None:
    """Gradient of the whole batch's summed loss with respect to the session's parameters, and the per-token outputs.

    Every rank takes part, rank 0 gets the answer.
    """
    leaves = {name: session.backbone.whole(p).double().clone().requires_grad_(True) for name, p in session.named_parameters()}
    if session.backbone.ranks.rank:
        return None
    weights = dense_weights(path)
    if session.adapter is not None:
        weights = fold(weights, leaves, session.scaling())
    else:
        weights |= {name: leaf for name, leaf in leaves.items() if not name.startswith("value_head.")}
    hidden, head = dense_hidden(path, weights, batch)
    outputs = []
    for t, rows in zip(batch, hidden, strict=True):
        mask = torch.from_numpy(t.action_mask)[1:]
        if value:
            if session.adapter is not None:
                direction = session.scaling() * leaves["value_head.lora_B"] @ leaves["value_head.lora_A"]
            else:
                direction = leaves["value_head.weight"]
            row = (rows @ direction.T)[:-1, 0]
        else:
            row = (rows @ head.T).log_softmax(-1)[:-1].gather(-1, torch.from_numpy(t.tokens.astype("int64"))[1:, None])[:, 0]
        outputs.append(torch.cat([torch.zeros(1, dtype=torch.float64), torch.where(mask, row, 0)]))
    per_token = torch.cat(outputs)
    mask = torch.from_numpy(batch.action_mask)
    if value:
        loss = 0.5 * (torch.where(mask, per_token - torch.from_numpy(batch.returns), 0) ** 2).sum()
    else:
        loss = -(per_token * torch.from_numpy(batch.advantages)).sum()
    names = [t.name for t in session.trainables]
    found = torch.autograd.grad(loss, [leaves[name] for name in names], allow_unused=True)
    zeros = [torch.zeros_like(leaves[name]) if g is None else g for name, g in zip(names, found, strict=True)]
    return dict(zip(names, zeros, strict=True)), per_token.detach()


def close(mine: dict[str, Tensor], reference: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    """Every tensor agrees within ``tolerance`` of the largest gradient entry of the whole session."""
    assert mine.keys() == reference.keys()
    largest = max(float(r.abs().max()) for r in reference.values())
    for name, r in reference.items():
        error = float((mine[name].double() - r).abs().max())
        assert error <= tolerance * largest, f"{name}: {error} of {largest}"

"""An estimate of the memory that each process of a job needs, from the model's config.json alone. Loads no weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlframe.config import LoraConfig
from trainer.cluster.placement import BackbonePlan, Placement
from trainer.settings.config import Config
from workers.engines.registry import engine_spec

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PROCESS_OVERHEAD = {"learner": 1.0 * 2**30, "rollout": 1.5 * 2**30}
"""Interpreter, torch and (rollout) engine before any weight is loaded, as seen on a CPU machine."""
TRAINED = 16
"""Bytes of a trained parameter: float32 master, gradient and Adam's two moments."""


@dataclass(frozen=True)
class Shape:
    """What the estimate needs to know of a model."""

    parameters: int
    """All parameters, tied ones once."""
    largest_block: int
    """Parameters of the largest layer, which FSDP2 gathers whole."""
    layers: int
    hidden: int
    activations: int
    """Widths of a layer's activations together, elements per token."""
    kv: int
    """Elements of the KV cache per token, all layers together."""
    vocab: int
    linear: dict[str, tuple[int, int]]
    """Linear layers but the head: name -> (in, out)."""


def read_shape(model_path: str, trust_remote_code: bool = False) -> Shape:
    """The shape of the model in folder ``model_path``: its modules are built without memory, on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hf: Any = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    text = hf.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf, trust_remote_code=trust_remote_code)
    model.tie_weights()
    blocks = [block for blocks in model.modules() if isinstance(blocks, nn.ModuleList) for block in blocks]
    head = model.get_output_embeddings()
    linear = {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    layers, hidden = text.num_hidden_layers, text.hidden_size
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    return Shape(
        parameters=sum(p.numel() for p in model.parameters()),
        largest_block=max((sum(p.numel() for p in block.parameters()) for block in blocks), default=0),
        layers=layers,
        hidden=hidden,
        activations=4 * hidden + 2 * sum(out for _, out in linear.values()) // max(layers, 1),
        kv=2 * layers * kv_heads * head_dim,
        vocab=text.vocab_size,
        linear=linear,
    )


def lora_parameters(shape: Shape, lora: LoraConfig) -> int:
    """Parameters of an adapter: rank * (in + out) for every linear layer that ``targets`` names."""

    def targeted(name: str) -> bool:
        if lora.targets == "all-linear":
            return True
        if isinstance(lora.targets, str):
            return re.fullmatch(lora.targets, name) is not None
        return any(name == target or name.endswith(f".{target}") for target in lora.targets)

    return sum(lora.rank * (i + o) for name, (i, o) in shape.linear.items() if targeted(name))


def estimate(config: Config, placement: Placement, shape: Shape) -> str:
    """Memory per process, line by line, and its sum over the job.

    With P parameters of the base, b bytes of ``model.dtype``, R ranks, p trained parameters of a session:

    - frozen backbone: P b / R, plus the largest block b gathered whole while it runs (R > 1);
    - session: 16 p / R (float32 master, gradient, two moments), where p = P for all weights, rank * (in + out) over the
      targeted layers (and the value head, hidden -> 1) for an adapter; all weights in another dtype than float32 also P b / R;
    - activations: tokens of a micro-batch * layers * widths of a layer * b (with checkpointing one layer, and hidden per
      layer); the fused losses hold one chunk of logits, never all;
    - rollout: P b' / tensor_parallel_size for ``rollout.dtype``, plus the KV cache: at most ``max_concurrency`` trajectories
      of ``max_model_len`` tokens of 2 * layers * kv heads * head dim elements. An engine may reserve its cache at the start
      (`EngineSpec.reserved_cache`): vLLM on a CPU ``VLLM_CPU_KVCACHE_SPACE`` GiB, on a GPU what ``gpu_memory_utilization``
      leaves;
    - 1 GiB (learner) or 1.5 GiB (rollout) for the process itself.
    """
    lines = []
    total = 0.0
    for group, parts in (
        (placement.groups[0], dict(_learner(config, placement, shape))),
        (placement.groups[1], dict(_rollout(config, shape))),
    ):
        each = sum(parts.values())
        total += group.count * each
        lines.append(f"each {group.name}: {_size(each)}")
        lines += [f"  {_size(value):>10}  {name}" for name, value in parts.items()]
    lines.append(f"all processes together: {_size(total)}")
    return "\n".join(lines)


def _learner(config: Config, placement: Placement, shape: Shape) -> Iterator[tuple[str, float]]:
    ranks, width = config.actor.ranks, BYTES[config.model.dtype]
    for i, backbone in enumerate(placement.backbones):
        if not backbone.trainable:
            yield f"base weights of backbone {i}, frozen", shape.parameters * width / ranks
        elif width < 4:
            yield f"{config.model.dtype} copy of backbone {i}", shape.parameters * width / ranks
        for session in backbone.sessions:
            trained = _trained(config, backbone, session, shape)
            yield f"{session}: {trained:,} trained parameters, gradients and moments", trained * TRAINED / ranks
    if ranks > 1:
        yield "largest block, gathered", float(shape.largest_block * width)
    tokens = min(config.actor.micro_batch_tokens, -(-config.batch_size // ranks) * config.rollout.max_model_len)
    per_layer = shape.activations * width
    if config.actor.activation_checkpointing:
        yield f"activations of {tokens:,} tokens", float(tokens * (per_layer + shape.layers * shape.hidden * width))
    else:
        yield f"activations of {tokens:,} tokens", float(tokens * shape.layers * per_layer)
    yield "the process itself", PROCESS_OVERHEAD["learner"]


def _trained(config: Config, backbone: BackbonePlan, session: str, shape: Shape) -> int:
    lora, critic = (config.actor.lora, 0) if session == "actor" else (config.critic.lora, 1)
    if backbone.trainable:
        return shape.parameters + critic * shape.hidden
    return lora_parameters(shape, lora) + critic * lora.rank * (shape.hidden + 1)


def _rollout(config: Config, shape: Shape) -> Iterator[tuple[str, float]]:
    rollout = config.rollout
    width = BYTES[rollout.dtype]
    tokens = rollout.max_concurrency * rollout.max_model_len
    wanted = shape.kv * width * tokens / rollout.tensor_parallel_size
    yield "weights", shape.parameters * width / rollout.tensor_parallel_size
    engine = engine_spec(rollout.engine)
    if (reserved := engine.reserved_cache(rollout)) is not None:
        yield f"KV cache that {engine.title} reserves ({_size(wanted)} hold {tokens:,} tokens)", reserved
    else:
        yield f"KV cache of {tokens:,} tokens", wanted
    yield "the process itself", PROCESS_OVERHEAD["rollout"]


def _size(value: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value:.0f} B"

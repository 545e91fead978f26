"""What the engine tests share: a tiny model on disk, its dense reference, and weight updates made from it."""

from __future__ import annotations

import asyncio
import copy
import os
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlframe.checksum import weights_checksum
from tests.support.sglang_wire_server import WireServer
from trainer.settings.config import Config
from workers.engines.protocol import Completion, WeightUpdate
from workers.engines.registry import ENGINES, engine_spec, make_engine
from workers.engines.sglang.engine import SGLangEngine
from workers.rollout.settings import RolloutConfig

VOCABULARY = 64
MAX_MODEL_LEN = 512
RANK = 8
"""Of adapters."""
PATIENCE_S = 900
"""For an engine that starts on a machine which does much else."""


def engine_params():
    """The registered engines that run here, and that of ``RLFRAME_ENGINE=module:ENGINE``; those in processes of their own are
    slow. ``sglang-wire`` is the SGLang engine before a server of our own (`sglang_wire_server`)."""
    names = [*ENGINES, *filter(None, [os.environ.get("RLFRAME_ENGINE")])]
    here = [name for name in names if (package := engine_spec(name).package) is None or find_spec(package)]
    return ["sglang-wire", *(name if name == "torch" else pytest.param(name, marks=pytest.mark.slow) for name in here)]


@contextmanager
def serving(name: str, path: str, *, max_lora_rank: int = 0):
    """An engine of `engine_params`, started, and ``run`` of the loop that it lives on."""
    with asyncio.Runner() as runner:
        server = None
        if name == "sglang-wire":
            server = WireServer(path, context_length=MAX_MODEL_LEN)
            url = runner.run(server.start())
            limits = {"max_model_len": MAX_MODEL_LEN, "timeout_s": PATIENCE_S}
            engine = SGLangEngine(path, url=url, max_lora_rank=max_lora_rank, **limits)
        else:
            config = Config()
            config.rollout = RolloutConfig(engine=name, max_model_len=MAX_MODEL_LEN, timeout_s=PATIENCE_S)
            if max_lora_rank:
                config.rollout.weight_sync, config.actor.lora.rank = "adapter", max_lora_rank
            engine = make_engine(config, path, 0)
        runner.run(engine.start())
        yield engine, runner.run
        runner.run(engine.close())
        if server is not None:
            runner.run(server.stop())


def tiny_model(seed: int = 0) -> Qwen3ForCausalLM:
    """Qwen3 architecture, grouped queries, tied embeddings; weights large enough for peaked distributions."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


def save(model: Qwen3ForCausalLM, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


def perturbed(model: Qwen3ForCausalLM, seed: int, patterns: tuple[str, ...] = ("",)) -> Qwen3ForCausalLM:
    """A copy whose parameters with one of ``patterns`` in their names are moved."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in moved.named_parameters():
            if any(pattern in name for pattern in patterns):
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return moved


def update_of(model: Qwen3ForCausalLM, version: int, mode: str = "full", patterns: tuple[str, ...] = ("",)) -> WeightUpdate:
    named = [(n, p) for n, p in model.named_parameters() if any(pattern in n for pattern in patterns)]
    return make_update(version, mode, named)


def make_update(version: int, mode: str, named, adapter: dict | None = None) -> WeightUpdate:
    tensors = {name: tensor.detach().numpy() for name, tensor in named}
    for array in tensors.values():
        array.flags.writeable = False  # as arrays out of Ray's object store are
    return WeightUpdate(version=version, mode=mode, tensors=tensors, adapter=adapter)


def adapted(seed):
    """The base model with a LoRA adapter whose factors are random, alpha / rank no power of two."""
    config = LoraConfig(r=RANK, lora_alpha=12, target_modules="all-linear", bias="none")
    model = get_peft_model(tiny_model(), config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model


def adapter_update(model, version):
    factors = get_peft_model_state_dict(model)
    config = model.peft_config["default"].to_dict()
    config["target_modules"] = sorted(config["target_modules"])
    return make_update(version, "adapter", factors.items(), adapter=config)


def checksum_of(model: torch.nn.Module) -> str:
    return weights_checksum(model.parameters())


@torch.no_grad()
def dense_logprobs(model: torch.nn.Module, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """float32[T - 1, V]: row t is the distribution of token t + 1, from one dense pass without a cache."""
    logits = model(input_ids=torch.tensor(tokens[None].astype(np.int64)), use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float() / temperature, -1).numpy()


def alignment_error(model: torch.nn.Module, prompt: np.ndarray, completion: Completion, temperature: float) -> float:
    """Largest difference (nats) of sampled and head log-probabilities from `dense_logprobs`; the head must be best first."""
    tokens = np.concatenate([prompt, completion.ids])
    rows = dense_logprobs(model, tokens, temperature)[len(prompt) - 1 :]
    best = -np.sort(-rows, axis=1)[:, : completion.head_ids.shape[1]]
    errors = [
        np.abs(rows[np.arange(len(rows)), completion.ids] - completion.logprobs).max(),
        np.abs(np.take_along_axis(rows, completion.head_ids.astype(np.int64), 1) - completion.head_logprobs).max(initial=0),
        np.abs(best - completion.head_logprobs).max(initial=0),
    ]
    return float(max(errors))


def prompt_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).astype(np.int32)


async def apply(engine, update: WeightUpdate) -> str:
    await engine.pause()
    checksum = await engine.load_weights(update)
    await engine.resume()
    return checksum


async def update_in_flight(engine, update: WeightUpdate, prompt: np.ndarray, long, short) -> Completion:
    """Start ``long``, wait until ``short``, started with it, has ended, apply ``update``, and wait for ``long``."""
    running = asyncio.create_task(engine.generate(prompt, long))
    await engine.generate(prompt, short)
    await apply(engine, update)
    return await running


def part(completion, rows):
    names = ("ids", "logprobs", "head_ids", "head_logprobs", "versions")
    return type(completion)(**{name: getattr(completion, name)[rows] for name in names}, finish=completion.finish)

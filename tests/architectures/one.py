"""One architecture of transformers, built tiny and tried: how it trains, what adapters are on, whether exports are the session.

Run as a process of its own by `sweep`, which may die; prints one JSON object as its last line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlframe.backbone import Backbone
from rlframe.config import ConfigError, LoraConfig, OptimConfig
from rlframe.losses.logprobs import LogProbs
from rlframe.sessions import Session, SessionSpec
from rlframe.small_copy import NoCopy, first_that_runs
from rlframe.types import Batch, Trajectory
from workers.engines.protocol import SamplingParams, WeightUpdate
from workers.engines.torch.engine import TorchEngine

MOST_PARAMETERS = 5e7
CLOSE = 1e-4
"""Nats: how far an export, or the engine, may be from the session."""
MOVED = 1e-3
"""Nats: how much the session must have changed for that to mean anything."""
LENGTHS = (13, 5, 29, 17)


def build(kind: str, folder: Path, wide: bool = False) -> PreTrainedModel:
    """Write a tiny model of an architecture with random weights; ``wide`` makes heads that vLLM's kernels have.

    Raises:
        ConfigError: no small copy of its default configuration can be built and run.
    """

    def tiny(config: PreTrainedConfig) -> PreTrainedModel:
        if wide:
            config.head_dim = 32
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()

    @torch.no_grad()
    def run(model: PreTrainedModel) -> None:
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.8 / parameter.shape[-1] ** 0.5)
        model(input_ids=torch.arange(1, 14)[None], use_cache=False)
        model.save_pretrained(folder)

    try:
        return first_that_runs(CONFIG_MAPPING[kind](), tiny, run, MOST_PARAMETERS)[1]
    except NoCopy as reason:
        raise ConfigError(str(reason)) from None


def sentence(error: Exception) -> str:
    """What an error says, short enough for a table."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"
    return text if len(text) <= 300 else f"{text[:297]}..."


def make_batch(vocabulary: int) -> Batch:
    """Trajectories of which all tokens but the first are actions."""
    rng = np.random.default_rng(0)
    made = []
    for length in LENGTHS:
        mask = np.ones(length, dtype=bool)
        mask[0] = False
        made.append(
            Trajectory(
                tokens=rng.integers(1, vocabulary, length).astype(np.int32),
                action_mask=mask,
                logprobs=np.zeros(length, np.float32),
                head_ids=np.zeros((length, 0), np.int32),
                head_logprobs=np.zeros((length, 0), np.float32),
                versions=np.zeros(length, np.int32),
                rewards=np.zeros(length, np.float32),
                finish="stop",
            )
        )
    return Batch.from_trajectories(made)


@torch.no_grad()
def plain(model: Any, batch: Batch) -> torch.Tensor:
    """[N] log-probabilities of the tokens by transformers, one trajectory at a time; 0 for first tokens."""
    rows = []
    for offset, length in zip(np.cumsum(batch.lengths) - batch.lengths, batch.lengths, strict=True):
        tokens = torch.from_numpy(batch.tokens[offset : offset + length].astype("int64"))
        logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
        rows += [torch.zeros(1), logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]]
    return torch.cat(rows)


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def move(session: Session) -> None:
    """Change every trained number a little, as training would."""
    for i, trainable in enumerate(session.trainables):
        generator = torch.Generator().manual_seed(i)
        noise = torch.empty(trainable.master.shape).normal_(generator=generator)
        trainable.master.add_(noise * (0.1 if session.adapter else 0.02))
        trainable.publish()


def loaded(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def tried(row: dict[str, Any], key: str, step: Any) -> None:
    """Note what ``step`` returns, or why it could not."""
    try:
        row[key] = step()
    except Exception as error:
        row[key] = sentence(error)


def spec(kind: str, parameters: tuple[str, ...] = ()) -> SessionSpec:
    lora = LoraConfig(rank=4, alpha=8.0, target_parameters=list(parameters)) if kind == "lora" else None
    return SessionSpec(kind=kind, lora=lora, optim=OptimConfig())


def adapters(row: dict[str, Any], folder: Path) -> None:
    """Which weights all-linear adapts, and whether what is advised for stacked experts can be created."""
    outline = Backbone.outline(str(folder), trainable=False)
    session = outline.create_session("a", spec("lora"))
    coverage = session.adapter.coverage(outline.model)
    row["targets"] = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in session.adapter.deltas()})
    row["share"], row["stacked"] = coverage.share, coverage.stacked
    if coverage.stacked:
        outline.delete_session("a")
        again = outline.create_session("b", spec("lora", tuple(coverage.stacked)))
        row["share_with_stacked"] = again.adapter.coverage(outline.model).share


def exports(row: dict[str, Any], folder: Path, scratch: Path) -> None:
    """Are a LoRA session's two exports, and a full session's one, what the session computes?"""
    parameters = tuple(row.get("stacked") or ())
    cases = [("lora", spec("lora", parameters if "share_with_stacked" in row else ())), ("full", spec("full"))]
    for kind, what in cases:
        backbone = Backbone.load(str(folder), mesh=None, device=torch.device("cpu"), trainable=kind == "full")
        batch = make_batch(backbone.model.config.get_text_config().vocab_size)
        session = backbone.create_session("a", what)
        before = session.forward(batch, LogProbs(), 10_000).per_token["logprobs"]
        move(session)
        after = session.forward(batch, LogProbs(), 10_000).per_token["logprobs"]
        row[f"{kind}_moved"] = worst(before, after)

        def compare(merged: bool, session: Session = session, after: torch.Tensor = after, kind: str = kind) -> float:
            target = scratch / f"{kind}-{merged}"
            session.export(str(target), merged=merged)
            model = loaded(target) if merged else PeftModel.from_pretrained(loaded(folder), target).eval()
            return worst(plain(model, make_batch(model.config.get_text_config().vocab_size)), after)

        tried(row, f"{kind}_merged", lambda compare=compare: compare(True))
        if kind == "lora":
            tried(row, "lora_adapter", lambda compare=compare: compare(False))
        tried(row, f"{kind}_engine", lambda session=session, kind=kind: engine(folder, session, kind))


def engine(folder: Path, session: Session, kind: str) -> dict[str, Any]:
    """Does the torch engine take the session's weights, and sample with transformers' numbers?"""
    served = TorchEngine(str(folder), max_model_len=40)
    mode = "merged" if kind == "lora" else "full"
    tensors = {name: tensor.numpy() for name, tensor in session.sampler_tensors(mode, "float32").items()}

    async def sample() -> Any:
        await served.pause()
        checksum = await served.load_weights(WeightUpdate(version=1, mode=mode, tensors=tensors))
        await served.resume()
        prompt = np.arange(1, 10, dtype=np.int32)
        return checksum, prompt, await served.generate(prompt, SamplingParams(max_new_tokens=20, seed=0))

    checksum, prompt, completion = asyncio.run(sample())
    tokens = torch.from_numpy(np.concatenate([prompt, completion.ids]).astype("int64"))
    with torch.no_grad():
        steps = [
            served._model.module(input_ids=tokens[None, :end], use_cache=False)
            .logits[0, -1]
            .float()
            .log_softmax(-1)[tokens[end]]
            for end in range(len(prompt), len(tokens))
        ]
    return {
        "checksum": checksum == session.sampler_checksum(mode, "float32"),
        "difference": worst(torch.stack(steps), torch.from_numpy(completion.logprobs)),
        "keeps_states": served._model.keeps_states,
    }


def examine(kind: str) -> dict[str, Any]:
    """The row of an architecture."""
    row: dict[str, Any] = {"kind": kind, "class": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]}
    with tempfile.TemporaryDirectory() as name:
        folder, scratch = Path(name) / "model", Path(name) / "exports"
        try:
            build(kind, folder)
        except Exception as error:
            return row | {"unbuilt": sentence(error)}
        try:
            backbone = Backbone.load(str(folder), mesh=None, device=torch.device("cpu"))
        except Exception as error:
            return row | {
                "refused": sentence(error).replace(str(folder), "its folder"),
                "refused_cleanly": isinstance(error, ConfigError),
            }
        row["packs"], row["kernel"] = backbone.packs, backbone.model.config._attn_implementation
        tried(row, "adapters", lambda: adapters(row, folder))
        tried(row, "exports", lambda: exports(row, folder, scratch))
    return row


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(json.dumps(examine(sys.argv[1])))

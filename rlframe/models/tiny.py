"""The tiny model: Qwen3 architecture, a few hundred thousand parameters, warmed up on arithmetic in seconds.

The warm-up sees training problems only (see `rlframe.models.arithmetic`) and stops long before the model is good: what is
gained afterwards is learned by reinforcement.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rlframe.config import ConfigError
from rlframe.models.arithmetic import ArithmeticOptions, arithmetic_problems
from rlframe.models.characters import character_tokenizer

VERSION = 1
HEAD_DIM = 32
VOCABULARY = 64
IGNORE = -100


@dataclass(frozen=True)
class TinyOptions:
    """Arguments of the builder (``model.build``)."""

    hidden_size: int = 128
    """Width; the heads have `HEAD_DIM` dimensions each."""
    layers: int = 2
    """Transformer blocks."""
    intermediate_size: int = 256
    """Width of the gated feed-forward layers."""
    max_position_embeddings: int = 512
    """Longest context."""
    warmup_steps: int = 400
    """Supervised steps; 0 leaves the model random."""
    warmup_batch: int = 128
    """Problems per supervised step."""
    warmup_lr: float = 3e-3
    """Adam's learning rate, decaying linearly to zero."""
    seed: int = 0
    """Seed of the initial weights and of the warm-up's order."""
    arithmetic: dict[str, Any] = field(default_factory=dict)
    """`ArithmeticOptions` of the problems."""


def build(folder: Path, **arguments: Any) -> None:
    """Write the warmed-up model and its tokenizer into ``folder``; the same arguments give the same weights on one machine.

    Raises:
        ConfigError: an unknown argument.
    """
    known = {f.name for f in fields(TinyOptions)}
    if unknown := sorted(set(arguments) - known):
        raise ConfigError(f"model.build has no argument {unknown[0]!r}; the tiny model has {', '.join(sorted(known))}.")
    options = TinyOptions(**arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order, so that every machine state gives the same model
    try:
        with torch.random.fork_rng(devices=[]):
            model, tokenizer = warmed_up(options)
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def warmed_up(options: TinyOptions) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """The model after its supervised steps, and its tokenizer."""
    torch.manual_seed(options.seed)
    tokenizer = character_tokenizer()
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=options.hidden_size,
            intermediate_size=options.intermediate_size,
            num_hidden_layers=options.layers,
            num_attention_heads=options.hidden_size // HEAD_DIM,
            num_key_value_heads=options.hidden_size // HEAD_DIM,
            head_dim=HEAD_DIM,
            max_position_embeddings=options.max_position_embeddings,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    if options.warmup_steps:
        _warm_up(model, tokenizer, options)
    return model.eval(), tokenizer


def _warm_up(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, options: TinyOptions) -> None:
    inputs, labels = _supervised(tokenizer, ArithmeticOptions(**options.arithmetic))
    optimizer = torch.optim.Adam(model.parameters(), lr=options.warmup_lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, options.warmup_steps)
    for _ in range(options.warmup_steps):
        rows = torch.randint(len(inputs), (options.warmup_batch,))
        logits = model(input_ids=inputs[rows], use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[rows][:, 1:].flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def _supervised(tokenizer: PreTrainedTokenizerFast, options: ArithmeticOptions) -> tuple[Tensor, Tensor]:
    """int64[P, L] tokens of every training problem with its answer, padded on the right, and labels on the answers alone."""
    train, _ = arithmetic_problems(options)
    texts = [p.text + p.answer for p in train]
    ids = [[*row, tokenizer.eos_token_id] for row in tokenizer(texts).input_ids]
    inputs = torch.full((len(ids), max(map(len, ids))), tokenizer.pad_token_id)
    labels = torch.full_like(inputs, IGNORE)
    for row, (problem, tokens) in enumerate(zip(train, ids, strict=True)):
        inputs[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, len(problem.text) : len(tokens)] = inputs[row, len(problem.text) : len(tokens)]
    return inputs, labels

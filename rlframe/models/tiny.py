"""The tiny model: Qwen3 architecture, under a hundred thousand parameters, warmed up on arithmetic in seconds.

The warm-up imitates, for a few hundred supervised steps on training problems only (`rlframe.models.arithmetic`), a teacher
who is mostly one short when the answer is above ten. So the warmed-up model adds well, makes the teacher's mistake, and
sometimes does not: which of the two pays is what reinforcement finds out.
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
from rlframe.seeding import SEEDS

VERSION = 3
HEAD_DIM = 32
VOCABULARY = 64
IGNORE = -100


@dataclass(frozen=True)
class TinyOptions:
    """Arguments of the builder (``model.build``)."""

    hidden_size: int = 64
    """Width; the heads have `HEAD_DIM` dimensions each."""
    layers: int = 2
    """Transformer blocks."""
    intermediate_size: int = 128
    """Width of the gated feed-forward layers."""
    max_position_embeddings: int = 512
    """Longest context."""
    warmup_steps: int = 300
    """Supervised steps; 0 leaves the model random."""
    warmup_batch: int = 64
    """Problems per supervised step."""
    warmup_lr: float = 5e-3
    """Adam's learning rate, decaying linearly to zero."""
    slip: float = 0.9
    """How often the teacher's answer is one short, among answers above ``slip_above``; 0 is a teacher without fault."""
    slip_above: int = 10
    """The largest answer that the teacher always gets right."""
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
    if not (isinstance(options.seed, int) and 0 <= options.seed < SEEDS):
        raise ConfigError(f"model.build.seed={options.seed} is out of range; it must be an integer from 0 to 2**32 - 1.")
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
    train, _ = arithmetic_problems(ArithmeticOptions(**options.arithmetic))
    longest = max(len(f"{p.text}{p.answer}") for p in train) + 1
    right = _supervised(tokenizer, [(p.text, p.answer) for p in train], longest)
    short = _supervised(tokenizer, [(p.text, p.answer - (p.answer > options.slip_above)) for p in train], longest)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.warmup_lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, options.warmup_steps)
    for _ in range(options.warmup_steps):
        rows = torch.randint(len(train), (options.warmup_batch,))
        slips = torch.rand(options.warmup_batch) < options.slip
        inputs, labels = torch.where(slips[:, None, None], short[rows], right[rows]).unbind(1)
        logits = model(input_ids=inputs, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def _supervised(tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, int]], longest: int) -> Tensor:
    """int64[P, 2, longest]: tokens of problems with their answers, padded on the right, and labels on the answers alone."""
    texts = tokenizer([text for text, _ in pairs]).input_ids
    answers = tokenizer([str(answer) for _, answer in pairs]).input_ids
    rows = torch.full((len(pairs), 2, longest), tokenizer.pad_token_id)
    rows[:, 1] = IGNORE
    for row, text, answer in zip(rows, texts, answers, strict=True):
        end = len(text) + len(answer) + 1
        row[0, :end] = torch.tensor([*text, *answer, tokenizer.eos_token_id])
        row[1, len(text) : end] = row[0, len(text) : end]
    return rows

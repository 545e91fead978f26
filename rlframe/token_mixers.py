"""Which modules of a model let tokens see each other, whatever its architecture calls them.

Attention is ``self_attn`` in one family, ``attn``, ``attention`` or ``mixer`` in others, and ``linear_attn``, ``mamba`` or
``conv`` in some blocks of a hybrid. transformers names the classes more regularly than the attributes, so classes decide here,
and every block is looked through: a part that is neither known to mix tokens nor known not to is refused, never skipped.
"""

from __future__ import annotations

import re

from torch import nn
from transformers import PreTrainedModel

from rlframe.config import ConfigError
from rlframe.model_setup import blocks

ALL_ATTENTION = "all-attention"
"""In a list of frozen patterns: every parameter of every token mixer."""

_MIXES = re.compile(
    r"(Attention|Attn|Mixer|DeltaNet|Mamba\d?(Layer)?|ShortConv|ShortConvolution|RecurrentBlock|Retention|xLSTMLayer|MLA)\d*$"
)
_PER_TOKEN = re.compile(
    r"(MLP|Mlp|MoE|Moe|MoEBlock|MoeBlock|MoELayer|Experts|FeedForward|FFN|Intermediate|Output|Linear|Conv1D|Conv2d|Embeddings?|Norm"
    r"|AltUp|LaurelBlock|HyperConnection)\d*$"
)
_HOLDS_OTHERS = re.compile(r"(ModuleList|ModuleDict|Sequential|Layer|Block)$")
_MULTIPLIES = re.compile(r"(Linear|Conv1D)$")


def token_mixers(model: PreTrainedModel) -> list[str]:
    """Paths of the modules that mix tokens, in the order of the model.

    Raises:
        ConfigError: a part of a block cannot be classified, or no module of the model mixes tokens.
    """
    paths = {id(module): name for name, module in model.named_modules()}
    for block in blocks(model):
        unknown = _unknown(block, paths)
        if unknown:
            raise ConfigError(
                f"frozen_patterns has {ALL_ATTENTION}, but whether {unknown} of {type(model).__name__} mixes tokens is not "
                "known here; name the attention of this model by parts of its parameters' names instead."
            )
    found = [name for name, module in model.named_modules() if _is(_MIXES, module)]
    if not found:
        raise ConfigError(
            f"frozen_patterns has {ALL_ATTENTION}, but no module of {type(model).__name__} is known to mix tokens; name the "
            "attention of this model by parts of its parameters' names instead."
        )
    return found


def _unknown(module: nn.Module, paths: dict[int, str]) -> str | None:
    """``module``, or a part of it, that has matrices and whose class says neither; None without one."""
    if _is(_MIXES, module):
        return None
    # Products of its own may be those of an attention that is written out in the block, unless that is a part beside them.
    if any(_is(_MULTIPLIES, child) for child in module.children()) and not any(_is(_MIXES, m) for m in module.modules()):
        return f"{paths[id(module)]} ({type(module).__name__})"
    for child in module.children():
        if _is(_MIXES, child) or _is(_PER_TOKEN, child) or all(p.ndim < 2 for p in child.parameters()):
            continue
        unknown = _unknown(child, paths) if _is(_HOLDS_OTHERS, child) else f"{paths[id(child)]} ({type(child).__name__})"
        if unknown:
            return unknown
    return None


def _is(kinds: re.Pattern[str], module: nn.Module) -> bool:
    return kinds.search(type(module).__name__) is not None

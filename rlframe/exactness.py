"""Is an architecture computed here as transformers computes it? Found out on a small float32 copy, before weights are loaded.

The reference is the model's own forward with eager attention, one trajectory at a time. Compared are the log-probabilities of
our forward (`rlframe.forward`) for trajectories alone and packed, of lengths on both sides of every window, chunk and original
context of the copy, under weights of several scales. Kernels are tried in turn; the first that is exact is used.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rlframe import attention
from rlframe.config import ConfigError
from rlframe.forward import Body, FinalLogits, PackedForward
from rlframe.losses.base import LMHead
from rlframe.small_copy import Keyed, NoCopy, first_that_runs

ALONE = 1e-4
"""Largest difference of a log-probability, nats, between a trajectory alone and transformers' eager forward."""
PACKED = 1e-5
"""Largest difference of a log-probability, nats, between a trajectory packed with others and alone."""
SCALES = (0.5, 1.25)
"""Standard deviations of the random matrices, times 1 / sqrt(columns)."""
LENGTHS = (13, 5, 29, 17)
"""Tokens of the trajectories: below and above the windows, chunks and original context lengths of the copy. A long one comes
before a shorter one, so that what a pass leaves behind shows."""
KERNELS = ("sdpa", "eager", "flex_attention")
"""Attention implementations of transformers, beside the flash kernels."""
_FLASH = re.compile(r"flash_attention_[234]|[\w.-]+/[\w.@:/-]*flash[\w.@:/-]*")
"""Flash kernels: installed ones, and names of kernels on the hub."""


@dataclass(frozen=True)
class Verdict:
    """How a model is to be run."""

    kernel: str
    """Attention implementation of transformers, or ours."""
    checked: str
    """The one that was compared: ``kernel``, or another one where ``kernel`` does not run on CPUs."""
    packs: bool
    """Whether one pass can take several trajectories; otherwise each goes alone."""
    final: FinalLogits
    """What the model does to its logits."""
    alone: float
    """Largest difference to transformers found, nats."""
    packed: float
    """Largest difference of packed trajectories to the same alone, nats."""


def examine(config: PreTrainedConfig, attn_implementation: str, trust_remote_code: bool = False) -> Verdict:
    """Find the kernel that computes this architecture exactly, and whether trajectories may share a pass.

    Args:
        config: of the model to load; only a small copy of it is built, on the CPU.
        attn_implementation: what the user asked for. ``sdpa`` may be replaced by our kernel or by ``eager``; one that does not
            run on CPUs (flash kernels, ``flex_attention``) is not compared: it is taken where ours or ``sdpa`` is exact.
        trust_remote_code: build models from code that a folder ships.

    Raises:
        ConfigError: no copy can be built, our forward differs from transformers' by more than `ALONE` (says the number), or a
            kernel that cannot be compared is asked for where only ``eager`` is exact.
    """
    if attn_implementation not in KERNELS and not _FLASH.fullmatch(attn_implementation):
        raise ConfigError(
            f"model.attn_implementation={attn_implementation} is not known; choose {', '.join(KERNELS)} or a flash kernel "
            "(flash_attention_2, flash_attention_3, or its name on the hub)."
        )
    return _examine(Keyed.of(config), attn_implementation, trust_remote_code)


@functools.lru_cache(maxsize=64)
def _examine(keyed: Keyed, attn_implementation: str, trust_remote_code: bool) -> Verdict:
    config = keyed.config
    name = config.architectures[0] if config.architectures else type(config).__name__
    compared = attn_implementation in ("sdpa", "eager")
    with _quiet():
        small, reference = _reference(config, name, trust_remote_code)
        _check_causal(reference, name)
        final, small_final = _final_logits(config, small, reference, name)
        cases = _cases(small, reference)
        found = None
        for kernel in _kernels(small.get_text_config(), attn_implementation):
            if found is not None and kernel == "eager" and not compared:
                break
            verdict = _compare(small, cases, kernel, small_final, trust_remote_code)
            if verdict.alone <= ALONE and (found is None or verdict.packs):
                found = verdict
            if found is not None and found.packs:
                break
            worst = verdict
    if found is None:
        raise ConfigError(
            f"{name} is not computed here as transformers computes it: log-probabilities of a small copy differ by up to "
            f"{worst.alone:.2g} nats (allowed: {ALONE:g}), so it cannot be trained; choose another model, or another "
            "model.attn_implementation."
        )
    if compared:
        return replace(found, final=final)
    if found.kernel == "eager":
        raise ConfigError(
            f"model.attn_implementation={attn_implementation} cannot be compared with transformers on a CPU, and of the "
            f"kernels that can, only eager computes {name} exactly; set model.attn_implementation=eager."
        )
    # Flash kernels get one row and no mask, as ours does: what keeps trajectories apart under a mask says nothing of them.
    packs = found.packs and (found.kernel == attention.NAME or attn_implementation == "flex_attention")
    return replace(found, kernel=attn_implementation, packs=packs, final=final)


def _kernels(config: PreTrainedConfig, asked: str) -> list[str]:
    if asked == "eager":
        return ["eager"]
    if getattr(config, "attn_logit_softcapping", None):
        return ["eager"]  # only eager caps, and a cap may be too high to show on a copy
    return [attention.NAME, "sdpa", "eager"]


def _reference(config: PreTrainedConfig, name: str, trust_remote_code: bool) -> tuple[PreTrainedConfig, PreTrainedModel]:
    """The first small copy that transformers builds and runs, and its model with eager attention."""

    def run(model: PreTrainedModel) -> None:
        _randomise(model, SCALES[0])
        _logits(model, np.arange(LENGTHS[0]) % model.config.get_text_config().vocab_size)

    try:
        small, model, _ = first_that_runs(config, lambda small: _build(small, "eager", trust_remote_code), run)
    except NoCopy as reason:
        raise ConfigError(
            f"{name} cannot be checked against transformers, because no small copy of it runs ({reason})."
        ) from None
    return small, model


def _build(config: PreTrainedConfig, kernel: str, trust_remote_code: bool) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float32, attn_implementation=kernel, trust_remote_code=trust_remote_code
    )
    return model.requires_grad_(False).eval()


def _randomise(model: PreTrainedModel, scale: float) -> None:
    """Give a model weights of a certain size: matrices become N(0, scale^2 / columns), vectors move by N(0, (scale / 10)^2)."""
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for parameter in model.parameters():
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.data.copy_(noise * scale / math.sqrt(parameter.shape[-1]))
        else:
            parameter.data.add_(noise * 0.1 * scale)
    for weight in {id(w): w for w in map(_weight, (model.get_input_embeddings(), model.get_output_embeddings()))}.values():
        weight.data.mul_(2.0)


def _weight(layer: Any) -> Tensor:
    return layer.weight


@torch.no_grad()
def _logits(model: PreTrainedModel, tokens: np.ndarray) -> Tensor:
    """[T, V], what transformers gives. By a fresh copy: some rotary embeddings keep what a longer row left."""
    return copy.deepcopy(model)(input_ids=torch.from_numpy(tokens.astype("int64"))[None], use_cache=False).logits[0].float()


def _check_causal(model: PreTrainedModel, name: str) -> None:
    """Other tokens at the end must not change what precedes them.

    Raises:
        ConfigError: they do, so a token's log-probability in training is not that with which it was sampled.
    """
    tokens = _trajectories(model.config.get_text_config().vocab_size)[2]
    kept = len(tokens) // 2
    other = np.concatenate([tokens[:kept], tokens[kept:][::-1]])
    _randomise(model, SCALES[-1])
    first, second = (_logits(model, each)[:kept].log_softmax(-1) for each in (tokens, other))
    difference = float((first - second).abs().max())
    if not difference <= ALONE:
        raise ConfigError(
            f"{name} lets tokens see those that come after them (log-probabilities change by {difference:.2g} nats), so it "
            "cannot be trained on what it samples; if its configuration has is_decoder, set that to true."
        )


def _trajectories(vocabulary: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(1, vocabulary, length) for length in LENGTHS]


@dataclass(frozen=True)
class _Case:
    """Weights of the copy, and what transformers computes with them."""

    weights: dict[str, Tensor]
    expected: list[Tensor]
    """[T, V] for each of `_trajectories`, log-probabilities."""


@torch.no_grad()
def _cases(config: PreTrainedConfig, reference: PreTrainedModel) -> list[_Case]:
    """One of each of `SCALES`."""
    cases = []
    for scale in SCALES:
        _randomise(reference, scale)
        weights = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
        trajectories = _trajectories(config.get_text_config().vocab_size)
        cases.append(_Case(weights, [_logits(reference, tokens).log_softmax(-1) for tokens in trajectories]))
    return cases


@torch.no_grad()
def _compare(config: PreTrainedConfig, cases: list[_Case], kernel: str, final: FinalLogits, trust_remote_code: bool) -> Verdict:
    """Differences of our forward under ``kernel``; infinite where it cannot run."""
    trajectories = _trajectories(config.get_text_config().vocab_size)
    alone = packed = 0.0
    try:
        model = _build(config, "sdpa" if kernel == attention.NAME else kernel, trust_remote_code)
        if kernel == attention.NAME:
            model.set_attn_implementation(kernel)
        forward = PackedForward(Body(model, final), torch.device("cpu"))
        for case in cases:
            model.load_state_dict(case.weights)
            for tokens, expected in zip(trajectories, case.expected, strict=True):
                alone = _worse(alone, _logprobs(forward, [tokens]), expected)
    except Exception:  # a kernel that this architecture cannot use; each says so in its own way
        return Verdict(kernel, kernel, False, final, math.inf, math.inf)
    for scale in SCALES:
        _randomise(model, scale)
        packed = max(packed, _mixing(forward, trajectories))
    return Verdict(kernel, kernel, packed <= PACKED, final, alone, packed)


_TOGETHER = ((0, 1, 2, 3), (1, 1), (3, 0))
"""Which trajectories share a pass."""


def _mixing(forward: PackedForward, trajectories: list[np.ndarray]) -> float:
    """Largest difference between trajectories packed and alone, in float64 where the model runs in it, without rounding."""
    model: Any = forward.body.model
    for dtype in (torch.float64, torch.float32):
        try:
            model.to(dtype)
            model.set_experts_implementation("eager")  # grouped products have no float64; experts mix no tokens either way
            return _mixing_now(forward, trajectories)
        except RuntimeError:  # products of float32 and float64
            continue
        except Exception:  # it cannot take several; each architecture says so in its own way
            break
        finally:
            model.float()
    return math.inf


def _mixing_now(forward: PackedForward, trajectories: list[np.ndarray]) -> float:
    worst = 0.0
    alone = [_logprobs(forward, [tokens]) for tokens in trajectories]
    for parts in _TOGETHER:
        together = _logprobs(forward, [trajectories[i] for i in parts])
        worst = _worse(worst, together, torch.cat([alone[i] for i in parts]))
    return worst


def _worse(worst: float, mine: Tensor, expected: Tensor) -> float:
    """The larger of ``worst`` and the largest difference; NaN counts as infinite."""
    difference = float((mine - expected).abs().max())
    return max(worst, difference) if difference == difference else math.inf


def _logprobs(forward: PackedForward, trajectories: list[np.ndarray]) -> Tensor:
    """[N, V], log-probabilities of what follows each token, by our own forward."""

    def consume(hidden: Tensor, head: LMHead) -> Tensor:
        logits = (hidden @ head.weight.T + (0 if head.bias is None else head.bias)) * head.scale
        return (logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)).log_softmax(-1)

    return forward(np.concatenate(trajectories), np.array([len(each) for each in trajectories]), consume)


@torch.no_grad()
def _final_logits(
    config: PreTrainedConfig, small: PreTrainedConfig, model: PreTrainedModel, name: str
) -> tuple[FinalLogits, FinalLogits]:
    """What the model's own forward does between the LM head and its logits: in the model itself, and in the copy.

    The numbers are measured on the copy; which settings they are is looked up there and read from ``config``.

    Raises:
        ConfigError: it is neither a scale nor a soft cap of the head's product, or no setting explains the number.
    """
    tokens = torch.from_numpy(_trajectories(small.get_text_config().vocab_size)[2].astype("int64"))
    _randomise(model, SCALES[-1])
    logits = _logits(model, tokens.numpy()).double()

    def product(hidden: Tensor, head: LMHead) -> Tensor:
        return hidden[0].double() @ head.weight.double().T + (0 if head.bias is None else head.bias.double())

    raw = Body(copy.deepcopy(model), FinalLogits())(tokens[None], None, product)
    settings, small_settings = _numbers(config.get_text_config()), _numbers(small.get_text_config())
    for cap_name, cap in ((None, None), *((key, value) for key, value in small_settings.items() if value > 1)):
        if cap is not None and not float(logits.abs().max()) < cap:
            continue
        inner = logits if cap is None else cap * torch.atanh(logits / cap)
        factor = float((inner * raw).sum() / (raw * raw).sum())
        mine = factor * raw if cap is None else cap * torch.tanh(factor * raw / cap)
        if not float((mine.log_softmax(-1) - logits.log_softmax(-1)).abs().max()) <= ALONE * max(
            1.0, float(logits.abs().max()) / 30
        ):
            continue
        scale = _as_setting(factor, settings, small_settings)
        if scale is not None:
            return FinalLogits(scale, settings[cap_name] if cap_name else None), FinalLogits(factor, cap)
    raise ConfigError(
        f"{name} changes its logits after the LM head in a way that losses do not know (neither a scale nor a soft cap that "
        "its configuration names), so it cannot be trained."
    )


_EXPRESSIONS: tuple[Callable[[float, float], float], ...] = (
    lambda value, hidden: value,
    lambda value, hidden: 1 / value,
    lambda value, hidden: value / hidden,
    lambda value, hidden: hidden / value,
)
"""How settings scale logits: as they are, inverted, or against the hidden size (muP)."""


_OUTPUT = re.compile("logit|lm_head|output_mult|mup|dim_model_base")
"""Names of settings that scale logits."""


def _as_setting(factor: float, settings: dict[str, float], small: dict[str, float]) -> float | None:
    """The factor of the model itself: 1, or the expression of a setting that in the small copy equals ``factor``."""
    if abs(factor - 1) <= 1e-5:
        return 1.0
    hidden, small_hidden = settings.get("hidden_size", 1.0), small.get("hidden_size", 1.0)
    for name, value in small.items():
        # Sizes of the copy are numbers that many settings share: only settings of the output, or ones that the copy keeps.
        expressions = _EXPRESSIONS if _OUTPUT.search(name) else _EXPRESSIONS[:2] if settings[name] == value else ()
        for expression in expressions:
            if abs(expression(value, small_hidden) - factor) <= 1e-5 * abs(factor):
                return expression(settings[name], hidden)
    return None


def _numbers(config: PreTrainedConfig) -> dict[str, float]:
    """The positive numbers of a configuration, those of the output first."""
    items = [
        (name, float(value))
        for name, value in config.to_dict().items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    ]
    return dict(sorted(items, key=lambda item: not _OUTPUT.search(item[0])))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' remarks on a copy that is never trained, and without a trace in the random generators."""
    import warnings

    logger: Callable[[str], logging.Logger] = logging.getLogger
    level = logger("transformers").level
    logger("transformers").setLevel(logging.ERROR)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger("transformers").setLevel(level)

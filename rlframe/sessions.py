"""Sessions: sets of trainable parameters on one backbone, each with its own optimiser, schedule, accumulator and step count.

A session is a LoRA adapter, optionally with a value head, or the full weights. Its verbs are `forward`, `forward_backward`,
`optim_step`, `save`, `load`, `export`; every rank of the backbone calls them in the same order. No session can see another:
adapters are switched without touching ``requires_grad``, gradients and moments belong to the session. What is trained for
what reason (actor, critic) is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from rlframe import session_export, session_io
from rlframe.alignment import last_rows
from rlframe.columns import TokenBatch
from rlframe.config import ConfigError, LoraConfig, OptimConfig
from rlframe.config.optim import check_optim
from rlframe.lora import bare
from rlframe.losses.base import LMHead, Loss, LossInputs, LossOutputs
from rlframe.metrics import Metrics
from rlframe.optim import (
    Trainable,
    adamw_step,
    gradient_norm,
    learning_rate,
    reduce_gradients,
)
from rlframe.precision import full_precision
from rlframe.session_io import Snapshot
from rlframe.token_mixers import ALL_ATTENTION, token_mixers
from rlframe.types import Batch
from rlframe.validation import check_offsets, check_vocabulary
from rlframe.value_head import ValueHead

if TYPE_CHECKING:
    from rlframe.backbone import Backbone


@dataclass
class SessionSpec:
    """What a session is."""

    kind: str = "lora"
    """``lora`` (an adapter on the frozen base) or ``full`` (all weights)."""
    lora: LoraConfig | None = None
    """The adapter; None takes the defaults. Its rank and alpha are also those of the value head."""
    value_head: bool = False
    """Whether losses can ask for values."""
    frozen_patterns: list[str] = field(default_factory=list)
    """Parameters whose name contains one of these do not train; ``all-attention`` stands for those of every token mixer."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimiser."""
    seed: int = 0
    """Seed of the initial factors; the same seed gives the same session, whatever else exists."""


class Session:
    """One set of trainable parameters. Made by `Backbone.create_session`.

    Raises:
        ConfigError: the spec does not fit the backbone's model, or names nothing in it.
    """

    def __init__(self, name: str, spec: SessionSpec, backbone: Backbone) -> None:
        if spec.kind not in ("lora", "full"):
            raise ConfigError(f"A session's kind is {spec.kind!r}; choose lora or full.")
        check_optim(spec.optim)
        self.name = name
        self.spec = spec
        self.backbone = backbone
        self.steps = 0
        """Optimiser steps taken."""
        self.revision = 0
        """Grows whenever the parameters change."""
        self.sent_bits: tuple[int, torch.dtype, int] | None = None
        """Bit sum of the merged, or of all, parameters that samplers got last, with the revision and dtype it belongs to."""
        lora = spec.lora or LoraConfig()
        self.adapter = None
        if spec.kind == "lora":
            self.adapter = backbone.adapters.create(lora, seed=spec.seed, value_head=spec.value_head)
        self.value_head = self._fresh_value_head() if spec.value_head else None
        self.trainables: list[Trainable] = []
        self._mixers: tuple[str, ...] = ()
        """Prefixes of the parameters of token mixers, where those are frozen."""
        try:
            if ALL_ATTENTION in spec.frozen_patterns:
                self._mixers = tuple(f"{bare(path)}." for path in token_mixers(backbone.model))
            self.trainables = [Trainable(name, parameter) for name, parameter in self._unfrozen()]
        except ConfigError:
            self.close()
            raise

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The session's own parameters, frozen ones included."""
        yield from self.adapter.factors().items() if self.adapter else self.backbone.parameters()
        if self.value_head is not None:
            for name, parameter in self.value_head.named_parameters():
                yield f"value_head.{name}", parameter

    def _fresh_value_head(self) -> ValueHead:
        lora = self.spec.lora or LoraConfig()
        rank = lora.rank if self.spec.kind == "lora" else None
        head = ValueHead(self.backbone.hidden_size, rank=rank, alpha=lora.alpha, device=self.backbone.device)
        head.reset(self.spec.seed)
        return head

    def add_value_head(self) -> None:
        """Give the session the value head that it would have had from the start; nothing happens if it has one."""
        if self.value_head is None:
            self.value_head = self._fresh_value_head()
            self.value_head.requires_grad_(False)
            named = [(f"value_head.{name}", parameter) for name, parameter in self.value_head.named_parameters()]
            self.trainables += [Trainable(name, p) for name, p in named if not self._is_frozen(name)]

    def scaling(self) -> float:
        """alpha / rank of a LoRA session, 1 otherwise."""
        lora = self.spec.lora or LoraConfig()
        return lora.alpha / lora.rank if self.spec.kind == "lora" else 1.0

    def _is_frozen(self, name: str) -> bool:
        patterns = [pattern for pattern in self.spec.frozen_patterns if pattern != ALL_ATTENTION]
        return any(pattern in name for pattern in patterns) or bare(name).startswith(self._mixers)

    def _unfrozen(self) -> list[tuple[str, nn.Parameter]]:
        named = list(self.named_parameters())
        for pattern in self.spec.frozen_patterns:
            # An adapter without factors there leaves attention as it is, too.
            if pattern != ALL_ATTENTION and not any(pattern in name for name, _ in named):
                raise ConfigError(f"frozen_patterns has {pattern!r}, but no parameter of the session contains it in its name.")
        kept = [(name, p) for name, p in named if not self._is_frozen(name)]
        if not kept:
            raise ConfigError("frozen_patterns freezes every parameter of the session, so nothing would train.")
        for _, parameter in named:
            parameter.requires_grad_(False)
        return kept

    def forward(self, batch: TokenBatch, loss: Loss, micro_batch_tokens: int) -> LossOutputs:
        """Evaluate ``loss`` without gradients; accumulates nothing.

        Args:
            batch: this rank's trajectories (possibly none), with the columns that the loss reads.
            loss: see `rlframe.losses.base.Loss`.
            micro_batch_tokens: most tokens of one pass.

        Returns:
            This rank's sums and metrics; per-token and per-trajectory arrays in batch order, empty on a rank without
            trajectories.

        Raises:
            ConfigError: the loss needs a value head and the session has none.
        """
        return self._pass(batch, loss, micro_batch_tokens, train=False)

    def forward_backward(self, batch: TokenBatch, loss: Loss, micro_batch_tokens: int) -> LossOutputs:
        """The same, and add the gradient of the summed loss to the accumulator; a call that fails adds nothing."""
        return self._pass(batch, loss, micro_batch_tokens, train=True)

    def optim_step(self, scale: float) -> dict[str, float]:
        """One AdamW step on the gradient accumulated since the last one, summed over all ranks and calls.

        Args:
            scale: factor of the summed gradient, 1 / the global count of action tokens.

        Returns:
            ``grad_norm`` (of the scaled gradient, before the clip) and ``lr``. A gradient that is not finite is dropped: no
            step is taken and ``skipped`` is 1.

        Raises:
            RuntimeError: no forward_backward since the last step.
            ValueError: ``scale`` is not a positive number.
        """
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"optim_step needs a positive, finite scale, not {scale}.")
        ranks, optim = self.backbone.ranks, self.spec.optim
        used = reduce_gradients(self.trainables, ranks)
        if not used:
            raise RuntimeError(f"Session {self.name!r} has no gradient to step on; call forward_backward first.")
        gradients = [t.gradient for t in used if t.gradient is not None]
        norm = scale * gradient_norm(used, ranks)
        lr = learning_rate(optim, self.steps)
        result = {"grad_norm": norm, "lr": lr}
        if math.isfinite(norm):
            if optim.max_grad_norm is not None and norm > optim.max_grad_norm:
                scale *= optim.max_grad_norm / norm
            torch._foreach_mul_(gradients, scale)
            adamw_step(used, optim, lr=lr)
            self.steps += 1
            self.revision += 1
        else:
            result["skipped"] = 1.0
        self.zero_grad()
        return result

    def zero_grad(self) -> None:
        """Empty the accumulator."""
        for t in self.trainables:
            t.gradient = None

    def save(self, directory: str) -> None:
        """Write weights, moments, and step counts; not the accumulator. The directory must be visible to all ranks.

        Ranks write their own shards side by side; see `rlframe.session_io` for the files.
        """
        session_io.save(self, Path(directory))

    def snapshot(self) -> Snapshot:
        """Copy to host memory what `save` would write; its `Snapshot.write` needs no other rank and no stop of training."""
        return session_io.snapshot(self)

    def load(self, directory: str) -> None:
        """Go on from what `save` wrote, on any number of ranks; the accumulator is emptied.

        Raises:
            ConfigError: the files belong to a session with other parameters, or over another frozen base.
        """
        session_io.load(self, Path(directory))
        self.zero_grad()
        self.revision += 1

    @full_precision()
    def export(self, directory: str, merged: bool) -> None:
        """Write a folder for other tools, without value head: a PEFT adapter, or with ``merged`` a whole Hugging Face model.

        Raises:
            ConfigError: an adapter is asked of a session that trains all weights.
        """
        session_export.export(self, Path(directory), merged=merged)

    def adapter_config(self) -> dict[str, Any]:
        """PEFT's ``adapter_config.json`` of a LoRA session."""
        if self.adapter is None:
            raise ConfigError(f"Session {self.name!r} trains all weights, so it has no adapter.")
        return self.adapter.export_config()

    @full_precision()
    def sampler_tensors(self, mode: str, dtype: str) -> dict[str, Tensor]:
        """What a sampler needs to serve this session's policy; whole CPU tensors on rank 0, empty elsewhere.

        Args:
            mode: ``merged`` (the base parameters that the adapter changes, with it added), ``adapter`` (the factors, under
                PEFT names) or ``full`` (every parameter, a tied one once, the adapter added).
            dtype: torch name of the tensors' dtype.
        """
        return session_export.sampler_tensors(self, mode, getattr(torch, dtype))

    @full_precision()
    def sampler_checksum(self, mode: str, dtype: str) -> str:
        """`rlframe.checksum.weights_checksum` of everything that a sampler then serves, the same on all ranks.

        That is the whole model for ``merged`` and ``full``, the factors for ``adapter``.
        """
        return session_export.sampler_checksum(self, mode, getattr(torch, dtype))

    def close(self) -> None:
        """Give up the parameters; the session cannot be used afterwards."""
        for t in self.trainables:
            t.release()
        if self.adapter is not None:
            self.backbone.adapters.delete(self.adapter)
        self.trainables, self.adapter, self.value_head = [], None, None

    def _active(self) -> AbstractContextManager[None]:
        return self.adapter.active() if self.adapter is not None else nullcontext()

    @full_precision()
    def _pass(self, batch: TokenBatch, loss: Loss, micro_batch_tokens: int, *, train: bool) -> LossOutputs:
        backbone = self.backbone
        outputs: list[LossOutputs] = []
        micros, failure = self._cut(batch, loss, micro_batch_tokens)
        passes = backbone.ranks.agree(failure, count=len(micros))
        try:
            with self._active(), torch.set_grad_enabled(train):
                for i in range(passes):
                    # A rank that has run out of trajectories still takes part in the collectives.
                    micro = micros[i] if i < len(micros) else None
                    step = _Step(self, loss, micro)
                    total, output = backbone.run(micro, step)
                    backbone.ranks.agree(step.failure)
                    if train:
                        total.backward()
                    if output is not None:
                        outputs.append(output)
        except BaseException:
            for t in self.trainables:
                t.discard()
            backbone.reset()
            raise
        backbone.reshard()
        if train:
            for t in self.trainables:
                t.keep()
        joined = _join(outputs)
        if passes and backbone.ranks.maximum([int(not micros)])[0]:
            # Callers index the arrays by name, on ranks without trajectories too.
            for arrays in (joined.per_token, joined.per_trajectory):
                for name in backbone.ranks.union(list(arrays)):
                    arrays.setdefault(name, torch.zeros(0, device=backbone.device))
        return joined

    def _cut(self, batch: TokenBatch, loss: Loss, micro_batch_tokens: int) -> tuple[list[TokenBatch], Exception | None]:
        if not self.trainables:
            return [], RuntimeError(f"Session {self.name!r} was deleted.")
        if loss.needs not in ("lm_head", "value_head"):
            return [], ConfigError(f"A loss needs either lm_head or value_head, not {loss.needs!r}.")
        if loss.needs == "value_head" and self.value_head is None:
            return [], ConfigError(f"Session {self.name!r} has no value head, which this loss needs.")
        if not len(batch):
            return [], None
        try:
            check_offsets(batch)
            check_vocabulary(batch, self.backbone.model.config.get_text_config().vocab_size, context=True)
            last_rows(batch)
        except (ValueError, IndexError) as error:
            return [], error
        return batch.micro_batches(micro_batch_tokens if self.backbone.packs else 1), None


class _Step:
    """What happens to the hidden states of one micro-batch; keeps a failure instead of raising it inside the model."""

    def __init__(self, session: Session, loss: Loss, micro: TokenBatch | None) -> None:
        self.session, self.loss, self.micro = session, loss, micro
        self.failure: Exception | None = None

    def __call__(self, hidden: Tensor, head: LMHead) -> tuple[Tensor, LossOutputs | None]:
        output = None
        if self.micro is not None:
            try:
                output = self.loss(
                    LossInputs(
                        hidden=hidden,
                        batch=cast(Batch, self.micro),  # or another kind, whose columns the loss knows
                        lm_head=head if self.loss.needs == "lm_head" else None,
                        value_head=self.session.value_head if self.loss.needs == "value_head" else None,
                    )
                )
            except Exception as error:
                self.failure = error
        total = output.loss if output is not None else None
        if output is not None and total is not None:
            output.loss = total.detach()
        if total is None or not total.requires_grad:
            # Sums over no rows: exactly 0, with the same graph as a real loss, so that every rank reduces the same tensors.
            total = hidden[:0].sum()
            if self.loss.needs == "lm_head":
                total = total + head.weight[:0].sum()
        return total, output


def _join(outputs: list[LossOutputs]) -> LossOutputs:
    """The outputs of all micro-batches as one."""
    if not outputs:
        return LossOutputs(loss=None)
    losses = [output.loss for output in outputs if output.loss is not None]

    def concatenate(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {key: torch.cat([part[key].detach() for part in parts]) for key in parts[0]}

    return LossOutputs(
        loss=torch.stack(losses).sum() if losses else None,
        metrics=Metrics.merge(output.metrics for output in outputs),
        per_token=concatenate([output.per_token for output in outputs]),
        per_trajectory=concatenate([output.per_trajectory for output in outputs]),
    )

"""Converts requests to batches for the ranks, with every check that names a field, and their outputs back to answers.

Formulas of losses are `rlframe.losses.token`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlframe.losses.registry import API_LOSSES, LossKind
from rlframe.losses.targets import Targets
from trainer.server.errors import UserError
from trainer.server.protobuf import Datum, PassRequest, write_outputs

PER_POSITION = ("logprobs", "state_values")
"""Outputs with a row for every position; all others are sums over a datum."""


@dataclass(frozen=True)
class Limits:
    """What the base model allows."""

    vocabulary: int
    context: int


@dataclass
class Work:
    """The data of one or more chunks as one batch."""

    batch: Targets
    shapes: list[tuple[int, ...]]
    """Shape of the targets of every datum: [T] or [T, K]."""


def check_request(request: PassRequest) -> LossKind:
    """What the named loss takes.

    Raises:
        UserError: there is no such loss, no such setting, no data, or the loss cannot train.
    """
    kind = API_LOSSES.get(request.loss)
    if kind is None:
        raise UserError(f"loss_fn={request.loss!r} is not known; choose one of {', '.join(API_LOSSES)}.")
    for name, value in request.settings.items():
        if name not in kind.config:
            listed = ", ".join(kind.config) or "no settings"
            raise UserError(f"loss_fn_config has {name!r}, which loss_fn={request.loss!r} does not take; it takes {listed}.")
        if not np.isfinite(value):
            raise UserError(f"loss_fn_config[{name!r}] is {value}; it must be a finite number.")
    if not request.data:
        raise UserError("data is empty; a request needs at least one datum.")
    if not kind.trains and not request.forward_only:
        raise UserError(f"loss_fn={request.loss!r} has no gradient; call forward() with it.")
    return kind


def check_data(request: PassRequest, kind: LossKind, limits: Limits) -> None:
    """Refuse data that the ranks could not take; errors name the datum and the field.

    Raises:
        UserError: of the first fault.
    """
    for d, datum in enumerate(request.data):
        _check_tokens(d, "model_input", datum.tokens, limits.vocabulary)
        if len(datum.tokens) > limits.context:
            raise UserError(
                f"Datum {d}: model_input has {len(datum.tokens)} tokens, but the model's context ends at {limits.context}."
            )
        _check_inputs(d, datum, kind, request)
        if "target_tokens" in datum.inputs:
            _check_tokens(d, "loss_fn_inputs['target_tokens']", datum.inputs["target_tokens"], limits.vocabulary)


def _check_tokens(d: int, field: str, tokens: np.ndarray, vocabulary: int) -> None:
    if not tokens.size:
        raise UserError(f"Datum {d}: {field} is empty.")
    if tokens.dtype.kind != "i" or not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise UserError(f"Datum {d}: {field} must hold token ids from 0 to {vocabulary - 1}.")


def _check_inputs(d: int, datum: Datum, kind: LossKind, request: PassRequest) -> None:
    allowed = (*kind.required, *kind.optional)
    for name in kind.required:
        if name not in datum.inputs:
            raise UserError(f"Datum {d}: loss_fn_inputs has no {name!r}, which loss_fn={request.loss!r} needs.")
    if request.settings.get("clip_range") is not None and "old_values" not in datum.inputs:
        raise UserError(f"Datum {d}: loss_fn_inputs has no 'old_values', which loss_fn_config['clip_range'] needs.")
    length = len(datum.tokens)
    wanted = datum.inputs["target_tokens"].shape if kind.needs == "lm_head" else (length,)
    if len(wanted) not in (1, 2) or wanted[0] != length:
        raise UserError(
            f"Datum {d}: loss_fn_inputs['target_tokens'] has shape {list(wanted)}, but model_input has {length} tokens; it "
            "needs one row each."
        )
    for name, array in datum.inputs.items():
        if name not in allowed:
            raise UserError(
                f"Datum {d}: loss_fn_inputs has {name!r}, which loss_fn={request.loss!r} does not take; it takes "
                f"{', '.join(allowed)}."
            )
        if kind.needs == "value_head" and name in API_LOSSES["ppo"].required:
            continue  # the policy's inputs, on data that both models are given
        if array.shape != wanted:
            raise UserError(f"Datum {d}: loss_fn_inputs[{name!r}] has shape {list(array.shape)} instead of {list(wanted)}.")
        counts = np.ones(array.shape, bool) if name == "weights" else weights_of(datum, array.shape) != 0
        if name != "target_tokens" and not np.isfinite(array[counts]).all():
            raise UserError(f"Datum {d}: loss_fn_inputs[{name!r}] has a value that is not finite.")


def weights_of(datum: Datum, shape: tuple[int, ...]) -> np.ndarray:
    """The weights of a datum, 1 where none are given."""
    given = datum.inputs.get("weights")
    return np.ones(shape, np.float32) if given is None or given.shape != shape else given


def assemble(requests: list[PassRequest], kind: LossKind) -> Work:
    """The checked chunks of one call as one batch."""
    data = [datum for request in requests for datum in request.data]
    lengths = [len(datum.tokens) for datum in data]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    on_tokens = kind.needs == "lm_head"
    shapes = [datum.inputs["target_tokens"].shape if on_tokens else datum.tokens.shape for datum in data]
    width = max(shape[1] if len(shape) == 2 else 1 for shape in shapes)
    weights = _column(
        data, offsets, width, "weights", [weights_of(datum, shape) for datum, shape in zip(data, shapes, strict=True)]
    )
    columns: dict[str, Any] = {}
    for name in ("target_tokens", "logprobs", "advantages", "returns", "old_values"):
        used = name in (*kind.required, *kind.optional) and (on_tokens or name != "target_tokens")
        if used and kind.trains and all(name in datum.inputs for datum in data):
            column = _column(data, offsets, width, name, [datum.inputs[name] for datum in data])
            # What has no weight has no influence, whatever it is.
            columns[name] = column if name == "target_tokens" else np.where(weights != 0, column, 0).astype(np.float32)
    cross_entropy = on_tokens and "logprobs" not in kind.required
    if cross_entropy or not on_tokens:
        columns["weights"] = weights
    elif (weights != 1).any():
        columns["mask"] = weights
    tokens = np.concatenate([datum.tokens for datum in data])
    return Work(Targets(offsets, tokens=tokens, **columns), shapes)


def _column(data: list[Datum], offsets: np.ndarray, width: int, name: str, arrays: list[np.ndarray]) -> np.ndarray:
    """[N, width], what a datum does not fill is 0."""
    column = np.zeros((offsets[-1], width), np.int64 if name == "target_tokens" else np.float32)
    for d, array in enumerate(arrays):
        rows = array.reshape(len(data[d].tokens), -1)
        column[offsets[d] : offsets[d + 1], : rows.shape[1]] = rows
    return column


def answers(work: Work, outputs: dict[str, np.ndarray], requests: list[PassRequest]) -> list[bytes]:
    """The answer to each chunk from the outputs of all of them."""
    results, first = [], 0
    offsets = work.batch.offsets
    for request in requests:
        last = first + len(request.data)
        fields: dict[str, list[np.ndarray]] = {}
        for name in (name for name in outputs if name in PER_POSITION):
            rows = [outputs[name][offsets[d] : offsets[d + 1]] for d in range(first, last)]
            fields[name] = [_as_sent(array, work.shapes[d]) for d, array in zip(range(first, last), rows, strict=True)]
        sums = {name: array[first:last].sum() for name, array in outputs.items() if name not in PER_POSITION}
        results.append(write_outputs(fields, len(request.data), {f"{name}:sum": float(total) for name, total in sums.items()}))
        first = last
    return results


def _as_sent(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """[T, width] without the padding, in the shape of the targets."""
    return rows if rows.ndim == 1 else rows[:, : shape[1] if len(shape) == 2 else 1].reshape(shape)

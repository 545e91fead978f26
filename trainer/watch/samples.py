"""Samples of rollouts for people: which trajectories, what is kept of each, and the files under ``rollouts/``.

One file a sampled step, one JSON object a trajectory: its texts, its reward, and for every token what sampler and learner
knew of it. How a sample is shown is in `trainer.watch.rollouts_view` (terminal) and `trainer.watch.report` (a page).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlframe.advantages import total_rewards
from rlframe.config import ConfigError
from rlframe.types import Batch
from trainer.watch.step_metrics import extra_numbers
from trainer.watch.step_names import is_step_name, step_of
from workers.environments.base import FAILURE


@dataclass
class Sample:
    """Trajectories of a training batch and what the policy that was about to learn from them made of their tokens."""

    batch: Batch
    """B trajectories, with the learner's arrays where there are any; heads are left out."""
    logprobs: np.ndarray
    """float32[N], nats, of the trainer's policy before its update; 0 off the mask."""
    entropy: np.ndarray
    """float32[N], nats, of that policy; 0 off the mask."""


def choose(batch: Batch, count: int) -> Batch:
    """At most ``count`` trajectories from the worst to the best reward, evenly spaced in that order, without heads."""
    order = np.argsort(total_rewards(batch), kind="stable")
    which = order[np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(np.int64)]
    return batch.with_columns(head_ids=batch.head_ids[:, :0], head_logprobs=batch.head_logprobs[:, :0]).select(which)


def as_rows(step: int, sample: Sample, tokenizer: Any, max_tokens: int) -> list[dict[str, Any]]:
    """One JSON-like object a trajectory.

    ``tokens`` holds a column for each number: ``piece`` (the token's text), ``id``, ``sampled`` (by the policy), ``reward``,
    and, null where the policy did not sample: ``logprob`` (the sampler's), ``trainer_logprob``, ``ratio`` (trainer over
    sampler), ``advantage``, ``version``, ``entropy``; with a critic also ``value`` and ``return``.

    Args:
        step: the step that trained on it.
        sample: the trajectories.
        tokenizer: turns ids into text.
        max_tokens: of a longer trajectory the first and the last half of this many tokens keep their columns; ``omitted``
            says which rows are missing.
    """
    batch, rows = sample.batch, []
    for b in range(len(batch)):
        span = slice(int(batch.offsets[b]), int(batch.offsets[b + 1]))
        tokens, mask = batch.tokens[span], batch.action_mask[span]
        first = int(np.argmax(mask)) if mask.any() else len(tokens)
        versions = batch.versions[span][mask]
        kept = np.arange(len(tokens))
        if len(tokens) > max_tokens:
            kept = np.r_[: max_tokens - max_tokens // 2, len(tokens) - max_tokens // 2 : len(tokens)]
        rows.append(
            {
                "step": step,
                "prompt_id": batch.prompt_ids[b],
                "index": int(batch.indices[b]),
                "env": batch.envs[b],
                "prompt": _clipped(tokenizer.decode(tokens[:first]), max_tokens),
                "response": _clipped(tokenizer.decode(tokens[first:]), max_tokens),
                "reward": float(batch.rewards[span].sum()),
                "reward_extra": extra_numbers(batch.metadata[b]),
                "reward_failure": batch.metadata[b].get(FAILURE),
                "finish": batch.finish[b],
                "piece": int(batch.piece[b]),
                "last": bool(batch.last[b]),
                "versions": [int(versions.min()), int(versions.max())] if len(versions) else None,
                "length": len(tokens),
                "omitted": [max_tokens - max_tokens // 2, len(tokens) - max_tokens] if len(tokens) > max_tokens else None,
                "tokens": _columns(sample, span, kept, tokenizer),
            }
        )
    return rows


def _clipped(text: str, max_tokens: int) -> str:
    """``text``, or its beginning and end when it is longer than so many tokens could reasonably spell."""
    half = 4 * max_tokens
    return text if len(text) <= 2 * half else f"{text[:half]} ... {text[-half:]}"


def _columns(sample: Sample, span: slice, kept: np.ndarray, tokenizer: Any) -> dict[str, list[Any]]:
    batch = sample.batch
    ids, mask = batch.tokens[span], batch.action_mask[span][kept]
    ours, theirs = sample.logprobs[span], batch.logprobs[span]
    pieces = token_pieces(tokenizer, ids.tolist())

    def column(array: np.ndarray | None) -> list[float | int | None] | None:
        if array is None:
            return None
        return [_number(x) if here else None for x, here in zip(array[span][kept].tolist(), mask, strict=True)]

    with np.errstate(over="ignore"):
        ratio = np.exp(ours.astype(np.float64) - theirs)
    columns: dict[str, list[Any] | None] = {
        "piece": [pieces[i] for i in kept],
        "id": ids[kept].tolist(),
        "sampled": mask.tolist(),
        "logprob": column(batch.logprobs),
        "trainer_logprob": column(sample.logprobs),
        "ratio": [_number(x) if here else None for x, here in zip(ratio[kept].tolist(), mask, strict=True)],
        "advantage": column(batch.advantages),
        "value": column(batch.values),
        "return": column(batch.returns),
        "version": column(batch.versions),
        "reward": [_number(x) for x in batch.rewards[span][kept].tolist()],
        "entropy": column(sample.entropy),
    }
    return {name: values for name, values in columns.items() if values is not None}


def token_pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; a character that several tokens spell belongs to the last of them.

    Together they are ``tokenizer.decode(ids)``. Decoding tokens one by one would lose the spaces of word pieces and turn
    split characters into replacement marks.
    """
    pieces: list[str] = []
    before, done = 0, 0  # ids[before:done] is text already given away, decoded again as the context of what follows
    for end in range(1, len(ids) + 1):
        known, text = tokenizer.decode(ids[before:done]), tokenizer.decode(ids[before:end])
        if len(text) > len(known) and not text.endswith("\ufffd"):
            pieces.append(text[len(known) :])
            before, done = done, end
        else:
            pieces.append("")
    if done < len(ids):
        pieces[-1] = tokenizer.decode(ids[before:])[len(tokenizer.decode(ids[before:done])) :]
    return pieces


def write(directory: Path, step: int, rows: Iterable[dict[str, Any]], max_bytes: int) -> None:
    """Write ``step_NNNNNN.jsonl`` and thin the directory out to ``max_bytes``.

    The first and the newest sample stay; of the others, the one whose neighbours are nearest to each other goes first, so
    that what is left stays spread over the run.
    """
    path = directory / f"step_{step:06d}.jsonl"
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows), "utf-8")
    os.replace(temporary, path)
    files = _samples(directory)
    sizes = {file: file.stat().st_size for file in files}
    while len(files) > 2 and sum(sizes[file] for file in files) > max_bytes:
        steps = [step_of(file) for file in files]
        inner = range(1, len(files) - 1)
        files.pop(min(inner, key=lambda i: steps[i + 1] - steps[i - 1])).unlink()


def drop_after(directory: Path, step: int) -> None:
    """Remove samples of steps after ``step``, which an attempt that died has left."""
    for file in _samples(directory):
        if step_of(file) > step:
            file.unlink()


def sampled_steps(run_dir: Path) -> dict[int, Path]:
    """step -> file, in order."""
    return {step_of(file): file for file in _samples(run_dir / "rollouts")}


def _samples(directory: Path) -> list[Path]:
    """The sample files in the order of their steps; a copy under another name is none."""
    files = [file for file in directory.glob("step_*.jsonl") if is_step_name(file.stem)]
    return sorted(files, key=step_of)


def read(file: Path) -> list[dict[str, Any]]:
    """The trajectories of a sample file.

    Raises:
        ConfigError: a line is not a sample with its tokens.
    """
    rows = []
    # Not splitlines: texts may hold separators, such as U+2028, that JSON leaves as they are.
    for number, line in enumerate(file.read_text("utf-8").removesuffix("\n").split("\n"), 1):
        try:
            row = json.loads(line)
            lengths = {len(values) for values in row["tokens"].values()}
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ConfigError(f"{file}, line {number} is not a rollout with its tokens.") from None
        if len(lengths) != 1:
            raise ConfigError(f"{file}, line {number} has token columns of different lengths.")
        rows.append(row)
    return rows


def _number(x: float | int) -> float | int | None:
    """Six significant digits of a float; null for what JSON has no number for."""
    if isinstance(x, int):
        return x
    return float(f"{x:.6g}") if math.isfinite(x) else None

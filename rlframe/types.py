"""The vocabulary: every noun that travels between rollout workers, controller and learner.

Dimension suffixes used across the library: ``T`` tokens of one trajectory, ``N`` tokens of a batch (all trajectories
concatenated, no padding), ``B`` trajectories, ``A`` action tokens, ``k`` entries of a sampler's top-k head, ``V`` the
vocabulary, ``H`` the hidden size.

Two contracts hold everywhere. Row ``t`` of a per-token array describes token ``t``: its log-probability, head and value
belong to the distribution that *produced* token ``t``. And all per-token arrays of one trajectory have the same length,
checked here, where trajectories are built.

What is not here: losses and metrics (`rlframe.losses`, `rlframe.metrics`), engines (`workers.rollout`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import numpy as np

from rlframe.heads import MASS_TOLERANCE, head_fault

Finish = Literal["stop", "length", "abort", "error"]
FINISHES: tuple[str, ...] = get_args(Finish)

_PER_TOKEN = {
    "tokens": np.int32,
    "action_mask": np.bool_,
    "logprobs": np.float32,
    "head_ids": np.int32,
    "head_logprobs": np.float32,
    "versions": np.int32,
    "rewards": np.float32,
}


@dataclass
class Prompt:
    """One task instance: what an environment starts an episode from."""

    id: str
    """Identity of the problem in its data set; the same in every epoch."""
    index: int
    """Running number in the prompt stream of this run; unique, also across epochs. Its rollouts form one group."""
    tokens: np.ndarray
    """int32[P], the rendered prompt; text is never tokenised again after this."""
    env: str
    """Name of the environment that runs the episode and rewards it."""
    payload: dict[str, Any] = field(default_factory=dict)
    """What the environment needs to reward the answer (JSON-like)."""


@dataclass
class Trajectory:
    """One finished episode, token by token.

    Raises:
        ValueError: lengths differ, an action token has no finite log-probability (or a positive one), the first token is an
            action (nothing produced it), a head is shifted, duplicated or over-full, or ``finish`` is unknown. The message
            names the trajectory and the field.
    """

    tokens: np.ndarray
    """int32[T], prompt, actions and observations in order."""
    action_mask: np.ndarray
    """bool[T], True where the policy sampled the token."""
    logprobs: np.ndarray
    """float32[T], nats; the sampler's processed log-probability when it sampled the token. Ignored off the mask."""
    head_ids: np.ndarray
    """int32[T, k], the sampler's top-k token ids; k = 0 when no head was asked for. Ignored off the mask."""
    head_logprobs: np.ndarray
    """float32[T, k], nats, normalised over the full vocabulary; -inf marks a padded entry. Ignored off the mask."""
    versions: np.ndarray
    """int32[T], policy version that sampled the token; -1 on observations."""
    rewards: np.ndarray
    """float32[T], reward received at the token; 0 where there is none."""
    finish: Finish
    """Why the episode ended: ``stop`` (terminal), ``length`` (a budget cut it), ``abort``, ``error``."""
    prompt_id: str = ""
    """`Prompt.id` of the prompt."""
    index: int = 0
    """`Prompt.index` of the prompt; trajectories with the same index form a group."""
    env: str = ""
    """Name of the environment."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Whatever else is worth logging (JSON-like, small)."""

    def __post_init__(self) -> None:
        for name, dtype in _PER_TOKEN.items():
            setattr(self, name, np.ascontiguousarray(getattr(self, name), dtype=dtype))
        _check_trajectory(self)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def name(self) -> str:
        """How messages refer to this trajectory."""
        return _name(self.prompt_id, self.index)

    @property
    def reward(self) -> float:
        """Sum of all rewards of the episode."""
        return float(self.rewards.sum())

    @property
    def oldest_version(self) -> int:
        """Version that sampled the oldest action token; staleness counts from here. -1 without actions."""
        sampled = self.versions[self.action_mask]
        return int(sampled.min()) if len(sampled) else -1


def _name(prompt_id: str, index: int) -> str:
    return f"trajectory of prompt {prompt_id!r} (index {index})"


def _check_trajectory(t: Trajectory) -> None:
    length = len(t.tokens)
    for name in _PER_TOKEN:
        array = getattr(t, name)
        wanted = 2 if name.startswith("head_") else 1
        if array.ndim != wanted or len(array) != length:
            raise ValueError(f"{t.name}: {name} has shape {array.shape}, expected {length} rows in {wanted} dimension(s).")
    if t.head_ids.shape != t.head_logprobs.shape:
        raise ValueError(f"{t.name}: head_ids {t.head_ids.shape} and head_logprobs {t.head_logprobs.shape} differ in shape.")
    if t.finish not in FINISHES:
        raise ValueError(f"{t.name}: finish is {t.finish!r}, expected one of {', '.join(FINISHES)}.")
    if length and t.action_mask[0]:
        raise ValueError(f"{t.name}: its first token is an action, but no earlier token produced it.")
    actions = t.logprobs[t.action_mask]
    if not np.isfinite(actions).all():
        raise ValueError(f"{t.name}: logprobs has a missing or non-finite value on an action token.")
    if len(actions) and actions.max() > MASS_TOLERANCE:
        raise ValueError(f"{t.name}: logprobs has a positive value ({actions.max():.4g}) on an action token.")
    if t.head_ids.shape[1] and len(actions):
        rows = np.flatnonzero(t.action_mask)
        fault = head_fault(t.tokens[rows], actions, t.head_ids[rows], t.head_logprobs[rows])
        if fault:
            raise ValueError(f"{t.name}: action token {rows[fault[0]]} {fault[1]}.")
    if not np.isfinite(t.rewards).all():
        raise ValueError(f"{t.name}: rewards has a non-finite value.")


@dataclass
class Batch:
    """Many trajectories without padding: per-token arrays concatenated, trajectory ``b`` at rows ``offsets[b]:offsets[b+1]``.

    This is what crosses process boundaries (flat numpy arrays, no per-token Python objects). Build it with
    `Batch.from_trajectories`; the learner adds ``values``, ``advantages`` and ``returns``.
    """

    offsets: np.ndarray
    """int64[B + 1], first row of every trajectory, then N."""
    tokens: np.ndarray
    """int32[N]"""
    action_mask: np.ndarray
    """bool[N]"""
    logprobs: np.ndarray
    """float32[N], nats."""
    head_ids: np.ndarray
    """int32[N, k]"""
    head_logprobs: np.ndarray
    """float32[N, k], nats."""
    versions: np.ndarray
    """int32[N]"""
    rewards: np.ndarray
    """float32[N]"""
    finish: list[str]
    """B reasons, see `Trajectory.finish`."""
    prompt_ids: list[str]
    """B prompt ids."""
    indices: np.ndarray
    """int64[B], `Trajectory.index`; equal within a group."""
    envs: list[str]
    """B environment names."""
    metadata: list[dict[str, Any]]
    """B dictionaries."""
    values: np.ndarray | None = None
    """float32[N], V before token t (the critic's view of the state that produced it)."""
    bootstrap: np.ndarray | None = None
    """float32[B], V after the last token; used where ``finish`` is ``length``."""
    advantages: np.ndarray | None = None
    """float32[N], 0 off the mask."""
    returns: np.ndarray | None = None
    """float32[N], the critic's targets."""

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory]) -> Batch:
        """Concatenate trajectories.

        Raises:
            ValueError: no trajectories, or heads of different widths.
        """
        _check_joinable(trajectories)
        return cls(
            offsets=np.concatenate([[0], np.cumsum([len(t) for t in trajectories])]).astype(np.int64),
            finish=[t.finish for t in trajectories],
            prompt_ids=[t.prompt_id for t in trajectories],
            indices=np.array([t.index for t in trajectories], dtype=np.int64),
            envs=[t.env for t in trajectories],
            metadata=[t.metadata for t in trajectories],
            **{name: np.concatenate([getattr(t, name) for t in trajectories]) for name in _PER_TOKEN},
        )

    @classmethod
    def concat(cls, batches: Iterable[Batch]) -> Batch:
        """Concatenate batches, which were checked when they were built.

        Learner arrays are left out: they belong to one whole batch.

        Raises:
            ValueError: no batches, or heads of different widths.
        """
        parts = list(batches)
        _check_joinable(parts)
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            finish=[reason for part in parts for reason in part.finish],
            prompt_ids=[name for part in parts for name in part.prompt_ids],
            indices=np.concatenate([part.indices for part in parts]),
            envs=[env for part in parts for env in part.envs],
            metadata=[entry for part in parts for entry in part.metadata],
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in _PER_TOKEN},
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[Trajectory]:
        return (self.trajectory(b) for b in range(len(self)))

    @property
    def num_tokens(self) -> int:
        """N, rows of the batch."""
        return int(self.offsets[-1])

    @property
    def num_actions(self) -> int:
        """Action tokens of the batch: the one denominator of every token mean."""
        return int(self.action_mask.sum())

    @property
    def lengths(self) -> np.ndarray:
        """int64[B], tokens of every trajectory."""
        return np.diff(self.offsets)

    def name(self, b: int) -> str:
        """How messages refer to trajectory ``b``."""
        return _name(self.prompt_ids[b], int(self.indices[b]))

    def trajectory(self, b: int) -> Trajectory:
        """Trajectory ``b`` as views into this batch."""
        rows = slice(self.offsets[b], self.offsets[b + 1])
        return Trajectory(
            **{name: getattr(self, name)[rows] for name in _PER_TOKEN},
            finish=self.finish[b],  # type: ignore[arg-type]
            prompt_id=self.prompt_ids[b],
            index=int(self.indices[b]),
            env=self.envs[b],
            metadata=self.metadata[b],
        )

    def select(self, which: Sequence[int] | np.ndarray) -> Batch:
        """The trajectories ``which``, in that order, with their learner arrays."""
        which = np.asarray(which, dtype=np.int64)
        rows = np.concatenate([np.arange(self.offsets[b], self.offsets[b + 1]) for b in which] or [np.zeros(0, np.int64)])
        picked: dict[str, Any] = {"offsets": np.concatenate([[0], np.cumsum(self.lengths[which])]).astype(np.int64)}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "offsets":
                continue
            if isinstance(value, list):
                picked[f.name] = [value[b] for b in which]
            elif f.name in ("indices", "bootstrap"):
                picked[f.name] = None if value is None else value[which]
            else:
                picked[f.name] = None if value is None else value[rows]
        return Batch(**picked)

    def micro_batches(self, max_tokens: int) -> list[Batch]:
        """Cut into whole trajectories of at most ``max_tokens`` rows together (a longer trajectory stands alone), in order."""
        groups: list[list[int]] = []
        filled = 0
        for b, length in enumerate(self.lengths.tolist()):
            if not groups or filled + length > max_tokens:
                groups.append([])
                filled = 0
            groups[-1].append(b)
            filled += length
        return [self.select(group) for group in groups]

    def shard(self, rank: int, ranks: int) -> Batch:
        """The trajectories of one rank: contiguous runs, balanced by tokens. May be empty of trajectories."""
        middle = (self.offsets[:-1] + self.offsets[1:]) / 2
        owner = np.minimum((middle * ranks / max(self.num_tokens, 1)).astype(np.int64), ranks - 1)
        return self.select(np.flatnonzero(owner == rank))


def _check_joinable(parts: Sequence[Trajectory] | Sequence[Batch]) -> None:
    if not parts:
        raise ValueError("A batch needs at least one trajectory.")
    widths = {part.head_ids.shape[1] for part in parts}
    if len(widths) > 1:
        raise ValueError(f"Trajectories of one batch have heads of different widths: {sorted(widths)}.")

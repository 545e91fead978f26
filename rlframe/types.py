"""The vocabulary: every type that travels between rollout workers, controller and learner.

Dimension suffixes used across the library: ``T`` tokens of one trajectory, ``N`` tokens of a batch (all trajectories
concatenated, no padding), ``B`` trajectories, ``A`` action tokens, ``k`` entries of a sampler's top-k head, ``V`` the
vocabulary, ``H`` the hidden size.

Two contracts hold everywhere. Row ``t`` of a per-token array describes token ``t``: its log-probability, head and value
belong to the distribution that *produced* token ``t``. And all per-token arrays of one trajectory have the same length,
checked here, where trajectories are built.

What is not here: how batches are cut (`rlframe.columns`), losses and metrics (`rlframe.losses`, `rlframe.metrics`), engines
(`workers.engines`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args

import numpy as np

from rlframe.columns import Column, Per, TokenBatch
from rlframe.topk import MASS_TOLERANCE, topk_fault

Finish = Literal["stop", "length", "abort", "error"]
FINISHES: tuple[str, ...] = get_args(Finish)


@dataclass
class Prompt:
    """One task instance, from which an environment starts an episode."""

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
    """One finished episode, or a piece of one, token by token.

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
    """Further data worth logging (JSON-like, small)."""
    piece: int = 0
    """Number of this piece of its episode; a whole episode is one piece. What earlier pieces hold is context here."""
    last: bool = True
    """Whether the episode ended with this piece; one that continues has ``finish`` ``length`` and is bootstrapped."""
    actions_before: int = 0
    """Action tokens of the earlier pieces."""
    reward_before: float = 0.0
    """Sum of the rewards of the earlier pieces."""

    def __post_init__(self) -> None:
        for name, column in _of_trajectory("token", "head").items():
            setattr(self, name, np.ascontiguousarray(getattr(self, name), dtype=column.dtype))
        _check_trajectory(self)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def name(self) -> str:
        """How messages refer to this trajectory."""
        return _name(self.prompt_id, self.index)

    @property
    def reward(self) -> float:
        """Sum of all rewards of this piece."""
        return float(self.rewards.sum())


def _name(prompt_id: str, index: int) -> str:
    return f"trajectory of prompt {prompt_id!r} (index {index})"


def _check_trajectory(t: Trajectory) -> None:
    length = len(t.tokens)
    for name, column in _of_trajectory("token", "head").items():
        array = getattr(t, name)
        wanted = 2 if column.per == "head" else 1
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
        fault = topk_fault(t.tokens[rows], actions, t.head_ids[rows], t.head_logprobs[rows])
        if fault:
            raise ValueError(f"{t.name}: action token {rows[fault[0]]} {fault[1]}.")
    if not np.isfinite(t.rewards).all():
        raise ValueError(f"{t.name}: rewards has a non-finite value.")


_ACTOR = frozenset({"actor"})
_CRITIC = frozenset({"critic"})


class Batch(TokenBatch):
    """Many trajectories without padding: the tokens of `TokenBatch` and these columns, the one table of what travels.

    This is what crosses process boundaries (flat numpy arrays, no per-token Python objects). Build it with
    `Batch.from_trajectories`; the controller adds ``values``, ``bootstrap``, ``advantages`` and ``returns``. What comes out of
    Ray is read-only.
    """

    action_mask = Column[np.ndarray](np.bool_)
    """bool[N]"""
    logprobs = Column[np.ndarray](np.float32, readers=_ACTOR)
    """float32[N], nats."""
    head_ids = Column[np.ndarray](np.int32, "head", readers=_ACTOR)
    """int32[N, k]"""
    head_logprobs = Column[np.ndarray](np.float32, "head", readers=_ACTOR)
    """float32[N, k], nats."""
    versions = Column[np.ndarray](np.int32, readers=_ACTOR)
    """int32[N]"""
    rewards = Column[np.ndarray](np.float32, readers=_ACTOR)
    """float32[N]"""
    finish = Column[list[str]](object, "trajectory", readers=_ACTOR)
    """B reasons, see `Trajectory.finish`."""
    prompt_ids = Column[list[str]](object, "trajectory", field="prompt_id")
    """B prompt ids."""
    indices = Column[np.ndarray](np.int64, "trajectory", field="index")
    """int64[B], `Trajectory.index`; equal within a group."""
    envs = Column[list[str]](object, "trajectory", field="env", readers=_ACTOR)
    """B environment names."""
    metadata = Column[list[dict[str, Any]]](object, "trajectory", readers=_ACTOR)
    """B dictionaries."""
    piece = Column[np.ndarray](np.int32, "trajectory", readers=frozenset())
    """int32[B], number of the piece of its episode."""
    last = Column[np.ndarray](np.bool_, "trajectory", readers=frozenset())
    """bool[B], whether the episode ended with it."""
    actions_before = Column[np.ndarray](np.int64, "trajectory", readers=frozenset())
    """int64[B], action tokens of the earlier pieces."""
    reward_before = Column[np.ndarray](np.float64, "trajectory", readers=frozenset())
    """float64[B], rewards of the earlier pieces."""
    values = Column[np.ndarray | None](np.float32, readers=_CRITIC, added=True)
    """float32[N], V before token t (the critic's view of the state that produced it)."""
    bootstrap = Column[np.ndarray | None](np.float32, "trajectory", readers=frozenset(), added=True)
    """float32[B], V after the last token; used where ``finish`` is ``length``."""
    advantages = Column[np.ndarray | None](np.float32, readers=_ACTOR, added=True)
    """float32[N], 0 off the mask."""
    returns = Column[np.ndarray | None](np.float32, readers=_CRITIC, added=True)
    """float32[N], the critic's targets."""

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory]) -> Batch:
        """Concatenate trajectories.

        Raises:
            ValueError: no trajectories, or heads of different widths.
        """
        _check_joinable(trajectories)
        columns: dict[str, Any] = {}
        for name, column in _of_trajectory("token", "head", "trajectory").items():
            parts = [getattr(t, column.field) for t in trajectories]
            if column.per != "trajectory":
                columns[name] = np.concatenate(parts)
            else:
                columns[name] = parts if column.dtype is object else np.array(parts, column.dtype)
        return cls(_offsets([len(t) for t in trajectories]), **columns)

    @classmethod
    def concat(cls, batches: Iterable[Batch]) -> Batch:
        """Concatenate batches, which were checked when they were built.

        Columns that were added are left out: they belong to one whole batch.

        Raises:
            ValueError: no batches, or heads of different widths.
        """
        parts = list(batches)
        _check_joinable(parts)
        declared = _of_trajectory("token", "head", "trajectory")
        joined = {name: column.join(part.columns[name] for part in parts) for name, column in declared.items()}
        return cls(_offsets(np.concatenate([part.lengths for part in parts])), **joined)

    def __iter__(self) -> Iterator[Trajectory]:
        return (self.trajectory(b) for b in range(len(self)))

    @property
    def num_actions(self) -> int:
        """Action tokens of the batch: the one denominator of every token mean."""
        return int(self.action_mask.sum())

    def name(self, b: int) -> str:
        """How messages refer to trajectory ``b``."""
        return _name(self.prompt_ids[b], int(self.indices[b]))

    def trajectory(self, b: int) -> Trajectory:
        """Trajectory ``b`` as views into this batch."""
        rows = slice(self.offsets[b], self.offsets[b + 1])
        return Trajectory(
            **{name: self.columns[name][rows] for name in _of_trajectory("token", "head")},
            finish=self.finish[b],  # type: ignore[arg-type]
            prompt_id=self.prompt_ids[b],
            index=int(self.indices[b]),
            env=self.envs[b],
            metadata=self.metadata[b],
            piece=int(self.piece[b]),
            last=bool(self.last[b]),
            actions_before=int(self.actions_before[b]),
            reward_before=float(self.reward_before[b]),
        )


@cache
def _of_trajectory(*per: Per) -> dict[str, Column[Any]]:
    """The columns of a batch that come from its trajectories."""
    return {name: column for name, column in Batch.schema().items() if column.per in per and not column.added}


def _offsets(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _check_joinable(parts: Sequence[Trajectory] | Sequence[Batch]) -> None:
    if not parts:
        raise ValueError("A batch needs at least one trajectory.")
    widths = {part.head_ids.shape[1] for part in parts}
    if len(widths) > 1:
        raise ValueError(f"Trajectories of one batch have heads of different widths: {sorted(widths)}.")

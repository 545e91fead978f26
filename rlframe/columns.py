"""Tokens without padding, and columns beside them; no column of reinforcement learning is named here.

`TokenBatch` cuts and joins whole sequences; what a column is, says a `Column` in the class body of a kind of batch
(`rlframe.types.Batch`, `rlframe.losses.targets.Targets`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Generic, Literal, Self, TypeVar, cast, overload

import numpy as np

T = TypeVar("T")
Per = Literal["token", "head", "trajectory"]
"""One entry per token [N, ...], k per token (an entry of a sampler's head) [N, k], or one per trajectory [B]."""
Readers = frozenset[str]
ALL: Readers = frozenset({"actor", "critic"})


class Column(Generic[T]):
    """What a column of a batch holds, declared in the class body; reads as the attribute of that name.

    Reading one that a batch does not have gives None if it is ``added`` later, else an AttributeError.
    """

    def __init__(
        self, dtype: Any, per: Per = "token", *, field: str = "", readers: Readers = ALL, added: bool = False, name: str = ""
    ) -> None:
        """``dtype``: of the array; object: a list of Python objects.

        ``field``: attribute of a `Trajectory` that has it, its own name where empty. ``readers``: roles of the learner that
        it travels to. ``added``: by the controller, after rollout.
        """
        self.dtype, self.per, self.readers, self.added = dtype, per, readers, added
        self.name, self.field = name, field or name

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.field = name, self.field or name

    @overload
    def __get__(self, batch: None, owner: type) -> Column[T]: ...
    @overload
    def __get__(self, batch: TokenBatch, owner: type) -> T: ...
    def __get__(self, batch: TokenBatch | None, owner: type) -> Column[T] | T:
        if batch is None:
            return self
        if self.name not in batch.columns and not self.added:
            raise AttributeError(f"The batch has no {self.name}.")
        return cast(T, batch.columns.get(self.name))

    def __set__(self, batch: TokenBatch, value: T) -> None:
        if value is None:
            batch.columns.pop(self.name, None)
        else:
            batch.columns[self.name] = value

    def join(self, parts: Iterable[Any]) -> Any:
        """Columns one after the other."""
        if self.dtype is object:
            return [entry for part in parts for entry in part]
        return np.concatenate(list(parts))

    def pick(self, column: Any, rows: np.ndarray, which: np.ndarray) -> Any:
        """The part of trajectories ``which``, whose tokens are ``rows``; arrays are copied."""
        if self.dtype is object:
            return [column[b] for b in which]
        return column[which if self.per == "trajectory" else rows]


class TokenBatch:
    """B sequences of tokens without padding, sequence ``b`` at rows ``offsets[b]:offsets[b+1]``, and columns beside them."""

    offsets: np.ndarray
    """int64[B + 1], first row of every sequence, then N."""
    columns: dict[str, Any]
    """Columns by name, as arrays or lists; each is declared in the class, or in ``extras``."""
    extras: dict[str, Column[Any]]
    """Columns that the class does not declare; see `add`."""

    tokens = Column[np.ndarray](np.int32)
    """int32[N]"""

    def __init__(self, offsets: np.ndarray, extras: Mapping[str, Column[Any]] | None = None, **columns: Any) -> None:
        """``columns``: those that the batch has; None is none.

        Raises:
            TypeError: a column that is not declared.
        """
        self.offsets, self.extras = offsets, dict(extras or {})
        self.columns = {name: column for name, column in columns.items() if column is not None}
        for name in self.columns:
            if name not in self.declared():
                raise TypeError(f"{type(self).__name__} has no column {name!r}; there are {', '.join(self.declared())}.")

    @classmethod
    @cache
    def schema(cls) -> dict[str, Column[Any]]:
        """The columns that the class declares, by name."""
        bases = reversed(cls.__mro__)
        return {name: column for base in bases for name, column in vars(base).items() if isinstance(column, Column)}

    def declared(self) -> dict[str, Column[Any]]:
        """All columns that this batch may have."""
        return {**self.schema(), **self.extras}

    def add(self, name: str, column: Any, per: Per = "token") -> None:
        """Add a custom column, which then travels with the batch, also to the actor's loss.

        Args:
            name: not that of another column; losses read it as ``batch.columns[name]``.
            column: an array with N or B rows.
            per: ``token`` or ``trajectory``.

        Raises:
            ValueError: the name is taken, or the number of rows is another one.
        """
        rows = len(self) if per == "trajectory" else self.num_tokens
        if name in self.schema():
            raise ValueError(f"{type(self).__name__} has a column {name!r} of its own; choose another name.")
        if len(column) != rows:
            raise ValueError(f"Column {name!r} has {len(column)} rows, but the batch has {rows} (one per {per}).")
        array = np.asarray(column)
        self.extras[name] = Column(array.dtype, per, readers=frozenset({"actor"}), name=name, added=True)
        self.columns[name] = array

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """N, rows of the batch."""
        return int(self.offsets[-1])

    @property
    def lengths(self) -> np.ndarray:
        """int64[B], tokens of every sequence."""
        return np.diff(self.offsets)

    def name(self, b: int) -> str:
        """How messages refer to sequence ``b``."""
        return f"sequence {b} of the batch"

    def with_columns(self, **columns: Any) -> Self:
        """The same sequences with some columns replaced, added or (None) left out; nothing is copied."""
        return type(self)(self.offsets, self.extras, **{**self.columns, **columns})

    def only(self, names: Iterable[str]) -> Self:
        """The same sequences with the columns ``names`` alone; nothing is copied."""
        kept = {name: self.columns[name] for name in names}
        return type(self)(self.offsets, {name: c for name, c in self.extras.items() if name in kept}, **kept)

    @classmethod
    def union(cls, parts: Sequence[Self]) -> Self:
        """One batch from parts that have different columns of the same sequences (see `only`); nothing is copied."""
        columns = {name: column for part in parts for name, column in part.columns.items()}
        extras = {name: column for part in parts for name, column in part.extras.items()}
        return cls(parts[0].offsets, extras, **columns)

    def select(self, which: Sequence[int] | np.ndarray) -> Self:
        """The sequences ``which``, in that order, with all their columns."""
        which = np.asarray(which, dtype=np.int64)
        rows = np.concatenate([np.arange(self.offsets[b], self.offsets[b + 1]) for b in which] or [np.zeros(0, np.int64)])
        offsets = np.concatenate([[0], np.cumsum(self.lengths[which])]).astype(np.int64)
        declared = self.declared()
        picked = {name: declared[name].pick(column, rows, which) for name, column in self.columns.items()}
        return type(self)(offsets, self.extras, **picked)

    def micro_batches(self, max_tokens: int) -> list[Self]:
        """Cut into whole sequences of at most ``max_tokens`` rows together (a longer one stands alone), in order."""
        groups: list[list[int]] = []
        filled = 0
        for b, length in enumerate(self.lengths.tolist()):
            if not groups or filled + length > max_tokens:
                groups.append([])
                filled = 0
            groups[-1].append(b)
            filled += length
        return [self.select(group) for group in groups]

    def shard(self, rank: int, ranks: int) -> Self:
        """The sequences of one rank: contiguous runs, balanced by tokens. May be empty."""
        middle = (self.offsets[:-1] + self.offsets[1:]) / 2
        owner = np.minimum((middle * ranks / max(self.num_tokens, 1)).astype(np.int64), ranks - 1)
        return self.select(np.flatnonzero(owner == rank))

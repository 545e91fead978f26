"""One batch in Ray's object store: every column is put once, on first use, and each role fetches only what it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlframe.columns import Readers
from rlframe.types import Batch


class SharedBatch:
    """References to the columns of ``batch``, those that are added to it later included.

    Heads, by far the largest, are the actor's alone; a critic's update fetches only its targets in addition to what the
    pass before it had fetched.
    """

    def __init__(self, batch: Batch, put: Callable[[Batch], Any]) -> None:
        """``put``: a batch with some of the columns -> a reference to it."""
        self.batch, self._put = batch, put
        self._parts: list[tuple[Readers, Any]] = []
        self._columns: dict[str, Any] = {}
        """What was put, by name; a column that was replaced since is put again."""

    def parts(self, reader: str) -> list[Any]:
        """References to batches that together (`TokenBatch.union`) have the columns that ``reader``, a role, reads now."""
        new: dict[Readers, list[str]] = {}
        declared = self.batch.declared()
        for name, column in self.batch.columns.items():
            if reader in declared[name].readers and self._columns.get(name) is not column:
                new.setdefault(declared[name].readers, []).append(name)
        for readers, names in new.items():
            part = self.batch.only(names)
            self._columns |= part.columns
            self._parts.append((readers, self._put(part)))
        return [part for readers, part in self._parts if reader in readers]

"""Sessions of clients: their users, the time of their last request, their samplers.

See `trainer.server.training` for their models.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from trainer.server.errors import UserError, not_found
from trainer.server.store import Store
from workers.engines.adapters import ServedAdapter


@dataclass
class Sampler:
    """What a sampling session samples from."""

    id: str
    base_model: str
    model_path: str | None = None
    adapter: ServedAdapter | None = None


@dataclass
class ClientSession:
    """One `ServiceClient`."""

    id: str
    user: str
    created: float = field(default_factory=time.time)
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    finished: bool = False
    samplers: dict[str, Sampler] = field(default_factory=dict)
    seen: float = field(default_factory=time.monotonic)
    """Time of the client's last request, monotonic seconds."""


class Clients:
    """All sessions, those of before a restart included."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._all: dict[str, ClientSession] = {}
        for content in store.sessions():
            samplers = {id: _sampler(id, sampler) for id, sampler in content.pop("samplers").items()}
            self._all[content["id"]] = ClientSession(**content, samplers=samplers)

    def create(self, user: str, user_metadata: dict[str, Any] | None, display_name: str | None) -> ClientSession:
        """A new session."""
        session = ClientSession(str(uuid.uuid4()), user, user_metadata=user_metadata, display_name=display_name)
        self._all[session.id] = session
        self.save(session)
        return session

    def get(self, id: str, user: str, *, active: bool = True) -> ClientSession:
        """The session of ``user``; being asked for keeps it awake.

        Raises:
            UserError: (404) this user has no such session; (410) it was finished and ``active`` is asked for.
        """
        session = self._all.get(id)
        if session is None or session.user != user:
            raise not_found(f"session {id!r}")
        if active and session.finished:
            raise UserError(f"Session {id} has finished; create another one.", status=410)
        session.seen = time.monotonic()
        return session

    def of(self, user: str) -> list[ClientSession]:
        """All sessions of ``user``, oldest first."""
        return sorted((s for s in self._all.values() if s.user == user), key=lambda s: s.created)

    def by_id(self, id: str) -> ClientSession | None:
        """A session, regardless of its user."""
        return self._all.get(id)

    def add_sampler(self, session: ClientSession, sampler: Sampler) -> Sampler:
        """Add a sampler to a session, or return the one that it has under that id."""
        if sampler.id in session.samplers:
            return session.samplers[sampler.id]
        session.samplers[sampler.id] = sampler
        self.save(session)
        return sampler

    def sampler(self, id: str, user: str) -> Sampler:
        """A sampler of ``user``.

        Raises:
            UserError: (404) this user has no such sampler.
        """
        session = self._all.get(id.partition(":sample:")[0])
        if session is None or session.user != user or id not in session.samplers:
            raise not_found(f"sampling session {id!r}; its weights may have been deleted")
        session.seen = time.monotonic()
        return session.samplers[id]

    def save(self, session: ClientSession) -> None:
        """Save a session to disk."""
        content = {
            "id": session.id,
            "user": session.user,
            "created": session.created,
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
            "finished": session.finished,
            "samplers": {id: _content(sampler) for id, sampler in session.samplers.items()},
        }
        self._store.save_session(session.id, content)


def _content(sampler: Sampler) -> dict[str, Any]:
    adapter = sampler.adapter and {"key": sampler.adapter.key, "folder": sampler.adapter.folder}
    return {"base_model": sampler.base_model, "model_path": sampler.model_path, "adapter": adapter}


def _sampler(id: str, content: dict[str, Any]) -> Sampler:
    adapter = content.pop("adapter")
    return Sampler(id, **content, adapter=ServedAdapter(**adapter) if adapter else None)

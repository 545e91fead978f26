"""Errors as clients see them: one sentence, and whether the client or the server is at fault."""

from __future__ import annotations

import logging
from typing import Any

from rlframe.config import ConfigError
from workers.rollout.sampler import NoSampler

logger = logging.getLogger("rlframe.server")


class UserError(ValueError):
    """The request cannot be done; the message is one sentence for the client.

    Args:
        message: the sentence.
        status: HTTP status where the request is answered at once.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def not_found(what: str) -> UserError:
    """Also for what belongs to another user, so that clients cannot learn which names others use."""
    return UserError(f"There is no {what}.", status=404)


def explain(error: BaseException, request_id: str) -> dict[str, Any]:
    """The failure of a request as the client sees it; the reason of a server's fault goes to the log only."""
    cause = getattr(error, "cause", None)  # Ray's copy of an error has the worker's traceback in its message
    plain = cause if isinstance(cause, BaseException) else error
    if isinstance(plain, UserError | ConfigError):
        return {"error": str(plain), "category": "user"}
    if isinstance(plain, NoSampler):
        return {"error": str(plain), "category": "server"}
    logger.error("request %s failed", request_id, exc_info=error)
    return {"error": f"The server failed; its log has the reason under request {request_id}.", "category": "server"}

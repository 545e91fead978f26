"""API keys: which user sends a request. Only digests of keys are kept in memory, and they are compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request

from rlframe.config import ConfigError
from trainer.server.errors import UserError

PREFIX = "tml-"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Keys:
    """The keys that a server accepts."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        """``keys``: key to the name of its user; several keys may have one user."""
        self._digests = [(_digest(key), user) for key, user in keys.items()]

    def user(self, key: str | None) -> str:
        """The user of a key.

        Raises:
            UserError: none was given, or an unknown one.
        """
        given, found = _digest(key or ""), None
        for digest, user in self._digests:  # all of them, so that time tells nothing
            if hmac.compare_digest(digest, given):
                found = user
        if found is None:
            raise UserError("The API key is missing or not one of this server's; pass it as X-API-Key.", status=401)
        return found


def read_keys(keys_file: str | None, folder: Path) -> tuple[Keys, Path | None]:
    """Keys of ``keys_file``, or the one kept in ``folder``, which is generated if needed.

    Returns:
        The keys, and the path of the generated one; None with a file of the user.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line is not a key.
    """
    if keys_file is None:
        own = folder / "api_key"
        if not own.exists():
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{PREFIX}{secrets.token_urlsafe(32)}\n")
        return Keys({own.read_text().strip(): "default"}), own
    try:
        lines = Path(os.path.expanduser(keys_file)).read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"server.keys_file={keys_file} cannot be read: {error.strerror}.") from None
    return Keys(_parse(keys_file, lines)), None


def _parse(keys_file: str, lines: list[str]) -> dict[str, str]:
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        key = words[-1]
        user = words[0] if len(words) == 2 else f"key-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        if len(words) > 2 or not key.startswith(PREFIX) or len(key) < 12 or not _NAME.fullmatch(user):
            raise ConfigError(
                f"server.keys_file={keys_file}, line {number}, is not a key: write {PREFIX}... (12 characters or more), or a "
                "name and a key."
            )
        keys[key] = user
    if not keys:
        raise ConfigError(f"server.keys_file={keys_file} has no keys.")
    return keys


async def _current_user(request: Request) -> str:
    header = request.headers.get("X-API-Key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
    return request.app.state.service.keys.user(header)


User = Annotated[str, Depends(_current_user)]
"""The user of a request, as a parameter of a route."""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()

"""Takes secrets out of what is shown or uploaded: configurations and command lines. Nothing is read from the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_NAME = re.compile(
    r"(^|[._-])((api|access|private)[_-]?key|token|secret|passw(or)?d|passphrase|credentials?|authorization|bearer)$",
    re.IGNORECASE,
)
_VOCABULARY = re.compile(r"(^|[._-])(bos|eos|pad|unk|stop|sep|cls|mask)[_-]token$", re.IGNORECASE)
_VALUE = re.compile(r"\b(sk|hf|gh[opsu]|xox[abp]|wandb_v\d)[-_][A-Za-z0-9_-]{16,}|\bBearer\s+\S+")
_LOGIN = re.compile(r"(\w+://)[^/\s@]+@")


def without_secrets(tree: Any) -> Any:
    """A copy of a tree of mappings, lists and plain values in which ``***`` stands for what looks like a secret.

    A value is hidden when its name says so (``api_key``, ``hf_token``, ``password``, ...); in any text, logins of addresses
    and well-known forms of keys are.
    """
    if isinstance(tree, Mapping):
        return {name: HIDDEN if value and _is_secret(str(name)) else without_secrets(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [without_secrets(value) for value in tree]
    return redact_text(tree) if isinstance(tree, str) else tree


def redact_text(text: str) -> str:
    """The same for a line of text; of ``name=value`` and ``name: value`` the value goes when the name says so."""
    text = _LOGIN.sub(rf"\1{HIDDEN}@", _VALUE.sub(HIDDEN, text))
    return re.sub(
        r"""([\w.-]+)(["']?\s*[=:]\s*)("[^"]*"|'[^']*'|[^\s,{}\[\]]+)""",
        lambda found: f"{found[1]}{found[2]}{HIDDEN}" if _is_secret(found[1]) else found[0],
        text,
    )


def _is_secret(name: str) -> bool:
    return bool(_NAME.search(name)) and not _VOCABULARY.search(name)

"""Removes secrets from everything that is written or shown: configurations, variables, command lines, messages.

The same rule applies everywhere. Nothing is read from the environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "***"


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_ALWAYS = _set("""secret secrets password passwords passwd pwd passphrase credential credentials authorization bearer""")
"""Words that make a secret wherever they stand in a name."""
_JOINED = re.compile(r"(password|passwd|passphrase|secret|credentials?|(api|secret|access|private|auth|ssh)keys?)$")
_JOINED_TOKEN = re.compile(r"(hf|api|auth|access|refresh|bearer|session|user|id)tokens?$")
_AUTH = _set("""auth oauth""")
_OF_KEYS = _AUTH | _set("""api access private secret ssh signing encryption master session license""")
"""Words before ``keys``, ``tokens`` or ``key id`` that make secrets of them."""
_PLAIN_KEY = _set(
    """prompt answer response row column label field dict json yaml map sort group index primary foreign partition cache hash
    lookup tool tools public image images text message messages reward score target input output metric data dataset batch
    state id by"""
)
"""Words before ``key`` that make it a name of data."""
_PLAIN_TOKEN = _set(
    """bos eos pad unk stop sep cls mask image video audio start end begin think per max min num n first last next prev new
    boundary special added turn prompt response vocab"""
)
"""Words before ``token`` that make it a piece of text."""
_ABOUT = _set(
    """file files path paths dir folder name names length len size count limit type mode timeout s ms ttl expiry required
    enabled policy algorithm version"""
)
"""Last words of names that speak about a secret and do not hold it."""
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|[^\W\d_]+")
_VALUE = re.compile(
    r"\b(?=[\w-]*\d)(sk-[\w-]{16,}|hf_[A-Za-z0-9]{16,}|gh[oprsu]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{16,}"
    r"|wandb_v\d_\w{16,}|tml-[\w-]{16,}|AKIA[A-Z0-9]{12,}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
    r"|\b(?i:bearer|basic)\s+(?=\S*[\d=])[\w.~+/-]{8,}=*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)",
    re.DOTALL,
)
"""Well-known forms of keys."""
_LOGIN = re.compile(r"(\w[\w+.-]*://)[^/\s]*@|(\w[\w+.-]*:/)[^/\s:@]+:[^/\s]*@")
"""Also with one slash, which is what `pathlib` leaves."""
_PAIR = re.compile(r"""(?<![\w.-])(-{0,2}[\w.-]+)(["']?\s*[=:]\s*)("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^\s,{}\[\]&;"']+)""")


def is_secret(name: str) -> bool:
    """Whether what is called ``name`` is a secret; of ``a.b.c``, whether any part is (``api_key``, ``credentials.user``)."""
    return any(_is_secret(_words(part)) for part in name.split("."))


def without_secrets(tree: Any) -> Any:
    """A copy of a tree of mappings, lists and plain values in which ``***`` stands for what looks like a secret.

    A value, or all that is below it, is hidden when its name says so (`is_secret`); in any text, `redact_text` applies.
    """
    if isinstance(tree, Mapping):
        return {name: HIDDEN if _holds(str(name), value) else without_secrets(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [without_secrets(value) for value in tree]
    return redact_text(tree) if isinstance(tree, str) else tree


def redact_text(text: str) -> str:
    """The same for text: logins of addresses, well-known forms of keys, and of ``name=value`` and ``name: value`` the value."""
    text = _LOGIN.sub(rf"\1\2{HIDDEN}@", _VALUE.sub(HIDDEN, text))
    return _PAIR.sub(_without_value, text)


def secret_names(tree: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of the values that `without_secrets` changes."""
    for name, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        key = f"{prefix}.{name}" if prefix else str(name)
        if _holds(str(name), value):
            yield key
        elif isinstance(value, Mapping | list | tuple):
            yield from secret_names(value, key)
        elif isinstance(value, str) and redact_text(value) != value:
            yield key


def hidden_names(tree: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of the values that `without_secrets` has changed in what was read back."""
    for name, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        key = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Mapping | list | tuple):
            yield from hidden_names(value, key)
        elif isinstance(value, str) and re.search(rf"(^|[\s=:'\"/]){re.escape(HIDDEN)}($|[@\s,;&'\"])", value):
            yield key


def _holds(name: str, value: Any) -> bool:
    """Whether ``value`` is worth hiding under ``name``: something that is there, and not a switch or the id of a token."""
    weak = _words(name) in (["token"], ["key"]) and isinstance(value, int)
    return bool(value) and not isinstance(value, bool) and not weak and is_secret(name)


def _without_value(found: re.Match[str]) -> str:
    """A pair, hidden if it is a secret; its value may have pairs of its own, as in ``url=http://host/?api_key=...``."""
    value = HIDDEN if _is_secret_pair(found) else _PAIR.sub(_without_value, found[3])
    return f"{found[1]}{found[2]}{value}"


def _is_secret_pair(found: re.Match[str]) -> bool:
    name, value = found[1].lstrip("-"), found[3].strip("\"'")
    if (
        not value
        or value.lower() in ("null", "none", "true", "false")
        or (_words(name) in (["token"], ["key"]) and value.isdigit())
    ):
        return False
    return is_secret(name)


def _words(name: str) -> list[str]:
    """``WANDB_API_KEY``, ``wandbApiKey``, ``wandb-api-key_2`` -> wandb, api, key."""
    return [word.lower() for word in _WORD.findall(name)]


def _is_secret(words: list[str]) -> bool:
    if not words or words[-1] in _ABOUT:
        return False
    *before, last = words
    if _ALWAYS.intersection(words) or any(_JOINED.search(word) for word in words) or last in _AUTH:
        return True
    if last == "id" and before:
        *before, last = before
        return last == "key" and bool(_OF_KEYS.intersection(before))
    if last in ("keys", "tokens"):
        return bool(_OF_KEYS.intersection(before))
    if last == "key":
        return not before or before[-1] not in _PLAIN_KEY
    if last == "token":
        return not before or before[-1] not in _PLAIN_TOKEN
    return bool(_JOINED_TOKEN.search(last)) or (
        bool(_AUTH.intersection(before)) and last in ("header", "headers", "code", "cookie")
    )

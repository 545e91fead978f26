"""The settings as a list for people, from the schema's own docstrings. Imports nothing heavy."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from rlframe.config import ConfigError
from rlframe.config.validate import nearest
from trainer.settings.config import Config


@dataclass(frozen=True)
class Setting:
    """One key of the schema."""

    key: str
    """For example ``actor.optim.lr``."""
    default: str
    """The schema's default, as it would be typed."""
    meaning: str
    """Its docstring, on one line, and its range."""


def settings(of: Any = None, prefix: str = "") -> list[Setting]:
    """All settings of a section (an instance of its dataclass; None: the whole schema), in the order of the schema."""
    of = Config() if of is None else of
    docs = _docstrings(type(of))
    found = []
    for field in fields(of):
        key, default = prefix + field.name, getattr(of, field.name)
        if is_dataclass(default):
            found += settings(default, f"{key}.")
        else:
            if isinstance(field.default, str) and "${" in field.default:  # as it would be typed
                default = field.default
            found.append(Setting(key, _typed(default), docs[field.name] + _range(field.metadata)))
    return found


def as_text(section: str | None = None) -> str:
    """One line a setting, of all or of one section.

    Raises:
        ConfigError: there is no such section or setting.
    """
    known = settings()
    chosen = [s for s in known if section is None or s.key == section or s.key.startswith(f"{section}.")]
    if not chosen:
        near = nearest(section, {part for s in known for part in _parents(s.key)})
        raise ConfigError(f"{section} is not a setting; did you mean {near}?")
    width = max(len(f"{s.key}={s.default}") for s in chosen)
    return "\n".join(f"{f'{s.key}={s.default}':<{width}}  {s.meaning.replace('``', '')}" for s in chosen)


def as_markdown() -> str:
    """docs/settings.md: a table for each section."""
    lines = [
        "# Settings",
        "",
        "Written by `make docs` from the sections of `trainer/settings/config.py`. These are the defaults of the schema: a",
        "choice (a model, a task, a preset) may set another one, and `rlframe train --dry-run` shows what a job ends up with.",
    ]
    section: str | None = None
    for setting in settings():
        parent = setting.key.rpartition(".")[0]
        if parent != section:
            section = parent
            lines += ["", f"### {section or 'The job'}", "", "| setting | default | meaning |", "|---|---|---|"]
        meaning = setting.meaning.replace("``", "`").replace("|", "\\|")
        lines.append(f"| `{setting.key}` | `{setting.default}` | {meaning} |")
    return "\n".join(lines)


def _range(metadata: Mapping[str, Any]) -> str:
    """The rule beside a field as a sentence; names are in the docstring already."""
    if "rule" not in metadata or "out of range" not in metadata["rule"].refusal:
        return ""
    wanted = metadata["rule"].wanted
    return f" {wanted[0].upper()}{wanted[1:]}."


def _docstrings(of: type) -> dict[str, str]:
    (node,) = [n for n in ast.parse(inspect.getsource(of)).body if isinstance(n, ast.ClassDef) and n.name == of.__name__]
    docs = {}
    for line, after in zip(node.body, node.body[1:], strict=False):
        documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and documented:
            docs[line.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return docs


def _typed(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(_typed, value))}]"
    return str(value) or "''"


def _parents(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]

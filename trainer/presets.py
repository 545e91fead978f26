"""The algorithm presets as a list for people. Reads the YAML files only, so that it is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_PACKAGE = Path(__file__).parents[1]


def configs_dir() -> Path:
    """The folder of the groups: inside an installed wheel, else beside the packages of a checkout."""
    installed = _PACKAGE / "rlframe" / "_configs"
    return installed if installed.is_dir() else _PACKAGE / "configs"


def presets() -> dict[str, dict[str, Any]]:
    """name -> what the preset sets, in alphabetical order; settings outside of ``algorithm`` have their dotted keys."""
    return {path.stem: _settings(path.read_text()) for path in sorted((configs_dir() / "algorithm").glob("*.yaml"))}


def _settings(text: str) -> dict[str, Any]:
    settings = yaml.safe_load(text)
    if not text.startswith("# @package _global_"):
        return settings
    return settings.pop("algorithm") | _flat(settings)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def as_text() -> str:
    """One line a preset."""
    known = presets()
    width = max(map(len, known))
    lines = [f"{name:<{width}}  {settings['description']}" for name, settings in known.items()]
    return "\n".join([*lines, "", "Choose one with `rlframe train algorithm=NAME`; any setting of it can be overridden."])


def as_markdown() -> str:
    """docs/presets.md: a table with the settings of every preset."""
    rows = [
        "# Presets",
        "",
        "Written by `make docs` from `configs/algorithm/`. What a preset leaves out has the schema's default",
        "([settings](settings.md)): one rollout per prompt, and advantages by skip-observation GAE from a critic.",
        "",
        "| preset | what it is | settings |",
        "|---|---|---|",
    ]
    for name, settings in presets().items():
        rest = ", ".join(f"`{key}={_value(value)}`" for key, value in settings.items() if key != "description")
        rows.append(f"| `{name}` | {settings['description']} | {rest} |")
    return "\n".join(rows)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)

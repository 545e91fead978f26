"""The algorithm presets as a list for people. Reads the lines of their files only: instant, and without a package."""

from __future__ import annotations

import re
from pathlib import Path

_PACKAGE = Path(__file__).parents[2]


def configs_dir() -> Path:
    """The folder of the groups: inside an installed wheel, else next to the packages of a checkout."""
    installed = _PACKAGE / "rlframe" / "_configs"
    return installed if installed.is_dir() else _PACKAGE / "configs"


def presets() -> dict[str, dict[str, str]]:
    """name -> what the preset sets, as it is written there, in alphabetical order.

    Settings of ``algorithm`` have their bare names, those of other sections their dotted keys.
    """
    return {path.stem: _settings(path.read_text("utf-8")) for path in sorted((configs_dir() / "algorithm").glob("*.yaml"))}


def _settings(text: str) -> dict[str, str]:
    """The lines ``name: value``, below the lines ``section:`` where a preset sets more than the algorithm."""
    settings, section = {}, ""
    for line in text.splitlines():
        if found := re.match(r"(\w+):\s*$", line):
            section = "" if found[1] == "algorithm" else f"{found[1]}."
        elif found := re.match(r"\s*(\w+):(.*)", line):
            settings[section + found[1]] = _unquoted(found[2].strip())
    return settings


def _unquoted(value: str) -> str:
    quoted = re.fullmatch(r"(['\"])(.*)\1(\s+#.*)?", value)
    plain = quoted[2] if quoted else re.sub(r"\s+#.*", "", value)
    return plain.replace(", ", ",") if plain.startswith("[") else plain  # as it can be typed without quotes


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
        rest = ", ".join(f"`{key}={value}`" for key, value in settings.items() if key != "description")
        rows.append(f"| `{name}` | {settings['description']} | {rest} |")
    return "\n".join(rows)

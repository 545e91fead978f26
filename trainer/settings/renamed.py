"""Settings written as an older version had them: read as what they are now, with one sentence on the console each.

An entry of `RENAMED` stays for one version. Values: `rlframe.config.algorithm.band`.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from rlframe.config import ConfigError
from rlframe.config.algorithm import band

RENAMED: dict[str, str] = {}
"""Old name -> new name, of a setting or of a whole section, dotted."""
REMOVED = {"critic.per_env": "a run has one environment, and its critic is that environment's already"}
"""Former settings and why they are gone; a saved configuration may still have them."""
BANDS = ("algorithm.rollout_is_threshold", "algorithm.rollout_rs_threshold")
"""Settings whose bands were texts, ``"lo_hi"``."""


def current(key: str) -> str:
    """The name that a setting has now; one sentence where ``key`` is its old one."""
    for old, new in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            now = new + key.removeprefix(old)
            warn(f"{key} is called {now} now; write {now}, since the next version does not know the old name.")
            return now
    return key


def rename(root: yaml.Node) -> None:
    """Move what a parsed ``config.yaml`` has under old names to the new ones.

    Raises:
        ConfigError: the file has both names of a setting.
    """
    for old, new in RENAMED.items():
        found = _section(root, old.split(".")[:-1])
        for pair in list(found.value) if found else []:
            if pair[0].value == old.rpartition(".")[2]:
                found.value.remove(pair)  # type: ignore[union-attr]
                place = _section(root, new.split(".")[:-1], make=True)
                name = new.rpartition(".")[2]
                if place is None or any(key.value == name for key, _ in place.value):
                    raise ConfigError(f"{old} and {new} are two names of one setting; leave out {old}.")
                place.value.append((yaml.ScalarNode("tag:yaml.org,2002:str", name), pair[1]))
                current(old)


def name_bands(composed: Any) -> None:
    """One sentence for each band that is written as a text."""
    for key in BANDS:
        value = OmegaConf.select(composed, key)
        if isinstance(bounds := band(value), list) and isinstance(value, str):
            wanted = f"{key}=[{bounds[0]:g},{bounds[1]:g}]"
            warn(f"{key}={value} is read as a band; write {wanted}, since the next version does not know the old form.")


def refuse_torn_bands(folder: Path) -> None:
    """Refuse a band in its old form without quotes in a file of a group, which reaches us as one number.

    Raises:
        ConfigError: one sentence that names the file and says what to write.
    """
    names = "|".join(key.rpartition(".")[2] for key in BANDS)
    for path in sorted(folder.glob("*/*.yaml")):
        for name, low, high in re.findall(rf"^\s*({names}):\s*([\d.]+)_([\d.]+)\s*(?:#.*)?$", path.read_text("utf-8"), re.M):
            raise ConfigError(
                f"{path} has {name}: {low}_{high}, which YAML reads as one number; write {name}: [{low}, {high}]."
            )


@functools.cache
def warn(sentence: str) -> None:
    """Once in a process; on stderr, since stdout may be a configuration."""
    print(f"rlframe: {sentence}", file=sys.stderr)


def _section(node: yaml.Node | None, path: list[str], make: bool = False) -> yaml.MappingNode | None:
    """The mapping at a path of names; None where there is none and it is not to be made."""
    for name in path:
        if not isinstance(node, yaml.MappingNode):
            return None
        inside = next((value for key, value in node.value if key.value == name), None)
        if inside is None and make:
            inside = yaml.MappingNode("tag:yaml.org,2002:map", [])
            node.value.append((yaml.ScalarNode("tag:yaml.org,2002:str", name), inside))
        node = inside
    return node if isinstance(node, yaml.MappingNode) else None

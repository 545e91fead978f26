"""Every command of docs/clusters.md, given to the program that it names, as far as that needs no cluster.

`test_cluster` runs those of a job on a real one; `test_docs` follows the links.
"""

import os
import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.support.ray_cluster import check_ray_command
from trainer.cli import main
from trainer.settings.compose import compose

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "clusters.md").read_text()


def commands() -> list[str]:
    """Lines of the code blocks."""
    return [line for block in re.findall(r"^```\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE) for line in block.splitlines()]


@pytest.mark.parametrize("line", commands())
def test_a_command_is_understood_by_its_program(line):
    words = shlex.split(line)
    while re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    if words[0] == "rlframe":
        check_ours(words[1:])
    elif words[0] == "ray":
        entrypoint = check_ray_command(words).get("entrypoint")
        if entrypoint:
            assert entrypoint[0] == "rlframe"
            check_ours(list(entrypoint)[1:])
    elif words[0] == "docker":
        assert (ROOT / words[words.index("-f") + 1]).exists()
    else:
        assert words[:3] == ["kubectl", "apply", "-f"] and yaml.safe_load((ROOT / words[3]).read_text())


def check_ours(words: list[str]) -> None:
    """Options by the parser, overrides by composing them; a job's request as ``--dry-run`` shows it."""
    arguments, rest = main._parser().parse_known_args(words)
    overrides = [*getattr(arguments, "overrides", []), *rest]
    assert not [word for word in overrides if word.startswith("-")]
    if words[0] == "train":
        compose(overrides)
    elif words[0] == "submit":
        assert main.main([*words, "--dry-run"] if "--dry-run" not in words else words) == 0


def test_every_command_and_every_check_is_on_the_page():
    lines = " ".join(commands())
    for command in ("rlframe doctor", "rlframe submit", "ray job submit", "--resume", "--dry-run"):
        assert command in lines
    for verb in ("list", "status", "logs", "stop"):
        assert f"rlframe job {verb}" in lines


def test_files_that_the_readme_of_docker_names_exist():
    named = re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docker" / "README.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(set(os.listdir(ROOT / "docker")) - {"README.md"})

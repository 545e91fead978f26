"""The documentation holds: links lead somewhere, commands are commands, quoted messages are the program's own."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from trainer.cli import main
from trainer.settings.compose import compose, load_yaml, to_yaml
from trainer.watch import glossary

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "docker" / "README.md",
    *DOCS,
    *sorted(ROOT.glob("examples/*/README.md")),
]
MAKEFILE = (ROOT / "Makefile").read_text()
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:do )?((?:\S*/)?(?:rlframe|make|python) .*)")


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return BLOCK.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """What GitHub and mkdocs call the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()) for title in titles]
    return {title.strip().replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = re.findall(
        r"!?\[[^\]]*\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", prose(page).replace("](", "]\0(")).replace("\0", "")
    )
    for link in links:
        if re.match(r"https?:|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} does not exist"
        assert ROOT in [target, *target.parents], f"{link} leaves the repository"
        assert not anchor or anchor in anchors(target), f"{link} has no such heading"


def test_every_page_can_be_found():
    """Linked from another page, or named in the navigation of the site."""
    linked = set(re.findall(r"\]\(([\w-]+\.md)", "".join(page.read_text() for page in DOCS)))
    listed = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {page.name for page in DOCS} <= linked | listed


def commands() -> list:
    """Every command in a block of shell, one test each."""
    found = []
    for page in PAGES:
        folder = page.parent if page.parent.parent.name == "examples" else ROOT
        shell = [block for language, block in BLOCK.findall(page.read_text()) if language in ("", "bash", "sh")]
        for line in "".join(shell).replace("\\\n", " ").splitlines():
            for part in re.split(r"\s&&\s|;\s|\s--\s+(?=rlframe )", line):
                if command := COMMAND.match(part.strip()):
                    program, *words = shlex.split(command[1], comments=True)
                    name = f"{page.name}: {' '.join([Path(program).name, *words])}"
                    found.append(pytest.param(Path(program).name, words, folder, id=name[:100]))
    return found


@pytest.mark.parametrize(("program", "words", "folder"), commands())
def test_commands_are_commands(program, words, folder, tmp_path, capsys):
    if program == "make":
        targets = [word for word in words if "=" not in word and not word.startswith("-")]
        assert all(re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE) for target in targets)
    elif program == "python":
        file = words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0]
        assert words[0].startswith("-") or any((base / file).exists() for base in (folder, ROOT))
    else:
        check_rlframe(words, tmp_path, capsys)


def check_rlframe(words: list[str], tmp_path: Path, capsys) -> None:
    words = [word.replace("$seed", "0") for word in words]
    arguments, rest = main._parser().parse_known_args(words)
    assert not [word for word in rest if word.startswith("-")], f"{rest} is not an option of rlframe {words[0]}"
    overrides = [*getattr(arguments, "overrides", ()), *rest]
    if words[0] == "resume":
        (tmp_path / "config.yaml").write_text(to_yaml(compose([])))
        load_yaml(tmp_path / "config.yaml", overrides)
    elif "overrides" in arguments:
        compose(overrides)
    elif words[0] in ("presets", "settings", "metrics"):
        assert main.main([word for word in words if word not in ("[SECTION]", "[NAME]")]) == 0 and capsys.readouterr().out


def test_quoted_messages_are_the_programs_own():
    sources = "\n".join(
        file.read_text() for folder in ("rlframe", "workers", "trainer") for file in (ROOT / folder).rglob("*.py")
    )
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)  # a message over several lines of code
    page = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## It runs")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) > 10
    for message in messages:
        assert message in joined, f"{message!r} is no message any more"


def test_names_of_metrics_in_the_documentation_exist():
    groups = {metric.pattern.partition("/")[0] for metric in glossary.metrics() if "/" in metric.pattern}
    for page in [ROOT / "README.md", *DOCS]:
        for name in re.findall(rf"`((?:{'|'.join(groups)})/[\w/]+)`", page.read_text()):
            assert glossary.find(name), f"{page.name}: {name}"


def test_the_site_pins_what_the_runtime_pins():
    def pins(file: str) -> dict[str, str]:
        lines = (ROOT / "requirements" / file).read_text().splitlines()
        return dict(line.partition(";")[0].strip().lower().split("==") for line in lines if "==" in line)

    site, others = pins("docs.txt"), pins("cpu.txt") | pins("dev.txt")
    assert site and {name: pin for name, pin in site.items() if others.get(name, pin) != pin} == {}
    assert "train" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

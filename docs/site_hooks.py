"""What mkdocs does with these pages besides rendering: pictures of the examples come along, other links that leave ``docs/``
become paths, and no page is left out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

DOCS = Path(__file__).parent


def on_config(config: Any) -> Any:
    """Complete the navigation with the pages that exist."""
    listed = [page for entry in config["nav"] for page in entry.values()]
    config["nav"] = [entry for entry in config["nav"] if (DOCS / next(iter(entry.values()))).exists()]
    config["nav"] += [page.name for page in sorted(DOCS.glob("*.md")) if page.name not in listed]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pictures that the examples drew."""
    for picture in sorted((DOCS.parent / "examples").glob("*/*.png")):
        name = picture.relative_to(DOCS.parent).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A site has no code to link to: ``[text](../path)`` keeps its text and names the path in the repository."""
    markdown = re.sub(r"!\[([^\]]*)\]\(\.\./(examples/[^)]+\.png)\)", r"![\1](\2)", markdown)
    return re.sub(
        r"\[([^\]]+)\]\(\.\./(?:\.\./)*([^)]+)\)",
        lambda link: f"`{link[2]}`" if link[1].strip("`") == link[2] else f"{link[1]} (`{link[2]}`)",
        markdown,
    )

"""What mkdocs does with these pages besides rendering: links that leave ``docs/`` become paths, and no page is left out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent


def on_config(config: Any) -> Any:
    """Complete the navigation with the pages that exist."""
    listed = [page for entry in config["nav"] for page in entry.values()]
    config["nav"] = [entry for entry in config["nav"] if (DOCS / next(iter(entry.values()))).exists()]
    config["nav"] += [page.name for page in sorted(DOCS.glob("*.md")) if page.name not in listed]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A site has no code to link to: ``[text](../path)`` keeps its text and names the path in the repository."""
    return re.sub(
        r"\[([^\]]+)\]\(\.\./(?:\.\./)*([^)]+)\)",
        lambda link: f"`{link[2]}`" if link[1].strip("`") == link[2] else f"{link[1]} (`{link[2]}`)",
        markdown,
    )

"""``rlframe rollouts``: sampled trajectories in the terminal, token by token. What a sample holds: `trainer.watch.samples`."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rlframe.config import ConfigError
from trainer.watch import samples

COLUMNS = {"logprob": "log q", "ratio": "ratio", "value": "value", "advantage": "advantage", "version": "version"}
"""Column of a sample -> its title in the table of tokens; log q is the sampler's log-probability."""


def show_rollouts(
    run: Path, step: int | None, prompt: str | None, count: int, max_tokens: int, console: Console | None = None
) -> None:
    """Print at most ``count`` trajectories of a run.

    Args:
        run: the run directory.
        step: which sampled step; None: the newest one, or with ``prompt`` all of them.
        prompt: only trajectories of this prompt id.
        count: most trajectories.
        max_tokens: most rows of the table under a trajectory; 0: no table.
        console: where to; None: stdout.

    Raises:
        ConfigError: the run has no samples, none of this step, or none of this prompt.
    """
    files = samples.sampled_steps(run)
    if not files:
        raise ConfigError(f"{run} has no sampled rollouts; log.rollouts_every says how often a run writes some.")
    if step is not None and step not in files:
        raise ConfigError(f"{run} has no sample of step {step}; there are {', '.join(map(str, files))}.")
    steps = [step] if step is not None else list(files) if prompt is not None else [max(files)]
    rows = [row for number in steps for row in samples.read(files[number])]
    if prompt is not None:
        rows = [row for row in rows if row["prompt_id"] == prompt]
        if not rows:
            raise ConfigError(f"No sampled rollout is of the prompt {prompt}; leave --prompt out to see which there are.")
    console = console or Console()
    for row in rows[:count]:
        console.print(describe(row, max_tokens))
    if len(rows) > count:
        console.print(Text(f"{len(rows) - count} more of the same; -n {len(rows)} shows them all.", style="dim"))


def describe(row: dict[str, Any], max_tokens: int) -> RenderableType:
    """A trajectory: a line of facts, its text with sampled tokens coloured by advantage, and the table of its tokens."""
    facts = f"step {row['step']}  prompt {printable(row['prompt_id'])}  reward {_short(row['reward'])}  {row['finish']}"
    facts += f"  piece {row['piece']}" if row.get("piece") or not row.get("last", True) else ""
    facts += "".join(f"  {printable(name)} {_short(x)}" for name, x in row.get("reward_extra", {}).items())
    facts += f"  no reward: {printable(row['reward_failure'])}" if row.get("reward_failure") else ""
    parts: list[RenderableType] = [_coloured(row)]
    if max_tokens:
        parts.append(_table(row, max_tokens))
    return Panel(Group(*parts), title=Text(facts), title_align="left")


def printable(text: str) -> str:
    """``text`` without anything that a terminal would obey: control and format characters become escapes."""
    return "".join(_escaped(c) if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in text)


def _escaped(character: str) -> str:
    named = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    code = ord(character)
    return named.get(character) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}")


def _coloured(row: dict[str, Any]) -> Text:
    """The text; sampled tokens in blue where the advantage is positive, in orange where it is negative, strong where large."""
    tokens, text = row["tokens"], Text()
    advantages = tokens.get("advantage") or [None] * len(tokens["piece"])
    most = max((abs(a) for a in advantages if a is not None), default=0.0)
    for t, (piece, sampled, advantage) in enumerate(zip(tokens["piece"], tokens["sampled"], advantages, strict=True)):
        if row["omitted"] and t == row["omitted"][0]:
            text.append(f" [{row['omitted'][1]} tokens left out] ", style="dim italic")
        style = "dim"
        if sampled:
            strong = advantage is not None and most > 0 and abs(advantage) > most / 2
            colour = "" if not advantage else "dodger_blue1" if advantage > 0 else "dark_orange"
            style = f"{'bold ' if strong else ''}{colour}".strip() or "default"
        text.append("\n".join(map(printable, piece.split("\n"))), style=style)
    return text


def _table(row: dict[str, Any], max_tokens: int) -> Table:
    tokens = row["tokens"]
    present = {name: title for name, title in COLUMNS.items() if name in tokens}
    table = Table("token", *present.values(), box=None, pad_edge=False, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    sampled = [t for t, here in enumerate(tokens["sampled"]) if here]
    for t in sampled[:max_tokens]:
        piece = Text(printable(tokens["piece"][t]) or "·", overflow="ellipsis", no_wrap=True)
        table.add_row(piece, *(_short(tokens[name][t]) for name in present))
    if len(sampled) > max_tokens:
        table.add_row(Text(f"{len(sampled) - max_tokens} more", style="dim"))
    return table


def _short(x: float | int | None) -> str:
    return "-" if x is None else str(x) if isinstance(x, int) else f"{x:.4g}"

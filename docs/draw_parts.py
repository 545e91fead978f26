"""Draw docs/parts.svg: the parts of a run and what travels between them. `python docs/draw_parts.py`.

Filled boxes carry white text, and everything outside them is a middle grey: legible on a light page and on a dark one.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

GREY, BLUE, GREEN, ORANGE, PURPLE, SLATE = "#7d8590", "#2f6db5", "#2e7d4f", "#b5602f", "#7a52b3", "#56606b"
OUTPUT = Path(__file__).with_name("parts.svg")


def box(axes: Axes, x: float, y: float, width: float, height: float, colour: str, title: str, text: str = "") -> None:
    """A filled box with a title and smaller text below it."""
    axes.add_patch(FancyBboxPatch((x, y), width, height, "round,pad=0,rounding_size=0.12", facecolor=colour, linewidth=0))
    centre, lines = x + width / 2, text.count("\n") + 1 if text else 0
    top = y + height / 2 + 0.13 * lines
    axes.text(centre, top, title, color="white", ha="center", va="center", fontsize=11, weight="bold")
    if text:
        axes.text(centre, top - 0.17, text, color="white", ha="center", va="top", fontsize=8.5, linespacing=1.35)


def frame(axes: Axes, x: float, y: float, width: float, height: float, title: str) -> None:
    """An outline around several boxes, with its title inside at the top."""
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, "round,pad=0,rounding_size=0.12", facecolor="none", edgecolor=GREY, linewidth=1.3)
    )
    axes.text(x + width / 2, y + height - 0.2, title, color=GREY, ha="center", va="center", fontsize=9.5, weight="bold")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], label: str, at: tuple[float, float]) -> None:
    """An arrow and its label, centred ``at``."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": GREY, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0})
    axes.text(*at, label, color=GREY, ha="center", va="center", fontsize=8.5, linespacing=1.3)


def main() -> None:
    """Draw it."""
    figure, axes = plt.subplots(figsize=(10, 4.4))
    axes.set(xlim=(0, 12), ylim=(0, 5.28), aspect="equal")
    axes.axis("off")

    box(axes, 0.1, 4.35, 11.8, 0.8, SLATE, "controller", "one asyncio program: admits prompts, takes batches, gives the orders")

    frame(axes, 0.1, 0.75, 3.4, 2.95, "rollout workers (Ray actors)")
    box(axes, 0.3, 2.1, 3.0, 1.05, BLUE, "engine", "vLLM, SGLang or torch: tokens,\nlog-probabilities, top-k heads")
    box(axes, 0.3, 0.9, 3.0, 1.05, GREEN, "environment", "task, tools, reward function")

    box(axes, 4.65, 1.45, 2.2, 1.5, ORANGE, "buffer", "finished rollouts, trained\non at most max_staleness\nversions late")

    frame(axes, 7.9, 0.75, 4.0, 2.95, "learner ranks (Ray actors, FSDP2)")
    box(axes, 8.1, 1.85, 1.8, 1.3, PURPLE, "actor", "LoRA adapter")
    box(axes, 10.0, 1.85, 1.7, 1.3, PURPLE, "critic", "LoRA adapter\n+ value head")
    box(axes, 8.1, 0.9, 3.6, 0.8, SLATE, "one frozen base model", "in memory once, shared by both")

    arrow(axes, (1.8, 4.35), (1.8, 3.72), "prompts", (2.35, 4.03))
    arrow(axes, (3.52, 2.2), (4.63, 2.2), "trajec-\ntories", (4.07, 2.55))
    arrow(axes, (6.87, 2.2), (7.88, 2.2), "batch", (7.37, 2.4))
    arrow(axes, (9.9, 4.35), (9.9, 3.72), "values, advantages, critic updates, actor update", (7.5, 4.03))

    axes.plot([9.0, 9.0, 1.8], [0.73, 0.3, 0.3], color=GREY, linewidth=1.6)
    arrow(axes, (1.8, 0.29), (1.8, 0.73), "weight sync: the new actor, checked by checksum and probe", (5.4, 0.12))

    plt.rcParams["svg.hashsalt"] = "parts"  # the same picture gives the same file
    figure.subplots_adjust(0, 0, 1, 1)
    figure.savefig(OUTPUT, transparent=True, metadata={"Date": None})
    print(f"wrote {OUTPUT}")


if __name__ == "__main__":
    main()

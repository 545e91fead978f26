"""The task of both runs, as a custom environment: Wordle with 31 short words, the first guess given, three left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workers.environments.settings import TaskConfig
from workers.environments.wordle import Wordle

WORDS = [
    *("ant", "arm", "art", "bat", "bow", "box", "car", "cat", "cow", "cup", "dot", "eat", "ear", "fan", "fox", "gum"),
    *("hat", "hen", "ice", "ink", "jam", "jar", "key", "map", "nut", "oak", "oil", "owl", "pan", "pen", "pig"),
]


def short_wordle(task: TaskConfig, tokenizer: Any, *, seed: int, eval_size: int) -> Wordle:
    """``rlframe train task.name=game:short_wordle``; a problem is a secret and a first guess, 800 to train on."""
    options = {"words": WORDS, "guesses": 3, "openers": 1, "problems": 800}
    return Wordle(replace(task, options=options), tokenizer, seed=seed, eval_size=eval_size)

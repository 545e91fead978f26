"""reasoning-gym's side of `workers.environments.reasoning_gym`: questions and scores, which only run in separate processes.

Some of its data sets order things by the hash of strings, and some scorers evaluate an answer as code: so every process that
imports it has ``PYTHONHASHSEED=0`` (the same index is the same problem everywhere), and can be killed. As a script it prints
the questions of one data set as JSON.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import sys
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS


class Refused(ValueError):
    """The data set is unknown; the message is one sentence."""


def score(response: str, row: dict[str, Any]) -> float:
    """The data set's own score, in [0, 1], of the answer in ``response``: its last ``<answer>...</answer>``, else all of it."""
    marked = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
    data = dataset(row["dataset"], json.dumps(row["config"], sort_keys=True))
    return float(data.score_answer((marked[-1] if marked else response).strip(), data[row["index"]]))


@functools.cache
def dataset(name: str, config: str) -> Any:
    """A data set by its name and its configuration as JSON.

    Raises:
        Refused: no such name, or a configuration that it does not take.
    """
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0.0)[0]
        raise Refused(f"task.options.dataset={name} is not a data set of reasoning-gym; did you mean {near}?")
    try:
        return reasoning_gym.create_dataset(name, **json.loads(config))
    except (TypeError, ValueError, AssertionError) as error:
        raise Refused(f"task.options.config does not fit reasoning-gym's {name}: {error}.") from None


def main() -> None:
    """Print ``{"questions": [...]}`` or ``{"error": sentence}`` on the last line."""
    name, config = sys.argv[1:]
    try:
        data = dataset(name, config)
        reply: dict[str, Any] = {"questions": [str(data[i]["question"]) for i in range(json.loads(config)["size"])]}
    except Refused as refused:
        reply = {"error": str(refused)}
    print("\n" + json.dumps(reply))


if __name__ == "__main__":
    main()

"""The built-in reward ``task.reward=math``: is the response's final answer mathematically equal to the right one (math-verify)?

It runs in a reward process (`workers.rewards.pool`), whose time limit replaces math-verify's own, which needs the same signal.
"""

from __future__ import annotations

import logging
from typing import Any

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off


def math_reward(response: str, row: dict[str, Any]) -> float:
    """1 if the last answer in ``response`` (``\\boxed{...}``, LaTeX in dollars, or a plain expression) equals the right one.

    The right one is the row's ``answer``, or verl's ``reward_model.ground_truth``, with or without dollars.

    Raises:
        ValueError: the right answer is no mathematics.
    """
    answer = right_answer(row)
    right = parse(f"\\boxed{{{answer.strip().strip('$')}}}", parsing_timeout=None)
    if not right:
        raise ValueError(f"the right answer {answer!r:.60} cannot be read as mathematics")
    return float(verify(right, parse(response, parsing_timeout=None), timeout_seconds=None))


def right_answer(row: dict[str, Any]) -> str:
    """The right answer of a row."""
    return str(row["answer"] if "answer" in row else row["reward_model"]["ground_truth"])

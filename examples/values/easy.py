"""(a) An easy value function: the first letter of a text decides its reward.

    python -m examples.values.easy [--seeds 0 1 2] [--out runs/values/easy]

A text is ``?``, a topic letter and ten letters of filler that the policy wrote; it pays 1 if the topic is one of abcd and 0 if
it is one of wxyz. The critic must carry the topic to every later position. Two critics, of which one may not touch the
attention, live on the same frozen backbone of random weights; every step brings new texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from examples.values.common import (
    ARMS,
    ENCODE,
    Row,
    arguments,
    draw,
    fit,
    make_session,
    random_backbone,
    table,
    trajectory,
    with_returns,
    write,
)
from rlframe.types import Batch

GOOD, BAD, FILLER = "abcd", "wxyz", "efghijklmnopqrstuv"
LENGTH = 10
STEPS, BATCH, HELD_OUT, EVERY = 60, 32, 48, 5
LR = 3e-3
METRIC = "held_out/explained_variance_mse"


def texts(rng: np.random.Generator, count: int) -> Batch:
    """``count`` texts, half of them good."""
    made = []
    for i in range(count):
        topic = rng.choice(list(GOOD if i % 2 else BAD))
        filler = "".join(rng.choice(list(FILLER), LENGTH))
        made.append(trajectory([("?" + topic, False), (filler, True)], reward=i % 2))
    return with_returns(made)


def run(seed: int, steps: int = STEPS, arms: Sequence[str] = tuple(ARMS)) -> Iterator[Row]:
    """Both critics of one seed: weights of the backbone, adapters and texts all come from it."""
    backbone = random_backbone(seed, len(ENCODE))
    held_out = texts(np.random.default_rng([seed, 1]), HELD_OUT)
    assert held_out.returns is not None
    for arm in arms:
        critic = make_session(backbone, arm, LR, seed, critic=True, frozen=ARMS[arm])
        rng = np.random.default_rng([seed, 0])
        yield from fit(critic, (texts(rng, BATCH) for _ in range(steps)), held_out, held_out.returns, EVERY)


def main() -> None:
    options = arguments(__doc__, "easy", seeds=3)
    rows = [row for seed in options.seeds for row in run(seed)]
    write(rows, options.out)
    panels = {METRIC: "held-out explained variance (mse form)", "train_error": "training error (V - R)^2"}
    draw(rows, panels, options.out / "easy.png")
    print(table(rows, METRIC, [0, 5, 10, 15, 20, 30, 60]))


if __name__ == "__main__":
    main()

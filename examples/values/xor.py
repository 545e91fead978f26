"""(b) A compositional value under label noise: pays with probability 0.9 if (the sign is +) XOR (X > Y), else with 0.1.

    python -m examples.values.xor [--seeds 0 1 2] [--out runs/values/xor]

Two turns: ``+7=`` shows sign and X, the policy writes three letters, the environment shows Y, the policy writes three more.
Rewards are drawn once, for a fixed set of training texts that is then gone over again and again. A quarter of all (sign, X, Y)
is in no training text; on those, values are compared with the true probability given what a text has shown so far:
0.1 + 0.8 P(XOR), where P(X > Y) is X / 10 until Y is shown. The backbone is the tiny model after its warm-up on sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from examples.values.common import (
    ARMS,
    Row,
    arguments,
    draw,
    fit,
    make_session,
    table,
    tiny_backbone,
    trajectory,
    with_returns,
    write,
)
from rlframe.types import Batch

DIGITS, LETTERS, LENGTH = 10, "abcdefghijklmnopqrstuvwxyz", 3
LIKELY, UNLIKELY, HELD_OUT_SHARE = 0.9, 0.1, 0.25
STEPS, BATCH, POOL, HELD_OUT, EVERY = 480, 32, 384, 256, 20
LR = 3e-3
METRIC = "held_out/explained_variance"

Combination = tuple[bool, int, int]
"""Whether the sign is +, X, Y."""


def probability(plus: bool, x: int, y: int | None) -> float:
    """Of reward 1, given what is shown: y is None in the first turn, when it may still be any digit."""
    greater = x / DIGITS if y is None else float(x > y)
    xor = 1 - greater if plus else greater
    return UNLIKELY + (LIKELY - UNLIKELY) * xor


def split(rng: np.random.Generator) -> tuple[list[Combination], list[Combination]]:
    """Combinations for training, and held-out ones."""
    everything = list(itertools.product((False, True), range(DIGITS), range(DIGITS)))
    order = rng.permutation(len(everything))
    first = int(HELD_OUT_SHARE * len(everything))
    return [everything[i] for i in order[first:]], [everything[i] for i in order[:first]]


def texts(rng: np.random.Generator, combinations: Sequence[Combination], count: int) -> tuple[Batch, np.ndarray]:
    """``count`` texts with drawn rewards, and the true probability [N] at every action token (0 elsewhere)."""
    made, truth = [], []
    for _ in range(count):
        plus, x, y = combinations[rng.integers(len(combinations))]
        first, second = ("".join(rng.choice(list(LETTERS), LENGTH)) for _ in range(2))
        late = probability(plus, x, y)
        parts = [(f"{'+' if plus else '-'}{x}=", False), (first, True), (f"\n{y}=", False), (second, True)]
        made.append(trajectory(parts, reward=float(rng.random() < late)))
        known = {False: itertools.repeat(0.0), True: itertools.chain([probability(plus, x, None)] * LENGTH, [late] * LENGTH)}
        truth += [next(known[bool(acted)]) for acted in made[-1].action_mask]
    return with_returns(made), np.array(truth)


def epochs(rng: np.random.Generator, pool: Batch, steps: int) -> Iterator[Batch]:
    """Batches of the pool, each text once before any comes again."""
    order: list[int] = []
    for _ in range(steps):
        if len(order) < BATCH:
            order = rng.permutation(len(pool)).tolist()
        yield pool.select([order.pop() for _ in range(BATCH)])


def run(seed: int, steps: int = STEPS, every: int = EVERY, arms: Sequence[str] = tuple(ARMS)) -> Iterator[Row]:
    """Both critics of one seed, on the same texts in the same order."""
    backbone = tiny_backbone()
    rng = np.random.default_rng([seed, 0])
    training, unseen = split(rng)
    pool, _ = texts(rng, training, POOL)
    held_out, truth = texts(rng, unseen, HELD_OUT)
    for arm in arms:
        critic = make_session(backbone, arm, LR, seed, critic=True, frozen=ARMS[arm])
        yield from fit(critic, epochs(np.random.default_rng([seed, 1]), pool, steps), held_out, truth, every)


def main() -> None:
    options = arguments(__doc__, "xor", seeds=3)
    rows = [row for seed in options.seeds for row in run(seed)]
    write(rows, options.out)
    panels = {METRIC: "held-out explained variance of the true p", "train_error": "training error (V - R)^2"}
    draw(rows, panels, options.out / "xor.png", lowest=-1)
    print(table(rows, METRIC, range(0, STEPS + 1, 80)))
    print(table(rows, "train_error", range(80, STEPS + 1, 80)))


if __name__ == "__main__":
    main()

"""What becomes of each kind of fault: how it is counted, whether the rollout is tried again, when it ends the run.

What the kinds are is in `workers.faults`. The table is printed into docs/troubleshooting.md (`as_markdown`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.run.failures import RunFailed
from workers.faults import Fault, Kind
from workers.rollout.worker import Collected

LEAST_IN_A_ROW = 8
"""A run does not end before all rollouts of so many prompts in a row failed."""


@dataclass(frozen=True)
class Treatment:
    """One row of the table."""

    what: str
    """What happens, for people."""
    counter: str
    """``fault/`` and this: rollouts that were given up because of it, since the run began."""
    retried: str
    """Whether the same rollout is tried again."""
    fatal: str
    """When the run ends because of it."""


IN_A_ROW = "after as many in a row as the buffer holds, at least 8"
LOST = "when no worker has a restart left of `rollout.max_restarts`"
AGAIN = "yes, at most twice, on another worker or a new one"
TREATMENT = {
    Kind.TIMEOUT: Treatment("An episode took longer than `rollout.timeout_s`.", "timeouts", "no", IN_A_ROW),
    Kind.REWARD: Treatment(
        "There is no reward: the reward function failed, or returned no finite number.",
        "reward",
        "no",
        f"at once with `task.on_reward_failure=raise`; with `drop` {IN_A_ROW}; `zero` makes it a reward of 0",
    ),
    Kind.ENVIRONMENT: Treatment("The environment raised an exception.", "environment", "no", IN_A_ROW),
    Kind.ENGINE: Treatment(
        "The engine died or hangs; or one request failed, which is not tried again.",
        "engine",
        AGAIN,
        f"{LOST}; single requests: {IN_A_ROW}",
    ),
    Kind.WORKER_LOST: Treatment(
        "The worker's process or node is gone, or says nothing for `rollout.timeout_s`.", "worker_lost", AGAIN, LOST
    ),
    Kind.REJECTED: Treatment(
        "The sequence has no room in `rollout.max_model_len`, or a token that is not in the vocabulary.",
        "rejected",
        "no",
        IN_A_ROW,
    ),
}
COUNTERS = (
    "dropped",
    *(treatment.counter for treatment in TREATMENT.values()),
    "partial_groups",
    "reissued",
    "lost_rests",
    "worker_restarts",
    "learner_restarts",
)
"""All of ``fault/*``; what they count is in `trainer.watch.glossary`."""


class Faults:
    """Counts faults, and says when they are too many.

    Args:
        capacity: prompts that the buffer holds.
        rollouts_per_prompt: rollouts of each.
        note: takes a line for the log, one for each rollout that is given up.
    """

    def __init__(self, capacity: int, rollouts_per_prompt: int, note: Callable[[str], None]) -> None:
        self.counts = dict.fromkeys(COUNTERS, 0)
        self.in_a_row = 0
        """Rollouts that failed since one succeeded."""
        self.rollouts_per_prompt, self.note = rollouts_per_prompt, note
        self.limit = max(capacity, LEAST_IN_A_ROW) * rollouts_per_prompt

    def count(self, faults: Sequence[Fault]) -> None:
        """Rollouts were given up."""
        self.counts["dropped"] += len(faults)
        for fault in faults:
            self.counts[TREATMENT[fault.kind].counter] += 1
            self.note(f"dropped a rollout: {fault.kind}: {fault.reason}")

    def succeeded(self, collected: Collected) -> None:
        """Prompts gave trajectories; some of them fewer than they should."""
        if collected.slots:
            self.in_a_row = 0
        self.count(collected.lost)
        self.counts["partial_groups"] += sum(count < self.rollouts_per_prompt for count in collected.counts)

    def dropped(self, faults: Sequence[Fault]) -> None:
        """All rollouts of a prompt were given up.

        Raises:
            RunFailed: nothing succeeds any more.
        """
        self.count(faults)
        self.in_a_row += len(faults)
        if self.in_a_row >= self.limit:
            raise RunFailed(f"{self.in_a_row} rollouts in a row failed, the last one because: {faults[-1].reason}")


def as_markdown() -> str:
    """The table of docs/troubleshooting.md."""
    lines = ["| kind | what | counted in | tried again | ends the run |", "|---|---|---|---|---|"]
    for kind, row in TREATMENT.items():
        lines.append(f"| {kind} | {row.what} | `fault/{row.counter}` | {row.retried} | {row.fatal} |")
    return "\n".join(lines)

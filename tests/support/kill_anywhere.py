"""Kills jobs at random places, round after round, and checks what each ends with. Not part of the suite.

    python -m tests.support.kill_anywhere --rounds 20 --seed 0          # at exact points of the code, in one process
    python -m tests.support.kill_anywhere --rounds 3 --seed 0 --ray     # from outside: driver, a rank or everything, with Ray

A round is one run of 6 steps that is killed twice and resumed. Even rounds are synchronous and are compared bit for bit with a
run that nobody killed; odd ones run ahead by two versions, and every prompt must be trained on exactly once.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.support.kill_points import (
    IN_A_CHECKPOINT,
    IN_A_STEP,
    Point,
    check_log,
    check_survivors,
    numbers,
    read_rows,
    train,
    trained,
    waiting,
)
from tests.support.local_run import SMALL

STEPS, BATCH = 6, 8
OPTIONS = [*SMALL, f"steps={STEPS}", f"batch_size={BATCH}", "checkpoint.every=1", "eval.every=2", "log.rollouts_every=1"]
OPTIONS += [f"log.rollouts_count={BATCH}", "checkpoint.keep_last=2"]
COUNTED = "fault/learner_restarts"


def die_at_a_point(run_dir: Path, options: list[str], rng: random.Random) -> str:
    """One attempt that dies by itself; what it died in."""
    point = Point(*rng.choice(IN_A_STEP + IN_A_CHECKPOINT), nth=rng.randint(1, 5), after=rng.random() < 0.5)
    code = train(run_dir, options, point)
    return f"{'after' if point.after else 'in'} {point.function} #{point.nth}" if code else "done before the point"


def command(run_dir: Path, options: list[str]) -> list[str]:
    """`rlframe train`, or `resume` where the run has begun."""
    begun = (run_dir / "config.yaml").exists()
    arguments = ["resume", str(run_dir)] if begun else ["train", f"run_dir={run_dir}", *options, "actor.ranks=2"]
    return [str(Path(sys.executable).parent / "rlframe"), *arguments]


def kill_from_outside(run_dir: Path, options: list[str], rng: random.Random) -> str:
    """One attempt with Ray, of which the driver, a learner rank or every process is killed; what, and when."""
    victim, step, writing = rng.choice(["driver", "rank", "everything"]), rng.randint(1, STEPS - 1), rng.random() < 0.5
    driver = psutil.Popen(command(run_dir, options), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def reached() -> bool:
        if writing:
            return any(int(path.name[5:11]) >= step for path in (run_dir / "checkpoints").glob("step_*.tmp"))
        path = run_dir / "metrics.jsonl"
        return path.exists() and path.read_text().count("\n") > step

    while driver.poll() is None and not reached():
        time.sleep(0.001)
    if driver.poll() is not None:
        return "done before the kill"
    if not writing:
        time.sleep(rng.random())
    everyone = driver.children(recursive=True)
    ranks = [process for process in everyone if process.is_running() and process.name().startswith("ray::LearnerRank")]
    for process in {"driver": [driver], "rank": ranks[:1], "everything": [driver, *everyone]}[victim]:
        process.kill()
    driver.wait()
    psutil.wait_procs(everyone, timeout=60)
    return f"{victim} at step {step}{' while a checkpoint was written' if writing else ''}"


def finish(run_dir: Path, options: list[str], ray: bool) -> None:
    """Go on to the end, undisturbed."""
    if ray:
        subprocess.run(command(run_dir, options), check=True, stdout=subprocess.DEVNULL)
    else:
        assert train(run_dir, options) == 0


def check_prompts(run_dir: Path, survivors: dict[int, tuple]) -> None:
    """Every prompt of the stream was trained on once, in order, and what had finished before a kill came back as it was."""
    assert [row["index"] for row in trained(run_dir)] == list(range(STEPS * BATCH))
    check_survivors(run_dir, survivors)


def without_count(rows: list[dict]) -> list[dict]:
    """Numbers but for the count of restarts, in which a killed run differs rightly."""
    return [{name: value for name, value in row.items() if name != COUNTED} for row in numbers(rows)]


def main() -> None:
    """Run the rounds; raises at the first that ends wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ray", action="store_true")
    arguments = parser.parse_args()
    rng, interrupt = random.Random(arguments.seed), kill_from_outside if arguments.ray else die_at_a_point
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "whole"
        finish(reference, [*OPTIONS, "max_staleness=0"], arguments.ray)
        whole, kills = without_count(read_rows(reference)), 0
        for number in range(arguments.rounds):
            run_dir, staleness = Path(folder) / f"run{number}", 2 * (number % 2)
            options, survivors, deaths = [*OPTIONS, f"max_staleness={staleness}"], {}, []
            for _ in range(2):
                deaths.append(interrupt(run_dir, options, rng))
                survivors |= waiting(run_dir)
            finish(run_dir, options, arguments.ray)
            check_log(run_dir, STEPS)
            check_prompts(run_dir, survivors)
            assert staleness or without_count(read_rows(run_dir)) == whole, "numbers differ"
            kills += sum("before" not in death for death in deaths)
            print(f"round {number}, staleness {staleness}: {'; '.join(deaths)}; {len(survivors)} finished ones came back")
    print(f"{arguments.rounds} rounds, {kills} kills, nothing lost")


if __name__ == "__main__":
    main()

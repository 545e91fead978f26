"""The two main effects in a quarter of an hour on two cores: short runs of two studies, and whether the signs are right.

python examples/evidence_quick.py [--jobs 2]        # or: make evidence-quick

Ends with 1 if an effect does not show. One seed and few steps: this checks that the effects are there, not how large they are;
docs/evidence.md has the whole studies.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from study import reduced, run_all

HERE = Path(__file__).resolve().parent
ROOT = Path("runs/evidence_quick")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    jobs = parser.parse_args().jobs

    def runs(study: str, arms: list[str], steps: int) -> list[Path]:
        found = run_all(
            HERE / study, root=ROOT / Path(study).parent, arms=arms, seeds=[0], overrides=[f"steps={steps}"], jobs=jobs
        )
        return [paths[0] for paths in found.values()]

    plain, corrected = runs("quantized_sampler/study.yaml", ["policy gradient", "TIS + centred"], 100)
    critic, groups = runs("single_rollout/arithmetic.yaml", ["critic, K=2", "groups of 8"], 60)
    held_out = "eval/arithmetic/reward"

    checks = [
        (
            "a 3-bit sampler ruins plain policy gradient: held-out reward, last third < start",
            (plain, held_out, "late"),
            (plain, held_out, "first"),
        ),
        ("TIS and centring keep it: last third, plain < corrected", (plain, held_out, "late"), (corrected, held_out, "late")),
        (
            "single rollouts with a critic learn: held-out reward, start < last third",
            (critic, held_out, "first"),
            (critic, held_out, "late"),
        ),
        ("and so do groups", (groups, held_out, "first"), (groups, held_out, "late")),
        (
            "the critic learns: explained variance, first < last third",
            (critic, "critic/explained_variance", "first"),
            (critic, "critic/explained_variance", "late"),
        ),
        (
            "at equal rollouts groups are behind: held-out reward, mean over the run, groups < critic",
            (groups, held_out, "mean"),
            (critic, held_out, "mean"),
        ),
    ]
    failed = 0
    for claim, smaller, larger in checks:
        a, b = reduced(*smaller), reduced(*larger)
        holds = a is not None and b is not None and a < b
        failed += not holds
        print(f"{'yes' if holds else 'NO ':3s}  {claim}: {a} and {b}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

"""What studies make of metrics files, against numbers written out by hand."""

import json

import pytest
import yaml

from examples import study


@pytest.fixture
def run(tmp_path):
    rows = [
        {"step": 0, "eval/sums/reward": 0.25},
        {"step": 1, "reward/mean": 0.1, "actor/advantage_mean": -0.5, "rollout_corr/expected_score_l1": 0.2, "time/step": 2.0},
        {"step": 2, "reward/mean": 0.3, "time/step": 5.0, "time/eval": 3.0, "eval/sums/reward": 0.75},
        {"step": 3, "reward/mean": 0.8, "time/step": 1.0},
        {"step": 4, "reward/mean": float("nan"), "time/step": 1.0, "eval/sums/reward": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_series_hold_what_was_measured(run):
    assert study.series(run, "reward/mean") == {1: 0.1, 2: 0.3, 3: 0.8}
    assert study.series(run, "drift") == {1: 0.1}
    assert study.smoothed({1: 1.0, 2: 3.0, 3: 8.0}, 2) == {2: 2.0, 3: 8.0}
    assert study.seconds(run) == {0: 0.0, 1: 2.0, 2: 4.0, 3: 5.0, 4: 6.0}


def test_a_run_is_reduced_to_one_number(run):
    numbers = {how: study.reduced(run, "eval/sums/reward", how) for how in study.REDUCED}
    assert numbers == {"first": 0.25, "best": 0.75, "last": 0.5, "late": 0.5, "mean": 0.5}
    assert study.reduced(run, "critic/explained_variance", "mean") is None


def test_the_table_has_mean_and_range_over_seeds(run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text(json.dumps({"step": 0, "eval/sums/reward": 0.75}) + "\n")
    wanted = {"table": {"start": "eval/sums/reward first", "staleness": "off_policy/mean late"}}
    lines = study.table(wanted, {"both": [run, other], "none": [tmp_path / "absent"]}).splitlines()
    assert lines[0] == "| arm | start | staleness |"
    assert lines[2:] == ["| both | 0.5 (0.25 to 0.75) | - |", "| none | - | - |"]


def test_every_study_composes():
    """Arms are settings of `rlframe train`: a mistyped one is found here, not after the runs before it."""
    from pathlib import Path

    from trainer.settings.compose import compose

    files = [f for f in sorted(Path("examples").glob("*/*.yaml")) if "seeds" in yaml.safe_load(f.read_text())]
    assert len(files) >= 5
    for file in files:
        wanted = study.load(file)
        for own in wanted["arms"].values():
            compose(["run_dir=unused", *wanted["common"], *own])
        named = {override.partition("=")[0] for override in wanted["common"]}
        assert {"actor", "actor.optim.lr"} <= named, f"{file}: its figures must not depend on what model=tiny brings"

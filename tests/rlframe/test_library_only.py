"""The library is useful, and light, without the rest."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rlframe

ROOT = Path(__file__).resolve().parents[2]

PROBE = """
import json, sys
import torch, numpy
before = set(sys.modules)
import rlframe
alone = set(sys.modules) - before
for name in rlframe.__all__:
    getattr(rlframe, name)
names = set(sys.modules) - before
print(json.dumps({"alone": sorted(alone), "names": sorted(names), "all": sorted({name.split(".")[0] for name in sys.modules})}))
"""


def test_import_needs_torch_and_numpy_only_and_costs_next_to_nothing() -> None:
    out = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    found = json.loads(out.splitlines()[-1])
    heavy = {
        "ray",
        "vllm",
        "sglang",
        "hydra",
        "omegaconf",
        "transformers",
        "peft",
        "safetensors",
        "workers",
        "trainer",
        "scipy",
    }
    assert not heavy & set(found["all"])
    assert found["alone"] == ["rlframe"], "its modules are imported with the first name out of them"
    others = [name for name in found["names"] if not name.startswith(("rlframe.", "torch.", "numpy."))]
    assert len(others) <= 20, others


def test_every_public_name_is_documented() -> None:
    assert sorted(rlframe.__all__) == rlframe.__all__ == dir(rlframe)
    for name in rlframe.__all__:
        assert (getattr(rlframe, name).__doc__ or "").strip(), name


def test_the_example_learns() -> None:
    example = runpy.run_path(str(ROOT / "examples" / "library_only" / "train.py"))
    history = example["train"](example["ALGORITHMS"]["centred"], steps=35)
    rewards = [metrics["reward/mean"] for metrics in history]
    assert np.mean(rewards[:3]) < 0.15 and np.mean(rewards[-3:]) > 0.3


@pytest.mark.slow
def test_the_benchmarks_run_and_meet_the_bar_on_memory() -> None:
    """At a small size; times are for a quiet machine and are not asserted here."""
    from benchmarks import gae, policy_loss

    small = ["--tokens", "512", "--vocabulary", "32768", "--hidden", "32", "--head", "16", "--threads", "1", "--rounds", "1"]
    assert policy_loss.main(small)["centred / full memory"] < 0.8
    assert gae.main(["--trajectories", "8", "--tokens", "64", "--rounds", "1"])["lambda 1"] > 0

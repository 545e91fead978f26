"""The gauges, as Prometheus reads them from the endpoint of a Ray node."""

import re
import time
import urllib.request

import pytest
import ray

from trainer.compose import compose
from trainer.gauges import GAUGES, endpoint
from trainer.tracking import Tracker


def scrape(address: str) -> dict[str, tuple[str, float]]:
    """name -> (tags, value) of every rlframe gauge."""
    with urllib.request.urlopen(address, timeout=120) as answer:
        text = answer.read().decode()
    return {name: (tags, float(x)) for name, tags, x in re.findall(r"^ray_(rlframe_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE)}


@pytest.mark.slow
def test_a_step_shows_on_rays_own_endpoint(tmp_path):
    (tmp_path / "logs").mkdir()
    config = compose(["log.wandb=disabled", "log.console=false", "name=watched", f"run_dir={tmp_path}"])
    # By default a process reports every ten seconds; nothing here depends on when it does.
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        _system_config={"metrics_report_interval_ms": 500},
    )
    try:
        tracker = Tracker(config, tmp_path, None)
        tracker.log(0, {"eval/arithmetic/reward": 0.25})
        metrics = {metric: 1 + i / 8 for i, metric in enumerate(GAUGES.values()) if "*" not in metric and metric != "step"}
        tracker.log(5, metrics | {"critic/explained_variance": float("nan")})
        expected = metrics | {"step": 5, "eval/*/reward": 0.25}
        del expected["critic/explained_variance"]
        address = endpoint()
        assert address is not None and address in (tmp_path / "logs" / "controller.log").read_text()
        deadline = time.monotonic() + 240
        while (found := scrape(address)).keys() != {name for name, metric in GAUGES.items() if metric in expected}:
            assert time.monotonic() < deadline, f"only {sorted(found)} are exported"
            time.sleep(0.2)
        for name, (tags, value) in found.items():
            assert value == expected[GAUGES[name]] and 'run="watched"' in tags, name
        tracker.close()
    finally:
        ray.shutdown()

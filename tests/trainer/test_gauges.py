"""The gauges, as Prometheus reads them from the endpoint of a Ray node."""

import re
import time
import urllib.error
import urllib.request

import pytest
import ray

from trainer.settings.compose import compose
from trainer.watch.gauges import GAUGES, endpoint
from trainer.watch.tracking import Tracker


def scrape(address: str) -> dict[str, tuple[str, float]]:
    """name -> (the tag of the run, value) of every rlframe gauge; nothing while the node's agent does not listen yet."""
    try:
        with urllib.request.urlopen(address, timeout=120) as answer:
            text = answer.read().decode()
    except urllib.error.URLError:
        return {}
    lines = re.findall(r"^ray_(rlframe_\w+)\{.*(run=\"[^\"]*\").*\} (\S+)$", text, re.MULTILINE)
    return {name: (run, float(value)) for name, run, value in lines}


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
        wanted = {name: expected[metric] for name, metric in GAUGES.items() if metric in expected}
        deadline = time.monotonic() + 600
        while (found := scrape(address)) != {name: ('run="watched"', value) for name, value in wanted.items()}:
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
        tracker.close()
    finally:
        ray.shutdown()

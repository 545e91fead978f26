"""A few numbers of a run on Ray's own metrics endpoint, for dashboards and alerts of the cluster (Prometheus).

Every node's agent serves them beside Ray's metrics, as ``ray_rlframe_...`` with the run's name as the tag ``run``. All numbers
of a run are in ``metrics.jsonl``; this is not a second copy of it.
"""

from __future__ import annotations

import fnmatch
import math

import ray
from ray.util.metrics import Gauge

from trainer.watch.glossary import meaning

GAUGES = {
    "rlframe_step": "step",
    "rlframe_policy_version": "version",
    "rlframe_reward_mean": "reward/mean",
    "rlframe_eval_reward": "eval/*/reward",
    "rlframe_explained_variance": "critic/explained_variance",
    "rlframe_k3_kl": "rollout_corr/k3_kl",
    "rlframe_staleness_max": "off_policy/max",
    "rlframe_rollouts_in_flight": "off_policy/in_flight",
    "rlframe_dropped_total": "fault/dropped",
    "rlframe_idle_trainer": "idle/trainer",
    "rlframe_idle_rollout": "idle/rollout",
    "rlframe_step_seconds": "time/step",
    "rlframe_tokens_per_second": "perf/accepted_tokens_per_s",
}
"""Gauge -> the metric it shows."""


class Gauges:
    """The gauges of one run; Ray must be running."""

    def __init__(self, run: str) -> None:
        self.gauges = {}
        for name, metric in GAUGES.items():
            self.gauges[metric] = Gauge(name, description=meaning(metric.replace("*", "task")), tag_keys=("run",))
            self.gauges[metric].set_default_tags({"run": run})

    def set(self, step: int, metrics: dict[str, float]) -> None:
        """Show the numbers of a step; what is missing or not finite keeps its last value."""
        shown = {"step": float(step), **metrics}
        for pattern, gauge in self.gauges.items():
            for name in fnmatch.filter(shown, pattern):
                if math.isfinite(shown[name]):
                    gauge.set(shown[name])


def endpoint() -> str | None:
    """Address of this node's metrics; None when its agent does not run, which needs ``ray[default]``."""
    here = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == here and node.get("MetricsExportPort", -1) > 0:
            return f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    return None

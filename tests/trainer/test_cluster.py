"""A real cluster of three nodes with token authentication: jobs sent to it, stopped and resumed, and where they run.

Every node has a loopback address of its own, so that a rank that looked for its peers on its own host would not find them.
"""

import json
import re
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.ray_cluster import ROOT, TOKEN, ray_cluster

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(900)]
WORKERS = ["127.0.0.3", "127.0.0.4"]
KEY = "a-wandb-key-that-nobody-may-see"
SMALL = ["rollout=torch", "log.wandb=disabled", "batch_size=8", "eval.size=8", "eval.every=0"]
FOLDER = ["--working-dir", str(ROOT / "examples" / "jsonl")]


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster([4, 4], WANDB_API_KEY=KEY) as running:
        yield running


def steps(run_dir) -> list[int]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def actors(cluster, job_id: str) -> dict[str, list[str]]:
    """Addresses of the nodes that the living actors of a job are on, by class, as Ray's state API knows them."""
    ips = {node["node_id"]: node["node_ip"] for node in cluster.get("/api/v0/nodes")["data"]["result"]["result"]}
    found: dict[str, list[str]] = {}
    for actor in cluster.get("/api/v0/actors?detail=1")["data"]["result"]["result"]:
        if actor["state"] == "ALIVE" and actor["job_id"] == job_id:
            found.setdefault(actor["class_name"], []).append(ips[actor["node_id"]])
    return found


def test_pools_on_three_nodes(cluster):
    out = cluster.call("python", str(ROOT / "tests" / "support" / "pool_checks.py"), cluster.head, cluster.dashboard)
    found = json.loads(out.splitlines()[-1])
    assert re.match(r"The job asks for 10 CPUs \(actor.ranks=9 x .* has 8; lower one of these settings\.$", found["too_much"])
    assert "1 x learner (5 CPU each) and 1 x rollout (1 CPU each) cannot be placed on the nodes" in found["too_large"]
    assert found["too_large"].count(": 4 CPU, 0 GPU") == 2
    assert found["ray"] == version("ray")
    assert len(found["learner"]) == 3 and len(set(found["learner"])) == 1, "ranks are packed"
    assert sorted(found["rollout"]) == WORKERS, "rollout workers are spread"
    assert re.search(r"which the cluster has, but [\d.]+ CPUs and 0 GPUs are free now; stop another job", found["busy"])
    assert re.fullmatch(rf"tcp://{re.escape(found['learner'][0])}:\d+", found["meet_at"])


@dataclass
class Stopped:
    """A job that was stopped."""

    run_dir: Path
    where: dict[str, list[str]]
    environment: list[str]
    log: str


@pytest.fixture(scope="module")
def stopped(cluster, tmp_path_factory):
    """A job with its own prompts and reward function, on both nodes, stopped once it has made a step."""
    run_dir = tmp_path_factory.mktemp("submitted") / "run"
    given = ["steps=100000", "actor.ranks=2", "actor.cpus=3", "rollout.workers=2", "task=jsonl", "task.train=prompts.jsonl"]
    given += ["task.reward=reward:near_sum", *SMALL, f"run_dir={run_dir}"]
    sent = cluster.call(
        "rlframe", "submit", "--no-wait", "--id", "first", "--working-dir", str(ROOT / "examples/jsonl"), *given
    )
    assert "first" in sent.splitlines()
    while len(steps(run_dir)) < 2:
        job = cluster.get("/api/jobs/first")
        assert job is None or job["status"] in ("PENDING", "RUNNING"), cluster.call("rlframe", "job", "logs", "first")
        time.sleep(0.2)
    assert cluster.call("rlframe", "job", "status", "first").startswith("RUNNING")
    job = cluster.get("/api/jobs/first")
    where = actors(cluster, job["job_id"])
    inherited = Path(f"/proc/{job['driver_info']['pid']}/environ").read_text().split("\0")
    assert "stopping" in cluster.call("rlframe", "job", "stop", "first")
    log = cluster.call("rlframe", "job", "logs", "-f", "first", expect=1)
    return Stopped(run_dir, where, inherited, log)


def test_ranks_and_rollout_workers_of_a_submitted_job_run_on_the_nodes_of_the_cluster(stopped):
    assert sorted(stopped.where["LearnerRank"]) == WORKERS, "a rank of 3 CPUs on each node of 4"
    assert sorted(stopped.where["RolloutProcess"]) == WORKERS


def test_a_stopped_job_saves_first(stopped):
    assert "stopping; a checkpoint is written" in stopped.log
    assert "first STOPPED" in stopped.log.splitlines()
    last = steps(stopped.run_dir)[-1]
    assert (stopped.run_dir / "checkpoints" / "LATEST").read_text().strip() == f"step_{last:06d}"


def test_a_stopped_job_is_resumed_through_the_cluster(cluster, stopped):
    done = steps(stopped.run_dir)[-1]
    log = cluster.call("rlframe", "submit", *FOLDER, "--resume", str(stopped.run_dir), f"steps={done + 1}")
    assert f"resumed after step {done}" in log and "SUCCEEDED" in log
    assert steps(stopped.run_dir) == list(range(done + 2))


def test_rays_own_command_submits_too_and_the_run_joins_its_cluster(cluster, tmp_path):
    run_dir = tmp_path / "run"
    out = cluster.call("ray", "job", "submit", "--", "rlframe", "train", f"run_dir={run_dir}", "steps=1", *SMALL)
    assert "succeeded" in out
    assert steps(run_dir) == [0, 1]
    job_id = re.search(r"raysubmit_\w+", out)[0]
    job = cluster.get(f"/api/jobs/{job_id}")["job_id"]
    seen = cluster.get("/api/v0/actors?detail=1")["data"]["result"]["result"]
    assert {actor["class_name"] for actor in seen if actor["job_id"] == job} >= {"LearnerRank", "RolloutProcess"}


@pytest.mark.usefixtures("stopped")
def test_jobs_are_listed_and_what_the_cluster_refuses_is_one_sentence(cluster):
    out = cluster.call("rlframe", "job", "status", "nobody", expect=2)
    assert "has no job nobody" in out and "Traceback" not in out
    listed = cluster.call("rlframe", "job", "list")
    assert "first  STOPPED  rlframe train steps=100000" in listed
    again = cluster.call("rlframe", "submit", "--id", "first", "--working-dir", "", "run_dir=/nowhere", expect=2)
    assert "already exists" in again and "Traceback" not in again
    assert "wants a token" in cluster.call("rlframe", "job", "list", expect=2, RAY_AUTH_TOKEN="x" * 40)


def test_secrets_of_the_cluster_reach_the_job_and_are_shown_and_saved_nowhere(cluster, stopped):
    assert f"WANDB_API_KEY={KEY}" in stopped.environment
    everywhere = [json.dumps(cluster.get("/api/jobs/")), stopped.log]
    everywhere += [path.read_text(errors="replace") for path in stopped.run_dir.rglob("*") if path.is_file()]
    for secret in (KEY, TOKEN):
        assert not any(secret in text for text in everywhere)

"""A run that does not get as far as training: why it cannot start, and a signal while it waits for what it needs."""

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.processes import PATIENCE_S, alive, descendants, named, wait_for
from tests.support.ray_cluster import environment, ray_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
HOLDER = """
import sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False)
ray.get(ray.util.placement_group([{"CPU": 2}]).ready())
print("held", flush=True)
time.sleep(3600)
"""


@contextmanager
def driver(run_dir, *overrides, command="train", **variables):
    """``rlframe train``, or another command, in the root of the repository, with its console in a file beside ``run_dir``.

    None unsets an environment variable.
    """
    words = [str(Path(sys.executable).parent / "rlframe"), command, f"run_dir={run_dir}", "rollout=torch"]
    words += ["eval.size=8", "log.wandb=disabled", "server.port=0", *overrides]
    with run_dir.with_suffix(".console").open("w") as console:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            stdout=console,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in {**environment(), **variables}.items() if value is not None},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def console(run_dir):
    return run_dir.with_suffix(".console").read_text()


def ended_by(process, number):
    """The exit code after a signal to the driver alone, and after it no process is left."""
    family = descendants(process.pid)
    os.kill(process.pid, number)
    code = process.wait(timeout=PATIENCE_S)
    wait_for(lambda: not any(map(alive, family)))
    return code


@pytest.mark.cluster
def test_a_signal_ends_a_run_that_waits_for_the_cluster(tmp_path):
    """For an hour, with a limit above the patience of this test; the cluster is left as it was."""
    with ray_cluster([2]) as cluster:
        command = [sys.executable, "-c", HOLDER, cluster.head]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as holder:
            try:
                assert holder.stdout.readline() == "held\n"
                for number in (signal.SIGTERM, signal.SIGINT):
                    run_dir = tmp_path / number.name
                    with driver(run_dir, f"cluster.address={cluster.head}", "cluster.startup_timeout_s=3600") as process:
                        wait_for(lambda d=run_dir, p=process: "waiting for the cluster" in console(d) or p.poll() is not None)
                        assert ended_by(process, number) == 130, console(run_dir)
                    assert "Traceback" not in console(run_dir) and not (run_dir / "config.yaml").exists()
                assert holder.poll() is None and cluster.nodes() == 2
            finally:
                holder.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_whose_ray_head_starts(tmp_path, number):
    run_dir = tmp_path / "run"
    with driver(run_dir) as process:
        wait_for(lambda: named(descendants(process.pid), "gcs_server") or process.poll() is not None)
        assert ended_by(process, number) == 130, console(run_dir)
    assert not console(run_dir) and not (run_dir / "config.yaml").exists()


def test_a_killed_driver_leaves_no_head_behind(tmp_path):
    run_dir = tmp_path / "run"
    with driver(run_dir, "steps=1000") as process:
        wait_for(lambda: re.search(r"step +1/", console(run_dir)) or process.poll() is not None)
        family = descendants(process.pid)
        assert named(family, "gcs_server") and ended_by(process, signal.SIGKILL) == -signal.SIGKILL
    wait_for(lambda: not any(map(alive, family)))


def test_a_model_that_is_refused_takes_the_head_with_it(tmp_path):
    run_dir = tmp_path / "run"
    with driver(run_dir, "model.path=/no/such/folder") as process:
        seen = set()
        while process.poll() is None:
            seen |= descendants(process.pid)
        assert process.returncode == 2
    assert console(run_dir).startswith("rlframe: model.path=/no/such/folder is not a folder") and not run_dir.exists()
    wait_for(lambda: not any(map(alive, seen)))


LINES = r"run: tiny on arithmetic, .*|(actor|critic): adapters on .* of the model's weights\.|step [01]/1  .*"
"""What a run of one step says."""


def test_the_console_has_the_lines_of_the_run_alone_and_a_file_those_of_ray(tmp_path):
    """Without a choice of Ray's authentication, of which Ray would speak; the metrics' endpoint is there all the same."""
    run_dir = tmp_path / "run"
    with driver(run_dir, "steps=1", RAY_AUTH_MODE=None, RAY_AUTH_TOKEN=None) as process:
        assert process.wait(timeout=PATIENCE_S) == 0, console(run_dir)
    lines = console(run_dir).splitlines()
    assert len(lines) == 5 and all(re.fullmatch(LINES, line) for line in lines), lines
    assert "authentication" in (run_dir / "logs" / "ray.log").read_text()
    assert re.search(r"gauges: http://\S+/metrics", (run_dir / "logs" / "controller.log").read_text())


def test_a_signal_ends_a_run_whose_engines_start(tmp_path):
    run_dir, mark = tmp_path / "run", tmp_path / "starting"
    with driver(run_dir, "task.name=tests.support.faults:HangsAtStart", f"task.options.mark={mark}") as process:
        wait_for(lambda: mark.exists() or process.poll() is not None)
        assert ended_by(process, signal.SIGTERM) == 130, console(run_dir)
    assert "Traceback" not in console(run_dir) and not (run_dir / "config.yaml").exists()


@pytest.mark.parametrize("command", ["train", "serve"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_or_a_server_whose_ray_starts(tmp_path, command, number):
    run_dir = tmp_path / "run"
    with driver(run_dir, command=command) as process:
        wait_for(lambda: named(descendants(process.pid), "gcs_server") or process.poll() is not None)
        assert ended_by(process, number) == 130, console(run_dir)
    assert "Traceback" not in console(run_dir) and "serving" not in console(run_dir)


def test_a_signal_ends_a_server_whose_engines_start(tmp_path):
    run_dir = tmp_path / "run"
    logs = run_dir / "logs"
    with driver(run_dir, command="serve") as process:
        wait_for(lambda: (logs.exists() and any(logs.iterdir())) or process.poll() is not None)
        assert ended_by(process, signal.SIGTERM) == 130, console(run_dir)
    assert "Traceback" not in console(run_dir) and "serving" not in console(run_dir)


def test_a_worker_that_cannot_start_says_why_once_and_where_its_log_is(tmp_path):
    run_dir = tmp_path / "run"
    with driver(run_dir, "task.name=tests.support.faults:BreaksAtStart") as process:
        assert process.wait(timeout=PATIENCE_S) == 1, console(run_dir)
    log = run_dir / "logs" / "rollout_0.log"
    said = (
        f"rlframe: Rollout worker 0 cannot start: MemoryError: the accelerator is full,\nas it was yesterday. Its log is {log}."
    )
    assert said in console(run_dir)
    assert "Starting again" not in console(run_dir) and "Traceback" not in console(run_dir)
    assert "Traceback" in log.read_text() and "faults.py" in log.read_text()
    assert not (run_dir / "config.yaml").exists(), "the next try in this folder is another run"

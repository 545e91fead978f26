"""The process of a local head and its driver's side; a stand-in for Ray says what the real one would. Real ones: test_start."""

import subprocess
import sys

import pytest

from tests.support.processes import alive, wait_for
from trainer.cluster.head import RayHead, RayHeadFailed

RAY = """
import os, pathlib, sys
def init(**options):
    print("a remark on", options["address"])
    starts = pathlib.Path(__file__).with_name("starts")
    starts.write_text(starts.read_text() + "." if starts.exists() else ".")
    {init}
def shutdown():
    print("down")
def get_runtime_context():
    class Context:
        gcs_address = "10.0.0.1:6379"
    return Context
"""


@pytest.fixture
def ray(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)

    def write(init="os.environ['RAY_AUTH_MODE'] = 'token'"):
        (tmp_path / "ray.py").write_text(RAY.format(init=init))

    return write


def test_a_head_says_where_it_is_and_its_remarks_go_to_the_log(ray, tmp_path):
    ray()
    head, log = RayHead(1.5), tmp_path / "ray.log"
    assert head.address() == ("10.0.0.1:6379", {"RAY_AUTH_MODE": "token"})
    head.log_to(log)
    head.end()
    head.wait()
    assert log.read_text().splitlines() == ["a remark on local", "down"]


def test_a_head_whose_processes_do_not_find_each_other_is_started_again_but_not_for_ever(ray, tmp_path):
    ray("raise RuntimeError('The current node timed out during startup.')")
    head = RayHead(1)
    with pytest.raises(
        RayHeadFailed, match=r"^No Ray head starts on this machine: The current node timed out during startup\.$"
    ):
        head.address()
    head.end()
    assert (tmp_path / "starts").read_text() == "..."


def test_a_head_that_dies_says_its_last_words(ray):
    ray("sys.exit('no room on the disk')")
    head = RayHead(1)
    with pytest.raises(RayHeadFailed, match=r"(?s)No Ray head starts on this machine: .*no room on the disk$"):
        head.address()
    head.end()


def test_a_head_that_is_still_starting_ends_at_once(ray, tmp_path):
    ray("import time; time.sleep(3600)")
    head = RayHead(1)
    wait_for((tmp_path / "starts").exists)
    head.end()
    assert not alive(head._process.pid)


def test_a_head_ends_with_its_driver(ray, tmp_path):
    ray()
    code = (
        "from trainer.cluster.head import RayHead; h = RayHead(1); h.address(); print(h._process.pid); import os; os._exit(0)"
    )
    root = __file__.rpartition("/tests/")[0]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    wait_for(lambda: not alive(int(done.stdout)))

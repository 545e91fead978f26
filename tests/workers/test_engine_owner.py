"""An engine process ends after its owner, also when that was killed."""

import os
import signal
import subprocess
import sys

import pytest

ENGINE = (
    "from workers.engines.owner import end_with_owner; import time; end_with_owner(); print('up', flush=True); time.sleep(60)"
)
OWNER = f"""
import os, subprocess, sys
os.environ["RLFRAME_ENGINE_OWNER"] = str(os.getpid())
engine = subprocess.Popen([sys.executable, "-c", {ENGINE!r}], stdout=subprocess.PIPE)
engine.stdout.readline()
print(engine.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_owner_takes_its_engine_along_also_one_that_is_stopped(stopped):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    engine = int(owner.stdout.readline())
    if stopped:
        os.kill(engine, signal.SIGSTOP)
    owner.kill()
    owner.wait()
    # The engine inherited stderr: it reads as ended only when the engine is gone too.
    assert owner.stderr.read() == b""

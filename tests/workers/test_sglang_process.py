"""The processes of a real SGLang server: whoever waits for one that hangs or dies gets an error, and none outlives its owner.

Needs SGLang (`make test-sglang`), which cannot be installed beside vLLM.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import psutil
import pytest

from tests.support.engines import MAX_MODEL_LEN, PATIENCE_S, prompt_of, save, serving, tiny_model
from workers.engines.protocol import EngineDeadError, SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang has an environment of its own: make test-sglang"),
]

OWNER = """
import asyncio, sys
from workers.engines.sglang.engine import SGLangEngine

async def own():
    engine = SGLangEngine(sys.argv[1], max_model_len=512, timeout_s=900)
    await engine.start()
    print(engine._process.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(own())
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(tiny_model(), tmp_path_factory.mktemp("model"))


def group(pid):
    """The processes of a server that still run."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):  # it may end while it is looked at
            if os.getpgid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


def scheduler_of(pid):
    (scheduler,) = [
        p for p in psutil.Process(pid).children(recursive=True) if "scheduler" in " ".join(p.cmdline() or [p.name()])
    ]
    return scheduler


def test_a_server_that_hangs_or_dies_raises_in_its_callers(path):
    with serving("sglang", path) as (engine, run):
        pid = engine._process.pid
        scheduler = scheduler_of(pid)
        scheduler.suspend()
        engine._timeout_s = 1.0
        with pytest.raises(EngineDeadError, match="did not answer"):
            run(engine.health())
        scheduler.resume()
        engine._timeout_s = PATIENCE_S
        run(engine.health())

        async def die():
            running = asyncio.create_task(engine.generate(prompt_of(5), SamplingParams(max_new_tokens=MAX_MODEL_LEN - 5)))
            await engine.generate(prompt_of(3), SamplingParams(max_new_tokens=2))
            scheduler.kill()
            with pytest.raises(EngineDeadError):
                await running
            with pytest.raises(EngineDeadError):
                await engine.health()

        run(die())
    assert group(pid) == []


def test_a_killed_owner_takes_its_server_along(path):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, path], stdout=subprocess.PIPE, text=True)
    pid = int(owner.stdout.readline())
    assert group(pid)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    while group(pid):
        time.sleep(0.1)

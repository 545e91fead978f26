"""An engine's process must not outlive the rollout worker that owns it, however that worker ends.

vLLM's core waits for messages that never come when its parent was killed; this watches for that. A process that is stopped or
hangs in native code cannot watch, so the kernel is asked, too. Nothing of vLLM is imported.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

OWNER_VARIABLE = "RLFRAME_ENGINE_OWNER"
"""Environment variable with the pid of the process that owns the engine."""
POLL_S = 1.0
PR_SET_PDEATHSIG = 1
"""prctl(2): the kernel sends this process a signal when the thread that started it ends."""


def end_with_owner() -> None:
    """End this process soon after the owner named by `OWNER_VARIABLE` is gone; without the variable nothing happens.

    It also ends at once when the thread that started it does, which an engine's parent keeps as long as the engine: the loop
    of a rollout worker, the main thread of an engine that spreads over processes.
    """
    if OWNER_VARIABLE in os.environ:
        owner = int(os.environ[OWNER_VARIABLE])
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        threading.Thread(target=_watch, args=(owner,), name="owner-watch", daemon=True).start()


def _watch(owner: int) -> None:
    while True:
        time.sleep(POLL_S)
        try:
            os.kill(owner, 0)
        except ProcessLookupError:
            os._exit(1)

"""An engine's process must not outlive the rollout worker that owns it, however that worker ends.

vLLM's core waits for messages that never come when its parent was killed; this watches for that. Nothing of vLLM is imported.
"""

from __future__ import annotations

import os
import threading
import time

OWNER_VARIABLE = "RLFRAME_ENGINE_OWNER"
"""Environment variable with the pid of the process that owns the engine."""
POLL_S = 1.0


def end_with_owner() -> None:
    """End this process soon after the owner named by `OWNER_VARIABLE` is gone; without the variable nothing happens."""
    if OWNER_VARIABLE in os.environ:
        owner = int(os.environ[OWNER_VARIABLE])
        threading.Thread(target=_watch, args=(owner,), name="owner-watch", daemon=True).start()


def _watch(owner: int) -> None:
    while True:
        time.sleep(POLL_S)
        try:
            os.kill(owner, 0)
        except ProcessLookupError:
            os._exit(1)

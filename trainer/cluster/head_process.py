"""The process of a local Ray head: ``python -P head_process.py CPUS``. The driver's side is `trainer.cluster.head`.

It imports Ray and nothing of ours, so that neither the driver's folder nor its imports matter to it. What it says, in order:
one line of JSON on stdout, with ``address`` and ``environment`` or with ``error``; then it reads the name of a log file from
stdin, writes there from then on, and takes the head down when stdin closes.
"""

from __future__ import annotations

import json
import logging
import os
import sys

STARTS = 3
"""How often Ray tries to start a head before giving up."""
SETTINGS = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 starves engine and learner beside anything else that runs
    # Actors have processes of their own; those that Ray starts ahead, one for each CPU, would end unused.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}
"""Ray's own settings, by environment variable, where the user has set none."""


def start(cpus: int) -> str:
    """The address of a new head. Ray gives its own processes 30 s to find each other, which a busy machine may exceed: then
    they are started again.
    """
    import ray

    for left in reversed(range(STARTS)):
        try:
            ray.init(
                address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING
            )
            break
        except Exception as error:
            if "timed out during startup" not in str(error) or not left:
                raise
            ray.shutdown()
    return str(ray.get_runtime_context().gcs_address)


def main() -> None:
    """Hold a head until stdin closes."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        address = start(int(sys.argv[1]))
    except Exception as error:
        print(json.dumps({"error": str(error) or type(error).__name__}), file=answer, flush=True)
        return
    import ray

    environment = {name: value for name, value in os.environ.items() if name == "RAY_AUTH_MODE"}
    print(json.dumps({"address": address, "environment": environment}), file=answer, flush=True)
    log = sys.stdin.readline().strip()
    if log:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()

"""Runs checks on several gloo ranks: one pool of four processes serves groups of 1, 2 and 4 ranks.

The processes are forked from a server that has the heavy imports done, so a pool starts in about a second.
"""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORLD = 4
PATIENCE_S = 600.0
"""For ranks on a machine that does much else; none of these limits is reached by a check that works."""
Check = Callable[..., None]


def _work(rank: int, store: str, plan: list[tuple[str, int, Check]], args: tuple, results: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=PATIENCE_S),
    )
    meshes = {n: init_device_mesh("cpu", (WORLD // n, n), mesh_dim_names=("copies", "ranks"))["ranks"] for n in (1, 2, 4)}
    for name, size, check in plan:
        # Ranks without a part in the last check wait here, with patience, not in a collective of the next one.
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=PATIENCE_S))
        if rank < size:
            try:
                check(meshes[size], *args)
            except BaseException:
                results.put((name, size, rank, traceback.format_exc()))
                break
            results.put((name, size, rank, None))
    results.put((None, 0, rank, None))
    dist.destroy_process_group()


def run_checks(
    plan: list[tuple[str, int, Check]], *args: Any, timeout_s: float = PATIENCE_S
) -> dict[tuple[str, int], str | None]:
    """Run ``check(mesh, *args)`` for every (name, ranks, check) in order.

    Returns:
        For each (name, ranks) that finished: None, or the traceback of the rank that failed. What comes after a failure on
        the same ranks does not run.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["session_cases", "torch.distributed.fsdp", "peft"])
    results = context.Queue()
    outcomes: dict[tuple[str, int], str | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        workers = [context.Process(target=_work, args=(r, store, plan, args, results), daemon=True) for r in range(WORLD)]
        for worker in workers:
            worker.start()
        waiting = WORLD
        try:
            while waiting:
                name, size, _rank, error = results.get(timeout=timeout_s)
                if name is None:
                    waiting -= 1
                elif error or (name, size) not in outcomes:
                    outcomes[name, size] = error
                if error:
                    break
        finally:
            for worker in workers:
                worker.join(timeout=0 if waiting else 10)
                if worker.is_alive():
                    worker.kill()
    return outcomes

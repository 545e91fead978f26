"""Load on the HTTP server: N clients of the tinker SDK at once, against the same work done in one process.

    python benchmarks/server.py                     # starts `rlframe serve` on the tiny model with Ray, and stops it
    python benchmarks/server.py --clients 4 --check # fails below 0.7 of the throughput in process

Every client trains a policy of its own: forward_backward on 32 data of 64 tokens, then optim_step, asking for the next step
before the answer to the last one is there, as the SDK's documentation advises. Afterwards the same clients send every request
three times, and the adapters are compared bit by bit with those of the work done once, in process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")

import httpx
import numpy as np
import tinker
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from torch.distributed.device_mesh import init_device_mesh

from rlframe.backbone import Backbone
from rlframe.config import LoraConfig, OptimConfig
from rlframe.losses.targets import make_loss
from rlframe.sessions import Session, SessionSpec
from trainer.server import data as server_data
from trainer.server import paths
from trainer.server.protobuf import read_pass
from trainer.server.serve import Base
from trainer.server.store import Store
from trainer.settings.compose import compose

DATA, LENGTH, RANK, BAR = 32, 64, 16, 0.7
ADAM = types.AdamParams(learning_rate=1e-3)


def batch(client: int, step: int) -> list[types.Datum]:
    rng = np.random.default_rng([client, step])
    tokens = rng.integers(0, 64, (DATA, LENGTH + 1))
    weights = np.ones(LENGTH, np.float32)
    return [
        types.Datum(types.ModelInput.from_ints(row[:-1].tolist()), {"target_tokens": row[1:], "weights": weights})
        for row in tokens
    ]


def message(model_id: str, seq: int, data: list[types.Datum]) -> bytes:
    body = types.ForwardBackwardInput(data=data, loss_fn="cross_entropy", loss_fn_config=None)
    request = types.ForwardBackwardRequest(forward_backward_input=body, model_id=model_id, seq_id=seq)
    return forward_backward_request_to_proto(request).SerializeToString()


def in_process(base: Base, clients: int, steps: int) -> tuple[list[Session], float]:
    """The sessions after their steps, and the seconds that the steps took; sharded over one rank, as the server's are."""
    backbone = Backbone.load(base.path, mesh=init_device_mesh("cpu", (1,)), device=torch.device("cpu"))
    targets = sorted({n.rpartition(".")[2] for part in ("attn", "mlp") for n in backbone.adapters.linear_modules()[part]})
    optim = OptimConfig(lr=ADAM.learning_rate, betas=[ADAM.beta1, ADAM.beta2], eps=ADAM.eps, max_grad_norm=None)
    sessions = [
        backbone.create_session(str(c), SessionSpec(lora=LoraConfig(RANK, 32.0, targets), optim=optim, seed=c))
        for c in range(clients)
    ]
    requests = [[read_pass(message("m", 1, batch(c, s))) for s in range(steps)] for c in range(clients)]
    began = time.perf_counter()
    for step in range(steps):
        for c, session in enumerate(sessions):
            work = server_data.assemble([requests[c][step]], server_data.check_request(requests[c][step]))
            session.forward_backward(work.batch, make_loss("cross_entropy", {}), 16384)
            session.optim_step(1.0)
    return sessions, time.perf_counter() - began


def drive(model: tinker.TrainingClient, number: int, steps: int) -> dict[str, list[float]]:
    """All steps of one client; seconds from asking to having the answer, by kind of request."""
    latencies: dict[str, list[float]] = {"forward_backward": [], "optim_step": []}
    waiting: list[tuple[str, float, object]] = []

    def take() -> None:
        kind, began, future = waiting.pop(0)
        future.result()  # type: ignore[attr-defined]
        latencies[kind].append(time.perf_counter() - began)

    for step in range(steps):
        waiting.append(("forward_backward", time.perf_counter(), model.forward_backward(batch(number, step), "cross_entropy")))
        waiting.append(("optim_step", time.perf_counter(), model.optim_step(ADAM)))
        while len(waiting) > 2:
            take()
    while waiting:
        take()
    return latencies


def drive_with_repeats(url: str, key: str, model: tinker.TrainingClient, number: int, steps: int) -> str:
    """The same steps with every request sent three times, the later ones of a step first; the path of the adapter."""
    http = httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": key}, timeout=120)

    def result(request: str) -> httpx.Response:
        while (answer := http.post("/retrieve_future", json={"request_id": request})).status_code == 408:
            pass
        return answer

    for step in range(steps):
        body = message(model.model_id, 2 * step + 1, batch(number, step))
        adam = {"model_id": model.model_id, "seq_id": 2 * step + 2, "adam_params": ADAM.model_dump()}
        asked = []
        for _ in range(3):
            asked.append(http.post("/optim_step", json=adam).json()["request_id"])
            headers = {"Content-Type": "application/x-protobuf"}
            asked.append(http.post("/forward_backward", content=body, headers=headers).json()["request_id"])
        assert len(set(asked)) == 2, "a repeated request was taken for another"
        for request in asked:
            result(request)
    save = {"model_id": model.model_id, "seq_id": 2 * steps + 1, "path": "repeated"}
    return result(http.post("/save_weights_for_sampler", json=save).json()["request_id"]).json()["path"]


def differences(store: Store, adapters: list[str], sessions: list[Session]) -> int:
    """Saved adapters that are not, bit by bit, those of the sessions with the same number."""
    wrong = 0
    for path, session in zip(adapters, sessions, strict=True):
        ours = load_file(store.folder(paths.parse(path)) / "adapter_model.safetensors")
        wrong += not all(torch.equal(ours[key], value) for key, value in session.sampler_tensors("adapter", "float32").items())
    return wrong


def start(folder: Path, overrides: list[str]) -> tuple[subprocess.Popen[str], str]:
    command = [
        sys.executable,
        "-m",
        "trainer.cli.main",
        "serve",
        f"run_dir={folder}",
        "server.port=0",
        "rollout=torch",
        *overrides,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("serving "):
            return process, line.split()[-1]
    raise SystemExit("the server did not start")


def measure(arguments: argparse.Namespace, folder: Path) -> float:
    base = Base.read(compose(["rollout=torch"]))
    process, url = start(folder, arguments.overrides)
    try:
        key, store = (folder / "api_key").read_text().strip(), Store(folder / "state")
        service = tinker.ServiceClient(base_url=url, api_key=key)

        def models() -> list[tinker.TrainingClient]:
            return [service.create_lora_training_client("tiny", RANK, seed=c).result() for c in range(arguments.clients)]

        drive(service.create_lora_training_client("tiny", RANK, seed=0).result(), 0, 3)  # warm up
        once, threads = models(), ThreadPoolExecutor(arguments.clients)
        began = time.perf_counter()
        found = list(threads.map(lambda c: drive(once[c], c, arguments.steps), range(arguments.clients)))
        seconds = time.perf_counter() - began
        saved = [model.save_weights_for_sampler("once").result().path for model in once]
        again = models()
        repeated = list(
            threads.map(lambda c: drive_with_repeats(url, key, again[c], c, arguments.steps), range(arguments.clients))
        )
        in_process(base, 1, 3)  # warm up
        sessions, alone = in_process(base, arguments.clients, arguments.steps)
        lost = differences(store, saved, sessions), differences(store, repeated, sessions)
    finally:
        process.terminate()
        process.wait(60)
    tokens = arguments.clients * arguments.steps * DATA * LENGTH
    print(f"{arguments.clients} clients x {arguments.steps} steps x {DATA} data x {LENGTH} tokens, rank {RANK}, tiny model")
    print(f"over HTTP   {tokens / seconds:9.0f} tokens/s   {seconds:.2f} s")
    print(f"in process  {tokens / alone:9.0f} tokens/s   {alone:.2f} s")
    print(f"ratio       {alone / seconds:9.2f}")
    for kind in found[0]:
        values = 1e3 * np.array([value for each in found for value in each[kind]])
        percentiles = ", ".join(f"p{p} {np.percentile(values, p):.0f}" for p in (50, 90, 99))
        print(f"{kind}: {percentiles} ms from asking to the answer")
    print(f"adapters that differ from the work done in process: {lost[0]} of {len(once)}")
    print(f"the same with every request sent three times:      {lost[1]} of {len(repeated)}")
    if any(lost):
        raise SystemExit("requests were lost or applied twice")
    return alone / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--check", action="store_true", help=f"fail below {BAR} of the throughput in process")
    parser.add_argument("overrides", nargs="*", help="settings of the server")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        ratio = measure(arguments, Path(folder))
    if arguments.check and ratio < BAR:
        raise SystemExit(f"{ratio:.2f} is below {BAR}")


if __name__ == "__main__":
    main()

"""How fast one rollout worker samples, what top-k heads cost, and what a weight sync costs; on the machine it runs on.

    python benchmarks/rollout.py [--model tiny|smollm2] [--engine vllm|sglang|torch]

The worker is a Ray actor on a real engine; every time includes the remote calls. Three numbers have a bar, which is printed
beside them, and the exit code says whether all are kept (of the tiny model):

- heads of k=32 keep 0.6 of the throughput without heads, in the same worker;
- parsing heads (vLLM's lists into arrays), packing them, shipping them through Ray's object store and checking them takes
  less than 5 % of the time in which they were generated;
- the weight sync of a whole job (default preset and batch size, critic included) takes less than 10 % of its step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import ray
import torch
from transformers import AutoModelForCausalLM

from rlframe.checksum import weights_checksum
from rlframe.config import ModelConfig
from rlframe.models import resolve_model
from rlframe.types import Batch, Prompt
from trainer.run.job import train
from trainer.settings.compose import compose
from trainer.settings.config import Config
from workers.engines.protocol import SamplingParams, WeightUpdate
from workers.environments.base import StepResult
from workers.rollout.worker import RolloutWorker

REPEATS = 10
HEADS_BAR, HANDLING_BAR, SYNC_BAR = 0.6, 0.05, 0.1
BAR_K = 32
JOB_STEPS = 16


class Endless:
    """No stop token, one turn, reward 0: every answer uses its whole budget."""

    name, stop_token_ids, max_turns = "endless", (), 1

    def __init__(self, *args, **kwargs) -> None: ...

    def episode(self, prompt: Prompt) -> Endless:
        return self

    async def step(self, action: np.ndarray, finish: str) -> StepResult:
        return StepResult(0.0, True)


async def sample(worker, prompts: list[Prompt], params: SamplingParams) -> tuple[float, Batch, int]:
    """Seconds from the submission to the last trajectory, all trajectories, and the number of remote calls they took."""
    begin, batches, done = time.perf_counter(), [], 0
    await worker.submit.remote(prompts, list(range(len(prompts))), 1, params)
    while done < len(prompts):
        collected = await worker.collect.remote(60.0)
        if collected.failures:
            raise RuntimeError(collected.failures[0][1][0].reason)
        batches.append(collected.batch)
        done += len(collected.slots)
    return time.perf_counter() - begin, Batch.concat(batches), len(batches)


async def median(worker, prompts, params, repeats=REPEATS) -> float:
    return statistics.median([(await sample(worker, prompts, params))[0] for _ in range(repeats)])


def handling_seconds(batch: Batch) -> float:
    """Seconds to build, ship (through Ray's object store) and take apart these trajectories, heads included."""
    trajectories = list(batch)
    begin = time.perf_counter()
    list(ray.get(ray.put(Batch.from_trajectories(trajectories))))
    return time.perf_counter() - begin


def parsing_seconds(batch: Batch) -> float:
    """Seconds in which the vLLM engine turns the flat lists of these completions into arrays."""
    from workers.engines.vllm.engine import completion_of

    k = batch.head_ids.shape[1]
    outputs = []
    for trajectory in batch:
        rows = trajectory.action_mask
        ids = np.concatenate([trajectory.tokens[rows, None], trajectory.head_ids[rows]], 1)
        logprobs = np.concatenate([trajectory.logprobs[rows, None], trajectory.head_logprobs[rows]], 1)
        flat = SimpleNamespace(token_ids=ids.ravel().tolist(), logprobs=logprobs.ravel().tolist())
        spans = [SimpleNamespace(start=0, end=len(ids), version="0")]
        sampled = trajectory.tokens[rows].tolist()
        outputs.append(SimpleNamespace(logprobs=flat, token_ids=sampled, weight_versions=spans, finish_reason="length"))
    begin = time.perf_counter()
    for output in outputs:
        completion_of(output, k)
    return time.perf_counter() - begin


def sync_fraction(options: argparse.Namespace) -> tuple[float, float]:
    """Median seconds of the weight sync and of the step, in a whole job with the default preset."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        settings = [f"model={options.model}", f"rollout={options.engine}", f"steps={JOB_STEPS}", "eval.size=8", "eval.every=0"]
        settings += ["actor=full"] if options.model == "tiny" else []
        quiet = [
            "log.wandb=disabled",
            "log.console=false",
            "log.rollouts_every=0",
            "checkpoint.every=0",
            "rollout.probe_every=0",
        ]
        train(compose([*settings, *quiet, f"run_dir={run_dir}"]))
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][4:]
    return tuple(statistics.median(row[name] for row in rows) for name in ("time/weight_sync", "time/step"))


def verdict(kept: bool, bar: str) -> str:
    return f"bar {bar}: {'kept' if kept else 'MISSED'}"


async def main(options: argparse.Namespace) -> bool:
    """Measure one worker; returns whether its bars are kept."""
    config = Config()
    config.task.name = "rollout:Endless"
    config.rollout.engine, config.rollout.max_model_len, config.rollout.timeout_s = options.engine, 256, 300
    path = resolve_model(ModelConfig(name=options.model, builder=options.model))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    vocabulary, size = model.config.vocab_size, sum(p.numel() for p in model.parameters())
    print(f"{options.model}: {size / 1e6:.2f} M parameters, engine {options.engine}, {torch.__version__}")

    begin = time.perf_counter()
    worker = ray.remote(RolloutWorker).options(num_cpus=1, max_concurrency=64).remote(config, path, 0, options.log)
    await worker.start.remote()
    print(f"start                                  {time.perf_counter() - begin:8.1f} s")

    rng = np.random.default_rng(0)
    prompts = [Prompt(str(i), i, rng.integers(0, vocabulary, 8).astype(np.int32), "endless") for i in range(128)]
    few, long = (128, 64) if size < 1e7 else (16, 16)
    k = min(16, vocabulary)
    await sample(worker, prompts[:few], SamplingParams(4, logprobs=k))
    seconds = await median(worker, prompts[:few], SamplingParams(4, logprobs=k))
    calls = (await sample(worker, prompts[:few], SamplingParams(4, logprobs=k)))[2]
    print(f"{few:3d} prompts x 4 tokens, k={k}            {seconds * 1e3:8.1f} ms   ({calls} collects)")

    repeats = REPEATS if size < 1e7 else 2
    kept = True
    sizes = {k: SamplingParams(32, logprobs=k) for k in (0, 8, 32, 128) if k <= vocabulary}
    samples = {k: [await sample(worker, prompts[:long], params)] for k, params in sizes.items()}
    for _ in range(repeats):  # in turns, so that other load on the machine meets all of them
        for k, params in sizes.items():
            samples[k].append(await sample(worker, prompts[:long], params))
    medians = {k: statistics.median(seconds for seconds, *_ in runs[1:]) for k, runs in samples.items()}
    base = medians[0]
    for k, seconds in medians.items():
        batch = samples[k][-1][1]
        parsing = statistics.median(parsing_seconds(batch) for _ in range(REPEATS)) if options.engine == "vllm" else 0.0
        handling = (statistics.median(handling_seconds(batch) for _ in range(REPEATS)) + parsing) / seconds
        print(
            f"{long:3d} prompts x 32 tokens, k={k:<3d}          {long * 32 / seconds:8.0f} tok/s  "
            f"({base / seconds:.2f} of k=0; heads parsed, packed and shipped in {handling:.1%} of the time)"
        )
        if k == BAR_K:
            heads_kept, handling_kept = base / seconds >= HEADS_BAR, handling < HANDLING_BAR
            print(
                f"    {verdict(heads_kept, f'{HEADS_BAR} of k=0')}; {verdict(handling_kept, f'{HANDLING_BAR:.0%} of the time')}"
            )
            kept = heads_kept and handling_kept

    tensors = {name: p.detach().numpy() for name, p in model.named_parameters()}
    expected, times = weights_checksum(model.parameters()), []
    for version in range(1, 1 + repeats):
        update = ray.put(WeightUpdate(version, "full", tensors))
        begin = time.perf_counter()
        served = await worker.update_weights.remote(update)
        times.append(time.perf_counter() - begin)
        assert served == expected, "the engine does not serve what was sent"
    print(f"full weight sync, checksum verified    {statistics.median(times) * 1e3:8.1f} ms")
    await worker.close.remote()
    return kept


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=["tiny", "smollm2"])
    parser.add_argument("--engine", default="vllm", choices=["vllm", "sglang", "torch"])
    parser.add_argument("--log", default="rollout_benchmark.log", help="where the worker and its engine write")
    arguments = parser.parse_args()
    os.environ.setdefault("RAY_worker_niceness", "0")  # as in a run: Ray's 15 starves the engine beside anything else that runs
    ray.init(address="local", logging_level=logging.ERROR, log_to_driver=False)
    all_kept = asyncio.run(main(arguments))
    ray.shutdown()
    sync, step = sync_fraction(arguments)
    all_kept &= sync < SYNC_BAR * step
    print(f"weight sync of a whole job             {sync * 1e3:8.1f} ms, {sync / step:.1%} of a step of {step:.2f} s")
    print(f"    {verdict(sync < SYNC_BAR * step, f'{SYNC_BAR:.0%} of a step')}")
    sys.exit(arguments.model == "tiny" and not all_kept)

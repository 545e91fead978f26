"""What sharing a backbone costs: memory of a critic beside the policy, time of idle sessions, and against a plain torch loop.

    python benchmarks/sessions.py [--model smollm2] [--tokens 512] [--repeats 5] [--threads 1] [--check]

Prints three ratios, measured in one run:

- memory: peak of policy + critic sessions on one backbone over the policy alone (and of two models over one), each in a fresh
  process, once loaded. On the CPU it is the peak resident set minus what the libraries take, on CUDA the allocator's peak.
- idle: a policy step with 8 idle sessions present over the same step with none.
- loop: a policy step over a hand-written loop (transformers, PEFT, full log-softmax, AdamW) on the same tokens: the faster of a
  packed row and a padded batch.

Steps are timed in turns and the fastest of each counts, since other load on the machine only ever adds; on the CPU it is
processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rlframe.backbone import Backbone
from rlframe.config import AlgorithmConfig, LoraConfig, ModelConfig
from rlframe.losses.policy import PolicyLoss
from rlframe.losses.value import ValueLoss
from rlframe.models import resolve_model
from rlframe.sessions import Session, SessionSpec
from rlframe.types import Batch, Trajectory

RANK = 16
LIMITS = {"memory": 1.15, "idle": 1.03, "loop": 1.25}
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def make_batch(tokens: int) -> Batch:
    """Trajectories of 32 to 96 tokens, the second half of each sampled."""
    rng = np.random.default_rng(0)
    trajectories: list[Trajectory] = []
    while sum(map(len, trajectories)) < tokens:
        length = int(rng.integers(32, 97))
        trajectories.append(
            Trajectory(
                tokens=rng.integers(0, 40000, length),
                action_mask=np.arange(length) >= length // 2,
                logprobs=np.full(length, -1.0),
                head_ids=np.zeros((length, 0)),
                head_logprobs=np.zeros((length, 0)),
                versions=np.zeros(length),
                rewards=np.zeros(length),
                finish="stop",
            )
        )
    batch = Batch.from_trajectories(trajectories)
    noise = rng.normal(size=(2, batch.num_tokens)).astype(np.float32) * batch.action_mask
    batch.advantages, batch.returns = noise
    return batch


def start(threads: int):
    torch.set_num_threads(threads)
    dist.init_process_group("nccl" if CUDA else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(DEVICE.type, (1,))


def spec(critic: bool, seed: int = 0) -> SessionSpec:
    return SessionSpec(lora=LoraConfig(rank=RANK), value_head=critic, seed=seed)


def policy_step(session: Session, batch: Batch) -> None:
    session.forward_backward(batch, PolicyLoss(AlgorithmConfig(), 1.0), batch.num_tokens)
    session.optim_step(1 / batch.num_actions)


def critic_step(session: Session, batch: Batch) -> None:
    session.forward_backward(batch, ValueLoss(), batch.num_tokens)
    session.optim_step(1 / batch.num_actions)


# --------------------------------------------------------------------------------------------------------------- memory


def peak_memory(path: str, what: str, tokens: int, threads: int) -> int:
    """Peak bytes of two steps of ``policy``, ``shared`` (policy and critic on one backbone) or ``apart`` (on two)."""
    command = [sys.executable, __file__, "--measure", what, "--path", path, "--tokens", str(tokens), "--threads", str(threads)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


def measure(path: str, what: str, tokens: int, threads: int) -> int:
    mesh = start(threads)
    batch = make_batch(tokens)
    before = resident("VmRSS")
    backbone = Backbone.load(path, mesh=mesh, device=DEVICE)
    policy = backbone.create_session("policy", spec(critic=False))
    critic = None
    if what != "policy":
        other = backbone if what == "shared" else Backbone.load(path, mesh=mesh, device=DEVICE)
        critic = other.create_session("critic", spec(critic=True, seed=1))
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    else:
        # While weights are read, pages of the file count as resident too; the kernel drops them under pressure.
        Path("/proc/self/clear_refs").write_text("5")
    for _ in range(2):
        policy_step(policy, batch)
        if critic is not None:
            critic_step(critic, batch)
    return torch.cuda.max_memory_allocated() if CUDA else resident("VmHWM") - before


def resident(field: str) -> int:
    """Bytes of a line of ``/proc/self/status``: VmRSS is resident now, VmHWM its peak."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


# ----------------------------------------------------------------------------------------------------------------- time


def seconds(run: Callable[[], None]) -> float:
    if not CUDA:
        started = time.process_time()
        run()
        return time.process_time() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def in_turns(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Fastest time of each, after one round to warm up."""
    best: dict[str, float] = {}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            taken = seconds(run)
            if turn:
                best[name] = min(taken, best.get(name, taken))
    return best


def idle_step(path: str, batch: Batch, mesh, repeats: int) -> dict[str, float]:
    """The same step on two backbones, one of which holds 8 more sessions that have trained before."""
    alone, crowded = (Backbone.load(path, mesh=mesh, device=DEVICE) for _ in range(2))
    sessions = {name: b.create_session("policy", spec(critic=False)) for name, b in (("none", alone), ("idle", crowded))}
    for i in range(8):
        critic_step(crowded.create_session(f"idle_{i}", spec(critic=True, seed=i)), batch.select([0]))
    return in_turns({name: lambda s=s: policy_step(s, batch) for name, s in sessions.items()}, repeats)


def plain_loop(path: str, batch: Batch, mesh, repeats: int) -> dict[str, float]:
    """The session against what one would write by hand."""
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(DEVICE)
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    model = peft.get_peft_model(model, config)
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)
    lengths = batch.lengths.tolist()

    def finish(logits, ids, mask, advantages) -> None:
        logprobs = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        loss = -(logprobs * advantages[:, 1:] * mask[:, 1:]).sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()

    row = [
        torch.from_numpy(np.asarray(a))[None].to(DEVICE)
        for a in (batch.tokens.astype(np.int64), batch.action_mask, batch.advantages)
    ]
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(DEVICE)
    padded = [torch.nn.utils.rnn.pad_sequence(list(a[0].split(lengths)), batch_first=True) for a in row]
    seen = torch.nn.utils.rnn.pad_sequence([torch.ones(n, dtype=torch.int64) for n in lengths], batch_first=True).to(DEVICE)
    session = Backbone.load(path, mesh=mesh, device=DEVICE).create_session("policy", spec(critic=False))
    return in_turns(
        {
            "session": lambda: policy_step(session, batch),
            "packed": lambda: finish(model(input_ids=row[0], position_ids=positions, use_cache=False).logits, *row),
            "padded": lambda: finish(model(input_ids=padded[0], attention_mask=seen, use_cache=False).logits, *padded),
        },
        repeats,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a builder of rlframe.models")
    parser.add_argument("--path", help="a Hugging Face folder instead")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a ratio is above its limit")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    path = options.path or resolve_model(ModelConfig(builder=options.model))
    if options.measure:
        print(measure(path, options.measure, options.tokens, options.threads))
        return 0
    peaks = {what: peak_memory(path, what, options.tokens, options.threads) for what in ("policy", "shared", "apart")}
    mesh, batch = start(options.threads), make_batch(options.tokens)
    idle = idle_step(path, batch, mesh, options.repeats)
    loop = plain_loop(path, batch, mesh, options.repeats)
    ratios = {
        "memory": peaks["shared"] / peaks["policy"],
        "idle": idle["idle"] / idle["none"],
        "loop": loop["session"] / min(loop["packed"], loop["padded"]),
    }
    print(f"{batch.num_tokens} tokens in {len(batch)} trajectories, {DEVICE.type}, {options.threads} thread(s), rank {RANK}")
    print("memory [MiB]  " + "  ".join(f"{name} {peak / 2**20:.0f}" for name, peak in peaks.items()))
    print(f"              two models over one: {peaks['apart'] / peaks['policy']:.3f}")
    print("idle [s]      " + "  ".join(f"{name} {taken:.3f}" for name, taken in idle.items()))
    print("loop [s]      " + "  ".join(f"{name} {taken:.3f}" for name, taken in loop.items()))
    for name, ratio in ratios.items():
        print(f"{name:7} {ratio:.3f}  (at most {LIMITS[name]})")
    print(json.dumps({"ratios": ratios, "peaks": peaks, "idle": idle, "loop": loop}))
    return int(options.check and any(ratio > LIMITS[name] for name, ratio in ratios.items()))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore")
    sys.exit(main())

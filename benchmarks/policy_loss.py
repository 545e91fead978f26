"""The fused policy loss against full logits: time and memory of one loss with its gradients, and their ratios.

    python -m benchmarks.policy_loss [--train-head] [--tokens 2048] [--vocabulary 65536] [--hidden 512] [--head 128] ...

Variants, all for the gradient of the hidden states (and of the lm_head with --train-head):

    full      logits = hidden @ weight.T, log_softmax, gather, autograd                        (a)
    chunked   full logits, but log-sum-exp and gradient chunk by chunk in an autograd function  (b)
    fused     rlframe's pass, REINFORCE
    centred   the same with score centering over the head

Rounds are interleaved and medians compared, since a shared machine drifts; on a busy one, --cpu-time counts the seconds of one
thread instead of those on the wall. Memory is the peak of resident memory above what is
there once inputs and gradients exist, each variant in a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlframe import AlgorithmConfig, policy_loss

BARS = {"centred / fused time": 1.10, "centred / full time": 1.15, "centred / full memory": 0.15}


class ChunkedGather(torch.autograd.Function):
    """log p of the sampled token from logits that are already there, 128 rows at a time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor) -> Tensor:
        total = torch.cat([part.logsumexp(1) for part in logits.split(128)])
        ctx.save_for_backward(logits, tokens, total)
        return logits.gather(1, tokens[:, None]).squeeze(1) - total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, tokens, total = ctx.saved_tensors
        out = torch.empty_like(logits)
        for z, y, s, g, o in zip(*(t.split(128) for t in (logits, tokens, total, grad, out)), strict=True):
            torch.sub(z, s[:, None], out=o).exp_().mul_(-g[:, None]).scatter_add_(1, y[:, None], g[:, None])
        return out, None


class Problem:
    """Random hidden states and head weights; the sampler is the trainer of another seed."""

    def __init__(self, args: argparse.Namespace) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(args.tokens, args.hidden, generator=generator).requires_grad_()
        self.weight = (torch.randn(args.vocabulary, args.hidden, generator=generator) * 0.05).requires_grad_(args.train_head)
        self.tokens = torch.randint(0, args.vocabulary, (args.tokens,), generator=generator)
        self.advantages = torch.randn(args.tokens, generator=generator)
        self.logprobs = torch.full((args.tokens,), -11.0)
        # The cost of a head does not depend on which ids it holds, only on how many.
        first = torch.randint(0, args.vocabulary, (args.tokens, 1), generator=generator)
        apart = args.vocabulary // args.head * torch.arange(args.head)
        self.head_ids = ((first + apart) % args.vocabulary).int()
        inside = self.head_ids == self.tokens[:, None]
        self.head_logprobs = torch.log_softmax(torch.randn(args.tokens, args.head + 1, generator=generator), 1)[:, :-1]
        self.head_logprobs = torch.where(inside, self.logprobs[:, None], self.head_logprobs)

    def full(self) -> Tensor:
        logprobs = torch.log_softmax(self.hidden @ self.weight.T, -1).gather(1, self.tokens[:, None]).squeeze(1)
        return -(self.advantages * logprobs).sum()

    def chunked(self) -> Tensor:
        return -(self.advantages * ChunkedGather.apply(self.hidden @ self.weight.T, self.tokens)).sum()

    def fused(self) -> Tensor:
        algorithm = AlgorithmConfig()
        return policy_loss(self.hidden, self.weight, self.tokens, self.logprobs, self.advantages, algorithm).loss

    def centred(self) -> Tensor:
        return policy_loss(
            self.hidden,
            self.weight,
            self.tokens,
            self.logprobs,
            self.advantages,
            AlgorithmConfig(score_centering=True),
            head_ids=self.head_ids,
            head_logprobs=self.head_logprobs,
        ).loss

    def variants(self) -> dict[str, Callable[[], Tensor]]:
        return {"full": self.full, "chunked": self.chunked, "fused": self.fused, "centred": self.centred}

    def zero_grad(self) -> None:
        for tensor in (self.hidden, self.weight):
            if tensor.requires_grad:
                tensor.grad = torch.zeros_like(tensor)


def seconds(problem: Problem, loss: Callable[[], Tensor], clock: Callable[[], float]) -> float:
    problem.zero_grad()
    start = clock()
    loss().backward()
    return clock() - start


def resident(field: str) -> int:
    """Bytes of a line of /proc/self/status: VmRSS now, VmHWM at its peak."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def measure_peak(args: argparse.Namespace, name: str, results: Any) -> None:
    torch.set_num_threads(args.threads)
    small = argparse.Namespace(**{**vars(args), "tokens": 8, "vocabulary": 256, "head": 4})
    Problem(small).variants()[name]().backward()  # library buffers exist now
    problem = Problem(args)
    problem.zero_grad()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts over
    before = resident("VmRSS")
    problem.variants()[name]().backward()
    results.put(resident("VmHWM") - before)


def peak(args: argparse.Namespace, name: str) -> int:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    worker = context.Process(target=measure_peak, args=(args, name, results))
    worker.start()
    worker.join()
    return results.get(timeout=1)


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, value in (
        ("tokens", 2048),
        ("vocabulary", 65536),
        ("hidden", 512),
        ("head", 128),
        ("threads", 2),
        ("rounds", 5),
    ):
        parser.add_argument(f"--{option}", type=int, default=value)
    parser.add_argument("--train-head", action="store_true")
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args(argv)
    if args.cpu_time:
        args.threads = 1
    clock = time.process_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(args.threads)
    problem = Problem(args)
    variants = problem.variants()
    for loss in variants.values():
        seconds(problem, loss, clock)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(args.rounds):
        for name, loss in variants.items():
            times[name].append(seconds(problem, loss, clock))
    peaks = {name: peak(args, name) for name in variants}
    clocked = "CPU time" if args.cpu_time else "wall time"
    print(f"T={args.tokens} V={args.vocabulary} H={args.hidden} k={args.head} fp32, {args.threads} threads, {clocked}")
    for name in variants:
        print(f"{name:8s} {statistics.median(times[name]):8.3f} s   {peaks[name] / 2**20:8.1f} MiB above inputs and gradients")

    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))

    ratios = {f"{a} / {b} time": ratio(a, b) for a, b in (("centred", "fused"), ("centred", "full"), ("centred", "chunked"))}
    ratios["fused / full time"] = ratio("fused", "full")
    ratios |= {f"centred / {b} memory": peaks["centred"] / peaks[b] for b in ("full", "chunked")}
    for name, value in ratios.items():
        bar = BARS.get(name)
        print(f"{name:24s} {value:6.3f}" + ("" if bar is None else f"   bar {bar:.2f}: {'met' if value <= bar else 'MISSED'}"))
    return ratios


if __name__ == "__main__":
    main()

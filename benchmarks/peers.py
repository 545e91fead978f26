"""Beside a peer: training steps of TRL's GRPOTrainer and of rlframe on this machine, one after the other.

    pip install "rlframe[peers]"      # TRL; it may live in an environment of its own: --trl-python .trl/bin/python
    python benchmarks/peers.py [--model tiny|smollm2] [--dtype float32|bfloat16] [--steps 8] [SETTING=VALUE ...]

Both train all weights of the same model by GRPO in groups of two on the same prompts, with the same number of samples a step
and answers of the same length (nothing ends an answer early), without KL term or critic, in the same precision: bfloat16
computation on float32 weights (TRL's default), or float32. TRL generates with transformers in its own process, as it does
without further setup, and may use all cores; rlframe has engine, learner and controller in processes of their own and trains
on rollouts that are up to two versions old. Printed are the median step after the first ones, samples per second and the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SKIPPED = 2
"""Steps before the steady state."""
GROUP = 2
LR = 1e-6
SIZES = {"tiny": (64, 4, 1), "smollm2": (16, 64, 2)}
"""Model to samples a step, tokens of an answer, and the bar: rlframe's samples per second over TRL's (tiny: none)."""
TINY_BAR_S = 0.25
PROMPTS = [
    f"{ask} {thing}"
    for ask in ("tell me about", "what is", "write a line on", "why is there")
    for thing in ("rain", "a river", "the moon", "music", "bread", "a bridge", "sleep", "the sea", "glass", "winter", "a key")
]


def reward(text: str) -> float:
    """Something that differs between answers."""
    return text.count("e") / (1 + len(text))


class Prompts:
    """The environment of our side: one turn, `reward`, no stop token."""

    # Not derived from `Environment`: TRL's environment reads this file, too, and has no rlframe.
    name, stop_token_ids, max_turns = "peers", (), 1
    answer_tokens, notes, held_out_by_tokens = 1, (), False

    def __init__(self, task, tokenizer, *, seed: int, eval_size: int) -> None:
        from workers.environments.base import Problem

        self.tokenizer = tokenizer
        rows = tokenizer(PROMPTS, add_special_tokens=False).input_ids
        self.problems = [Problem(text, np.array(row, np.int32)) for text, row in zip(PROMPTS, rows, strict=True)]

    def train_prompts(self):
        return self.problems

    def eval_prompts(self):
        return self.problems[:1]

    def episode(self, prompt):
        return self

    def close(self):
        pass

    async def step(self, action: np.ndarray, finish: str):
        from workers.environments.base import StepResult

        return StepResult(reward(self.tokenizer.decode(action, skip_special_tokens=True)), True)


def trl_steps(path: str, options: argparse.Namespace) -> list[float]:
    """Seconds of every step of TRL's trainer."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    samples, tokens, _ = SIZES[options.model]
    torch.set_num_threads(os.cpu_count() or 1)
    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.begin = self.begin if seconds else time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            now = time.perf_counter()
            seconds.append(now - self.begin)
            self.begin = now
            print(f"TRL: step {len(seconds)} took {seconds[-1]:.2f} s", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=options.dtype == "bfloat16",
            model_init_kwargs={"dtype": "float32"},
            per_device_train_batch_size=samples,
            num_generations=GROUP,
            max_completion_length=tokens,
            generation_kwargs={"min_new_tokens": tokens},
            gradient_checkpointing=False,
            beta=0.0,
            learning_rate=LR,
            max_steps=options.steps,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=path,
            reward_funcs=lambda completions, **kwargs: [reward(text) for text in completions],
            args=config,
            train_dataset=Dataset.from_list([{"prompt": text} for text in PROMPTS]),
            callbacks=[Clock()],
        )
        trainer.train()
    return seconds


def our_steps(path: str, options: argparse.Namespace) -> list[dict]:
    """Metrics of every step of ours."""
    from trainer.run.job import train
    from trainer.settings.compose import compose

    samples, tokens, _ = SIZES[options.model]
    with tempfile.TemporaryDirectory() as folder:
        config = compose(
            [
                f"model.path={path}",
                "task.name=peers:Prompts",
                "algorithm=grpo",
                f"algorithm.rollouts_per_prompt={GROUP}",
                "actor=full",
                f"actor.optim.lr={LR}",
                f"model.dtype={options.dtype}",
                f"rollout.dtype={options.dtype}",
                f"batch_size={samples}",
                f"rollout.max_new_tokens={tokens}",
                "rollout.max_model_len=256",
                "rollout.probe_every=0",
                "eval.size=1",
                "eval.every=0",
                "checkpoint.every=0",
                "log.rollouts_every=0",
                "log.wandb=disabled",
                "log.console=false",
                f"steps={options.steps}",
                f"run_dir={folder}/run",
                *options.settings,
            ]
        )
        train(config)
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["response_length/mean"] == tokens for row in rows[1:])
    return rows[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="settings of our side")
    parser.add_argument("--model", default="tiny", choices=list(SIZES))
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter of an environment with TRL")
    parser.add_argument("--only", choices=["trl", "ours"], help="one side")
    parser.add_argument("--path", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.path:  # TRL's side, in a process of its own
        print(json.dumps(trl_steps(options.path, options)))
        return
    from rlframe.config import ModelConfig
    from rlframe.models import resolve_model

    path = resolve_model(ModelConfig(name=options.model, builder=options.model))
    samples, tokens, bar = SIZES[options.model]
    print(f"{options.model}, {options.dtype}: {samples} samples of {tokens} tokens a step, {os.cpu_count()} cores")
    rates, step = {}, 0.0
    if options.only != "ours":
        command = [
            options.trl_python,
            __file__,
            "--model",
            options.model,
            "--dtype",
            options.dtype,
            "--steps",
            str(options.steps),
        ]
        output = subprocess.run([*command, "--path", path], stdout=subprocess.PIPE, text=True, check=True).stdout
        seconds = json.loads(output.splitlines()[-1])
        rates["TRL"] = report("TRL", seconds, samples)
    if options.only != "trl":
        rows = our_steps(path, options)
        step = statistics.median(row["time/step"] for row in rows[SKIPPED:])
        rates["rlframe"] = report("rlframe", [row["time/step"] for row in rows], samples)
        parts = sorted({name for row in rows for name in row if name.startswith(("time/", "idle/"))} - {"time/step"})
        print(
            "  " + ", ".join(f"{name} {statistics.median(row.get(name, 0.0) for row in rows[SKIPPED:]):.3f}" for name in parts)
        )
    if len(rates) == 2:
        print(f"ratio {rates['rlframe'] / rates['TRL']:.2f}" + (f" (bar {bar})" if options.model == "smollm2" else ""))
    if options.model == "tiny" and step:
        print(f"a step of ours takes {step:.3f} s (bar {TINY_BAR_S})")


def report(name: str, seconds: list[float], samples: int) -> float:
    """Print and return the samples per second."""
    middle = statistics.median(seconds[SKIPPED:])
    print(f"{name:8s} {middle:7.3f} s a step (from {min(seconds[SKIPPED:]):.3f}), {samples / middle:8.1f} samples/s")
    return samples / middle


if __name__ == "__main__":
    main()

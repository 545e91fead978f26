"""What the three examples share: a tiny backbone, trajectories from text, a value fit with held-out measurements, output.

Everything is called as a trainer of one's own would call it: `rlframe.backbone`, `rlframe.sessions`, losses. No Ray.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlframe.advantages import compute_advantages, make_estimator
from rlframe.backbone import Backbone
from rlframe.config import AlgorithmConfig, LoraConfig, ModelConfig, OptimConfig
from rlframe.losses.value import ValueLoss, ValuePrediction
from rlframe.metrics import Metrics
from rlframe.models import resolve_model
from rlframe.models.characters import character_tokenizer
from rlframe.sessions import Session, SessionSpec
from rlframe.types import Batch, Trajectory

MICRO_BATCH_TOKENS = 16384
ARMS = {"frozen attention": ["self_attn"], "full adapter": []}
"""Arm -> the critic's frozen patterns."""
MONTE_CARLO = make_estimator(AlgorithmConfig(advantage="none"))
"""Returns are the total reward: the targets of value pretraining."""
ENCODE = character_tokenizer()


def random_backbone(seed: int, vocabulary: int) -> Backbone:
    """Two Qwen3 blocks of random weights, which depend on ``seed`` alone."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.1,
    )
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(folder)
        return Backbone.load(folder, mesh=None, device=torch.device("cpu"))


def tiny_backbone() -> Backbone:
    """The project's tiny Qwen3, warmed up on sums (`rlframe.models.tiny`); built once and kept in the cache."""
    path = resolve_model(ModelConfig(builder="tiny"))
    return Backbone.load(path, mesh=None, device=torch.device("cpu"))


def make_session(backbone: Backbone, name: str, lr: float, seed: int, *, critic: bool, frozen: Sequence[str] = ()) -> Session:
    """A rank-16 adapter, with a value head if it is a critic."""
    optim = OptimConfig(lr=lr, warmup_steps=10)
    spec = SessionSpec(lora=LoraConfig(), value_head=critic, frozen_patterns=list(frozen), optim=optim, seed=seed)
    return backbone.create_session(name, spec)


def trajectory(parts: Sequence[tuple[str, bool]], reward: float) -> Trajectory:
    """Pieces of text, each with whether the policy wrote it; the reward comes with the last token."""
    pieces = [(token, acted) for text, acted in parts for token in ENCODE(text).input_ids]
    tokens, mask = (np.array(column) for column in zip(*pieces, strict=True))
    return from_tokens(tokens, mask, reward)


def from_tokens(tokens: np.ndarray, mask: np.ndarray, reward: float = 0.0) -> Trajectory:
    """A finished trajectory whose log-probabilities are not needed."""
    rewards = np.zeros(len(tokens))
    rewards[-1] = reward
    nothing = np.zeros((len(tokens), 0))
    return Trajectory(
        tokens=tokens,
        action_mask=mask,
        logprobs=np.zeros(len(tokens)),
        head_ids=nothing,
        head_logprobs=nothing,
        versions=np.where(mask, 0, -1),
        rewards=rewards,
        finish="stop",
    )


def with_returns(trajectories: Sequence[Trajectory]) -> Batch:
    """A batch with Monte-Carlo returns."""
    batch = Batch.from_trajectories(trajectories)
    compute_advantages(batch, MONTE_CARLO)
    return batch


def explained_variance(critic: Session, batch: Batch, targets: np.ndarray, rows: np.ndarray) -> dict[str, float]:
    """Both forms of explained variance of ``targets`` [N] by the critic's values, over ``rows`` (bool[N])."""
    values = critic.forward(batch, ValuePrediction(), MICRO_BATCH_TOKENS).per_token["values"].numpy()
    metrics = Metrics()
    metrics.explained_variance("explained_variance", values[rows], targets[rows])
    return metrics.compute()


@dataclass(frozen=True)
class Row:
    """One line of metrics.jsonl."""

    arm: str
    seed: int
    step: int
    metrics: dict[str, float]


def fit(critic: Session, batches: Iterable[Batch], held_out: Batch, targets: np.ndarray, every: int) -> Iterator[Row]:
    """One value step a batch; before the first, every ``every`` steps and after the last, what the critic says of ``held_out``.

    ``train_error`` is the mean of (V - R)^2 over the training tokens seen since the row before.
    """
    since = Metrics()

    def measured(step: int) -> Row:
        held = explained_variance(critic, held_out, targets, held_out.action_mask)
        return Row(critic.name, critic.spec.seed, step, {f"held_out/{key}": value for key, value in held.items()})

    yield measured(0)
    step = 0
    for step, batch in enumerate(batches, start=1):
        outputs = critic.forward_backward(batch, ValueLoss(), MICRO_BATCH_TOKENS)
        critic.optim_step(1 / batch.num_actions)
        since = Metrics.merge([since, outputs.metrics])
        if step % every == 0:
            row = measured(step)
            yield replace(row, metrics=row.metrics | {"train_error": 2 * since.compute()["critic/value_loss"]})
            since = Metrics()


def arguments(documentation: str | None, name: str, seeds: int) -> argparse.Namespace:
    """``--seeds`` and ``--out``."""
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(seeds)))
    parser.add_argument("--out", type=Path, default=Path("runs/values") / name, help="folder of metrics.jsonl and the picture")
    return parser.parse_args()


def write(rows: Sequence[Row], out: Path) -> None:
    """metrics.jsonl."""
    out.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({**asdict(row), "metrics": None} | row.metrics) for row in rows)
    (out / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))


def over_seeds(rows: Sequence[Row], arm: str, metric: str) -> tuple[list[int], np.ndarray]:
    """Steps, and [steps, seeds] numbers of one arm."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if row.arm == arm and metric in row.metrics:
            found.setdefault(row.step, []).append(row.metrics[metric])
    return sorted(found), np.array([found[step] for step in sorted(found)])


def table(rows: Sequence[Row], metric: str, steps: Sequence[int]) -> str:
    """Markdown: mean (lowest to highest over seeds) of ``metric`` at ``steps``, a line an arm."""
    lines = [f"| {metric}, step | " + " | ".join(map(str, steps)) + " |", "|---" * (len(steps) + 1) + "|"]
    for arm in dict.fromkeys(row.arm for row in rows):
        at, numbers = over_seeds(rows, arm, metric)
        cells = [numbers[at.index(step)] for step in steps]
        lines.append(f"| {arm} | " + " | ".join(f"{c.mean():+.2f} ({c.min():+.2f} to {c.max():+.2f})" for c in cells) + " |")
    return "\n".join(lines)


def draw(
    rows: Sequence[Row], panels: dict[str, str], path: Path, *, lowest: float | None = None, mark: int | None = None
) -> None:
    """One panel a metric (``panels``: metric -> title): mean over seeds, band from the lowest to the highest."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3), squeeze=False)
    for axis, (metric, title) in zip(axes[0], panels.items(), strict=True):
        for arm in dict.fromkeys(row.arm for row in rows):
            steps, numbers = over_seeds(rows, arm, metric)
            if not steps:
                continue
            (line,) = axis.plot(steps, numbers.mean(1), label=arm)
            axis.fill_between(steps, numbers.min(1), numbers.max(1), color=line.get_color(), alpha=0.2, linewidth=0)
        if mark is not None:
            axis.axvline(mark, color="0.5", linestyle=":")
        axis.set(xlabel="step", title=title)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
        if lowest is not None and metric.startswith("held_out/"):
            axis.set_ylim(bottom=lowest)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)

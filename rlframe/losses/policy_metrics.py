"""Metrics of a policy loss, as mergeable sums; their names are the field's."""

from __future__ import annotations

import numpy as np
import torch

from rlframe.losses.corrections import LOG_RATIO_BOUND
from rlframe.losses.fused import FusedOutputs
from rlframe.losses.objective import PolicyTokens
from rlframe.metrics import Metrics


def policy_metrics(data: PolicyTokens, out: FusedOutputs) -> Metrics:
    """Statistics of one micro-batch of whole trajectories; empty for one without action tokens.

    Token means run over all action tokens, those that rejection drops included; trajectory means over the trajectories that
    have action tokens, so that a fully masked one changes nothing.
    """
    metrics = Metrics()
    count = len(out.logprobs)
    if not count:
        return metrics
    # One transfer from the device for everything.
    columns = {"logprobs": out.logprobs, "entropy": out.entropy, "sampler": data.logprobs, "loss": out.losses, **out.stats}
    table = torch.stack([column.double() for column in columns.values()]).cpu().numpy()
    stats = dict(zip(columns, table, strict=True))
    metrics.mean("actor/pg_loss", stats["loss"].sum(), count)
    metrics.mean("actor/entropy", stats["entropy"].sum(), count)
    metrics.mean("actor/advantage_mean", data.advantages.double().sum().item(), count)
    _mismatch(metrics, stats["logprobs"], stats["sampler"], data.segments.cpu().numpy(), data.count)
    if "weight" in stats:
        _weights(metrics, stats["weight"])
    if "clipped" in stats:
        metrics.mean("actor/clip_fraction", stats["clipped"].sum(), count)
    if "kept" in stats:
        metrics.mean("rollout_corr/rollout_rs_masked_fraction", count - stats["kept"].sum(), count)
    for name, key in (
        ("actor/sc_correction", "correction"),
        ("actor/sc_sampler_head_mass", "sampler_mass"),
        ("actor/sc_train_head_mass", "trainer_mass"),
        ("actor/sc_coefficient_l1", "coefficient_l1"),
    ):
        if key in stats:
            metrics.mean(name, stats[key].sum(), count)
    return metrics


def _mismatch(metrics: Metrics, logprobs: np.ndarray, sampler: np.ndarray, segments: np.ndarray, trajectories: int) -> None:
    """How far trainer and sampler are apart, per token and per trajectory."""
    count = len(logprobs)
    log_ratio = logprobs - sampler
    bounded = log_ratio.clip(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    metrics.mean("rollout_corr/kl", -log_ratio.sum(), count)
    metrics.mean("rollout_corr/k3_kl", (np.expm1(bounded) - bounded).sum(), count)
    # E_q |1 - p/q| = sum_v |q_v - p_v|: the L1 norm of the sampler's expected score E_q[d log p / d logits] = q - p.
    metrics.mean("rollout_corr/expected_score_l1", np.abs(np.expm1(bounded)).sum(), count)
    metrics.max("rollout_corr/log_ratio_abs_max", np.abs(log_ratio).max())
    metrics.mean("rollout_corr/chi2_token", np.expm1(2 * bounded).sum(), count)
    lengths = np.bincount(segments, minlength=trajectories)
    acting = lengths > 0

    def totals(values: np.ndarray) -> np.ndarray:
        return np.bincount(segments, weights=values, minlength=trajectories)[acting]

    sequence = totals(log_ratio).clip(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    metrics.mean("rollout_corr/chi2_seq", np.expm1(2 * sequence).sum(), acting.sum())
    for name, values in (("training_ppl", logprobs), ("rollout_ppl", sampler)):
        nats = -totals(values) / lengths[acting]
        # exp(600) = 1e260: a trajectory that is impossible under one side must not turn the mean into infinity.
        metrics.mean(f"rollout_corr/{name}", np.exp(nats.clip(max=600)).sum(), acting.sum())


def _weights(metrics: Metrics, weights: np.ndarray) -> None:
    """Importance weights as applied, before rejection."""
    metrics.mean("rollout_corr/rollout_is_mean", weights.sum(), len(weights))
    metrics.max("rollout_corr/rollout_is_max", weights.max())
    metrics.min("rollout_corr/rollout_is_min", weights.min())
    metrics.effective_sample_size("rollout_corr/rollout_is_eff_sample_size", weights)

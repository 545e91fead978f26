"""What every logged number means, and what to do when it looks bad: one list for ``rlframe metrics``, the docs and reports.

Formulas are in docs/algorithms.md. A test holds this list against what runs of every preset log.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from rlframe.config import ConfigError
from rlframe.config.validate import nearest


@dataclass(frozen=True)
class Metric:
    """One name in ``metrics.jsonl``, or several that share a pattern."""

    pattern: str
    """The name; ``*`` stands for the name of a task, an environment, or a number of the reward function."""
    meaning: str
    """One line."""
    bad: str = ""
    """What a bad value looks like and what to do then."""


GROUPS: dict[str, tuple[Metric, ...]] = {
    "Held-out evaluation": (
        Metric(
            "eval/*/reward",
            "mean reward of the held-out problems (greedy unless `eval.temperature` is set)",
            "Flat while `reward/mean` rises: the policy learns its training prompts only; use more prompts or fewer epochs.",
        ),
        Metric("eval/*/response_length", "mean sampled tokens of a held-out answer"),
        Metric(
            "eval/*/failed",
            "share of the held-out episodes that failed; the other numbers are means over the rest",
            "Above 0: `logs/controller.log` says why; the run ends above `eval.max_failed`.",
        ),
        Metric("eval/*/reward_extra/*/mean", "mean of another number that the reward function returned, over held-out answers"),
        Metric(
            "eval/*/reward_failed",
            "fraction of held-out answers whose reward failed and counts 0; logged where there are some",
            "Above 0: `rlframe rollouts` and `logs/rollout_*.log` say why.",
        ),
    ),
    "Rewards of the training batch": (
        Metric(
            "reward/mean",
            "mean total reward of a trajectory",
            "Flat: look at `reward/std`, then at the rollouts themselves (`rlframe rollouts`).",
        ),
        Metric(
            "reward/std",
            "standard deviation of the trajectories' rewards",
            "Near 0: every answer is rewarded alike and nothing can be learned; use easier or harder prompts, or "
            "partial rewards.",
        ),
        Metric("reward/min", "lowest total reward"),
        Metric(
            "reward/max",
            "highest total reward",
            "Never above the start: nobody has found a good answer yet; sample longer, or warmer.",
        ),
        Metric(
            "reward/frac_zero_std",
            "share of groups whose rewards are all equal; with `algorithm.advantage=group` they train nothing",
            "Near 1: most rollouts are for nothing. Use prompts of another difficulty, larger groups, or a critic (`sao`).",
        ),
        Metric("reward/*/mean", "mean total reward of one environment's trajectories"),
        Metric(
            "reward/failed",
            "fraction of trajectories whose reward failed and is 0 (`task.on_reward_failure=zero`); only where there are some",
            "Above 0: `rlframe rollouts` and `logs/rollout_*.log` say why.",
        ),
        Metric(
            "reward_extra/*/mean",
            "mean of another number that the reward function returned in its dict, over the trajectories that have it",
        ),
    ),
    "Answers": (
        Metric(
            "response_length/mean",
            "mean sampled tokens of a trajectory",
            "Drifts without bound: the reward pays for length; look at rollouts with the lowest and highest rewards.",
        ),
        Metric("response_length/max", "most sampled tokens of a trajectory"),
        Metric(
            "response_length/clip_ratio",
            "fraction of trajectories that a budget cut",
            "Large: raise `rollout.max_new_tokens`; a cut answer seldom earns its reward.",
        ),
        Metric("finish/stop", "fraction of trajectories that ended by themselves"),
        Metric("finish/length", "fraction that a budget cut; the critic's value stands for the rest of their reward"),
        Metric("finish/abort", "fraction that was ended from outside", "Above 0: see `logs/controller.log`."),
        Metric("finish/error", "fraction that ended in an error", "Above 0: see `logs/rollout_*.log`."),
    ),
    "Segments": (
        Metric("segments/pieces", "pieces that an episode was trained in, mean over the episodes that ended"),
        Metric(
            "segments/continued",
            "share of the pieces in the batch whose episodes continue",
            "Near 1: few episodes end in a batch, and the critic's value decides more than rewards do; raise "
            "`rollout.segment_tokens`.",
        ),
    ),
    "The policy": (
        Metric(
            "actor/pg_loss",
            "policy loss, mean over action tokens",
            "Says little by itself: with score centering its value may be huge while the gradient is right.",
        ),
        Metric(
            "actor/grad_norm",
            "norm of the policy's gradient before it is clipped",
            "Spikes: look at `rollout_corr/*` of the same step; lower `actor.optim.lr`. Null: it was not finite, and "
            "the step was skipped.",
        ),
        Metric("actor/lr", "learning rate of the policy"),
        Metric(
            "actor/skipped",
            "1 in a step whose gradient was not finite and moved nothing",
            "More than now and then: lower `actor.optim.lr`, or use float32.",
        ),
        Metric(
            "actor/entropy",
            "entropy of the policy over the vocabulary, nats, mean over action tokens",
            "Falls to 0 early: the policy stops exploring; lower `actor.optim.lr`, or raise `rollout.temperature`.",
        ),
        Metric(
            "actor/advantage_mean",
            "mean advantage over action tokens",
            "Away from 0 for long: values are biased, and without score centering the policy drifts toward its own sampler.",
        ),
        Metric(
            "actor/clip_fraction",
            "fraction of action tokens whose ratio was clipped, truncated or out of band",
            "Above a few percent: sampler and policy are far apart; lower `max_staleness` or `actor.optim.lr`, or "
            "raise the engine's precision.",
        ),
        Metric("actor/sc_correction", "what score centering subtracts: sum over the head of c log p, mean over action tokens"),
        Metric(
            "actor/sc_sampler_head_mass",
            "the sampler's probability mass inside the top-k head",
            "Below 0.95: much of the correction is modelled instead of known; raise `rollout.head_size`.",
        ),
        Metric(
            "actor/sc_train_head_mass",
            "the policy's mass on the same tokens",
            "Far from the sampler's: as for `rollout_corr/k3_kl`.",
        ),
        Metric("actor/sc_coefficient_l1", "sum over the head of the absolute coefficients c; 0 when every ratio is in band"),
    ),
    "The critic": (
        Metric(
            "critic/explained_variance",
            "how much of the variance of returns the values explain, blind to a constant bias; 1 is perfect, 0 is a constant",
            "At or below 0 after some tens of steps: the critic is no better than a mean. Raise `critic.optim.lr` or "
            "`critic.updates_per_step`, or give it `critic.warmup_steps`. Rising and then falling: it overfits; lower "
            "the rank.",
        ),
        Metric(
            "critic/explained_variance_mse",
            "the same with the bias counted; a fresh critic has -1 on fair 0/1 returns",
            "Well below the other one: values are biased; more critic updates. Null: all returns are equal.",
        ),
        Metric("critic/value_loss", "half the squared error of values, mean over action tokens"),
        Metric("critic/value_mean", "mean value", "Away from `critic/return_mean` for long: as for the explained variance."),
        Metric("critic/return_mean", "mean return, the critic's target"),
        Metric("critic/grad_norm", "norm of the critic's gradient before it is clipped"),
        Metric("critic/lr", "learning rate of the critic"),
        Metric("critic/skipped", "1 in a step whose gradient was not finite and moved nothing"),
        Metric(
            "critic/clip_fraction",
            "fraction of values that `critic.clip_range` held back",
            "Large: the critic cannot follow; raise it.",
        ),
    ),
    "Mismatch of sampler and trainer": (
        Metric(
            "rollout_corr/kl",
            "E[log q - log p] over sampled tokens: KL of the sampler q to the policy p, may be negative by chance",
            "Away from 0 at `max_staleness=0`: engine and trainer disagree; compare dtypes, temperature and the chat template.",
        ),
        Metric(
            "rollout_corr/k3_kl",
            "the same divergence by an estimator that is never negative, E[r - 1 - log r]",
            "Grows: rollouts are too stale or the engine's precision too low; lower `max_staleness`, use a `_sc` preset.",
        ),
        Metric(
            "rollout_corr/expected_score_l1",
            "E[abs(1 - r)]: L1 norm, in logit space, of the score that the sampler expects; times `actor/advantage_mean` it is "
            "the drift that score centering removes",
            "Grows along with the advantage: the policy is pulled toward its sampler; use a `_sc` preset.",
        ),
        Metric(
            "rollout_corr/log_ratio_abs_max",
            "largest abs(log p - log q) of a sampled token, nats; 0 only where sampler and trainer agree bit for bit",
            "Above 1 at `max_staleness=0`: a token sees another model; compare dtypes and `rollout.weight_sync`.",
        ),
        Metric("rollout_corr/chi2_token", "E[r^2] - 1 over tokens: the variance that ratios add"),
        Metric(
            "rollout_corr/chi2_seq",
            "E[r^2] - 1 with the ratio of whole trajectories",
            "Huge: sequence weights would be useless; use token weights.",
        ),
        Metric("rollout_corr/training_ppl", "perplexity of answers under the policy, mean over trajectories"),
        Metric(
            "rollout_corr/rollout_ppl",
            "perplexity of answers under the sampler",
            "Far from `training_ppl`: as for `rollout_corr/kl`.",
        ),
        Metric("rollout_corr/rollout_is_mean", "mean importance weight as applied", "Far from 1: as for `rollout_corr/k3_kl`."),
        Metric(
            "rollout_corr/rollout_is_max", "largest importance weight", "Always at the threshold is normal for a few tokens."
        ),
        Metric("rollout_corr/rollout_is_min", "smallest importance weight"),
        Metric(
            "rollout_corr/rollout_is_eff_sample_size",
            "fraction of samples that still count: (sum w)^2 / (n sum w^2)",
            "Below 0.5: few tokens decide the gradient; lower `max_staleness`, or use token weights instead of "
            "sequence weights.",
        ),
        Metric(
            "rollout_corr/rollout_rs_masked_fraction",
            "fraction of action tokens that rejection dropped",
            "Near 1: the batch teaches nothing; widen `algorithm.rollout_rs_threshold`.",
        ),
    ),
    "Staleness": (
        Metric("off_policy/mean", "policy versions between sampling the oldest token of a trajectory and training on it, mean"),
        Metric("off_policy/max", "the same, largest; never above `max_staleness`"),
        Metric("off_policy/in_flight", "slots of the buffer in use: prompts being sampled and rollouts waiting"),
        Metric(
            "off_policy/in_flight_limit",
            "slots of the buffer that `admission` lets be in use",
            "As large as the buffer with `admission=fresh`: sampling is the bottleneck, or the longest rollouts take more than "
            "one step of training.",
        ),
        Metric(
            "off_policy/dropped",
            "prompts that gave no trajectory, since the run began",
            "Grows: see `logs/controller.log` for the reasons.",
        ),
    ),
    "Time": (
        Metric("time/step", "seconds of the whole step"),
        Metric(
            "time/wait_for_batch",
            "seconds that the learner waited for rollouts",
            "Large: sampling is the bottleneck; add `rollout.workers`, or raise `max_staleness`.",
        ),
        Metric("time/values", "seconds for the critic's values"),
        Metric("time/sample", "seconds for the sample of rollouts in `rollouts/`"),
        Metric("time/train_critic", "seconds for the critic's updates"),
        Metric("time/train_actor", "seconds for the policy's update"),
        Metric(
            "time/weight_sync",
            "seconds until every engine serves the new weights",
            "Large: try `rollout.weight_sync=adapter` with a LoRA actor.",
        ),
        Metric("time/eval", "seconds of the evaluation"),
        Metric("time/checkpoint", "seconds that training waited for the checkpoint", "Large: raise `checkpoint.every`."),
        Metric("time/checkpoint_write", "seconds that writing the checkpoint took beside training"),
        Metric(
            "controller/loop_lag_mean",
            "seconds by which the controller's event loop was late, mean of a look every 0.1 s",
            "As for `controller/loop_lag_max`.",
        ),
        Metric(
            "controller/loop_lag_max",
            "the latest that it was in the step",
            "While it is late nothing is admitted, collected or synced. Above a second: the driver's machine is overloaded, or "
            "putting large batches together blocks it; look at `rlframe timeline`.",
        ),
        Metric(
            "idle/trainer",
            "fraction of the step in which the learner waited for rollouts",
            "Near 1: as for `time/wait_for_batch`.",
        ),
        Metric(
            "idle/rollout",
            "fraction of the step in which a rollout worker had no episode running, mean over workers",
            "Near 1: the learner is the bottleneck; add `actor.ranks`, or fewer `rollout.workers`. Near 0.5 at "
            "`max_staleness=0` is its price.",
        ),
        Metric("perf/tokens_per_s", "tokens sampled per second"),
        Metric("perf/accepted_tokens_per_s", "sampled tokens trained on per second"),
    ),
    "Faults and progress": (
        Metric(
            "fault/dropped",
            "rollouts that gave no trajectory and were given up, since the run began; the next six are its parts, by kind",
            "Grows: see `logs/controller.log`.",
        ),
        Metric(
            "fault/timeouts",
            "rollouts that took too long",
            "Grows: raise `rollout.timeout_s`, or look for hanging tools.",
        ),
        Metric("fault/reward", "rollouts without a reward", "Grows: fix the reward function; see `task.on_reward_failure`."),
        Metric("fault/environment", "rollouts whose environment raised an exception", "Grows: fix the environment."),
        Metric("fault/engine", "rollouts that the engine failed on", "Grows: see `logs/rollout_*.log`."),
        Metric("fault/worker_lost", "rollouts given up because every worker that had them was lost"),
        Metric(
            "fault/rejected",
            "rollouts whose sequence has no room, or a token outside of the vocabulary",
            "Grows: raise `rollout.max_model_len`, or look at the prompts.",
        ),
        Metric(
            "fault/partial_groups",
            "prompts of which some rollouts were given up and the others trained on, since the run began",
            "Grows: groups are smaller than `algorithm.rollouts_per_prompt`, and so are batches.",
        ),
        Metric(
            "fault/worker_restarts",
            "times that a rollout worker was lost and started again, since the run began",
            "Grows: the console and `logs/rollout_*.log` say why; see `rollout.max_restarts`.",
        ),
        Metric("fault/reissued", "rollouts that were sent again because their worker was lost"),
        Metric(
            "fault/lost_rests",
            "episodes whose first pieces were trained on and whose rest was lost with its worker or at a restart of the run",
        ),
        Metric("fault/learner_restarts", "attempts that ended with a process that the run needs, after which it started again"),
        Metric(
            "data/epoch",
            "passes over the training prompts so far",
            "Far above 1: expect memorisation; watch the held-out reward.",
        ),
        Metric("version", "policy version after the step; it stands still while the critic is pretrained"),
        Metric("step", "policy step; step 0 is the evaluation before training"),
    ),
}
"""All metrics, by subject."""


def metrics() -> list[Metric]:
    """All of them, in order."""
    return [metric for group in GROUPS.values() for metric in group]


def find(name: str) -> Metric | None:
    """The entry of a logged name; an exact name wins over a pattern."""
    known = metrics()
    exact = [metric for metric in known if metric.pattern == name]
    return next(iter(exact + [metric for metric in known if fnmatch.fnmatch(name, metric.pattern)]), None)


def meaning(name: str) -> str:
    """The meaning of a logged name; empty for one that is not in the list."""
    found = find(name)
    return found.meaning.replace("`", "") if found else ""


def as_text(part: str | None = None) -> str:
    """The list, or what in it contains ``part``, for the terminal.

    Raises:
        ConfigError: no name contains it.
    """
    entry = find(part) if part else None
    chosen = [entry] if entry else [metric for metric in metrics() if part is None or part in metric.pattern]
    if not chosen:
        near = nearest(part, [metric.pattern for metric in metrics()])
        raise ConfigError(f"{part} is not a metric; did you mean {near}?")
    width = max(len(metric.pattern) for metric in chosen)
    lines = []
    for metric in chosen:
        lines.append(f"{metric.pattern:<{width}}  {metric.meaning.replace('`', '')}")
        if metric.bad and part is not None:
            lines.append(f"{'':<{width}}  {metric.bad.replace('`', '')}")
    return "\n".join(lines)


def as_markdown() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Written by `make docs` from `trainer/watch/glossary.py`. One JSON object a step in `metrics.jsonl`, and the "
        "same in wandb. Null",
        "stands for a number that is not finite. `*` is the name of a task, an environment or a number that a",
        "reward function returned; p is the trainer's policy, q the",
        "sampler, r = p / q of the sampled token. Formulas: [algorithms](algorithms.md). In the terminal: "
        "`rlframe metrics NAME`.",
    ]
    for title, group in GROUPS.items():
        lines += ["", f"## {title}", "", "| metric | meaning | when it looks bad |", "|---|---|---|"]
        lines += [f"| `{metric.pattern}` | {_cell(metric.meaning)} | {_cell(metric.bad)} |" for metric in group]
    return "\n".join(lines)


def _cell(text: str) -> str:
    text = text.replace("|", "\\|")
    return text[:1].upper() + text[1:] if text else ""

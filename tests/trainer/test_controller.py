"""The whole method on the reference sampler: every preset trains, runs repeat bit for bit, a resumed run continues."""

import math
import pickle
from typing import ClassVar

import pytest

from tests.support.faulty_workers import IgnoresNewWeights
from tests.support.kill_points import numbers, trained
from tests.support.local_run import run
from trainer.run import recovery
from trainer.run.checkpoints import Checkpoints
from trainer.settings.presets import presets
from trainer.settings.sections import CheckpointConfig
from trainer.watch import glossary
from workers.rollout.worker import RolloutWorker

PRESETS = presets()


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_trains(tmp_path, preset):
    short = ["critic.warmup_steps=0"] if presets()[preset].get("critic.warmup_steps") else []  # three steps leave no room
    rows = run(tmp_path, f"algorithm={preset}", *short)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(math.isfinite(row["actor/pg_loss"]) and math.isfinite(row["actor/grad_norm"]) for row in rows[1:])
    assert "eval/arithmetic/reward" in rows[0] and "eval/arithmetic/reward" in rows[-1]
    assert all(0 <= row[f"idle/{who}"] <= 1 for row in rows[1:] for who in ("trainer", "rollout"))
    assert max(row["off_policy/max"] for row in rows[1:]) <= 2
    assert {name for row in rows for name in row if glossary.find(name) is None} == set(), "docs/metrics.md explains every name"


@pytest.mark.slow
@pytest.mark.parametrize("options", [["running_mean"], ["none"], ["group", "algorithm.rollouts_per_prompt=4"]])
def test_a_run_without_a_critic(tmp_path, options):
    advantage, *more = options
    rows = run(tmp_path, f"algorithm.advantage={advantage}", *more)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(math.isfinite(row["actor/grad_norm"]) and "critic/value_loss" not in row for row in rows[1:])


@pytest.mark.slow
def test_synchronous_runs_repeat_to_the_bit(tmp_path):
    first, second = (numbers(run(tmp_path / name, "max_staleness=0", "seed=3")) for name in "ab")
    assert first == second
    assert [row["off_policy/max"] for row in first[1:]] == [0, 0, 0]
    other = numbers(run(tmp_path / "c", "max_staleness=0", "seed=4"))
    assert other[1:] != first[1:]


@pytest.mark.slow
@pytest.mark.parametrize("actor", ["lora", "full"])
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(tmp_path, actor):
    options = ["max_staleness=0", f"actor={actor}", "checkpoint.every=1"]
    whole = numbers(run(tmp_path / "whole", *options, "steps=4"))
    run(tmp_path / "cut", *options, "steps=2")
    resumed = numbers(run(tmp_path / "cut", *options, "steps=4", resume=True))
    assert [row["step"] for row in resumed] == [0, 1, 2, 3, 4]
    assert resumed[3:] == whole[3:]


@pytest.mark.slow
def test_an_advantage_of_the_users_own_resumes_from_its_state(tmp_path, monkeypatch):
    """Its baseline is the number of batches that it has seen, so a forgotten state shows in every number after a resume."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "counting_advantages.py").write_text(
        "from rlframe.advantages import Estimator, per_token, total_rewards\n"
        "class Counting(Estimator):\n"
        "    def __init__(self, algorithm): self.state = {'seen': 0}\n"
        "    def __call__(self, batch):\n"
        "        self.state['seen'] += 1\n"
        "        return per_token(batch, total_rewards(batch) - self.state['seen']), per_token(batch, total_rewards(batch))\n"
        "    def state_dict(self): return self.state\n"
        "    def load_state_dict(self, state): self.state = state\n"
    )
    options = ["max_staleness=0", "algorithm.advantage=counting_advantages:Counting"]
    whole = numbers(run(tmp_path / "whole", *options))
    run(tmp_path / "cut", *options, "steps=2")
    assert last_state(tmp_path / "cut")["advantage"] == {"seen": 2}
    assert numbers(run(tmp_path / "cut", *options, resume=True))[3:] == whole[3:]


@pytest.mark.slow
def test_on_policy_the_trainer_and_the_sampler_agree(tmp_path):
    rows = run(tmp_path, "max_staleness=0", "rollout.temperature=0.7")
    for row in rows[1:]:
        assert abs(row["rollout_corr/kl"]) < 1e-5 and row["actor/clip_fraction"] == 0


@pytest.mark.slow
def test_value_pretraining_leaves_the_actor_where_it_is(tmp_path):
    rows = run(tmp_path, "critic.warmup_steps=2")
    assert [row["version"] for row in rows[1:]] == [0, 0, 1]
    assert "actor/pg_loss" not in rows[1] and "critic/value_loss" in rows[1]


@pytest.mark.slow
def test_the_critic_takes_k_steps_for_each_of_the_actor_also_while_the_actor_waits(tmp_path):
    """Optimiser steps are read off two linear warm-ups: step n of 100 has the rate n / 100."""
    warm = [f"{role}.optim.{key}" for role in ("actor", "critic") for key in ("warmup_steps=100", "lr=1e-3")]
    rows = run(tmp_path, *warm, "critic.updates_per_step=3", "critic.warmup_steps=1")[1:]
    assert [row["critic/lr"] for row in rows] == pytest.approx([3e-5, 6e-5, 9e-5])
    assert [row.get("actor/lr") for row in rows] == [None, pytest.approx(1e-5), pytest.approx(2e-5)]


@pytest.mark.slow
def test_asynchronous_resume_trains_every_prompt_once(tmp_path):
    options = ["max_staleness=2", "checkpoint.every=1"]
    run(tmp_path, *options, "steps=2")
    rows = run(tmp_path, *options, "steps=4", resume=True)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[-1]["off_policy/in_flight"] <= 3 * 8


@pytest.mark.slow
def test_a_run_resumes_with_a_smaller_buffer_inside_the_smaller_bound(tmp_path):
    """What does not fit is sampled again, also by an attempt after that; each prompt is trained on once, or still held."""
    common = ["checkpoint.every=1", "log.rollouts_every=1", "log.rollouts_count=8"]
    smaller = ["max_staleness=1", "batch_size=4", "reorder_window=2"]
    run(tmp_path, *common, "max_staleness=3", "admission=full", "steps=2")
    states = [last_state(tmp_path)]
    for steps in (3, 9):
        rows = run(tmp_path, *common, *smaller, f"steps={steps}", resume=True)
        states.append(last_state(tmp_path))
    first, second, last = ([slot["index"] for slot in state["slots"]] for state in states)
    assert len(first) > 6 >= len(second) and states[1]["returned"], "some had to wait"
    assert first[-len(states[1]["returned"]) :] == states[1]["returned"]
    assert max(row["off_policy/max"] for row in rows[3:]) <= 1
    assert all(row["off_policy/in_flight"] <= 6 for row in rows[3:])
    used = [row["index"] for row in trained(tmp_path)]
    assert sorted(used + last + states[-1]["returned"]) == list(range(states[-1]["position"]))
    assert len(used) == 2 * 8 + 7 * 4


def last_state(run_dir):
    return recovery.read_state(Checkpoints(run_dir, CheckpointConfig()).newest()[0])


class Recorder(RolloutWorker):
    """Notes of every weight update its version, its checksum, and how many bytes of it are not plain array memory."""

    updates: ClassVar[list] = []

    async def update_weights(self, update, *places):
        checksum = await super().update_weights(update, *places)
        in_band = len(pickle.dumps(update, protocol=5, buffer_callback=lambda buffer: None))
        self.updates.append((update.version, checksum, update.mode, in_band / len(update.tensors)))
        return checksum


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "options"), [("merged", ["actor=lora"]), ("adapter", ["actor=lora"]), ("full", ["actor=full"])]
)
def test_every_version_reaches_the_sampler_as_flat_arrays_and_is_told_by_its_checksum(tmp_path, mode, options):
    Recorder.updates = []
    run(tmp_path, *options, f"rollout.weight_sync={mode}", worker=Recorder)
    versions, checksums, modes, in_band = zip(*Recorder.updates, strict=True)
    assert versions == (0, 1, 2, 3) and set(modes) == {mode}
    assert len(set(checksums)) == 4
    assert max(in_band) < 500, "bytes a tensor beside its memory: nothing grows with the number of its elements"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["merged", "adapter"])
def test_an_adapter_that_never_reaches_the_sampler_ends_the_run(tmp_path, mode):
    with pytest.raises(ExceptionGroup) as failure:
        run(tmp_path, "actor=lora", f"rollout.weight_sync={mode}", worker=IgnoresNewWeights)
    assert "serves weights with checksum" in str(failure.value.exceptions[0]) and "version 1" in str(
        failure.value.exceptions[0]
    )


@pytest.mark.slow
def test_a_reorder_window_keeps_the_bound(tmp_path):
    rows = run(tmp_path, "reorder_window=8", "rollout.max_concurrency=3", "steps=5")
    assert max(row["off_policy/max"] for row in rows[1:]) <= 2
    assert all(row["off_policy/in_flight"] <= 16 for row in rows[1:])


@pytest.mark.slow
@pytest.mark.parametrize("actor", ["lora", "full"])
def test_a_rounded_sampler_is_off_policy_by_its_rounding(tmp_path, actor):
    """The served checksum is compared at every sync, so these runs also show that what is served is what was rounded."""
    options = ["max_staleness=0", f"actor={actor}", "steps=1"]
    kl = {
        form: run(tmp_path / form, *options, f"rollout.quantize={form}")[1]["rollout_corr/k3_kl"]
        for form in ("null", "int8", "int3")
    }
    assert kl["null"] < 1e-9 < 10 * kl["int8"] < kl["int3"]
    noisy = run(tmp_path / "noise", *options, "rollout.weight_noise=0.1")
    assert noisy[1]["rollout_corr/k3_kl"] > 1e-6

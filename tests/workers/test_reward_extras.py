"""The other numbers of a reward's dict, from the reward process through an episode to metrics, files and the terminal."""

import asyncio
import io
import json

import numpy as np
import pytest
from rich.console import Console

from rlframe.models.characters import character_tokenizer
from rlframe.types import Batch, Prompt
from tests.support.engines import save, tiny_model
from trainer.watch import samples
from trainer.watch.glossary import find
from trainer.watch.rollouts_view import show_rollouts
from trainer.watch.step_metrics import MAX_EXTRAS, eval_metrics, rollout_metrics
from workers.engines.protocol import SamplingParams
from workers.engines.torch.engine import TorchEngine
from workers.environments.registry import make_environment
from workers.environments.settings import TaskConfig
from workers.rollout.episode import run_episode

REWARD = """
def scored(response, row):
    if row["prompt"] == "bad": return float("nan")
    extra = {"only [red]first": 7} if row["prompt"] == "first" else {}
    return {"score": 0.5, "length": len(response), "reward": 2, "turns": -1, "note": "x", "nan": float("nan"), **extra}
"""
TOKENIZER = character_tokenizer()


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("extras")
    (folder / "extra_rewards.py").write_text(REWARD)
    (folder / "p.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("first", "second", "third", "bad")))
    task = TaskConfig(
        name="jsonl", train=str(folder / "p.jsonl"), reward="extra_rewards:scored", reward_workers=1, on_reward_failure="zero"
    )
    engine = TorchEngine(save(tiny_model(), folder), max_model_len=64)

    async def run():
        environment = make_environment(task, TOKENIZER, seed=0, eval_size=1)
        problems = [*environment.train_prompts(), *environment.eval_prompts()]
        problems.sort(key=lambda problem: problem.id)
        prompts = [Prompt(p.id, i, p.tokens, "jsonl", p.payload) for i, p in enumerate(problems)]
        params = [SamplingParams(max_new_tokens=3 + 2 * i, seed=i) for i in range(len(prompts))]
        done = [await run_episode(engine, environment, *given, max_model_len=64) for given in zip(prompts, params, strict=True)]
        environment.close()
        return Batch.from_trajectories(done)

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield asyncio.run(run())


def response(trajectory):
    return TOKENIZER.decode(trajectory.tokens[trajectory.action_mask], skip_special_tokens=True)


def test_their_means_are_metrics_that_clash_with_nothing(batch):
    lengths = [len(response(trajectory)) for trajectory in list(batch)[:3]]
    expected = {"length": np.mean(lengths), "reward": 2.0, "turns": -1.0, "only [red]first": 7.0}
    train, held_out = rollout_metrics(batch), eval_metrics(batch, "jsonl")
    for prefix, metrics in (("", train), ("eval/jsonl/", held_out)):
        extra = {name: value for name, value in metrics.items() if name.startswith(f"{prefix}reward_extra/")}
        assert extra == {f"{prefix}reward_extra/{name}/mean": value for name, value in expected.items()}
    assert train["reward/mean"] == 1.5 / 4 and train["reward/failed"] == 0.25
    assert held_out["eval/jsonl/reward_failed"] == 0.25
    assert [name for name in held_out if name.startswith("eval/") and name.endswith("/reward")] == ["eval/jsonl/reward"]
    assert batch.metadata[0]["turns"] == 1, "the number of turns is ours"


def test_every_name_has_its_own_entry_in_the_glossary(batch):
    patterns = {name: find(name).pattern for name in (*rollout_metrics(batch), *eval_metrics(batch, "jsonl"))}
    assert patterns["reward_extra/length/mean"] == "reward_extra/*/mean"
    assert patterns["eval/jsonl/reward_extra/reward/mean"] == "eval/*/reward_extra/*/mean"
    assert patterns["reward/failed"] == "reward/failed" and patterns["eval/jsonl/reward_failed"] == "eval/*/reward_failed"


def test_they_are_in_the_files_and_in_the_terminal(batch, tmp_path):
    zeros = np.zeros(batch.num_tokens, np.float32)
    rows = samples.as_rows(3, samples.Sample(batch, zeros, zeros), TOKENIZER, 100)
    (tmp_path / "rollouts").mkdir()
    samples.write(tmp_path / "rollouts", 3, rows, 2**20)
    first, *_, bad = samples.read(tmp_path / "rollouts" / "step_000003.jsonl")
    assert first["reward_extra"]["length"] == len(response(batch.trajectory(0))) and first["reward_failure"] is None
    assert bad["reward_extra"] == {} and "nan" in bad["reward_failure"]
    console = Console(file=io.StringIO(), width=200)
    show_rollouts(tmp_path, 3, None, 4, 0, console)
    text = console.file.getvalue()
    assert f"length {first['reward_extra']['length']:g}" in text and "only [red]first 7" in text and "no reward:" in text


def test_samples_of_older_runs_are_still_shown(batch, tmp_path):
    zeros = np.zeros(batch.num_tokens, np.float32)
    (row, *_) = samples.as_rows(3, samples.Sample(batch, zeros, zeros), TOKENIZER, 100)
    (tmp_path / "rollouts").mkdir()
    old = {name: value for name, value in row.items() if not name.startswith("reward_")}
    samples.write(tmp_path / "rollouts", 3, [old], 2**20)
    show_rollouts(tmp_path, 3, None, 4, 0, Console(file=io.StringIO()))


def test_an_environment_of_ones_own_may_say_anything_and_names_are_bounded(batch):
    chosen = batch.select([0, 1, 2])
    names = {f"n{i:03}": i for i in range(100)}
    chosen.metadata = [
        {"reward_extra": names},
        {"reward_extra": {"n099": 1.0, "x": 10**400, "y": None, "z": "1", "\ud800": np.float32(0.5), 3: True}},
        {"reward_extra": "text"},
    ]
    metrics = {name: value for name, value in rollout_metrics(chosen).items() if name.startswith("reward_extra/")}
    assert len(metrics) == MAX_EXTRAS and metrics["reward_extra/n099/mean"] == 50.0, "the most frequent come first"
    json.dumps(metrics, ensure_ascii=False).encode()

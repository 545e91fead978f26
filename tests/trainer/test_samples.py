"""Samples of rollouts: which are taken, what is kept of their tokens, how the files are bounded, and how they are shown."""

import io
import json
import math
import re
import unicodedata

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlframe.config import ConfigError
from rlframe.types import Batch, Trajectory
from tests.support.kill_points import TIMES
from tests.support.local_run import run
from trainer.watch import samples
from trainer.watch.rollouts_view import printable, show_rollouts
from trainer.watch.samples import Sample, as_rows, choose, token_pieces

TEXTS = ["The cat sat on the mat. ", " two  spaces\n\tand a tab", "naïve 日本語 🙂👩‍👩‍👧", "🙂", "a\u2028b\x85c"]


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS[:2], trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def word_pieces_with_spaces_in_front() -> PreTrainedTokenizerFast:
    """As in Llama 2: a word's space belongs to its first piece, and unknown characters fall back to bytes."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {piece: 256 + i for i, piece in enumerate(["▁", *map(chr, range(33, 127))])}
    vocabulary |= {"<unk>": len(vocabulary), "▁t": len(vocabulary) + 1}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "t")], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("make", [byte_level, word_pieces_with_spaces_in_front])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_tokens_add_up_to_the_text(make, text):
    tokenizer = make()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = token_pieces(tokenizer, ids)
    assert len(pieces) == len(ids) and "".join(pieces) == tokenizer.decode(ids)
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_that_is_cut_off_stays_one_mark():
    tokenizer = byte_level()
    ids = tokenizer("a🙂", add_special_tokens=False)["input_ids"][:-1]
    pieces = token_pieces(tokenizer, ids)
    assert pieces[0] == "a" and "".join(pieces) == tokenizer.decode(ids)


class Letters:
    def decode(self, ids):
        return "".join(chr(96 + int(i)) for i in ids)


def trajectory(reward=0.0, length=4, index=0, version=3):
    mask = np.arange(length) >= 2
    return Trajectory(
        tokens=1 + np.arange(length) % 26,
        action_mask=mask,
        logprobs=np.where(mask, -1.0, 0),
        head_ids=np.zeros((length, 1)),
        head_logprobs=np.full((length, 1), -np.inf),
        versions=np.where(mask, version, -1),
        rewards=np.where(np.arange(length) == length - 1, reward, 0),
        finish="stop",
        prompt_id=f"p{index}",
        index=index,
        env="env",
    )


def test_chosen_trajectories_run_from_the_worst_to_the_best_reward():
    rewards = [3, 0, 5, 1, 4, 2, 8, 6, 7]
    batch = Batch.from_trajectories([trajectory(reward, index=i) for i, reward in enumerate(rewards)])
    chosen = choose(batch, 5)
    assert [t.reward for t in chosen] == [0, 2, 4, 6, 8] and chosen.head_ids.shape[1] == 0
    assert len(choose(batch, 50)) == 9


def test_every_sampled_token_has_its_numbers_and_others_have_none():
    batch = Batch.from_trajectories([trajectory(1.0), trajectory(2.0, length=3, index=1)])
    n = batch.num_tokens
    batch.advantages = np.array([0, 0, 0.5, -0.25, 0, 0, 7], np.float32)
    batch.values = np.array([9, 9, 0.125, np.nan, 9, 9, 1 / 3], np.float32)
    ours = np.where(batch.action_mask, -1 + math.log(2), 0).astype(np.float32)
    first, second = as_rows(6, Sample(batch, ours, np.full(n, 0.5, np.float32)), Letters(), 100)
    assert (first["prompt"], first["response"], first["reward"], first["versions"]) == ("ab", "cd", 1.0, [3, 3])
    tokens = first["tokens"]
    assert tokens["piece"] == list("abcd") and tokens["sampled"] == [False, False, True, True]
    assert tokens["advantage"] == [None, None, 0.5, -0.25]
    assert tokens["value"] == [None, None, 0.125, None], "a number that is not finite is null"
    assert tokens["ratio"] == [None, None, 2.0, 2.0] and tokens["version"] == [None, None, 3, 3]
    assert tokens["reward"] == [0, 0, 0, 1.0] and "return" not in tokens
    assert second["tokens"]["advantage"] == [None, None, 7.0] and second["tokens"]["value"][2] == 0.333333


def test_of_a_long_trajectory_beginning_and_end_are_kept():
    batch = Batch.from_trajectories([trajectory(1.0, length=5000)])
    (row,) = as_rows(1, Sample(batch, np.zeros(5000, np.float32), np.zeros(5000, np.float32)), Letters(), 11)
    assert row["length"] == 5000 and row["omitted"] == [6, 4989]
    assert row["tokens"]["id"] == [*range(1, 7), *(1 + t % 26 for t in range(4995, 5000))]
    assert {len(column) for column in row["tokens"].values()} == {11} and len(row["response"]) < 100


def test_files_stay_within_their_bound_and_spread_over_the_run(tmp_path):
    row = as_rows(1, sample(), Letters(), 100)[0]
    size = len(json.dumps(row, ensure_ascii=False)) + 1
    for step in range(10, 210, 10):
        samples.write(tmp_path, step, [row], 6 * size)
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 6 * size
    steps = sorted(samples.step_of(file) for file in tmp_path.iterdir())
    assert (len(steps), steps[0], steps[-1]) == (6, 10, 200)
    assert max(np.diff(steps)) <= 2 * 190 / 5, "no gap is more than twice the even one"
    samples.write(tmp_path, 210, [row], 1)
    assert sorted(samples.step_of(file) for file in tmp_path.iterdir()) == [10, 210], "first and newest always stay"
    samples.drop_after(tmp_path, 100)
    assert [samples.step_of(file) for file in tmp_path.iterdir()] == [10]


def sample() -> Sample:
    batch = Batch.from_trajectories([trajectory(1.0)])
    return Sample(batch, np.zeros(4, np.float32), np.zeros(4, np.float32))


def test_texts_with_strange_line_ends_are_read_as_they_were_written(tmp_path):
    row = as_rows(1, sample(), Letters(), 100)[0] | {"response": "".join(map(chr, [8232, 8233, 133, 28, 10, 13]))}
    samples.write(tmp_path, 1, [row, row], 2**20)
    assert samples.read(tmp_path / "step_000001.jsonl") == [row, row]
    (tmp_path / "step_000002.jsonl").write_text('{"step": 2}\n')
    with pytest.raises(ConfigError, match=r"step_000002.jsonl, line 1"):
        samples.read(tmp_path / "step_000002.jsonl")


def shown(run_dir, step=None, prompt=None, count=4, max_tokens=40, width=100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system="256")
    show_rollouts(run_dir, step, prompt, count, max_tokens, console)
    return console.file.getvalue()


def test_a_terminal_never_obeys_a_token(tmp_path):
    (tmp_path / "rollouts").mkdir()
    row = as_rows(1, sample(), Letters(), 100)[0]
    nasty = ["\x1b[2J", "\x07\x9b1m", "[red]x[/red]", "\u202etxt"]
    row["tokens"]["piece"], row["prompt_id"] = nasty, "\x1b]0;title\x07"
    samples.write(tmp_path / "rollouts", 1, [row], 2**20)
    text = shown(tmp_path)
    own = re.sub(r"\x1b\[[\d;]*m", "", text)  # what rich colours with
    assert {c for c in own if unicodedata.category(c) in ("Cc", "Cf")} == {"\n"}
    assert "\\x1b[2J" in own and "[red]x[/red]" in own and "\\u202etxt" in own
    assert printable("日本 ok") == "日本 ok"


@pytest.mark.slow
def test_a_run_writes_them_and_the_terminal_shows_them(tmp_path):
    options = ["max_staleness=0", "rollout.temperature=0.7", "log.rollouts_count=3", "steps=2"]
    watched = run(tmp_path, *options, "log.rollouts_every=1")
    unwatched = run(tmp_path / "unwatched", *options, "log.rollouts_every=0")
    for row, other in zip(watched, unwatched, strict=True):
        for name in row.keys() - {name for name in row if name.startswith(TIMES)}:
            assert row[name] == other[name], f"{name}: looking changed what is trained"
    assert list(samples.sampled_steps(tmp_path)) == [1, 2]
    rows = samples.read(samples.sampled_steps(tmp_path)[2])
    assert [row["reward"] for row in rows] == sorted(row["reward"] for row in rows)
    for row in rows:
        tokens = row["tokens"]
        assert "".join(tokens["piece"]) == row["prompt"] + row["response"]
        sampled = [t for t, here in enumerate(tokens["sampled"]) if here]
        ratios = np.array([tokens["ratio"][t] for t in sampled])
        assert np.abs(np.log(ratios)).max() < 1e-4, "on-policy, trainer and sampler agree at this temperature"
        assert {tokens["version"][t] for t in sampled} == {1}
        # One reward at the end, gamma = lambda_critic = 1: the return of every token is the reward.
        assert [tokens["return"][t] for t in sampled] == pytest.approx([row["reward"]] * len(sampled), abs=1e-5)
        last = sampled[-1]
        assert tokens["advantage"][last] == pytest.approx(row["reward"] - tokens["value"][last], abs=1e-5)
    text = shown(tmp_path, count=2)
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert plain.count("reward") == 2 and "1 more of the same" in plain
    header = next(line for line in plain.splitlines() if "log q" in line)
    assert re.findall(r"log q|\w+", header.strip("│ ")) == ["token", "log q", "ratio", "value", "advantage", "version"]
    assert "eos" in plain
    assert shown(tmp_path, prompt=rows[0]["prompt_id"]).count("prompt") >= 1
    for options in ({"step": 7}, {"prompt": "no such"}):
        with pytest.raises(ConfigError):
            shown(tmp_path, **options)

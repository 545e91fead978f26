"""Make the model that the two runs start from: it has seen games of a player who mostly guesses blindly.

python warm_up.py model        # writes a Hugging Face folder, a minute on one core

The player guesses a word that fits all marks so far with probability ``--care``, else any word that was not guessed yet. By
imitation the model learns to write words and, now and then, to look at the marks. Which of the two pays is left to find out.
"""

from __future__ import annotations

import argparse
import random

import torch
from game import WORDS, short_wordle
from torch.nn.functional import cross_entropy

from rlframe.config import TaskConfig
from rlframe.models.tiny import IGNORE, TinyOptions, warmed_up
from workers.environments.wordle import Wordle, marked, marks

EVAL_SIZE = 64
"""Problems that the runs hold out (``eval.size``); the model is warmed up on others."""


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
        turn = [*env.tokenizer(made[-1]).input_ids, env.stop_token_ids[0]]
        reply = env.replies(marked(made[-1], secret), turn).tolist()
        tokens += turn + reply
        labels += turn + [IGNORE] * len(reply)
        if made[-1] == secret:
            break
    return tokens, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--care", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=3e-3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = warmed_up(TinyOptions(warmup_steps=0))
    env = short_wordle(TaskConfig(), tokenizer, seed=0, eval_size=EVAL_SIZE)
    problems, rng = env.train_prompts(), random.Random(0)
    optimizer = torch.optim.Adam(model.train().parameters(), lr=arguments.lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, arguments.steps)
    for step in range(arguments.steps):
        games = [game(env, rng.choice(problems), rng, arguments.care) for _ in range(64)]
        longest = max(len(tokens) for tokens, _ in games)
        inputs = torch.tensor([tokens + [tokenizer.pad_token_id] * (longest - len(tokens)) for tokens, _ in games])
        labels = torch.tensor([labels + [IGNORE] * (longest - len(labels)) for _, labels in games])
        logits = model(input_ids=inputs, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    model.eval().save_pretrained(arguments.folder)
    tokenizer.save_pretrained(arguments.folder)
    print(f"wrote {arguments.folder} (loss {loss.item():.3f})")


if __name__ == "__main__":
    main()

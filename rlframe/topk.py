"""Consistency checks of a sampler's top-k head. Takes plain arrays and returns one fault; callers raise the error.

The sampled token and its head come from one distribution, which gives a check of alignment for free: if the token is in the
head, both log-probabilities are the same number, and if it is not, it cannot be likelier than what the head holds. A head that
slipped by one row fails one or the other.
"""

from __future__ import annotations

import numpy as np

LOGPROB_TOLERANCE = 1e-3
"""Nats by which two reports of the same log-probability may differ."""
MASS_TOLERANCE = 1e-4
"""How far probabilities may exceed 1 by rounding."""


def topk_fault(
    tokens: np.ndarray,
    logprobs: np.ndarray,
    head_ids: np.ndarray,
    head_logprobs: np.ndarray,
    *,
    required: bool = False,
    likeliest: bool = True,
) -> tuple[int, str] | None:
    """Why heads cannot be the top-k of the distributions that their tokens were sampled from.

    Args:
        tokens: int[A], sampled tokens.
        logprobs: float[A], their log-probabilities, nats.
        head_ids: int[A, k]
        head_logprobs: float[A, k], -inf in padded entries.
        required: whether a row of padded entries alone is a fault.
        likeliest: whether heads hold the likeliest tokens; the formulas hold for any tokens chosen before y was sampled.

    Returns:
        A faulty row and what is wrong with it, as the end of a sentence; None if nothing is.
    """
    padded = head_logprobs == -np.inf
    # Padded entries get distinct ids below zero, so that equal neighbours after sorting are real duplicates.
    ids = np.sort(np.where(padded, -1 - np.arange(head_ids.shape[1]), head_ids), axis=1)
    improper = ~(head_logprobs <= MASS_TOLERANCE)
    mass = np.exp(head_logprobs, where=~improper, out=np.zeros_like(head_logprobs)).sum(axis=1, dtype=np.float64)
    sampled = (head_ids == tokens[:, None]) & ~padded
    gap = np.where(sampled, np.abs(head_logprobs - logprobs[:, None]), 0).max(axis=1, initial=0)
    least = np.where(padded, np.inf, head_logprobs).min(axis=1, initial=np.inf)
    outside = ~sampled.any(axis=1) & ~padded.all(axis=1) & likeliest
    faults = (
        (padded.all(axis=1) & required, "has no head"),
        (((head_ids < 0) & ~padded).any(axis=1), "has a token id below 0 in head_ids"),
        (improper.any(axis=1), "has an entry of head_logprobs that is no log-probability"),
        ((ids[:, 1:] == ids[:, :-1]).any(axis=1), "has a token twice in head_ids"),
        (mass > 1 + MASS_TOLERANCE, "has head_logprobs whose probabilities sum to more than 1"),
        (gap > LOGPROB_TOLERANCE, "has another log-probability in head_logprobs than in logprobs: the head is shifted"),
        (outside & (logprobs > least + LOGPROB_TOLERANCE), "is missing from head_ids though likelier: the head is shifted"),
    )
    for faulty, what in faults:
        if faulty.any():
            return int(np.argmax(faulty)), what
    return None

"""The reward of examples/smollm2_sentences: one short sentence that has the word once."""

import re

FEWEST, MOST = 4, 12


def short_sentence(response: str, row: dict) -> float:
    """1 for one sentence of 4 to 12 words with the word once; 0.2 if it has the word but is otherwise wrong; else 0."""
    text = response.strip()
    times = len(re.findall(rf"\b{row['word']}\b", text, re.IGNORECASE))
    if times == 0:
        return 0.0
    one = re.fullmatch(r"[A-Z][^.!?\n]*[.!?]", text) is not None
    return 1.0 if one and times == 1 and FEWEST <= len(text.split()) <= MOST else 0.2

"""Write prompts.jsonl: one request for each word, in a shuffled order that is always the same.

python prompts.py
"""

import json
import random
from pathlib import Path

WORDS = """
apple army baby bag ball bank bear bed bell bird boat book bottle box boy branch bread bridge brother bus button cake camera car
castle cat chair child church city clock cloud coat coffee coin corn cow cup dance desk doctor dog door dream dress duck ear egg
engine eye face farm father feather field finger fire fish flag flower forest fox friend frog fruit game garden gate girl glass
goat gold grass guitar hair hammer hand hat heart hill honey horse hospital house ice island jacket key king kitchen kite knife
lake lamp leaf letter library light lion machine map market milk mirror money monkey moon morning mother mountain mouse music
nest night nose ocean office orange painting paper park path pen piano picture pig pillow plant plate pocket poem pond potato
prince queen rabbit rain ring river road robot rock roof room rose sail salt sand school sea seed sheep ship shirt shoe sister
sky snow soap soldier song soup spider spoon spring star station stone storm story street summer sun table tea teacher tiger
tower town toy train tree uncle valley village violin wall watch water wheel wind window winter wolf wood
"""
SEED = 0


def main() -> None:
    words = WORDS.split()
    random.Random(SEED).shuffle(words)
    lines = []
    for word in words:
        messages = [
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": f"Write a short sentence with the word {word}."},
        ]
        lines.append(json.dumps({"prompt": messages, "word": word}))
    Path(__file__).with_name("prompts.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

"""The reward of examples/jsonl: 1 for the right sum, else less the further the answer is away."""


def near_sum(response: str, row: dict) -> float:
    try:
        distance = abs(int(response) - int(row["answer"]))
    except ValueError:
        return 0.0
    return 1.0 if distance == 0 else 0.5 / (1 + distance)

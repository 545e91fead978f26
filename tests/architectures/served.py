"""One architecture in the real vLLM on this CPU: does it load the tiny model, and are its log-probabilities transformers'?

Run as a process of its own by ``sweep --vllm``; prints one JSON object as its last line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from one import build, loaded, sentence, worst

CLOSE = 1e-3
"""Nats."""


async def sample(folder: Path) -> tuple[np.ndarray, Any]:
    """A prompt, and vLLM's continuation of it."""
    from workers.engines.protocol import SamplingParams
    from workers.engines.vllm.engine import VLLMEngine

    engine = VLLMEngine(str(folder), max_model_len=48, dtype="float32", timeout_s=200)
    try:
        await engine.start()
        prompt = np.arange(1, 10, dtype=np.int32)
        return prompt, await engine.generate(prompt, SamplingParams(max_new_tokens=20, seed=0))
    finally:
        await engine.close()


def serve(kind: str) -> dict[str, Any]:
    """``vllm``: True, or why not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        try:
            build(kind, folder, wide=True)
            prompt, completion = asyncio.run(sample(folder))
            model = loaded(folder)
            tokens = torch.from_numpy(np.concatenate([prompt, completion.ids]).astype("int64"))
            with torch.no_grad():
                rows = [
                    model(input_ids=tokens[None, :end], use_cache=False).logits[0, -1].float().log_softmax(-1)[tokens[end]]
                    for end in range(len(prompt), len(tokens))
                ]
            off = worst(torch.stack(rows), torch.from_numpy(completion.logprobs))
            return {"kind": kind, "vllm": True if off <= CLOSE else f"its log-probabilities are {off:.2g} nats off"}
        except Exception as error:
            return {"kind": kind, "vllm": sentence(error)}


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    print(json.dumps(serve(sys.argv[1])))

"""SGLang's HTTP interface as of 0.5.23: what a request says, and how an answer becomes arrays.

No process and no network here; the client is in `workers.engines.sglang.engine`.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from workers.engines.protocol import Completion, EngineDeadError, SamplingParams

CHECKSUM_PREFIX = "bit-sum:"
"""What the checksum of a tensor begins with when `workers.engines.sglang.server` made it."""
ADAPTER_PREFIX = "adapter."
"""What the names of an adapter's tensors begin with among the checksums."""


def generate_body(
    request_id: str, tokens: np.ndarray, params: SamplingParams, k: int, adapter: str | None = None
) -> dict[str, Any]:
    """The body of ``POST /generate`` for one request.

    Args:
        request_id: unique; `abort_request` names it.
        tokens: int32[P], the prompt.
        params: budget, temperature, stop tokens and seed; truncated sampling is the caller's to refuse.
        k: width of the heads.
        adapter: name of a loaded adapter.
    """
    return {
        "rid": request_id,
        "input_ids": np.asarray(tokens).tolist(),
        "sampling_params": {
            "max_new_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(params.stop_token_ids),
            # It switches the request's own stop tokens off together with the model's.
            "ignore_eos": not params.stop_token_ids,
            "sampling_seed": params.seed,
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": k,
        # Heads as two arrays of numbers in base64: a list of lists of triples takes longer to read than to sample.
        "return_flat_raw_output_top_logprobs": k > 0,
        "return_flat_raw_top_logprobs_b64": k > 0,
        "lora_path": adapter,
    }


def completion_of(answer: dict[str, Any], k: int) -> Completion:
    """Arrays from the answer to `generate_body`; the head is apart from the sampled token and best first.

    Raises:
        ValueError: the lists of the answer do not fit each other.
    """
    meta, ids = answer["meta_info"], np.array(answer["output_ids"], dtype=np.int32)
    n = len(ids)
    sampled = meta.get("output_token_logprobs") or []
    if [token for _, token, _ in sampled] != ids.tolist():
        raise ValueError(f"The answer has {n} tokens and log-probabilities of {len(sampled)} others.")
    head_ids, head_logprobs = _head(meta, n, k)
    versions = np.full(n, int(meta["weight_version"]), dtype=np.int32)
    for span in meta.get("weight_versions") or []:
        versions[span["start"] : span["end"]] = int(span["version"])
    return Completion(
        ids=ids,
        logprobs=np.array([logprob for logprob, _, _ in sampled], dtype=np.float32),
        head_ids=head_ids,
        head_logprobs=head_logprobs,
        versions=versions,
        finish=meta["finish_reason"]["type"],
    )


def _head(meta: dict[str, Any], n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """int32[n, k] and float32[n, k]; the answer to a request that was aborted before its first token has none."""
    if n == 0 or k == 0:
        return np.zeros((n, k), np.int32), np.zeros((n, k), np.float32)
    if meta["output_top_logprobs_shape"] != [n, k] or meta["output_top_logprobs_null_prefix"] != 0:
        raise ValueError(f"The answer has {n} tokens and heads of shape {meta['output_top_logprobs_shape']}, not [{n}, {k}].")
    arrays = (
        np.frombuffer(
            base64.b64decode(meta[f"output_top_logprobs_{what}_flat_b64"]),
            dtype=np.dtype(meta[f"output_top_logprobs_{what}_flat_b64_dtype"]).newbyteorder("<"),
        ).reshape(n, k)
        for what in ("idx", "val")
    )
    head_ids, head_logprobs = arrays
    return head_ids.astype(np.int32), head_logprobs.astype(np.float32)


def server_flags(arguments: dict[str, Any]) -> list[str]:
    """SGLang's command-line flags from argument names of its ``ServerArgs``; False and None leave a flag out."""
    flags: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags += [str(part) for part in (value if isinstance(value, list | tuple) else [value])]
    return flags


def failure_of(path: str, status: int, content: bytes) -> Exception:
    """The error for an answer that is not 200: ValueError where the request was at fault, EngineDeadError elsewhere."""
    try:
        answer = json.loads(content)
        error = answer.get("error", answer)
        reason = str(error.get("message") or error.get("error_message") or error) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        reason = content.decode(errors="replace").strip()
    sentence = f"The SGLang server answered {path} with {status}: {reason}"
    return ValueError(sentence) if 400 <= status < 500 else EngineDeadError(sentence)

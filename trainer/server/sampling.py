"""From a request to sample to the engines and back: parameters, stop sequences, log-probabilities of prompts."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from trainer.server import protobuf, wire
from trainer.server.clients import Sampler
from trainer.server.data import Limits
from trainer.server.errors import UserError
from workers.engines.adapters import PromptScores, ScoreRequest
from workers.engines.protocol import Completion, SamplingParams
from workers.rollout.sampler import SamplerGroup

MAX_SAMPLES = 1024
"""Most samples of one request."""


class Sampling:
    """Serves `asample`."""

    def __init__(self, group: SamplerGroup, limits: Limits, tokenizer: Any, eos: tuple[int, ...]) -> None:
        """``eos``: what ends a sample where the client names no stop; ``limits.context`` is the engine's."""
        self._group, self._limits, self._tokenizer, self._eos = group, limits, tokenizer, eos

    async def sample(self, sampler: Sampler, body: wire.SampleRequest) -> bytes:
        """``SampleResponse`` of one request.

        Raises:
            UserError: a field is out of range, or the engine cannot do what is asked for.
        """
        tokens = self._prompt(body)
        params, strings = self._params(body, len(tokens))
        score = self._score(body, len(tokens))
        calls: list[Any] = [self._group.sample(tokens, params, body.num_samples, sampler.adapter)]
        if score is not None:
            calls.append(self._group.score(tokens, score, sampler.adapter))
        try:
            completions, *scores = await asyncio.gather(*calls)
        except ValueError as error:  # what engines refuse; see `workers.engines.adapters`
            raise UserError(str(getattr(error, "cause", None) or error)) from None
        if strings:
            completions = [self._cut(completion, strings) for completion in completions]
        scored: PromptScores | None = scores[0] if scores else None
        if scored is not None and body.prompt_logprobs_last_n is not None:
            scored.logprobs = _last(scored.logprobs, body.prompt_logprobs_last_n)
            scored.top_logprobs = _last(scored.top_logprobs, body.prompt_logprobs_last_n)
        if scored is not None and not body.prompt_logprobs:
            scored.logprobs = np.zeros(0, np.float32)
        return protobuf.write_samples(completions, body.topk_sample_logprobs, scored, body.topk_prompt_logprobs)

    def _prompt(self, body: wire.SampleRequest) -> np.ndarray:
        if any(chunk.type != "encoded_text" for chunk in body.prompt.chunks):
            raise UserError("prompt has a chunk that is not text, which no model of this server takes.")
        tokens = np.array([token for chunk in body.prompt.chunks for token in chunk.tokens], np.int64)
        if not len(tokens):
            raise UserError("prompt is empty; a sampler needs at least one token to continue.")
        if not 0 <= tokens.min() <= tokens.max() < self._limits.vocabulary:
            raise UserError(f"prompt must hold token ids from 0 to {self._limits.vocabulary - 1}.")
        return tokens.astype(np.int32)

    def _params(self, body: wire.SampleRequest, length: int) -> tuple[SamplingParams, list[str]]:
        wanted, room = body.sampling_params, self._limits.context - length
        if room < 1:
            raise UserError(
                f"prompt has {length} tokens, which leaves no room in rollout.max_model_len={self._limits.context}."
            )
        for name, value, good in (
            ("num_samples", body.num_samples, 1 <= body.num_samples <= MAX_SAMPLES),
            ("sampling_params.max_tokens", wanted.max_tokens, wanted.max_tokens is None or wanted.max_tokens >= 1),
            ("sampling_params.temperature", wanted.temperature, 0 <= wanted.temperature < float("inf")),
            ("sampling_params.top_p", wanted.top_p, 0 < wanted.top_p <= 1),
            ("sampling_params.top_k", wanted.top_k, wanted.top_k >= -1),
            ("topk_sample_logprobs", body.topk_sample_logprobs, body.topk_sample_logprobs >= 0),
        ):
            if not good:
                raise UserError(f"{name}={value} is out of range.")
        stops, strings = self._stops(wanted.stop)
        params = SamplingParams(
            max_new_tokens=min(wanted.max_tokens or room, room),
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=max(wanted.top_k, 0),
            logprobs=min(body.topk_sample_logprobs, self._limits.vocabulary),
            stop_token_ids=stops,
            seed=None if wanted.seed is None else wanted.seed % 2**63,
        )
        return params, strings

    def _stops(self, stop: str | list[str] | list[int] | None) -> tuple[tuple[int, ...], list[str]]:
        """Tokens that end a sample, and texts that do; a text that is one token is that token."""
        if stop is None:
            return self._eos, []
        if isinstance(stop, str):
            stop = [stop]
        tokens: list[int] = []
        strings: list[str] = []
        for item in stop:
            if isinstance(item, int):
                tokens.append(item)
                continue
            if not item:
                raise UserError("sampling_params.stop has an empty text.")
            strings.append(item)
        if any(not 0 <= token < self._limits.vocabulary for token in tokens):
            raise UserError(f"sampling_params.stop has a token outside of 0 to {self._limits.vocabulary - 1}.")
        return (*tokens, *(self._eos if strings else ())), strings

    def _cut(self, completion: Completion, strings: list[str]) -> Completion:
        """The completion up to the token that completes one of the texts.

        Engines see tokens only. What they sample before a stop does not depend on it, so cutting afterwards gives the same
        distribution as stopping, at the price of the tokens behind.
        """
        low, high = 1, len(completion.ids)
        if not self._has(completion.ids, strings):
            return completion
        while low < high:  # the shortest beginning whose text has one of them
            middle = (low + high) // 2
            low, high = (low, middle) if self._has(completion.ids[:middle], strings) else (middle + 1, high)
        return Completion(
            ids=completion.ids[:low],
            logprobs=completion.logprobs[:low],
            head_ids=completion.head_ids[:low],
            head_logprobs=completion.head_logprobs[:low],
            versions=completion.versions[:low],
            finish="stop",
        )

    def _has(self, ids: np.ndarray, strings: list[str]) -> bool:
        text = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        return any(string in text for string in strings)

    def _score(self, body: wire.SampleRequest, length: int) -> ScoreRequest | None:
        last, targets = body.prompt_logprobs_last_n, body.target_prompt_logprobs
        if last is not None and not (body.prompt_logprobs and 1 <= last < length):
            raise UserError(f"prompt_logprobs_last_n={last} needs prompt_logprobs, and a number from 1 to len(prompt) - 1.")
        for name in ("topk_prompt_logprobs", "prompt_alt_tokens_k"):
            if getattr(body, name) < 0:
                raise UserError(f"{name}={getattr(body, name)} is out of range.")
        if not (body.prompt_logprobs or body.topk_prompt_logprobs or targets or body.prompt_alt_tokens_k):
            return None
        return ScoreRequest(
            top_k=min(body.topk_prompt_logprobs, self._limits.vocabulary),
            targets=None if targets is None else self._targets(targets, length),
            draws=body.prompt_alt_tokens_k,
            temperature=body.sampling_params.temperature,
            seed=body.sampling_params.seed,
        )

    def _targets(self, body: wire.TensorBody, length: int) -> np.ndarray:
        shape = body.shape or []
        try:
            if body.sparse_crow_indices is not None:
                rows, columns = np.array(body.sparse_crow_indices), np.array(body.sparse_col_indices or [], np.int64)
                targets = protobuf.dense(np.array(body.data, np.int64), rows, columns, shape, fill=-1)
            else:
                targets = np.array(body.data, np.int64).reshape(shape)
        except ValueError:
            targets = np.zeros(0, np.int64)
        if targets.ndim != 2 or len(targets) != length - 1 or targets.max(initial=-1) >= self._limits.vocabulary:
            raise UserError(
                f"target_prompt_logprobs must be token ids of shape [len(prompt) - 1, K] = [{length - 1}, K], or -1."
            )
        return targets


def _last(rows: np.ndarray, count: int) -> np.ndarray:
    """``rows`` with NaN in all but the last ``count``; arrays that come from samplers cannot be written to."""
    kept = np.full_like(rows, np.nan)
    kept[-count:] = rows[-count:]
    return kept

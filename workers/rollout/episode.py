"""One episode: the policy and an environment take turns, token by token, until one of them ends it.

Tokens in, tokens out: what the engine sampled is what the trajectory holds and what the next turn continues. Scheduling many
episodes, time limits and failures are handled by the worker (`workers.rollout.worker`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlframe.seeding import derive_seed
from rlframe.types import Finish, Prompt, Trajectory
from workers.engines.protocol import Completion, Engine, SamplingParams
from workers.environments.base import Environment, FatalRewardError, RewardError, StepResult
from workers.environments.checks import token_fault
from workers.faults import EpisodeFailed, Fault, Kind, failures_as


@dataclass
class _Rows:
    """The arrays of a trajectory while it grows."""

    width: int
    """k, entries of a head."""
    parts: dict[str, list[np.ndarray]] = field(default_factory=dict)
    length: int = 0

    def observe(self, tokens: np.ndarray) -> None:
        """Append tokens that the policy did not sample."""
        n = len(tokens)
        self._append(
            tokens=tokens,
            action_mask=np.zeros(n, np.bool_),
            logprobs=np.zeros(n, np.float32),
            head_ids=np.zeros((n, self.width), np.int32),
            head_logprobs=np.full((n, self.width), -np.inf, np.float32),
            versions=np.full(n, -1, np.int32),
            rewards=np.zeros(n, np.float32),
        )

    def act(self, completion: Completion, reward: float) -> None:
        """Append one turn of the policy; its reward is received at its last token."""
        n = len(completion.ids)
        rewards = np.zeros(n, np.float32)
        rewards[-1] = reward
        self._append(
            tokens=completion.ids,
            action_mask=np.ones(n, np.bool_),
            logprobs=completion.logprobs,
            head_ids=completion.head_ids,
            head_logprobs=completion.head_logprobs,
            versions=completion.versions,
            rewards=rewards,
        )

    def _append(self, **arrays: np.ndarray) -> None:
        for name, array in arrays.items():
            self.parts.setdefault(name, []).append(array)
        self.length += len(arrays["tokens"])

    def trajectory(self, prompt: Prompt, finish: Finish, metadata: dict[str, Any]) -> Trajectory:
        """What has grown, whole."""
        arrays: dict[str, Any] = {name: np.concatenate(parts) for name, parts in self.parts.items()}
        return Trajectory(**arrays, finish=finish, prompt_id=prompt.id, index=prompt.index, env=prompt.env, metadata=metadata)


async def sample_turn(engine: Engine, tokens: np.ndarray, params: SamplingParams) -> Completion:
    """Sample one turn; a request that an update of the weights aborted continues from where it was.

    The budget is one for all parts: what was sampled before an abort counts (``max_new_tokens`` of the whole turn).
    """
    part = await engine.generate(tokens, params)
    if part.finish != "abort":
        return part
    parts = [part]
    while part.finish == "abort" and (left := params.max_new_tokens - sum(len(p.ids) for p in parts)) > 0:
        seed = None if params.seed is None else derive_seed(params.seed, left)
        prompt = np.concatenate([tokens, *(p.ids for p in parts)])
        part = await engine.generate(prompt, replace(params, max_new_tokens=left, seed=seed))
        parts.append(part)
    return _join(parts)


def _join(parts: list[Completion]) -> Completion:
    names = ("ids", "logprobs", "head_ids", "head_logprobs", "versions")
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return Completion(**arrays, finish="length" if parts[-1].finish == "abort" else parts[-1].finish)


def _check(prompt: Prompt, length: int, tokens: np.ndarray, max_model_len: int, vocabulary: int | None) -> None:
    """Refuse a sequence of ``length`` that ends in ``tokens``; an engine that tries may die, with the requests of others."""
    reason = None
    if length >= max_model_len:
        reason = f"has {length} tokens, which leaves no room in rollout.max_model_len={max_model_len}"
    elif vocabulary is not None and (unknown := token_fault(tokens, vocabulary)) is not None:
        reason = f"has the token {unknown}, but the ids of the model's vocabulary end at {vocabulary - 1}"
    if reason:
        raise EpisodeFailed(Fault(Kind.REJECTED, f"prompt {prompt.id!r} {reason}"))


def _reward(result: StepResult, policy: str) -> float:
    """The reward of a turn, or what ``policy`` (``task.on_reward_failure``) says about one that is no float32 number."""
    with np.errstate(over="ignore"):
        if np.isfinite(np.float32(result.reward)):
            return result.reward
    if policy == "zero":
        return 0.0
    kind = FatalRewardError if policy == "raise" else RewardError
    raise kind(
        f"The environment returned the reward {result.reward}, which is not a finite float32 (task.on_reward_failure={policy})."
    )


def _observed(result: StepResult) -> np.ndarray:
    """int64[O], the observation of a turn; ids beyond int32 are still themselves.

    Raises:
        ValueError: it is not token ids.
    """
    given = np.asarray(result.observation)
    if given.size and (given.dtype.kind not in "iu" or given.ndim != 1):
        raise ValueError(f"an observation must be a list of token ids, not {given.dtype} values of shape {given.shape}")
    return given.astype(np.int64)


def _of_turn(params: SamplingParams, environment: Environment, turn: int, room: int) -> SamplingParams:
    """How one turn is sampled, with ``room`` tokens left for the episode."""
    return replace(
        params,
        max_new_tokens=min(params.max_new_tokens, room),
        stop_token_ids=tuple(environment.stop_token_ids),
        seed=None if params.seed is None else derive_seed(params.seed, turn),
    )


async def run_episode(
    engine: Engine,
    environment: Environment,
    prompt: Prompt,
    params: SamplingParams,
    *,
    max_model_len: int,
    vocabulary: int | None = None,
    on_reward_failure: str = "raise",
) -> Trajectory:
    """Run one episode and return its trajectory.

    Args:
        engine: samples the turns.
        environment: answers them.
        prompt: where the episode starts.
        params: ``max_new_tokens`` is the budget of one turn; the environment's stop tokens end a turn; ``seed`` makes the
            seeds of all turns.
        max_model_len: budget of the whole episode in tokens, prompt and observations included.
        vocabulary: all token ids must be below it; None: not checked.
        on_reward_failure: what becomes of a reward that is not a finite float32, as ``task.on_reward_failure`` says.

    Returns:
        ``finish`` is ``stop`` when the environment ended the episode, and ``length`` when a budget did: the last turn hit
        its own, there is no room for another turn, or the environment's ``max_turns`` are used up.

    Raises:
        EpisodeFailed: the environment, its reward or the engine failed, or a sequence was rejected.
        EngineDeadError: the engine can serve no more.
    """
    metadata: dict[str, Any] = {}
    rows: _Rows | None = None
    tokens = np.asarray(prompt.tokens, dtype=np.int32)
    finish: Finish = "length"
    _check(prompt, len(tokens), tokens, max_model_len, vocabulary)
    with failures_as(Kind.ENVIRONMENT):
        episode = environment.episode(prompt)
    for turn in range(environment.max_turns):
        room = max_model_len - len(tokens)
        with failures_as(Kind.ENGINE, of_values=Kind.REJECTED):
            completion = await sample_turn(engine, tokens, _of_turn(params, environment, turn, room))
        with failures_as(Kind.ENVIRONMENT):
            result = await episode.step(completion.ids, completion.finish)
            reward, observation = _reward(result, on_reward_failure), _observed(result)
        with failures_as(Kind.ENGINE):
            if rows is None:
                rows = _Rows(completion.head_ids.shape[1])
                rows.observe(tokens)
            rows.act(completion, reward)
            tokens = np.concatenate([tokens, completion.ids, observation.astype(np.int32)])
        metadata |= result.metadata
        if result.done:
            finish = "length" if completion.finish == "length" else "stop"
            break
        if len(tokens) >= max_model_len or turn + 1 == environment.max_turns:
            break
        _check(prompt, len(tokens), observation, max_model_len, vocabulary)
        rows.observe(observation.astype(np.int32))
    assert rows is not None
    with failures_as(Kind.ENGINE):
        return rows.trajectory(prompt, finish, metadata | {"turns": turn + 1})

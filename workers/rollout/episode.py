"""One episode: the policy and an environment take turns, token by token, until one of them ends it.

Tokens in, tokens out: what the engine sampled is what the trajectory holds and what the next turn continues. Scheduling many
episodes, time limits and failures are handled by the worker (`workers.rollout.worker`). An episode may be handed over in pieces
(`LiveEpisode`): what earlier pieces hold is context in the later ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlframe.seeding import derive_seed
from rlframe.types import Finish, Prompt, Trajectory
from workers.engines.protocol import Completion, Engine, SamplingParams
from workers.environments.base import Environment, Episode, FatalRewardError, RewardError, StepResult
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

    def trajectory(self, prompt: Prompt, finish: Finish, metadata: dict[str, Any], **piece: Any) -> Trajectory:
        """What has grown, whole; ``piece``: what a `Trajectory` says about its place in the episode."""
        arrays: dict[str, Any] = {name: np.concatenate(parts) for name, parts in self.parts.items()}
        of_prompt: dict[str, Any] = {"prompt_id": prompt.id, "index": prompt.index, "env": prompt.env}
        return Trajectory(**arrays, finish=finish, metadata=metadata, **of_prompt, **piece)


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


class LiveEpisode:
    """An episode between its pieces: the environment's side, and the tokens so far.

    Args:
        engine: samples the turns.
        environment: answers them.
        prompt: where the episode starts.
        params: ``max_new_tokens`` is the budget of one turn; the environment's stop tokens end a turn; ``seed`` makes the
            seeds of all turns, and of the parts of a turn that is cut.
        max_model_len: budget of the whole episode in tokens, prompt and observations included.
        vocabulary: all token ids must be below it; None: not checked.
        on_reward_failure: what becomes of a reward that is not a finite float32, as ``task.on_reward_failure`` says.
        segment_tokens: sampled tokens after which a piece ends; None: the episode is one piece.
    """

    def __init__(
        self,
        engine: Engine,
        environment: Environment,
        prompt: Prompt,
        params: SamplingParams,
        *,
        max_model_len: int,
        vocabulary: int | None = None,
        on_reward_failure: str = "raise",
        segment_tokens: int | None = None,
    ) -> None:
        self.engine, self.environment, self.prompt, self.params = engine, environment, prompt, params
        self.max_model_len, self.vocabulary = max_model_len, vocabulary
        self.on_reward_failure, self.segment_tokens = on_reward_failure, segment_tokens
        self._tokens = np.asarray(prompt.tokens, dtype=np.int32)
        self._episode: Episode | None = None
        self._metadata: dict[str, Any] = {}
        self._rows: _Rows | None = None
        """Of the piece in work."""
        self._turn, self._piece = 0, 0
        self._said: list[np.ndarray] = []
        """Sampled parts of the turn in work; there are some only where a cut went through it."""
        self._sampled = 0
        """Action tokens of the piece in work."""
        self._actions_before, self._reward_before = 0, 0.0

    async def advance(self) -> Trajectory:
        """Sample to the end of the episode, or to the next cut.

        A cut comes when ``segment_tokens`` tokens were sampled since the last one and the episode continues: within a turn, or
        after the environment's answer to it, which then ends the piece. So where it comes depends on nothing that is sampled
        after it.

        Returns:
            One piece. ``last`` says whether the episode ended. Then ``finish`` is ``stop`` when the environment ended it, and
            ``length`` when a budget did: the last turn hit its own, there is no room for another turn, or the environment's
            ``max_turns`` are used up. At a cut ``finish`` is ``length``.

        Raises:
            EpisodeFailed: the environment, its reward or the engine failed, or a sequence was rejected.
            EngineDeadError: the engine can serve no more.
        """
        if self._episode is None:
            _check(self.prompt, len(self._tokens), self._tokens, self.max_model_len, self.vocabulary)
            with failures_as(Kind.ENVIRONMENT):
                self._episode = self.environment.episode(self.prompt)
        while (finish := await self._sample()) is None:
            if self._sampled == self.segment_tokens:
                return self._cut("length", last=False)
        return self._cut(finish, last=True)

    async def _sample(self) -> Finish | None:
        """Sample a turn and have it answered, or sample the part of it that fits the piece; the reason if the episode ended."""
        budget = min(self.params.max_new_tokens, self.max_model_len - len(self._tokens) + sum(map(len, self._said)))
        left = budget - sum(map(len, self._said))
        limit = left if self.segment_tokens is None else min(left, self.segment_tokens - self._sampled)
        with failures_as(Kind.ENGINE, of_values=Kind.REJECTED):
            completion = await sample_turn(self.engine, self._tokens, self._sampling(limit))
        self._said.append(completion.ids)
        if completion.finish == "length" and len(completion.ids) == limit < left:
            self._act(completion, 0.0)
            return None
        action, self._said = np.concatenate(self._said), []
        assert self._episode is not None
        with failures_as(Kind.ENVIRONMENT):
            result = await self._episode.step(action, completion.finish)
            reward, observation = _reward(result, self.on_reward_failure), _observed(result)
        self._act(completion, reward)
        self._metadata |= result.metadata
        self._turn += 1
        if result.done:
            return "length" if completion.finish == "length" else "stop"
        length = len(self._tokens) + len(observation)
        if length >= self.max_model_len or self._turn == self.environment.max_turns:
            return "length"
        _check(self.prompt, length, observation, self.max_model_len, self.vocabulary)
        self._observe(observation.astype(np.int32))
        return None

    def _sampling(self, limit: int) -> SamplingParams:
        """How the next ``limit`` tokens are sampled: what a turn was cut into has seeds of its own."""
        parts = (self._turn, self._piece) if self._said else (self._turn,)
        return replace(
            self.params,
            max_new_tokens=limit,
            stop_token_ids=tuple(self.environment.stop_token_ids),
            seed=None if self.params.seed is None else derive_seed(self.params.seed, *parts),
        )

    def _act(self, completion: Completion, reward: float) -> None:
        with failures_as(Kind.ENGINE):
            if self._rows is None:
                self._rows = _Rows(completion.head_ids.shape[1])
                self._rows.observe(self._tokens)
            self._rows.act(completion, reward)
            self._tokens = np.concatenate([self._tokens, completion.ids])
        self._sampled += len(completion.ids)

    def _observe(self, observation: np.ndarray) -> None:
        assert self._rows is not None
        self._rows.observe(observation)
        self._tokens = np.concatenate([self._tokens, observation])

    def _cut(self, finish: Finish, last: bool) -> Trajectory:
        """The piece in work; the next one begins with all tokens so far as its context."""
        assert self._rows is not None
        place = {"piece": self._piece, "actions_before": self._actions_before, "reward_before": self._reward_before}
        with failures_as(Kind.ENGINE):
            metadata = self._metadata | {"turns": self._turn}
            trajectory = self._rows.trajectory(self.prompt, finish, metadata, last=last, **place)
        self._rows, self._piece = None, self._piece + 1
        self._actions_before, self._sampled = self._actions_before + self._sampled, 0
        self._reward_before += trajectory.reward
        return trajectory


async def run_episode(
    engine: Engine, environment: Environment, prompt: Prompt, params: SamplingParams, **limits: Any
) -> Trajectory:
    """Run one whole episode and return its trajectory; arguments and exceptions are those of `LiveEpisode`."""
    return await LiveEpisode(engine, environment, prompt, params, **limits).advance()

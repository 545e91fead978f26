"""What every engine owes its callers, on the real ones: alignment, weight updates, budgets, aborts, versions, death."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from tests.support.engines import (
    MAX_MODEL_LEN,
    VOCABULARY,
    alignment_error,
    apply,
    checksum_of,
    dense_logprobs,
    engine_params,
    part,
    perturbed,
    prompt_of,
    save,
    serving,
    tiny_model,
    update_in_flight,
    update_of,
)
from tests.support.rollouts import config_of, model_folder, prompts_of
from workers.engines.protocol import EngineDeadError, SamplingParams
from workers.engines.sglang.engine import SGLangEngine
from workers.rollout.worker import RolloutWorker

BASE = tiny_model()


@pytest.fixture(scope="module", params=engine_params())
def served(request, tmp_path_factory):
    """An engine and the loop that it lives on."""
    with serving(request.param, save(BASE, tmp_path_factory.mktemp("model"))) as served:
        yield served


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_samples_and_heads_are_those_of_transformers(served, temperature):
    engine, run = served
    run(apply(engine, update_of(BASE, 1)))
    prompts = [prompt_of(5 + i, seed=i) for i in range(8)]
    params = SamplingParams(max_new_tokens=12, temperature=temperature, logprobs=16, seed=3)

    async def sample():
        return await asyncio.gather(*(engine.generate(p, params) for p in prompts))

    for prompt, completion in zip(prompts, run(sample()), strict=True):
        assert completion.head_ids.shape == (12, 16)
        assert all(len(set(row)) == 16 for row in completion.head_ids.tolist())
        assert alignment_error(BASE, prompt, completion, temperature) < 1e-4
        assert completion.finish == "length"
        assert (completion.versions == 1).all()


def test_a_head_as_wide_as_the_vocabulary_sums_to_one(served):
    engine, run = served
    completion = run(engine.generate(prompt_of(6), SamplingParams(max_new_tokens=4, logprobs=10_000, seed=0)))
    assert completion.head_ids.shape == (4, VOCABULARY)
    assert np.allclose(np.exp(completion.head_logprobs).sum(1), 1, atol=1e-5)
    assert (np.sort(completion.head_ids, axis=1) == np.arange(VOCABULARY)).all()


def test_without_heads_the_sampled_logprobs_are_still_there(served):
    engine, run = served
    run(apply(engine, update_of(BASE, 1)))
    prompt = prompt_of(6)
    completion = run(engine.generate(prompt, SamplingParams(max_new_tokens=5, seed=0)))
    assert completion.head_ids.shape == (5, 0)
    assert alignment_error(BASE, prompt, completion, 1.0) < 1e-4


@pytest.mark.parametrize(
    ("changes", "warper"),
    [({"top_k": 5}, TopKLogitsWarper(5)), ({"top_p": 0.6}, TopPLogitsWarper(0.6))],
    ids=["top_k", "top_p"],
)
def test_truncated_sampling_reports_the_distribution_it_sampled_from(served, changes, warper):
    engine, run = served
    run(apply(engine, update_of(BASE, 1)))
    prompt = prompt_of(9)
    params = SamplingParams(max_new_tokens=10, temperature=1.3, logprobs=24, seed=0, **changes)
    if isinstance(engine, SGLangEngine):  # which has only the distribution from before the cut
        with pytest.raises(ValueError, match="before top_p"):
            run(engine.generate(prompt, params))
        return
    completion = run(engine.generate(prompt, params))
    dense = dense_logprobs(BASE, np.concatenate([prompt, completion.ids]), 1.3)[len(prompt) - 1 :]
    kept = torch.log_softmax(warper(None, torch.tensor(dense)), -1).numpy()
    assert np.abs(kept[np.arange(10), completion.ids] - completion.logprobs).max() < 1e-4
    heads = np.take_along_axis(kept, completion.head_ids.astype(np.int64), 1)
    assert (np.isneginf(heads) == np.isneginf(completion.head_logprobs)).all() and np.isneginf(heads).any()
    finite = np.isfinite(heads)
    assert np.abs(heads[finite] - completion.head_logprobs[finite]).max() < 1e-4


def test_greedy_takes_the_likeliest_token_at_temperature_one(served):
    engine, run = served
    run(apply(engine, update_of(BASE, 1)))
    prompt = prompt_of(9)
    completion = run(engine.generate(prompt, SamplingParams(max_new_tokens=8, temperature=0.0, logprobs=2)))
    assert (completion.ids == completion.head_ids[:, 0]).all()
    assert alignment_error(BASE, prompt, completion, 1.0) < 1e-4


def test_a_full_update_moves_the_tied_head_and_every_layer(served):
    engine, run = served
    checksums = []
    for version in (2, 3):
        new, prompt = perturbed(BASE, version), prompt_of(7)
        checksums.append(run(apply(engine, update_of(new, version))))
        completion = run(engine.generate(prompt, SamplingParams(max_new_tokens=6, logprobs=8, seed=1)))
        assert checksums[-1] == checksum_of(new)
        assert alignment_error(new, prompt, completion, 1.0) < 1e-4
        assert (completion.versions == version).all() and engine.version == version
    assert len(set(checksums)) == 2


def test_a_merged_update_brings_only_what_an_adapter_changes(served):
    engine, run = served
    run(apply(engine, update_of(BASE, 1)))
    patterns = ("q_proj", "v_proj", "down_proj")
    new, prompt = perturbed(BASE, 4, patterns), prompt_of(7)
    assert run(apply(engine, update_of(new, 4, "merged", patterns))) == checksum_of(new)
    completion = run(engine.generate(prompt, SamplingParams(max_new_tokens=6, logprobs=8, seed=1)))
    assert alignment_error(new, prompt, completion, 1.0) < 1e-4


def test_a_prompt_that_was_seen_before_the_update_is_not_served_from_its_cache(served):
    engine, run = served
    prompt, params = prompt_of(400), SamplingParams(max_new_tokens=3, logprobs=4, seed=0)
    for version in (5, 6):
        new = perturbed(BASE, version)
        run(apply(engine, update_of(new, version)))
        for _ in range(2):
            assert alignment_error(new, prompt, run(engine.generate(prompt, params)), 1.0) < 1e-4


def test_a_request_in_flight_continues_under_the_new_weights(served):
    engine, run = served
    old, new, prompt = perturbed(BASE, 7), perturbed(BASE, 8), prompt_of(20)
    run(apply(engine, update_of(old, 7)))
    long = SamplingParams(max_new_tokens=250, temperature=0.7, logprobs=4, seed=0)
    completion = run(update_in_flight(engine, update_of(new, 8), prompt, long, SamplingParams(max_new_tokens=20, seed=1)))
    assert len(completion.ids) == 250
    assert set(completion.versions.tolist()) == {7, 8} and (np.diff(completion.versions) >= 0).all()
    n = int((completion.versions == 7).sum())
    assert n >= 15
    assert alignment_error(old, prompt, part(completion, slice(0, n)), 0.7) < 1e-4
    seen = np.concatenate([prompt, completion.ids[:n]])
    assert alignment_error(new, seen, part(completion, slice(n, None)), 0.7) < 1e-4


def test_an_update_that_does_not_fit_is_refused_and_names_the_tensor(served):
    engine, run = served
    run(apply(engine, update_of(BASE, 1)))
    for update in (update_of(BASE, 9, "full", ("layers.0",)), update_of(BASE, 9, "adapter")):
        run(engine.pause())
        with pytest.raises(Exception, match=r"layers\.1|adapter|embed_tokens"):
            run(engine.load_weights(update))
        run(engine.resume())
    assert engine.version == 1


def test_weights_are_refused_by_an_engine_that_is_not_paused(served):
    engine, run = served
    with pytest.raises(RuntimeError, match="pause"):
        run(engine.load_weights(update_of(BASE, 9)))


def test_stop_tokens_end_a_request_and_belong_to_it(served):
    engine, run = served
    stops = tuple(range(0, VOCABULARY, 2))
    params = SamplingParams(max_new_tokens=50, stop_token_ids=stops, logprobs=2, seed=0)
    completion = run(engine.generate(prompt_of(5), params))
    assert completion.finish == "stop"
    assert completion.ids[-1] in stops and not set(completion.ids[:-1].tolist()) & set(stops)
    assert len(completion.logprobs) == len(completion.head_ids) == len(completion.versions) == len(completion.ids)


def test_the_model_s_own_end_token_stops_nothing_unless_asked(served):
    engine, run = served
    biased = perturbed(BASE, 1, ("none",))
    params = SamplingParams(max_new_tokens=200, seed=0)
    run(apply(engine, update_of(biased, 1)))
    completions = [run(engine.generate(prompt_of(5, seed=i), params)) for i in range(4)]
    assert any(BASE.config.eos_token_id in c.ids[:-1] for c in completions)
    assert all(c.finish == "length" and len(c.ids) == 200 for c in completions)


def test_concurrent_requests_keep_their_own_parameters(served):
    engine, run = served
    run(apply(engine, update_of(BASE, 1)))
    with pytest.raises(FrozenInstanceError):
        SamplingParams(max_new_tokens=1).temperature = 2.0
    wanted = [
        SamplingParams(max_new_tokens=2 + i, temperature=t, logprobs=i, seed=i) for i, t in enumerate([1.0, 0.7, 1.5, 0.0])
    ]

    async def sample():
        return await asyncio.gather(*(engine.generate(prompt_of(6), params) for params in wanted))

    for params, completion in zip(wanted, run(sample()), strict=True):
        assert completion.head_ids.shape == (params.max_new_tokens, params.logprobs)
        assert alignment_error(BASE, prompt_of(6), completion, params.temperature or 1.0) < 1e-4


def test_an_abort_returns_what_was_sampled_and_is_no_natural_stop(served):
    engine, run = served
    run(apply(engine, update_of(BASE, 1)))
    prompt = prompt_of(10)

    async def abort():
        running = asyncio.create_task(engine.generate(prompt, SamplingParams(max_new_tokens=400, logprobs=3, seed=0)))
        await engine.generate(prompt, SamplingParams(max_new_tokens=10, seed=1))
        await engine.pause("abort")
        completion = await asyncio.wait_for(running, 120)
        waiting = asyncio.create_task(engine.generate(prompt, SamplingParams(max_new_tokens=4, seed=2)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await engine.resume()
        return completion, await waiting

    aborted, later = run(abort())
    assert aborted.finish == "abort" and 8 <= len(aborted.ids) < 400
    assert alignment_error(BASE, prompt, aborted, 1.0) < 1e-4
    assert later.finish == "length" and len(later.ids) == 4


@pytest.mark.parametrize(("length", "budget"), [(0, 4), (MAX_MODEL_LEN, 1), (10, MAX_MODEL_LEN), (10, 0)])
def test_a_request_that_cannot_fit_is_refused(served, length, budget):
    engine, run = served
    with pytest.raises(ValueError, match=r"max_model_len|empty|at least 1"):
        run(engine.generate(prompt_of(length), SamplingParams(max_new_tokens=budget)))


def test_a_cancelled_request_leaves_the_others_alone(served):
    engine, run = served
    run(apply(engine, update_of(BASE, 1)))

    async def cancel_one():
        params = SamplingParams(max_new_tokens=300, logprobs=2, seed=0)
        doomed, kept = (asyncio.create_task(engine.generate(prompt_of(10), params)) for _ in range(2))
        await engine.generate(prompt_of(3), SamplingParams(max_new_tokens=10))
        assert not doomed.done()
        doomed.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await doomed
        return await kept

    assert alignment_error(BASE, prompt_of(10), run(cancel_one()), 1.0) < 1e-4


def test_an_engine_that_hangs_or_dies_raises_in_its_callers(served, tmp_path):
    """Last: it leaves a dead engine behind."""
    engine, run = served
    run(engine.health())
    cores = multiprocessing.active_children()
    if not cores:  # for SGLang's processes see test_sglang_process.py
        run(engine.close())
        with pytest.raises(EngineDeadError):
            run(engine.health())
        return
    (core,) = cores
    engine._timeout_s = 1.0
    os.kill(core.pid, signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match="did not answer"):
        run(engine.health())
    os.kill(core.pid, signal.SIGCONT)
    engine._timeout_s = 86400.0  # of which the test has no time to wait

    async def die_with_episodes():
        worker = RolloutWorker(config_of(stop_token_ids=()), model_folder(tmp_path))
        worker.engine = engine
        await worker.submit(prompts_of(3, turns=4), [0, 1, 2], 1, SamplingParams(max_new_tokens=400))
        await engine.generate(prompt_of(3), SamplingParams(max_new_tokens=10))
        os.kill(core.pid, signal.SIGKILL)
        while not (fault := (await worker.collect(5.0)).engine_fault):
            pass
        with pytest.raises(EngineDeadError):
            await worker.update_weights(update_of(BASE, 1))
        return fault

    assert "died" in run(die_with_episodes()).reason
    for call in (engine.health, engine.pause, lambda: engine.generate(prompt_of(3), SamplingParams(max_new_tokens=1))):
        with pytest.raises(EngineDeadError):
            run(call())

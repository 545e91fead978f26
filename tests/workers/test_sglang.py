"""The SGLang engine before a server that speaks the wire format: what it asks, what it refuses, and what ends with whom.

What every engine owes is in `test_engine_contract.py`; the real server's processes are in `test_sglang_process.py`.
"""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from rlframe.config import ConfigError
from rlframe.types import Batch
from tests.support.engines import (
    MAX_MODEL_LEN,
    RANK,
    adapted,
    adapter_update,
    alignment_error,
    apply,
    perturbed,
    prompt_of,
    save,
    tiny_model,
    update_of,
)
from tests.support.rollouts import config_of, model_folder, prompts_of
from tests.support.sglang_wire_server import WireServer
from workers.engines.protocol import EngineDeadError, SamplingParams, WeightUpdate
from workers.engines.sglang.engine import SGLangEngine
from workers.engines.sglang.weights import check_update, weights_folder
from workers.engines.sglang.wire import completion_of, server_flags
from workers.rollout.worker import RolloutWorker

BASE = tiny_model()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(BASE, tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def connected(path, *, max_lora_rank=0, context_length=MAX_MODEL_LEN, **server_settings):
    server = WireServer(path, context_length=context_length, **server_settings)
    engine = SGLangEngine(
        path, url=await server.start(), max_model_len=MAX_MODEL_LEN, max_lora_rank=max_lora_rank, timeout_s=120
    )
    try:
        await engine.start()
        yield engine, server
    finally:
        await engine.close()
        await server.stop()


async def seen(server, path, count=1):
    """Wait until the server has got ``count`` requests for ``path``; the bodies."""
    while len(bodies := [body for where, body in server.seen if where == path]) < count:
        await asyncio.sleep(0.01)
    return bodies


def test_a_request_asks_for_the_whole_distribution_and_for_nothing_of_the_model_s_own(path):
    async def body_of(**params):
        async with connected(path) as (engine, server):
            await engine.generate(prompt_of(4), SamplingParams(max_new_tokens=2, **params))
            return (await seen(server, "/generate"))[0]

    body = asyncio.run(body_of(temperature=0.7, logprobs=3, stop_token_ids=(5, 9), seed=8))
    sampling = body["sampling_params"]
    assert body["input_ids"] == prompt_of(4).tolist() and "text" not in body
    assert (body["return_logprob"], body["top_logprobs_num"], body["logprob_start_len"]) == (True, 3, -1)
    assert (sampling["temperature"], sampling["max_new_tokens"], sampling["sampling_seed"]) == (0.7, 2, 8)
    assert (sampling["top_p"], sampling["top_k"], sampling["min_p"]) == (1.0, -1, 0.0)
    assert (sampling["frequency_penalty"], sampling["presence_penalty"], sampling["repetition_penalty"]) == (0.0, 0.0, 1.0)
    # SGLang passes over the request's stop tokens when it ignores those of the model.
    assert (sampling["stop_token_ids"], sampling["ignore_eos"]) == ([5, 9], False)
    assert asyncio.run(body_of())["sampling_params"]["ignore_eos"] is True


def test_a_server_that_hung_up_meanwhile_is_not_taken_for_a_dead_one(path):
    async def ask():
        async with connected(path) as (engine, server):
            for _ in range(2):
                server.hang_up()
                completion = await engine.generate(prompt_of(4), SamplingParams(max_new_tokens=2))
                server.hang_up()
                await engine.pause()
                await engine.resume()
            return len(completion.ids)

    assert asyncio.run(ask()) == 2


def test_a_server_of_our_own_that_is_not_ready_in_time_is_ended(path):
    with pytest.raises(EngineDeadError, match="not ready within"):
        asyncio.run(SGLangEngine(path, max_model_len=MAX_MODEL_LEN, timeout_s=0.01).start())
    children = psutil.Process().children(recursive=True)
    assert not [child for child in children if "workers.engines.sglang.server" in child.cmdline()]


def test_a_server_that_cannot_say_what_it_serves_is_refused(path):
    async def start():
        async with connected(path, own_checksums=True):
            pass

    with pytest.raises(ConfigError, match=r"python -m workers\.engines\.sglang\.server"):
        asyncio.run(start())


def test_an_end_that_nobody_asked_for_is_an_error(path):
    async def sample(**settings):
        async with connected(path, **settings) as (engine, _):
            stop = SamplingParams(max_new_tokens=400, temperature=3.0, stop_token_ids=(0,))
            for seed in range(20):
                await engine.generate(prompt_of(8, seed=seed), stop)

    with pytest.raises(RuntimeError, match="stopped at token 2"):
        asyncio.run(sample(own_ends=True))
    with pytest.raises(RuntimeError, match="context-length"):
        asyncio.run(sample(context_length=12))


def test_callers_of_a_server_that_dies_or_falls_silent_get_an_error(path):
    async def die():
        async with connected(path) as (engine, server):
            running = asyncio.create_task(engine.generate(prompt_of(5), SamplingParams(max_new_tokens=400)))
            await seen(server, "/generate")
            await server.stop()
            for call in (running, engine.health(), engine.pause()):
                with pytest.raises(EngineDeadError, match="died"):
                    await call

    async def fall_silent():
        async with connected(path, silent=("/pause_generation",)) as (engine, _):
            engine._timeout_s = 0.2
            with pytest.raises(EngineDeadError, match="did not answer /pause_generation"):
                await engine.pause()

    asyncio.run(die())
    asyncio.run(fall_silent())


def test_a_cancelled_request_is_aborted_on_the_server(path):
    async def cancel():
        async with connected(path) as (engine, server):
            doomed = asyncio.create_task(engine.generate(prompt_of(5), SamplingParams(max_new_tokens=400)))
            (generate,) = await seen(server, "/generate")
            doomed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await doomed
            return generate, (await seen(server, "/abort_request"))[0]

    generate, abort = asyncio.run(cancel())
    assert abort == {"rid": generate["rid"]}


def test_a_request_that_waits_while_its_adapter_is_replaced_runs_under_the_new_one(path):
    old, new, prompt = adapted(1), adapted(2), prompt_of(9)

    async def replace_adapter():
        async with connected(path, max_lora_rank=RANK) as (engine, server):
            await apply(engine, adapter_update(old, 1))
            await engine.pause("abort")
            waiting = asyncio.create_task(engine.generate(prompt, SamplingParams(max_new_tokens=6, logprobs=4, seed=0)))
            await seen(server, "/generate")
            await engine.load_weights(adapter_update(new, 2))
            await engine.resume()
            return await waiting, list(server.adapters), (await seen(server, "/generate", 2))

    completion, loaded, bodies = asyncio.run(replace_adapter())
    assert alignment_error(new, prompt, completion, 1.0) < 1e-4
    assert (completion.versions == 2).all()
    assert loaded == [bodies[1]["lora_path"]] != [bodies[0]["lora_path"]]


def test_a_worker_runs_its_episodes_on_a_server_through_an_update(tmp_path):
    folder = model_folder(tmp_path)
    new = perturbed(BASE, 1)

    async def work():
        server = WireServer(folder, context_length=MAX_MODEL_LEN)
        worker = RolloutWorker(config_of((), engine="sglang", server_urls=[await server.start()], on_update="abort"), folder)
        await worker.start()
        await worker.submit(prompts_of(6, turns=3), range(6), 1, SamplingParams(max_new_tokens=40, logprobs=4))
        while not any(request.ids for request in server.engine._in_flight.values()):
            await asyncio.sleep(0)
        await worker.update_weights(update_of(new, 1))
        batches = []
        while sum(map(len, batches)) < 6:
            collected = await worker.collect(5.0)
            assert not collected.failures
            batches += [collected.batch] if collected.batch else []
        await worker.close()
        await server.stop()
        return Batch.concat(batches)

    batch = asyncio.run(work())
    versions = batch.versions[batch.action_mask]
    assert set(versions.tolist()) == {0, 1}


def test_weights_that_sglang_would_pass_over_are_refused_first(path):
    good = update_of(BASE, 1, "merged", ("q_proj",))
    name = next(iter(good.tensors))
    for tensors, message in (
        ({"model.layers.9.self_attn.q_proj.weight": good.tensors[name]}, r"unknown \['model\.layers\.9"),
        ({name: good.tensors[name][:-1]}, r"q_proj.* as \(127, 64\)"),
    ):
        with pytest.raises(ValueError, match=message):
            check_update(replace(good, tensors=tensors), path, tied=True)
    check_update(good, path, tied=True)
    check_update(update_of(BASE, 1, "full"), path, tied=True)


def test_bfloat16_weights_pass_through_a_folder_that_is_gone_afterwards(tmp_path):
    held = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    update = WeightUpdate(1, "merged", {"w": held.view(torch.uint16).numpy()}, dtype="bfloat16")
    with weights_folder(update, str(tmp_path)) as folder:
        assert torch.equal(load_file(Path(folder, "model.safetensors"))["w"], held)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_ids": [5, 6, 7]}, "log-probabilities"),
        ({"output_token_logprobs": None}, "log-probabilities"),
        ({"output_top_logprobs_shape": [1, 2]}, "heads of shape"),
    ],
)
def test_an_answer_whose_lists_do_not_fit_is_refused(change, message):
    encoded = {"output_top_logprobs_idx_flat_b64": "", "output_top_logprobs_val_flat_b64": ""}
    meta = {
        "finish_reason": {"type": "length"},
        "weight_version": "3",
        "output_token_logprobs": [[-0.1, 5, None], [-0.2, 6, None]],
        "output_top_logprobs_shape": [2, 2],
        "output_top_logprobs_null_prefix": 0,
        **encoded,
    }
    answer = {"output_ids": [5, 6], "meta_info": meta}
    target = answer if "output_ids" in change else meta
    target |= change
    with pytest.raises(ValueError, match=message):
        completion_of(answer, 2)


def test_arguments_become_the_flags_of_the_server():
    arguments = {
        "model_path": "m",
        "enable_lora": True,
        "disable_radix_cache": False,
        "lora_target_modules": ["a", "b"],
        "x": None,
    }
    assert server_flags(arguments) == ["--model-path", "m", "--enable-lora", "--lora-target-modules", "a", "b"]

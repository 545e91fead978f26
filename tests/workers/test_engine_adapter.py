"""Weight sync by adapter: the LoRA factors alone reach the sampler, and what it then computes is what PEFT computes."""

from dataclasses import replace

import numpy as np
import pytest
from peft import get_peft_model_state_dict

from rlframe.checksum import weights_checksum
from tests.support.engines import (
    RANK,
    adapted,
    adapter_update,
    alignment_error,
    apply,
    engine_params,
    part,
    prompt_of,
    save,
    serving,
    tiny_model,
    update_in_flight,
    update_of,
)
from workers.engines.protocol import SamplingParams
from workers.engines.sglang.engine import SGLangEngine
from workers.engines.torch.engine import TorchEngine


@pytest.fixture(scope="module", params=engine_params())
def served(request, tmp_path_factory):
    with serving(request.param, save(tiny_model(), tmp_path_factory.mktemp("model")), max_lora_rank=RANK) as served:
        yield served


def test_an_adapter_is_what_peft_computes_and_each_version_has_its_checksum(served):
    engine, run = served
    prompt, checksums = prompt_of(300), []
    for version in (1, 2):
        model = adapted(version)
        checksums.append(run(apply(engine, adapter_update(model, version))))
        assert checksums[-1] == weights_checksum(get_peft_model_state_dict(model).values())
        for _ in range(2):  # the second time from the prefix cache
            completion = run(engine.generate(prompt, SamplingParams(max_new_tokens=6, logprobs=8, seed=version)))
            assert alignment_error(model, prompt, completion, 1.0) < 1e-4
            assert (completion.versions == version).all()
    assert len(set(checksums)) == 2


def test_a_request_in_flight_continues_under_the_new_adapter(served):
    engine, run = served
    old, new, prompt = adapted(3), adapted(4), prompt_of(20)
    run(apply(engine, adapter_update(old, 3)))
    long, short = SamplingParams(max_new_tokens=150, logprobs=4, seed=0), SamplingParams(max_new_tokens=10, seed=1)
    if isinstance(engine, SGLangEngine):  # where a request keeps the adapter that it started with
        with pytest.raises(RuntimeError, match="on_update=abort"):
            run(update_in_flight(engine, adapter_update(new, 4), prompt, long, short))
        run(engine.resume())
        return
    completion = run(update_in_flight(engine, adapter_update(new, 4), prompt, long, short))
    n = int((completion.versions == 3).sum())
    assert set(completion.versions.tolist()) == {3, 4}
    assert alignment_error(old, prompt, part(completion, slice(0, n)), 1.0) < 1e-4
    seen = np.concatenate([prompt, completion.ids[:n]])
    assert alignment_error(new, seen, part(completion, slice(n, None)), 1.0) < 1e-4


def test_adapter_tensors_for_no_module_are_refused(served):
    engine, run = served
    update = adapter_update(adapted(5), 5)
    renamed = {name.replace("layers.1", "layers.7"): array for name, array in update.tensors.items()}
    run(engine.pause())
    with pytest.raises(Exception, match=r"layers\.7"):
        run(engine.load_weights(replace(update, tensors=renamed)))
    run(engine.resume())


def test_an_engine_started_for_adapters_refuses_full_weights(served):
    engine, run = served
    if isinstance(engine, TorchEngine):
        pytest.skip("the torch engine takes every mode at any time")
    run(engine.pause())
    with pytest.raises(ValueError, match="adapters"):
        run(engine.load_weights(update_of(tiny_model(), 9)))
    run(engine.resume())

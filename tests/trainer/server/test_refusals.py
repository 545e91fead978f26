"""What cannot be done is the client's fault and says which field; what went wrong in the server stays in its log."""

import json
import logging
import shutil
import socket

import numpy as np
import pytest
import tinker
from tinker import RequestFailedError, types
from tinker.types import RequestErrorCategory

from rlframe.config import ConfigError, ModelConfig
from rlframe.models import resolve_model
from tests.support.local_server import ALICE
from tests.support.raw_client import Wire
from tests.support.server_data import ADAM, VOCAB, datum, policy_data, supervised_data
from trainer.server.errors import explain
from trainer.server.serve import Base, serve
from trainer.settings.compose import compose


@pytest.fixture(scope="module")
def model(server):
    client = server.client()
    yield client.create_lora_training_client("tiny", rank=2, seed=1).result()
    client.close("success").result()


GOOD = {"target_tokens": [1, 2, 3], "logprobs": np.zeros(3, np.float32), "advantages": np.ones(3, np.float32)}


def policy_datum(**changes):
    return datum([1, 2, 3], **{key: value for key, value in {**GOOD, **changes}.items() if value is not None})


@pytest.mark.parametrize(
    ("field", "loss", "data", "config"),
    [
        ("loss_fn='gspo'", "gspo", policy_datum(), None),
        ("'advantages'", "ppo", policy_datum(advantages=None), None),
        ("'target_tokens'", "cross_entropy", datum([1, 2, 3]), None),
        ("'logprobs'] has shape", "ppo", policy_datum(logprobs=np.zeros(2, np.float32)), None),
        ("'target_tokens'] has shape", "cross_entropy", datum([1, 2, 3], target_tokens=[1, 2]), None),
        ("'target_tokens'] must hold", "cross_entropy", datum([1, 2, 3], target_tokens=[1, 2, VOCAB]), None),
        ("model_input must hold", "cross_entropy", datum([1, 2, VOCAB], target_tokens=[1, 2, 3]), None),
        ("model_input is empty", "cross_entropy", datum([], target_tokens=np.zeros(0, np.int64)), None),
        ("model_input has 600", "cross_entropy", datum([1] * 600, target_tokens=[1] * 600), None),
        ("'advantages'] has a value", "ppo", policy_datum(advantages=np.array([1, np.nan, 1], np.float32)), None),
        ("'rewards'", "ppo", policy_datum(rewards=np.ones(3, np.float32)), None),
        ("loss_fn_config has 'gamma'", "ppo", policy_datum(), {"gamma": 1.0}),
        ("loss_fn_config['beta']", "dro", policy_datum(), {"beta": float("inf")}),
        ("'returns'", "value_loss", datum([1, 2, 3]), None),
    ],
)
def test_a_fault_in_the_data_is_named(model, field, loss, data, config):
    with pytest.raises(RequestFailedError) as refused:
        model.forward_backward([data], loss, config).result()
    assert field in str(refused.value) and refused.value.category is RequestErrorCategory.User
    assert str(refused.value).count("\n") == 0


def test_what_is_not_text_is_refused_and_the_next_call_still_works(model):
    image = types.ImageChunk(data=b"x", format="png", expected_tokens=1)
    seen = types.Datum(types.ModelInput(chunks=[image]), {"target_tokens": np.array([1])})
    refused, after = model.forward([seen], "cross_entropy"), model.forward(supervised_data(1), "cross_entropy")
    with pytest.raises(RequestFailedError, match="not text"):
        refused.result()
    assert after.result().loss_fn_outputs


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("base_model='other'", {"base_model": "other"}),
        ("lora_config.rank is 65", {"rank": 65}),
        ("lora_config.rank is 0", {"rank": 0}),
        ("lora_config trains nothing", {"train_attn": False, "train_mlp": False}),
        ("frozen_patterns has 'nowhere'", {"user_metadata": {"frozen_module_patterns": "nowhere"}}),
        ("optimizer_config.type", {"optimizer": types.DimuonOptimizerConfig()}),
    ],
)
def test_a_model_that_cannot_be_is_named(server, client, field, options):
    before = set(server.rank.backbone.sessions)
    with pytest.raises(RequestFailedError) as refused:
        client.create_lora_training_client(**{"base_model": "tiny", "rank": 2, **options}).result()
    assert field in str(refused.value) and refused.value.category is RequestErrorCategory.User
    assert set(server.rank.backbone.sessions) == before


def test_a_quantised_base_is_refused_before_anything_starts(tmp_path):
    source = resolve_model(ModelConfig(name="tiny", builder="tiny"))
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    with pytest.raises(ConfigError, match="quantised"):
        Base.read(compose([f"model.path={tmp_path}", "rollout=torch"]))


def test_what_cannot_be_served_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match=r"rollout\.engine=sglang"):
        serve(compose([f"run_dir={tmp_path}", "rollout.engine=sglang"]))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"server.port={port} cannot"):
            serve(compose([f"run_dir={tmp_path}", "rollout=torch", f"server.port={port}"]))


@pytest.mark.parametrize(("name", "value"), [("learning_rate", -1.0), ("beta1", 1.0), ("grad_clip_norm", -1.0)])
def test_a_setting_of_adam_out_of_range_is_named(model, name, value):
    model.forward_backward(supervised_data(1), "cross_entropy").result()
    with pytest.raises(RequestFailedError, match=f"adam_params.{name}"):
        model.optim_step(ADAM.model_copy(update={name: value})).result()


def test_another_optimiser_is_refused(model):
    with pytest.raises(RequestFailedError, match="dimuon"):
        model.optim_step(types.DimuonParams(learning_rate=1e-3)).result()


def test_the_other_kind_of_weights_is_refused_with_the_way_out(client, model):
    state, adapter = model.save_state("s").result().path, model.save_weights_for_sampler("s").result().path
    with pytest.raises(tinker.BadRequestError, match="save_weights_for_sampler"):
        client.create_sampling_client(model_path=state).result()
    with pytest.raises(tinker.BadRequestError, match="save_state"):
        client.create_training_client_from_state(adapter).result()


def test_a_body_that_is_not_a_message_is_refused(server):
    wire = Wire(server)
    headers = {"Content-Type": "application/x-protobuf"}
    answer = wire.http.post("/forward_backward", content=b"\xff\xff\xff", headers=headers)
    assert answer.status_code == 400 and answer.json()["category"] == "user"
    assert wire.http.post("/forward_backward", json={}).status_code == 415
    answer = wire.post("create_model", model_seq_id=1, base_model="tiny")
    assert answer.status_code == 422 and "session_id" in answer.json()["error"]


def test_a_fault_of_the_server_is_told_without_its_reason(caplog):
    with caplog.at_level(logging.ERROR, "rlframe.server"):
        told = explain(RuntimeError("/secret/detail"), "request-7")
    assert told["category"] == "server" and "request-7" in told["error"] and "/secret/detail" not in told["error"]
    assert "/secret/detail" in caplog.text


def test_keys_never_reach_the_log(server, client, caplog, capfd):
    with caplog.at_level(logging.DEBUG):
        Wire(server, key="tml-wrong-000000").post("session_heartbeat", session_id="x")
        model = client.create_lora_training_client("tiny", rank=2, seed=1).result()
        with pytest.raises(RequestFailedError):
            model.forward_backward(policy_data(1), "gspo").result()
    out, err = capfd.readouterr()
    mine = [r.getMessage() for r in caplog.records if r.name.startswith(("rlframe", "uvicorn", "fastapi"))]
    for text in (out, err, *mine):
        assert ALICE not in text and "tml-wrong" not in text

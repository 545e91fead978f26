"""Who may see what, what a name may be, and what becomes of models whose client is away."""

import pytest
import tinker
import torch
from tinker import types

from rlframe.config import ConfigError
from tests.support.local_server import ALICE, BOB, LocalServer
from tests.support.raw_client import Wire
from tests.support.server_data import ADAM, parameters, supervised_data
from trainer.server import paths
from trainer.server.auth import Keys, read_keys
from trainer.server.errors import UserError


def new_model(client, seed=1):
    return client.create_lora_training_client("tiny", rank=4, seed=seed).result()


def train(model, *seeds):
    for seed in seeds:
        model.forward_backward(supervised_data(seed), "cross_entropy").result()
        model.optim_step(ADAM).result()


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_without_a_key_of_the_server_nothing_is_answered(server):
    for key in ("", "tml-wrong-000000", ALICE + "x", ALICE[:-1]):
        wire = Wire(server, key=key)
        for route in ("client/config", "create_session", "retrieve_future", "forward_backward", "asample"):
            assert wire.post(route).status_code == 401
    assert Wire(server, key="").http.get("/healthz").json() == {"status": "ok"}
    assert Wire(server, key="").http.get("/readyz").json() == {"status": "ok"}


def test_nobody_sees_what_is_somebody_elses(server, client):
    model = new_model(client)
    path, adapter = model.save_state("mine").result().path, model.save_weights_for_sampler("mine").result().path
    sampler = client.create_sampling_client(model_path=adapter).result()
    stranger, wire, rest = server.client(BOB), Wire(server, key=BOB), server.rest(BOB)
    seen = [wire.post("get_info", model_id=model.model_id), wire.post("unload_model", model_id=model.model_id)]
    seen += [wire.post("optim_step", model_id=model.model_id, seq_id=1, adam_params={})]
    seen += [wire.post("save_weights", model_id=model.model_id, seq_id=1, path="x")]
    seen += [wire.post("session_heartbeat", session_id=client.holder.get_session_id())]
    seen += [wire.post("asample", sampling_session_id=sampler._sampling_session_id, seq_id=0, prompt={"chunks": []})]
    seen += [wire.http.get(f"/training_runs/{model.model_id}"), wire.http.get(f"/training_runs/{model.model_id}/checkpoints")]
    assert [answer.status_code for answer in seen] == [404] * len(seen)
    assert wire.post("retrieve_future", request_id=f"{model.model_id}:1").status_code == 410
    for call in (
        lambda: stranger.create_training_client_from_state(path).result(),
        lambda: stranger.create_sampling_client(model_path=adapter).result(),
        lambda: rest.delete_checkpoint_from_tinker_path(path).result(),
        lambda: rest.copy_weights(path, "p").result(),
        lambda: rest.get_weights_info_by_tinker_path(path).result(),
    ):
        with pytest.raises(tinker.NotFoundError):
            call()
    assert rest.list_training_runs().result().training_runs == [] and rest.list_user_checkpoints().result().checkpoints == []
    stranger.close("success").result()


TRICKS = ["..", "../x", "a/../../b", "/etc/passwd", "a/b", ".hidden", "a\\b", "a\0b", "a" * 129, "%2e%2e", "", "a..b", "~x"]


@pytest.mark.parametrize("name", TRICKS)
def test_a_name_cannot_leave_its_folder(name):
    for attempt in (lambda: paths.check_name(name), lambda: paths.parse(f"tinker://s:train:0/weights/{name}")):
        with pytest.raises(UserError):
            attempt()
    with pytest.raises(UserError):
        paths.parse(f"tinker://{name}/weights/x")


def test_tricks_over_http_are_refused_and_write_nothing(server, client):
    model, wire = new_model(client), Wire(server)
    before = set(server.folder.rglob("*"))
    for seq, name in enumerate(filter(None, TRICKS), 1):
        answer = wire.post("save_weights", model_id=model.model_id, seq_id=seq, path=name)
        assert "path=" in wire.failure(answer.json()["request_id"])
    assert set(server.folder.rglob("*")) == before


def test_a_body_that_is_too_large_is_refused(server):
    wire, limit = Wire(server), server.config.server.max_request_mb * 2**20
    assert wire.http.post("/create_session", content=b"x" * (limit + 1)).status_code == 413
    parts = (b"x" * 2**20 for _ in range(limit // 2**20 + 2))
    assert wire.http.post("/create_session", content=parts).status_code == 413


def test_keys_come_from_a_file_or_are_made_up_for_the_owner_alone(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# team\nalice tml-aaaaaaaaaaaa\nalice tml-bbbbbbbbbbbb\ntml-cccccccccccc\n")
    keys, own = read_keys(str(file), tmp_path)
    assert own is None and keys.user("tml-aaaaaaaaaaaa") == keys.user("tml-bbbbbbbbbbbb") == "alice"
    assert keys.user("tml-cccccccccccc") not in ("alice", "tml-cccccccccccc")
    made, own = read_keys(None, tmp_path / "run")
    assert own.stat().st_mode & 0o777 == 0o600
    assert made.user(own.read_text().strip()) == "default" and read_keys(None, tmp_path / "run")[1] == own
    for content in ("", "nonsense\n", "a b tml-aaaaaaaaaaaa\n", "tml-short\n"):
        file.write_text(content)
        with pytest.raises(ConfigError, match=r"server\.keys_file"):
            read_keys(str(file), tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(str(tmp_path / "none"), tmp_path)
    with pytest.raises(UserError):
        Keys({}).user("tml-aaaaaaaaaaaa")


def test_an_idle_model_leaves_memory_and_comes_back_as_it_was(server, client):
    model, control = new_model(client), new_model(client)
    train(control, 1, 2, 3)
    expected = parameters(server, control)
    train(model, 1)
    model.forward_backward(supervised_data(9), "cross_entropy").result()  # a gradient that nobody will step on
    for idle in server.service.training.models():
        idle.used -= 1e6
    for session in server.service.clients.of("alice"):
        session.seen -= 1e6
    server.run(server.service.sweep())
    server.run(server.service.scheduler.idle())
    assert model.model_id not in server.rank.backbone.sessions
    with pytest.raises(tinker.RequestFailedError, match="no gradient"):
        model.optim_step(ADAM).result()
    train(model, 2, 3)
    assert model.model_id in server.rank.backbone.sessions
    same(parameters(server, model), expected)


def test_a_finished_session_keeps_what_it_saved(server):
    client = server.client()
    model = new_model(client)
    path = model.save_state("last").result().path
    expected = parameters(server, model)
    client.close("success").result()
    server.run(server.service.scheduler.idle())
    assert model.model_id not in server.rank.backbone.sessions
    assert Wire(server).post("session_heartbeat", session_id=model.holder.get_session_id()).status_code == 410
    other = server.client()
    same(parameters(server, other.create_training_client_from_state(path).result()), expected)
    other.close("success").result()


def test_more_models_than_fit_take_turns_in_memory(tmp_path):
    small = LocalServer(tmp_path, "server.max_models=2")
    client = small.client()
    models = [new_model(client, seed) for seed in range(4)]
    for step in (1, 2):
        for model in models:
            train(model, step)
            assert len(small.rank.backbone.sessions) <= 2
    for model in models[:2]:
        model.forward_backward(supervised_data(9), "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match=r"server\.max_models"):
        models[2].forward(supervised_data(9), "cross_entropy").result()
    for model in models[:2]:
        model.optim_step(ADAM).result()
    ours = []
    for model in models:
        model.forward(supervised_data(1), "cross_entropy").result()
        ours.append(parameters(small, model))
    alone = [new_model(client, seed) for seed in range(4)]
    for model, theirs in zip(alone, ours, strict=True):
        train(model, 1, 2, *([9] if model in alone[:2] else []))
        same(parameters(small, model), theirs)
    client.close("success").result()
    small.stop()


def test_a_restart_restores_models_samplers_and_states(tmp_path):
    first = LocalServer(tmp_path)
    client = first.client()
    model, control = new_model(client), new_model(client)
    train(control, 1, 2)
    expected = parameters(first, control)
    train(model, 1)
    path = model.save_state("one").result().path
    sampler = model.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints([1, 2, 3, 4])
    scored = sampler.compute_logprobs(prompt).result()
    first.stop()
    second = LocalServer(tmp_path, port=first.port)
    train(model, 2)  # the same client, with the numbers that come next
    same(parameters(second, model), expected)
    assert sampler.compute_logprobs(prompt).result() == scored
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    train(resumed, 2)
    same(parameters(second, resumed), expected)
    client.close("success").result()
    second.stop()

"""Sessions in one process: optimiser, refusals, exports, precision. What must hold over ranks is in `test_sessions_ranks`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlframe.backbone import Backbone
from rlframe.config import ConfigError, OptimConfig
from rlframe.losses.base import LossInputs, LossOutputs
from rlframe.losses.logprobs import LogProbs
from rlframe.optim import learning_rate
from rlframe.sessions import Session
from rlframe.types import Batch
from tests.support.session_cases import (
    EXPERTS,
    FailsOn,
    Policy,
    Value,
    base,
    load,
    make_batch,
    randomise,
    same,
    spec,
    state,
    write_models,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def tied(models) -> Backbone:
    return load(models["tied"], None)


@pytest.fixture
def session(tied: Backbone):
    yield tied.create_session("actor", spec(value_head=True))
    tied.delete_session("actor")


def plain_logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Logits of each trajectory alone."""
    with torch.no_grad():
        return torch.cat([model(torch.from_numpy(t.tokens.astype("int64"))[None]).logits[0] for t in batch])


class Logits:
    """Not a loss: keeps the logits of the packed row."""

    needs = "lm_head"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        head = inputs.lm_head
        return LossOutputs(loss=None, per_token={"logits": inputs.hidden @ head.weight.T})


def packed_logits(session: Session, batch: Batch) -> torch.Tensor:
    return session.forward(batch, Logits(), 1000).per_token["logits"]


# ------------------------------------------------------------------------------------------------------------ optimiser


def test_schedules_follow_their_closed_forms() -> None:
    warm = OptimConfig(lr=2.0, warmup_steps=4)
    assert [learning_rate(warm, s) for s in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    linear = OptimConfig(lr=2.0, warmup_steps=2, schedule="linear", total_steps=6, min_lr_ratio=0.5)
    assert [learning_rate(linear, s) for s in range(8)] == [1.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0]
    cosine = OptimConfig(lr=2.0, schedule="cosine", total_steps=4)
    expected = [1 + math.cos(math.pi * min(s / 4, 1)) for s in range(6)]
    np.testing.assert_allclose([learning_rate(cosine, s) for s in range(6)], expected, atol=1e-12)


@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
def test_steps_equal_adamw_in_float64(tied: Backbone, max_grad_norm: float | None) -> None:
    optim = {"lr": 0.03, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.2, "max_grad_norm": max_grad_norm}
    session = tied.create_session("adamw", spec(optim=optim, value_head=True))
    randomise(session)
    weights = {t.name: t.master.double().clone() for t in session.trainables}
    first, second = ({name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    for step in range(1, 4):
        batch = make_batch(seed=step)
        session.forward_backward(batch, Policy(), 1000)
        grads = {t.name: 0.1 * t.gradient.double() for t in session.trainables if t.gradient is not None}
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
        result = session.optim_step(0.1)
        assert result["grad_norm"] == pytest.approx(norm, rel=1e-6)
        assert result["lr"] == pytest.approx(0.03 * min(step / 3, 1))
        clip = min(1.0, max_grad_norm / norm) if max_grad_norm else 1.0
        for name, g in grads.items():
            first[name] = 0.9 * first[name] + 0.1 * clip * g
            second[name] = 0.95 * second[name] + 0.05 * (clip * g) ** 2
            update = (first[name] / (1 - 0.9**step)) / ((second[name] / (1 - 0.95**step)).sqrt() + 1e-8)
            weights[name] = weights[name] * (1 - result["lr"] * 0.2) - result["lr"] * update
    for t in session.trainables:
        if t.name in grads:
            torch.testing.assert_close(t.master.double(), weights[t.name], atol=2e-6, rtol=1e-5)
        else:
            # The policy loss does not touch the value head: no gradient, no decay.
            assert t.name.startswith("value_head") and torch.equal(t.master.double(), weights[t.name])
    tied.delete_session("adamw")


def test_a_gradient_that_is_not_finite_moves_nothing(session: Session) -> None:
    before = state(session)
    batch = make_batch()
    batch.advantages[np.flatnonzero(batch.action_mask)[0]] = np.nan
    session.forward_backward(batch, Policy(), 1000)
    result = session.optim_step(0.1)
    assert result["skipped"] == 1.0 and math.isnan(result["grad_norm"])
    after = state(session)
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


def test_a_step_needs_a_gradient_and_a_sensible_scale(session: Session) -> None:
    with pytest.raises(RuntimeError, match="no gradient"):
        session.optim_step(1.0)
    session.forward_backward(make_batch(), Policy(), 1000)
    for scale in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="positive, finite scale"):
            session.optim_step(scale)
    assert session.optim_step(1.0)["grad_norm"] > 0


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("tied", {"lora": {"rank": 0}}, "lora.rank is 0"),
        ("tied", {"lora": {"targets": ["q_proj", "k_porj"]}}, "'k_porj'"),
        ("tied", {"lora": {"targets": ".*nothing"}}, "'.*nothing'"),
        ("tied", {"lora": {"targets": []}}, "are empty"),
        ("tied", {"lora": {"targets": "model.layers.0"}}, "PEFT refuses"),
        ("moe", {"lora": {"targets": ["q_proj", "gate_proj"]}}, "PEFT refuses.*without also targeting up_proj"),
        ("moe", {"lora": {"target_parameters": ["mlp.experts.gate_up"]}}, "target_parameters has 'mlp.experts.gate_up'"),
        ("untied", {"lora": {"targets": ["q_proj", "lm_head"]}, "value_head": True}, "LM head"),
        ("tied", {"lora": {"targets": ["embed_tokens"]}}, "ties the two"),
        ("tied", {"frozen_patterns": ["self_atn"]}, "'self_atn'"),
        ("tied", {"frozen_patterns": ["lora"]}, "nothing would train"),
        ("tied", {"kind": "full"}, "trainable=True"),
        ("tied", {"kind": "prefix"}, "choose lora or full"),
        ("tied", {"optim": {"schedule": "cosine"}}, "total_steps"),
        ("tied", {"optim": {"schedule": "step"}}, "constant, linear, cosine"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(models, model: str, options: dict, message: str) -> None:
    backbone = load(models[model], None)
    kept = backbone.create_session("kept", spec())
    before = state(kept)
    names = [name for name, _ in backbone.model.named_parameters()]
    with pytest.raises(ConfigError, match=message) as caught:
        backbone.create_session("refused", spec(**options))
    assert str(caught.value).rstrip(".").count(". ") == 0
    assert list(backbone.sessions) == ["kept"]
    assert [name for name, _ in backbone.model.named_parameters()] == names
    kept.forward_backward(make_batch(), Policy(), 1000)
    kept.optim_step(1.0)
    assert before.keys() < state(kept).keys()


def test_all_weights_and_adapters_do_not_share_a_backbone(models) -> None:
    backbone = load(models["tied"], None, trainable=True)
    backbone.create_session("a", spec(kind="full"))
    with pytest.raises(ConfigError, match="backbone of its own"):
        backbone.create_session("b", spec())
    with pytest.raises(ConfigError, match="already has a session"):
        backbone.create_session("a", spec(kind="full"))


def test_folders_that_cannot_be_loaded_are_refused(models, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load(str(tmp_path), None)
    config = json.loads((Path(models["tied"]) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="no safetensors"):
        load(str(tmp_path), None)
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match="quantised"):
        load(str(tmp_path), None)
    with pytest.raises(ConfigError, match="float32 or bfloat16"):
        load(models["tied"], None, dtype="float16")


def test_a_resume_with_another_optimiser_steps_by_it_from_the_saved_moments(models, tmp_path: Path) -> None:
    """Settings are the present ones, state is the saved one: AdamW by its formula in float64."""
    old = load(models["tied"], None).create_session("a", spec(optim={"lr": 0.3, "betas": [0.5, 0.6], "warmup_steps": 7}))
    for _ in range(2):
        old.forward_backward(make_batch(), Policy(), 1000)
        old.optim_step(0.1)
    old.save(str(tmp_path))
    settings = {"lr": 1e-2, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 0.2, "warmup_steps": 0, "max_grad_norm": None}
    decay = {"schedule": "linear", "total_steps": 10, "min_lr_ratio": 0.5}
    session = load(models["tied"], None).create_session("a", spec(optim={**settings, **decay}))
    session.load(str(tmp_path))
    session.forward_backward(make_batch(seed=1), Policy(), 1000)
    lr = 1e-2 * (1 - 0.5 * 2 / 10)
    wanted = {}
    for t in session.trainables:
        m, v, step = (x.double() for x in t.moments())
        assert float(step) == 2
        g, w = 0.1 * t.gradient.double(), t.master.double()
        m, v = 0.8 * m + 0.2 * g, 0.99 * v + 0.01 * g**2
        wanted[t.name] = w * (1 - lr * 0.2) - lr * (m / (1 - 0.8**3)) / ((v / (1 - 0.99**3)).sqrt() + 1e-6)
    assert session.optim_step(0.1)["lr"] == pytest.approx(lr)
    for t in session.trainables:
        torch.testing.assert_close(t.master.double(), wanted[t.name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_callers_autocast_changes_no_bit(models, kind: str) -> None:
    """The dtype is the backbone's: passes, steps and what samplers get."""
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            backbone = load(models["untied"], None, trainable=kind == "full")
            session = backbone.create_session("a", spec(kind=kind, value_head=True))
            for loss in (Policy(), Value()):
                for _ in range(2):
                    session.forward_backward(make_batch(), loss, 20)
                    session.optim_step(0.1)
            values = session.forward(make_batch(), Value(), 20).per_token
            served = session.sampler_tensors("full", "float32")
        found.append({**state(session), **values, **{f"served {name}": t for name, t in served.items()}})
    same(*found)


def test_a_batch_that_does_not_fit_is_refused_before_the_pass(session: Session) -> None:
    batch = make_batch()
    batch.tokens[3] = 61
    with pytest.raises(ValueError, match="token 3: tokens has 61, but the vocabulary has 61 entries"):
        session.forward(batch, Policy(), 1000)
    batch = make_batch()
    row = int(np.flatnonzero(batch.action_mask)[-1])
    batch.head_ids = np.zeros((batch.num_tokens, 2), np.int32)
    batch.head_logprobs = np.full((batch.num_tokens, 2), -1, np.float32)
    batch.head_ids[row, 1] = 61
    with pytest.raises(ValueError, match=rf"token {row - batch.offsets[-2]}: head_ids has 61, but the vocabulary has 61"):
        session.forward(batch, LogProbs(), 1000)
    batch = make_batch()
    batch.offsets[1:3] = batch.offsets[2:0:-1]
    with pytest.raises(ValueError, match="offsets go down from 14 to 9"):
        session.forward(batch, Policy(), 1000)
    with pytest.raises(KeyError, match="planted"):
        session.forward_backward(make_batch(), FailsOn(14), 20)


def test_a_deleted_session_is_of_no_use(tied: Backbone) -> None:
    session = tied.create_session("gone", spec())
    tied.delete_session("gone")
    with pytest.raises(RuntimeError, match="was deleted"):
        session.forward(make_batch(), Policy(), 1000)
    with pytest.raises(ConfigError, match="no session called"):
        tied.delete_session("gone")


# --------------------------------------------------------------------------------------------------- values and outputs


def test_a_fresh_critic_predicts_exactly_zero(models, session: Session) -> None:
    full = load(models["tied"], None, trainable=True).create_session("critic", spec(kind="full", value_head=True))
    for critic in (session, full):
        outputs = critic.forward(make_batch(), Value(), 20)
        assert not outputs.per_token["values"].any()
        assert len(outputs.per_token["values"]) == make_batch().num_tokens


def test_outputs_do_not_depend_on_how_a_batch_is_cut(session: Session) -> None:
    randomise(session)
    batch = make_batch()
    one, many = (session.forward(batch, Policy(), tokens) for tokens in (1000, 1))
    torch.testing.assert_close(one.per_token["logprobs"], many.per_token["logprobs"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(one.loss, many.loss, atol=1e-4, rtol=1e-5)
    assert one.metrics.compute()["logprob"] == pytest.approx(many.metrics.compute()["logprob"], rel=1e-6)


# -------------------------------------------------------------------------------------------------------------- exports


@pytest.mark.parametrize(
    ("model", "lora"),
    [
        ("tied", {}),
        ("untied", {"targets": ["lm_head", "q_proj"]}),
        ("untied", {"targets": ["embed_tokens", "v_proj"]}),
        ("moe", {"target_parameters": EXPERTS}),
    ],
)
def test_exports_load_in_plain_libraries_to_the_same_logits(models, tmp_path: Path, model: str, lora: dict) -> None:
    session = load(models[model], None).create_session("actor", spec(lora=lora))
    randomise(session)
    batch = make_batch()
    mine = packed_logits(session, batch)
    session.export(str(tmp_path / "adapter"), merged=False)
    session.export(str(tmp_path / "merged"), merged=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(plain_logits(merged, batch), mine, atol=1e-4, rtol=1e-4)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(models[model]), tmp_path / "adapter")
    torch.testing.assert_close(plain_logits(adapted, batch), mine, atol=1e-4, rtol=1e-4)
    assert (plain_logits(AutoModelForCausalLM.from_pretrained(models[model]), batch) - mine).abs().max() > 0.1


def test_the_value_head_is_saved_but_never_exported(models, session: Session, tmp_path: Path) -> None:
    session.forward_backward(make_batch(), Value(), 1000)
    session.optim_step(0.1)
    session.save(str(tmp_path / "saved"))
    full = load(models["tied"], None, trainable=True).create_session("critic", spec(kind="full", value_head=True))
    session.export(str(tmp_path / "adapter"), merged=False)
    session.export(str(tmp_path / "merged"), merged=True)
    full.export(str(tmp_path / "full"), merged=True)
    exported = [name for folder in ("adapter", "merged", "full") for name in _names(tmp_path / folder)]
    given = [*session.sampler_tensors("merged", "float32"), *session.sampler_tensors("adapter", "float32")]
    assert not any("value_head" in name for name in [*exported, *given, *full.sampler_tensors("full", "float32")])
    saved = load_file(tmp_path / "saved" / "replicated.safetensors")
    assert torch.equal(saved["weight/value_head.lora_B"], session.value_head.lora_B)
    assert {"exp_avg/value_head.lora_B", "step/value_head.lora_B"} <= saved.keys()


def _names(folder: Path) -> list[str]:
    found = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as opened:
            found += opened.keys()
    assert found
    return found


def test_exports_keep_the_dtype_of_the_folder_they_came_from(models, tmp_path: Path) -> None:
    half = AutoModelForCausalLM.from_pretrained(models["untied"], dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    session = load(str(tmp_path / "half"), None).create_session("actor", spec())
    randomise(session)
    session.export(str(tmp_path / "merged"), merged=True)
    exported = load_file(tmp_path / "merged" / "model.safetensors")
    full = session.sampler_tensors("full", "bfloat16")
    assert exported.keys() == full.keys() and all(torch.equal(exported[name], full[name]) for name in full)


def test_merging_never_drifts_the_base(models) -> None:
    """Adding and subtracting in bfloat16 would change the base; here it is read only, and a zero adapter merges to it."""
    backbone = load(models["tied"], None, dtype="bfloat16")
    session = backbone.create_session("actor", spec())
    before = base(backbone)
    fresh = session.sampler_tensors("merged", "bfloat16")
    assert all(torch.equal(fresh[name], before[name]) for name in fresh)
    for _ in range(3):
        randomise(session)
        session.revision += 1
        moved = session.sampler_tensors("merged", "bfloat16")
        assert not all(torch.equal(moved[name], before[name]) for name in moved)
    after = base(backbone)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_snapshot_is_what_a_save_was_whatever_is_trained_before_it_is_written(session: Session, tmp_path: Path) -> None:
    def train() -> None:
        session.forward_backward(make_batch(), Value(), 1000)
        session.optim_step(0.1)

    train()
    session.save(str(tmp_path / "saved"))
    taken = session.snapshot()
    train()
    written = taken.write(tmp_path / "written")
    session.save(str(tmp_path / "later"))
    assert {path.name for path in written} == {"session.json", "replicated.safetensors"}
    for path in written:
        assert path.read_bytes() == (tmp_path / "saved" / path.name).read_bytes()
        assert path.read_bytes() != (tmp_path / "later" / path.name).read_bytes()


def test_an_adapter_does_not_load_over_another_base(models, session: Session, tmp_path: Path) -> None:
    session.save(str(tmp_path / "saved"))
    model = AutoModelForCausalLM.from_pretrained(models["tied"])
    next(iter(model.parameters())).data[0, 0] += 1e-6
    model.save_pretrained(tmp_path / "other")
    other = load(str(tmp_path / "other"), None).create_session("actor", spec(value_head=True))
    with pytest.raises(ConfigError, match="another base model"):
        other.load(str(tmp_path / "saved"))


def test_a_saved_session_only_loads_into_its_like(tied: Backbone, session: Session, tmp_path: Path) -> None:
    session.save(str(tmp_path / "saved"))
    other = tied.create_session("other", spec(value_head=True, lora={"rank": 5}))
    with pytest.raises(ConfigError, match="parameters"):
        other.load(str(tmp_path / "saved"))
    tied.delete_session("other")
    other = tied.create_session("other", spec(value_head=True, lora={"alpha": 9.0}))
    with pytest.raises(ConfigError, match="scaling"):
        other.load(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match="no saved session"):
        other.load(str(tmp_path))
    tied.delete_session("other")


# ------------------------------------------------------------------------------------------------------------ precision


def test_bfloat16_adapters_train_in_float32(models) -> None:
    """Steps far below bfloat16's resolution add up in the master; the gradient adds up in float32 over micro-batches."""
    backbone = load(models["tied"], None, dtype="bfloat16")
    session = backbone.create_session("actor", spec(optim={"lr": 1e-5, "warmup_steps": 0, "weight_decay": 0.0}))
    randomise(session)
    start = {t.name: t.master.clone() for t in session.trainables}
    for _ in range(3):
        session.forward_backward(make_batch(), Policy(), 8)
        assert all(t.gradient.dtype == torch.float32 for t in session.trainables)
        session.optim_step(0.1)
    moved = torch.cat([(t.master - start[t.name]).abs().flatten() for t in session.trainables])
    assert moved.median() == pytest.approx(3e-5, rel=0.05)
    assert all(t.parameter.dtype == torch.bfloat16 for t in session.trainables)
    assert all(torch.equal(t.parameter, t.master.bfloat16()) for t in session.trainables)


def test_activation_checkpointing_changes_no_gradient(models) -> None:
    found = []
    for checkpointing in (False, True):
        backbone = load(models["moe"], None, activation_checkpointing=checkpointing)
        session = backbone.create_session("actor", spec(lora={"target_parameters": EXPERTS}))
        randomise(session)
        session.forward_backward(make_batch(), Policy(), 20)
        found.append({t.name: t.gradient for t in session.trainables})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])

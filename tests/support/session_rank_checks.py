"""What must hold on 1, 2 and 4 ranks; each function runs on every rank of its group (see `rank_pool`)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlframe.backbone import Backbone
from rlframe.checksum import weights_checksum
from rlframe.config import ConfigError
from rlframe.hf_checkpoint import load_weights
from rlframe.optim import local
from rlframe.sessions import Session
from rlframe.types import Batch
from tests.support.session_cases import (
    EXPERTS,
    FailsOn,
    Policy,
    Value,
    base,
    close,
    dense_reference,
    gradients,
    load,
    make_batch,
    randomise,
    same,
    shard,
    spec,
    state,
)

TOKENS = 20


def backward(session: Session, batch: Batch, loss, tokens: int = TOKENS):
    return session.forward_backward(shard(batch, session.backbone), loss, tokens)


def step(session: Session, batch: Batch, loss, tokens: int = TOKENS) -> dict[str, float]:
    backward(session, batch, loss, tokens)
    return session.optim_step(1 / batch.num_actions)


def _check_gradients(session: Session, path: str, batch: Batch, loss, *, value: bool) -> None:
    outputs = backward(session, batch, loss)
    reference = dense_reference(path, session, batch, value=value)
    mine = gradients(session)
    ranks = session.backbone.ranks
    parts: list = [None] * ranks.size
    dist.all_gather_object(parts, outputs.per_token["values" if value else "logprobs"], group=ranks.group)
    if reference is not None:
        close(mine, reference[0])
        torch.testing.assert_close(torch.cat(parts).double(), reference[1], atol=3e-5, rtol=1e-4)
    session.zero_grad()


def gradients_equal_dense_float64(mesh: DeviceMesh, models: dict[str, str], tmp: Path) -> None:
    batch = make_batch()
    for name, lora in (
        ("tied", {}),
        ("untied", {"targets": ["q_proj", "o_proj", "down_proj"]}),
        ("untied", {"targets": ["lm_head", "v_proj"]}),
        ("moe", {"targets": "all-linear", "target_parameters": EXPERTS}),
    ):
        backbone = load(models[name], mesh)
        actor = backbone.create_session("actor", spec(lora=lora))
        randomise(actor)
        _check_gradients(actor, models[name], batch, Policy(), value=False)
        if "lm_head" in (lora.get("targets") or ()):
            continue
        critic = backbone.create_session("critic", spec(lora=lora, value_head=True, seed=1))
        randomise(critic, seed=4)
        _check_gradients(critic, models[name], batch, Value(), value=True)
        _check_gradients(actor, models[name], batch, Policy(), value=False)


def full_weight_gradients_equal_dense_float64(mesh: DeviceMesh, models: dict[str, str], tmp: Path) -> None:
    batch = make_batch()
    for name, checkpointing in (("tied", True), ("untied", False), ("moe", True)):
        backbone = load(models[name], mesh, trainable=True, activation_checkpointing=checkpointing)
        session = backbone.create_session("actor", spec(kind="full", value_head=True))
        _check_gradients(session, models[name], batch, Policy(), value=False)
        session.value_head.weight.data.fill_(0.1)
        _check_gradients(session, models[name], batch, Value(), value=True)


def uneven_shards_and_empty_ranks(mesh: DeviceMesh, models: dict[str, str], tmp: Path) -> None:
    """One trajectory for all ranks: the others have none, or more ranks than trajectories have work."""
    for lengths in ([13], [4, 30, 3]):
        batch = make_batch(lengths, seed=5)
        backbone = load(models["untied"], mesh)
        critic = backbone.create_session("critic", spec(value_head=True))
        randomise(critic)
        _check_gradients(critic, models["untied"], batch, Value(), value=True)
        _check_gradients(critic, models["untied"], batch, Policy(), value=False)
        outputs = critic.forward(shard(batch, backbone), Value(), TOKENS)
        assert len(outputs.per_token["values"]) == shard(batch, backbone).num_tokens
        assert len(outputs.per_trajectory["ends"]) == len(shard(batch, backbone))
        full = load(models["untied"], mesh, trainable=True).create_session("actor", spec(kind="full"))
        _check_gradients(full, models["untied"], batch, Policy(), value=False)


def interleaving_changes_nothing(mesh: DeviceMesh, models: dict[str, str], tmp: Path) -> None:
    batches = [make_batch(seed=s) for s in range(2)]
    shared = load(models["tied"], mesh)
    a = shared.create_session("a", spec(seed=1))
    b = shared.create_session("b", spec(value_head=True, seed=2, lora={"rank": 6}, frozen_patterns=["mlp"]))
    for batch in batches:
        backward(a, batch, Policy())
        backward(b, batch, Value())
        a.optim_step(0.1)
        b.optim_step(0.2)
    alone_a = load(models["tied"], mesh).create_session("x", spec(seed=1))
    for batch in batches:
        backward(alone_a, batch, Policy())
        alone_a.optim_step(0.1)
    alone_b = load(models["tied"], mesh).create_session(
        "y", spec(value_head=True, seed=2, lora={"rank": 6}, frozen_patterns=["mlp"])
    )
    for batch in batches:
        backward(alone_b, batch, Value())
        alone_b.optim_step(0.2)
    same(state(a), state(alone_a))
    same(state(b), state(alone_b))


def a_step_leaves_the_other_session_and_the_base_untouched(mesh: DeviceMesh, models: dict[str, str], tmp: Path) -> None:
    backbone = load(models["moe"], mesh)
    lora = {"target_parameters": EXPERTS}
    a = backbone.create_session("a", spec(seed=1, lora=lora))
    b = backbone.create_session("b", spec(value_head=True, seed=2, lora=lora))
    batch = make_batch()
    step(b, batch, Value())
    backward(b, batch, Value())
    untouched, waiting, weights = state(b), gradients(b), base(backbone)
    flags = {name: p.requires_grad for name, p in backbone.model.named_parameters()}
    before = state(a)
    step(a, batch, Policy())
    assert not torch.equal(state(a)[a.trainables[0].name], before[a.trainables[0].name])
    same(state(b), untouched)
    same(gradients(b), waiting)
    same(base(backbone), weights)
    assert flags == {name: p.requires_grad for name, p in backbone.model.named_parameters()}
    b.optim_step(0.1)
    assert b.steps == 2


def two_calls_equal_one_on_the_concatenation(mesh: DeviceMesh, models: dict[str, str], tmp: Path) -> None:
    whole = make_batch([9, 5, 14, 7, 6, 8, 10, 3], seed=2)
    session = load(models["tied"], mesh).create_session("a", spec(value_head=True))
    randomise(session)
    mine = shard(whole, session.backbone)
    half = len(mine) // 2
    for loss in (Policy(), Value()):
        session.forward_backward(mine, loss, 8)
        once = gradients(session)
        session.zero_grad()
        session.forward_backward(mine.select(range(half)), loss, 8)
        session.forward_backward(mine.select(range(half, len(mine))), loss, 8)
        close(gradients(session), {name: g.double() for name, g in once.items()}, 1e-6)
        session.zero_grad()


def a_forward_never_accumulates(mesh: DeviceMesh, models: dict[str, str], tmp: Path) -> None:
    batch = make_batch()
    for kind in ("lora", "full"):
        backbone = load(models["untied"], mesh, trainable=kind == "full")
        session = backbone.create_session("a", spec(kind=kind))
        session.forward(shard(batch, backbone), Policy(), TOKENS)
        with pytest.raises(RuntimeError, match="no gradient"):
            session.optim_step(1.0)
        backward(session, batch, Policy())
        once = gradients(session)
        session.forward(shard(batch, backbone), Policy(), TOKENS)
        same(gradients(session), once)


def a_failing_call_leaves_no_partial_gradient(mesh: DeviceMesh, models: dict[str, str], tmp: Path) -> None:
    """The failure is planted in one trajectory, so that only one rank sees it, after other micro-batches went well."""
    batch = make_batch([4, 5, 6, 7, 8, 9, 30, 3])
    for kind in ("lora", "full"):
        backbone = load(models["untied"], mesh, trainable=kind == "full")
        session = backbone.create_session("a", spec(kind=kind))
        backward(session, batch, Policy(), 8)
        once = gradients(session)
        fails_here = 30 in shard(batch, backbone).lengths
        with pytest.raises(KeyError if fails_here else RuntimeError, match="planted" if fails_here else "Another rank"):
            backward(session, batch, FailsOn(30), 8)
        same(gradients(session), once)
        session.zero_grad()
        backward(session, batch, Policy(), 8)
        same(gradients(session), once)
        with pytest.raises(KeyError if fails_here else RuntimeError):
            session.forward(shard(batch, backbone), FailsOn(30), 8)
        assert step(session, batch, Policy())["grad_norm"] > 0


def forward_only_passes_leave_the_sharded_layout_usable(mesh: DeviceMesh, models: dict[str, str], tmp: Path) -> None:
    batch = make_batch()
    backbone = load(models["tied"], mesh, trainable=True)
    session = backbone.create_session("a", spec(kind="full"))
    for _ in range(2):
        session.forward(shard(batch, backbone), Policy(), TOKENS)
        assert all(isinstance(p, DTensor) for p in backbone.model.parameters())
        assert len(session.sampler_tensors("full", "float32")) == (24 if backbone.ranks.rank == 0 else 0)
        _check_gradients(session, models["tied"], batch, Policy(), value=False)  # of the weights after the last step
        step(session, batch, Policy())
        assert all(isinstance(p, DTensor) for p in backbone.model.parameters())
        session.save(str(tmp / f"forward-only-{mesh.size()}"))


def frozen_parameters_do_not_move(mesh: DeviceMesh, models: dict[str, str], tmp: Path) -> None:
    batch = make_batch()
    for kind, loss, frozen in (("lora", Value(), "self_attn"), ("full", Value(), "self_attn"), ("full", Policy(), "embed")):
        backbone = load(models["untied"], mesh, trainable=kind == "full")
        session = backbone.create_session("a", spec(kind=kind, value_head=True, frozen_patterns=[frozen]))
        held = {name: backbone.whole(p).clone() for name, p in session.named_parameters()}
        for _ in range(2):
            step(session, batch, loss)
        now = {name: backbone.whole(p) for name, p in session.named_parameters()}
        assert {frozen in name for name in now} == {True, False}
        for name, before in held.items():
            # The LM head takes no part in a value loss: no gradient, so no decay either.
            still = frozen in name or (name == "lm_head.weight" and loss.needs == "value_head")
            still = still or (name.startswith("value_head") and loss.needs == "lm_head")
            assert torch.equal(now[name], before) == still, name
        assert not any(frozen in t.name for t in session.trainables)


def save_and_load_resume_bit_for_bit(mesh: DeviceMesh, models: dict[str, str], tmp: Path) -> None:
    batches = [make_batch(seed=s) for s in range(4)]
    for kind, model in (("lora", "tied"), ("full", "moe")):
        options = {"trainable": kind == "full"}
        session = load(models[model], mesh, **options).create_session("a", spec(kind=kind, value_head=True))
        losses = (Value(), Policy()) * 2
        for batch, loss in zip(batches[:2], losses, strict=False):
            step(session, batch, loss)
        folder = str(tmp / f"resume-{kind}-{mesh.size()}")
        session.save(folder)
        for batch, loss in zip(batches[2:], losses, strict=False):
            step(session, batch, loss)
        other = load(models[model], mesh, **options).create_session("b", spec(kind=kind, value_head=True, seed=77))
        step(other, batches[0], Value())
        other.load(folder)
        assert other.steps == 2
        for batch, loss in zip(batches[2:], losses, strict=False):
            step(other, batch, loss)
        same(state(other), state(session))


def _only_on_rank_0(batch: Batch, backbone: Backbone) -> Batch:
    return batch if backbone.ranks.rank == 0 else batch.select([])


def state_written_by_two_ranks(mesh: DeviceMesh, models: dict[str, str], tmp: Path) -> None:
    """Trained for two steps; what a third gives is kept beside it."""
    for kind, model in (("lora", "moe"), ("full", "untied")):
        backbone = load(models[model], mesh, trainable=kind == "full")
        session = backbone.create_session("a", spec(kind=kind, value_head=True))
        for seed in range(2):
            step(session, make_batch(seed=seed), Value())
        session.save(str(tmp / f"elsewhere-{kind}"))
        # With all trajectories on one rank the other ranks add exact zeros, so any number of ranks sums the same.
        session.forward_backward(_only_on_rank_0(make_batch(seed=9), backbone), Value(), TOKENS)
        session.optim_step(0.1)
        session.save(str(tmp / f"elsewhere-{kind}-later"))


def another_number_of_ranks_resumes_bit_for_bit(mesh: DeviceMesh, models: dict[str, str], tmp: Path) -> None:
    for kind, model in (("lora", "moe"), ("full", "untied")):
        backbone = load(models[model], mesh, trainable=kind == "full")
        session = backbone.create_session("a", spec(kind=kind, value_head=True, seed=5))
        session.load(str(tmp / f"elsewhere-{kind}-later"))
        later = state(session)
        if kind == "full":
            partial = tmp / f"partial-{mesh.size()}-{backbone.ranks.rank}"
            shutil.copytree(tmp / "elsewhere-full", partial)
            (partial / "shard-00001-of-00002.safetensors").unlink()
            with pytest.raises(ConfigError, match="not complete: it has 1 shard"):
                session.load(str(partial))
            same(state(session), later)
        session.load(str(tmp / f"elsewhere-{kind}"))
        session.forward_backward(_only_on_rank_0(make_batch(seed=9), backbone), Value(), TOKENS)
        session.optim_step(0.1)
        same(state(session), later)


def deleting_and_creating_gives_a_fresh_session(mesh: DeviceMesh, models: dict[str, str], tmp: Path) -> None:
    batch = make_batch()
    for kind in ("lora", "full"):
        backbone = load(models["tied"], mesh, trainable=kind == "full")
        weights = base(backbone)
        first = backbone.create_session("a", spec(kind=kind, value_head=True))
        fresh = state(first)
        step(first, batch, Value())
        if kind == "lora":
            kept = backbone.create_session("kept", spec(seed=4))
            step(kept, batch, Policy())
            held = state(kept)
        backbone.delete_session("a")
        same(base(backbone), weights)
        second = backbone.create_session("a", spec(kind=kind, value_head=True))
        same(state(second), fresh)
        values = second.forward(shard(batch, backbone), Value(), TOKENS).per_token["values"]
        assert not values.any()
        if kind == "lora":
            same(state(kept), held)
            assert step(kept, batch, Policy())["grad_norm"] > 0


def initial_factors_depend_on_the_seed_alone(mesh: DeviceMesh, models: dict[str, str], tmp: Path) -> None:
    backbone = load(models["moe"], mesh)
    torch.manual_seed(mesh.get_local_rank())
    lora = {"target_parameters": EXPERTS}
    a = backbone.create_session("a", spec(seed=1, value_head=True, lora=lora))
    b = backbone.create_session("b", spec(seed=2, value_head=True, lora=lora))
    c = load(models["moe"], None).create_session("c", spec(seed=2, value_head=True, lora=lora))
    same(state(b), state(c))
    assert not torch.equal(state(a)[a.trainables[0].name], state(b)[b.trainables[0].name])
    here = [weights_checksum(state(b).values())] * mesh.size()
    gathered: list = [None] * mesh.size()
    dist.all_gather_object(gathered, here[0], group=mesh.get_group())
    assert gathered == here


def bfloat16_sessions_keep_float32_masters(mesh: DeviceMesh, models: dict[str, str], tmp: Path) -> None:
    """Gradients are reduced and added up in float32; steps far below bfloat16's resolution add up in the masters."""
    batch = make_batch()
    for kind in ("lora", "full"):
        backbone = load(models["untied"], mesh, trainable=kind == "full", dtype="bfloat16")
        session = backbone.create_session("a", spec(kind=kind, optim={"lr": 1e-5, "warmup_steps": 0, "weight_decay": 0.0}))
        if kind == "lora":
            randomise(session)
        backward(session, batch, Policy())
        reference, mine = dense_reference(models["untied"], session, batch, value=False), gradients(session)
        if reference is not None:
            close(mine, reference[0], 0.1)
        assert all(t.gradient.dtype == t.master.dtype == torch.float32 for t in session.trainables)
        start = {t.name: t.master.clone() for t in session.trainables}
        session.optim_step(0.1)
        for _ in range(2):
            step(session, batch, Policy())
        moved = torch.cat([(t.master - start[t.name]).abs().flatten() for t in session.trainables])
        assert abs(float(moved.median()) - 3e-5) < 3e-6
        session.forward(shard(batch, backbone), Policy(), TOKENS)
        session.spec.optim.lr = 0.02
        step(session, batch, Policy())
        parts, after = [None] * mesh.size(), session.forward(shard(batch, backbone), Policy(), TOKENS).per_token
        dist.all_gather_object(parts, after["logprobs"], group=backbone.ranks.group)
        reference = dense_reference(models["untied"], session, batch, value=False)
        if reference is not None:  # a copy that the pass before the step had left would be far off
            assert (torch.cat(parts).double() - reference[1]).abs().mean() < 0.03


class _Allocations(TorchDispatchMode):
    """Remembers the largest tensor, in bytes, that an operation returned outside of the mapped checkpoint."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not _is_mapped(local(tensor).data_ptr()):
                self.largest = max(self.largest, local(tensor).nbytes)
        return result


def _is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(x, 16) for x in line.split()[0].split("-"))
        if start <= address < stop:
            return line.endswith(".safetensors")
    return False


def no_rank_reads_more_than_its_rows(mesh: DeviceMesh, models: dict[str, str], tmp: Path) -> None:
    backbone = load(models["untied"], mesh)
    weights = base(backbone)
    rows = [-(-p.shape[0] // mesh.size()) * p.shape[1:].numel() * 4 for _, p in backbone.parameters()]
    with _Allocations() as seen:
        load_weights(backbone.model, backbone.path, backbone.ranks)
    assert 0 < seen.largest <= max(rows)
    same(base(backbone), weights)
    assert sum(p.to_local().nbytes for _, p in backbone.parameters()) <= sum(rows)


def samplers_get_what_the_checksum_says(mesh: DeviceMesh, models: dict[str, str], tmp: Path) -> None:
    """The checksum is compared with one over the checkpoint's tensors with the given ones in place; the base does not drift."""
    batch = make_batch()
    for model, kind, lora in (("tied", "lora", {}), ("moe", "lora", {"target_parameters": EXPERTS}), ("untied", "full", {})):
        backbone = load(models[model], mesh, trainable=kind == "full")
        session = backbone.create_session("a", spec(kind=kind, lora=lora))
        weights = base(backbone)
        for dtype in ("bfloat16", "float32"):
            step(session, batch, Policy())
            mode = "merged" if kind == "lora" else "full"
            tensors = session.sampler_tensors(mode, dtype)
            checksum = session.sampler_checksum(mode, dtype)
            session.sent_bits = None
            assert session.sampler_checksum(mode, dtype) == checksum
            assert session.sampler_checksum("full", dtype) == checksum
            if backbone.ranks.rank == 0:
                stored = load_file(Path(models[model]) / "model.safetensors")
                assert tensors.keys() <= stored.keys()
                served = {name: t.to(getattr(torch, dtype)) for name, t in stored.items()} | tensors
                assert weights_checksum(served.values()) == checksum
            else:
                assert tensors == {}
        if kind == "lora":
            same(base(backbone), weights)
        folder = tmp / f"export-{model}-{mesh.size()}"
        session.export(str(folder), merged=True)
        everything = session.sampler_tensors("full", "float32")
        if backbone.ranks.rank == 0:
            same(load_file(folder / "model.safetensors"), everything)


CHECKS = [
    gradients_equal_dense_float64,
    full_weight_gradients_equal_dense_float64,
    uneven_shards_and_empty_ranks,
    interleaving_changes_nothing,
    a_step_leaves_the_other_session_and_the_base_untouched,
    two_calls_equal_one_on_the_concatenation,
    a_forward_never_accumulates,
    a_failing_call_leaves_no_partial_gradient,
    forward_only_passes_leave_the_sharded_layout_usable,
    frozen_parameters_do_not_move,
    save_and_load_resume_bit_for_bit,
    deleting_and_creating_gives_a_fresh_session,
    initial_factors_depend_on_the_seed_alone,
    bfloat16_sessions_keep_float32_masters,
    no_rank_reads_more_than_its_rows,
    samplers_get_what_the_checksum_says,
    another_number_of_ranks_resumes_bit_for_bit,
]
PLAN = [
    ("state_written_by_two_ranks", 2, state_written_by_two_ranks),
    *((check.__name__, size, check) for size in (1, 2, 4) for check in CHECKS),
]

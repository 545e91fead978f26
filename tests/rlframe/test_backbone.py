"""Backbones of many architectures: packed trajectories get the logits that the plain model gives each alone."""

from __future__ import annotations

import logging
from threading import Thread

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlframe import attention
from rlframe.attention import Segments
from rlframe.backbone import Backbone
from rlframe.config import ConfigError
from rlframe.forward import Body, PackedForward
from rlframe.forward import FinalLogits as Final
from rlframe.model_setup import recompute_activations
from tests.support.session_cases import Policy, load, make_batch, spec
from tests.support.tiny_models import ARCHITECTURES, FinalLogits, write

ALONE = ("lfm2", "qwen3_next", "gpt_oss")
"""They do not keep packed trajectories apart: state is carried over, or positions are not looked at."""


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_trajectories_get_the_plain_models_logits(name: str, tmp_path, caplog) -> None:
    folder = str(tmp_path)
    write(name, folder)
    kernel = "eager" if name == "gpt_oss" else "sdpa"
    with caplog.at_level(logging.WARNING, "rlframe.backbone"):
        backbone = load(folder, None, attn_implementation=kernel)
    assert backbone.packs == (name not in ALONE)
    assert ("does not keep packed trajectories apart" in caplog.text) == (name in ALONE)
    session = backbone.create_session("a", spec())
    batch = make_batch()
    mine = session.forward(batch, FinalLogits(), 1000).per_token["logits"]
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        reference = torch.cat([plain(torch.from_numpy(t.tokens.astype("int64"))[None]).logits[0] for t in batch])
    torch.testing.assert_close(mine, reference, atol=2e-5, rtol=1e-4)
    session.forward_backward(batch, Policy(), 1000)
    assert session.optim_step(0.1)["grad_norm"] > 0


def test_a_head_that_losses_would_get_wrong_is_refused(tmp_path) -> None:
    write("roberta", str(tmp_path), is_decoder=True, type_vocab_size=1, num_key_value_heads=None)
    with pytest.raises(ConfigError, match="changes its logits after the LM head"):
        load(str(tmp_path), None)


def test_an_attention_implementation_that_a_model_lacks_is_refused(tmp_path) -> None:
    write("gpt_oss", str(tmp_path))
    assert load(str(tmp_path), None).model.config._attn_implementation == "eager"  # where sdpa is asked for, and lacking
    with pytest.raises(ConfigError, match="only eager computes"):
        load(str(tmp_path), None, attn_implementation="flash_attention_2")


def test_a_driver_without_flash_kernels_can_look_at_a_model_that_uses_them(tmp_path) -> None:
    write("llama", str(tmp_path))
    outline = Backbone.outline(str(tmp_path), trainable=False, attn_implementation="flash_attention_2")
    assert outline.create_session("a", spec()).trainables
    (note,) = outline.notes
    assert "flash_attention_2 does not run on a CPU" in note and "rlframe_segments was" in note
    assert not Backbone.outline(str(tmp_path), trainable=False).notes


def test_a_model_that_ranks_cannot_share_is_refused_before_there_are_ranks(tmp_path) -> None:
    write("ctrl", str(tmp_path), dff=40, n_layer=2, n_head=4, n_embd=32, n_positions=64)
    with pytest.raises(ConfigError, match="CTRLLMHeadModel does not say which of its modules are blocks"):
        Backbone.outline(str(tmp_path), trainable=False)


@pytest.mark.parametrize(("name", "options"), [("gpt2", {}), ("opt", {"ffn_dim": 40, "word_embed_proj_dim": 32})])
def test_padding_takes_no_positions_that_a_model_does_not_have(name: str, options: dict, tmp_path) -> None:
    write(name, str(tmp_path), max_position_embeddings=100, **options)
    backbone = load(str(tmp_path), None, attn_implementation="eager")
    lengths = [20] * 7  # a row of 128 would hold six, and the next one 108 tokens of padding
    hidden = backbone.run(make_batch(lengths), lambda hidden, head: hidden)
    assert hidden.shape == (140, 32) and bool(hidden.isfinite().all())


def dense_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], window: int | None) -> Tensor:
    """[1, N, heads, D] by the formula."""
    total = sum(lengths)
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    behind = torch.arange(total)[:, None] - torch.arange(total)[None]
    seen = (owner[:, None] == owner[None]) & (behind >= 0) & (behind < (window or total))
    scores = 0.3 * query @ key.repeat_interleave(2, 1).transpose(-1, -2)
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [9, 1, 3, 17, 4, 2, 16]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_attention_within_segments_equals_the_dense_formula(lengths: list[int], window: int | None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, heads, sum(lengths), 6) for heads in (4, 2, 2)]
    inputs = [torch.randn(size, dtype=torch.float64, generator=generator).to(dtype).requires_grad_() for size in sizes]
    segments = Segments(np.array(lengths), torch.device("cpu"))
    out = segments.attend(*inputs, scale=0.3, window=window)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    dense = dense_attention(*doubles, lengths, window)
    weights = torch.randn(dense.shape, dtype=torch.float64, generator=generator).to(dtype)
    mine = torch.autograd.grad((out * weights).sum(), inputs)
    reference = torch.autograd.grad((dense * weights.double()).sum(), doubles)
    # Short bfloat16 trajectories are rounded once, at the end; attention in bfloat16 would be off by several units.
    rtol, atol = (2**-8, 1e-5) if dtype == torch.bfloat16 else (None, None)
    for a, b in zip((out, *mine), (dense, *reference), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=atol)


def test_a_recomputed_block_sees_the_row_of_its_own_pass_on_any_thread(tmp_path) -> None:
    """Two passes begin before the first goes backward, on another thread, as autograd does it on accelerators."""
    write("llama", str(tmp_path))
    model, plain = (AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").eval() for _ in range(2))
    model.set_attn_implementation(attention.NAME)
    recompute_activations(model)
    forward = PackedForward(Body(model, Final()), torch.device("cpu"))
    rows = [(np.arange(1, 1 + sum(lengths)), np.array(lengths)) for lengths in ([9, 5, 12], [2, 17, 3])]
    losses = [forward(*row, lambda hidden, head: hidden.square().sum()) for row in rows]
    backward = Thread(target=losses[0].backward)
    backward.start()
    backward.join()
    tokens, lengths = rows[0]
    for part in np.split(tokens, np.cumsum(lengths)[:-1]):
        plain.model(input_ids=torch.from_numpy(part)[None]).last_hidden_state.square().sum().backward()
    found, expected = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (model, plain))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-4, rtol=1e-4)

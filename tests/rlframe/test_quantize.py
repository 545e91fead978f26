"""Rounding against every value that a format holds, enumerated from its definition."""

import itertools

import pytest
import torch

from rlframe.quantize import add_noise, degrade, quantize


def fp8_values():
    """All finite float8 e4m3 values from sign, exponent (bias 7) and mantissa; exponent 15 with mantissa 7 is NaN."""
    values = set()
    for exponent, mantissa in itertools.product(range(16), range(8)):
        if (exponent, mantissa) != (15, 7):
            value = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
            values |= {value, -value}
    return sorted(values)


GRIDS = {f"int{bits}": [float(v) for v in range(1 - 2 ** (bits - 1), 2 ** (bits - 1))] for bits in (3, 4, 8)}
GRIDS["fp8"] = fp8_values()


@pytest.mark.parametrize("form", GRIDS)
def test_every_weight_becomes_the_nearest_value_of_its_channel_s_grid(form):
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 6)[:, None]
    grid = torch.tensor(GRIDS[form], dtype=torch.float64)
    scale = weight.double().abs().amax(1, keepdim=True) / grid.max()
    distances = (weight.double()[..., None] / scale[..., None] - grid).abs()
    nearest = grid[distances.argmin(-1)] * scale
    rounded = quantize(weight, form)
    # In the middle between two values either is as near.
    unsure = (distances.topk(2, largest=False).values.diff(dim=-1).squeeze(-1) < 1e-5).expand_as(weight)
    torch.testing.assert_close(rounded.double()[~unsure], nearest[~unsure], rtol=1e-5, atol=0)
    assert len(rounded[0].unique()) <= len(grid)
    torch.testing.assert_close(quantize(rounded, form), rounded, rtol=1e-6, atol=0)


def test_a_channel_of_zeros_stays_zero_and_an_unknown_format_is_refused():
    assert quantize(torch.zeros(2, 3), "int4").tolist() == [[0, 0, 0]] * 2
    with pytest.raises(ValueError, match="int5"):
        quantize(torch.ones(2, 2), "int5")


def test_noise_has_its_size_and_depends_on_seed_version_and_name_alone():
    weight = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(1)) * torch.tensor([1e-3, 1.0, 7.0, 0.0])[:, None]
    noise = add_noise(weight, 0.1, seed=0, version=3, name="w") - weight
    expected = 0.1 * weight.pow(2).mean(1).sqrt()
    torch.testing.assert_close(noise.std(1), expected, rtol=0.03, atol=1e-9)
    assert noise.mean(1).abs().le(expected * 0.05 + 1e-9).all()
    assert torch.equal(noise, add_noise(weight, 0.1, seed=0, version=3, name="w") - weight)
    for other in ({"seed": 1}, {"version": 4}, {"name": "v"}):
        assert not torch.equal(noise, add_noise(weight, 0.1, **({"seed": 0, "version": 3, "name": "w"} | other)) - weight)


def test_only_linear_layers_are_changed():
    names = ["model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]
    tensors = {name: torch.randn(5, 7) if "norm" not in name else torch.randn(7) for name in names}
    served = degrade(tensors, form="int3", noise=0.1, seed=0, version=0, dtype=torch.bfloat16)
    for name, tensor in tensors.items():
        assert served[name].dtype == torch.bfloat16
        assert torch.equal(served[name], tensor.bfloat16()) == ("q_proj" not in name)

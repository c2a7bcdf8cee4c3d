"""Tests rotary embedding: Hugging Face's layout by complex numbers, Llama-3's bands one by one."""

import cmath
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from wlb.model import inverse_frequencies, rope_tables, rotate
from wlb.spec import ModelSpec, RopeKind, RopeScaling

SMALL = ModelSpec(hidden_size=32, num_heads=4, num_kv_heads=4, rope_theta=100.0)  # heads of 8

# Llama 3.1: heads of 128, theta 500000, context 8192 made 8 times longer.
LLAMA31 = ModelSpec(
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(factor=8.0, original_context=8192),
)


def random(rows: int, heads: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, heads, 8, generator=generator, dtype=torch.float64).float()


def rotated(x: Tensor, positions: list[int], spec: ModelSpec = SMALL) -> Tensor:
    return rotate(x, *rope_tables(torch.tensor(positions), inverse_frequencies(spec)))


def test_channels_i_and_i_plus_half_are_one_complex_number() -> None:
    positions = [0, 1, 7, 1000]
    x = random(4)
    expected = torch.empty_like(x)
    for row, position in enumerate(positions):
        for head in range(2):
            for i in range(4):
                angle = position * 100.0 ** (-i / 4)
                z = complex(x[row, head, i], x[row, head, i + 4]) * cmath.exp(1j * angle)
                expected[row, head, i], expected[row, head, i + 4] = z.real, z.imag
    torch.testing.assert_close(rotated(x, positions), expected, rtol=0, atol=2e-4)


def test_hugging_face_s_formula() -> None:
    positions = torch.tensor([0, 3, 11])
    x = random(3)
    angles = positions[:, None].float() * inverse_frequencies(SMALL)
    cos, sin = (f(torch.cat([angles, angles], -1))[:, None] for f in (torch.cos, torch.sin))
    rotate_half = torch.cat([-x[..., 4:], x[..., :4]], -1)
    torch.testing.assert_close(rotated(x, positions.tolist()), x * cos + rotate_half * sin)


def test_tables_have_one_row_for_each_token_and_half_a_head() -> None:
    cos, sin = rope_tables(torch.tensor([5, 0]), inverse_frequencies(SMALL))
    assert cos.shape == sin.shape == (2, 1, 4)
    assert cos.dtype == torch.float32
    assert torch.equal(cos[1], torch.ones(1, 4))
    assert torch.equal(sin[1], torch.zeros(1, 4))


def test_position_zero_is_left_alone_and_norms_stay() -> None:
    x = random(3)
    out = rotated(x, [0, 17, 90000])
    assert torch.equal(out[0], x[0])
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1))
    assert (out[1:] - x[1:]).abs().amax() > 0.1


def test_scores_depend_on_the_distance_alone() -> None:
    q, k = random(2)[:1], random(2)[1:]

    def score(at_q: int, at_k: int) -> Tensor:
        return (rotated(q, [at_q]) * rotated(k, [at_k])).sum(-1)

    torch.testing.assert_close(score(9, 4), score(105, 100), rtol=0, atol=1e-4)
    assert (score(9, 4) - score(9, 5)).abs().amax() > 1e-2


def test_computed_in_float32_whatever_the_rows_are() -> None:
    x = random(3).bfloat16()
    out = rotated(x, [1, 50, 999])
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, rotated(x.float(), [1, 50, 999]).bfloat16())


def test_frequencies_without_scaling() -> None:
    expected = torch.tensor([1.0, 100**-0.25, 0.1, 100**-0.75])
    torch.testing.assert_close(inverse_frequencies(SMALL), expected)
    assert inverse_frequencies(SMALL).dtype == torch.float32
    explicit = replace(SMALL, head_dim=4)
    torch.testing.assert_close(inverse_frequencies(explicit), torch.tensor([1.0, 0.1]))


def llama3(i: int) -> tuple[str, float]:
    """Returns band and frequency of channel pair i, as transformers scales llama3, in floats."""
    frequency = 500000.0 ** (-2 * i / 128)
    wavelength = 2 * math.pi / frequency
    if wavelength < 8192 / 4:
        return "kept", frequency
    if wavelength > 8192 / 1:
        return "divided", frequency / 8
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return "blended", (1 - smooth) * frequency / 8 + smooth * frequency


def test_llama_3_scaling_of_every_pair() -> None:
    bands = [llama3(i) for i in range(64)]
    assert [name for name, _ in bands] == ["kept"] * 29 + ["blended"] * 6 + ["divided"] * 29
    expected = torch.tensor([value for _, value in bands], dtype=torch.float64).float()
    torch.testing.assert_close(inverse_frequencies(LLAMA31), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("pair", "frequency"),
    [
        (0, 1.0),
        (28, 3.211446e-03),  # wavelength 1956.5, below 8192 / 4: kept
        (29, 2.166571e-03),  # wavelength 2401.74: 2.616099e-03 * (0.803621 + 0.196379 / 8)
        (34, 1.785078e-04),  # wavelength 6695.11: 9.384739e-04 * (0.074527 + 0.925473 / 8)
        (35, 9.556212e-05),  # wavelength 8218.7, above 8192: 7.644970e-04 / 8
        (63, 3.068926e-07),  # 2.455141e-06 / 8
    ],
)
def test_llama_3_numbers(pair: int, frequency: float) -> None:
    assert inverse_frequencies(LLAMA31)[pair].item() == pytest.approx(frequency, rel=1e-4)


@pytest.mark.parametrize("kind", RopeKind)
def test_a_factor_of_one_is_off(kind: RopeKind) -> None:
    off = replace(LLAMA31, rope_scaling=RopeScaling(kind=kind, factor=1.0))
    expected = torch.tensor([500000.0 ** (-i / 64) for i in range(64)], dtype=torch.float64)
    torch.testing.assert_close(inverse_frequencies(off), expected.float(), rtol=1e-6, atol=0)
    assert off.query_factor() == 1.0


def test_linear_scaling_divides_all_frequencies() -> None:
    scaled = replace(SMALL, rope_scaling=RopeScaling(kind=RopeKind.LINEAR, factor=4.0))
    torch.testing.assert_close(inverse_frequencies(scaled), inverse_frequencies(SMALL) / 4)
    assert scaled.query_factor() == 1.0


def test_yarn_keeps_the_first_pairs_and_divides_the_last() -> None:
    """Qwen's: heads of 128, theta 1e6, 32,768 tokens made 4 times longer. A pair i turns 32768 /
    (2 pi 1e6^(i / 64)) times: 32 times for i = 23.6, once for i = 39.7.
    """
    scaling = RopeScaling(kind=RopeKind.YARN, factor=4.0, original_context=32768)
    spec = replace(LLAMA31, rope_theta=1e6, rope_scaling=scaling)
    plain = inverse_frequencies(replace(spec, rope_scaling=RopeScaling()))
    ratio = inverse_frequencies(spec) / plain
    expected = [1.0] * 24 + [1 - 0.75 * (i - 23) / 17 for i in range(24, 40)] + [0.25] * 24
    torch.testing.assert_close(ratio, torch.tensor(expected), rtol=1e-5, atol=0)
    assert spec.query_factor() == pytest.approx((0.1 * math.log(4) + 1) ** 2)
    given = replace(spec, rope_scaling=replace(scaling, attention_factor=1.5))
    assert given.query_factor() == 2.25


def test_yarn_of_a_short_context_divides_from_one_pair_on() -> None:
    """All pairs but the first turn less than once: kept and divided pairs meet in one."""
    scaling = RopeScaling(kind=RopeKind.YARN, factor=2.0, original_context=6)
    ratio = inverse_frequencies(replace(SMALL, rope_scaling=scaling)) / inverse_frequencies(SMALL)
    torch.testing.assert_close(ratio, torch.tensor([1.0, 0.5, 0.5, 0.5]))

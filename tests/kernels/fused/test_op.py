"""Tests fused kernels, in Triton's interpreter, against the plain code and float64."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.kernels.fused.interpreter import interpret
from wlb.kernels.fused import fused_gated, fused_norm, fused_rotate, fused_sum_uses, launch
from wlb.kernels.fused.op import fused_gated_backward, fused_norm_backward
from wlb.model.elementwise import ZeroCentredNorm, gated, normalise, rotate
from wlb.parallel.context.op import gradients_by_row
from wlb.parallel.context.rows import rank_exchange
from wlb.plan import KeyExchange, exchange_of, local_tokens
from wlb.sharding.paper import per_document
from wlb.spec import Activation

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
DTYPES = st.sampled_from([BF16, FP32])


@pytest.fixture(scope="module", autouse=True)
def _interpreted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        yield


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(shape, generator=generator)).to(dtype)


def tables(rows: int, half: int) -> tuple[Tensor, Tensor]:
    angles = random(rows, 1, half, dtype=FP32, seed=9)
    return angles.cos(), angles.sin()


def with_gradients(call: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Returns the output and the gradient of each input."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def hold(fused: Callable[..., Tensor], plain: Callable[..., Tensor], *tensors: Tensor) -> None:
    """Holds output and gradients to at most twice the plain code's error against float64."""
    grad, *inputs = tensors
    exact = with_gradients(plain, grad.double(), *(x.double() for x in inputs))
    ours, theirs = with_gradients(fused, *tensors), with_gradients(plain, *tensors)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert (a.dtype, a.shape, a.is_contiguous()) == (b.dtype, b.shape, True)
        if not c.numel():
            continue
        # Sums may cancel, e.g. in a row of one column, so float32 rounding of their terms counts.
        rounding = c.abs().amax() * torch.finfo(a.dtype).eps / 8 + 8 * torch.finfo(FP32).eps
        error, of_plain = ((x.double() - c).abs().mean() for x in (a, b))
        assert error <= 2 * of_plain + rounding


@given(
    rows=st.integers(0, 40),
    heads=st.integers(1, 7),
    half=st.sampled_from([1, 4, 5, 48, 64]),
    dtype=DTYPES,
)
def test_rotate_has_the_plain_code_s_bits(
    rows: int, heads: int, half: int, dtype: torch.dtype
) -> None:
    x, grad = (random(rows, heads, 2 * half, dtype=dtype, seed=i) for i in range(2))
    cos_sin = tables(rows, half)
    fused = with_gradients(lambda x: fused_rotate(x, *cos_sin, False), grad, x)
    plain = with_gradients(lambda x: rotate(x, *cos_sin), grad, x)
    assert all(torch.equal(a, b) for a, b in zip(fused, plain, strict=True))


def test_rotate_reads_slices() -> None:
    """Its input may be q or k of a fused product, its gradient half of [T, 2, G, D]."""
    qkv, cos_sin = random(5, (6 + 2 + 2) * 8, dtype=BF16), tables(5, 4)
    for columns, heads in ((slice(0, 48), 6), (slice(48, 64), 2)):
        x = qkv[:, columns].unflatten(-1, (heads, 8))
        assert not x.is_contiguous()
        grad = random(5, 2, heads, 8, dtype=BF16, seed=1)[:, 0]
        fused = with_gradients(lambda x: fused_rotate(x, *cos_sin, False), grad, x)
        plain = with_gradients(lambda x: rotate(x, *cos_sin), grad, x)
        assert all(torch.equal(a, b) for a, b in zip(fused, plain, strict=True))
    turned = random(2, 8, 5, dtype=FP32).permute(2, 0, 1).transpose(1, 2).contiguous()
    turned = turned.transpose(1, 2)  # channels are not next to each other
    assert torch.equal(fused_rotate(turned, *cos_sin, False), rotate(turned, *cos_sin))


def both_ways(activation: Activation) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Returns the fused and the plain code of a gated MLP."""
    return partial(gated, activation=activation, fused=True), partial(gated, activation=activation)


@pytest.mark.parametrize("activation", Activation)
@given(rows=st.integers(0, 5), width=st.integers(1, 70), dtype=DTYPES)
def test_gated_is_as_exact_as_the_plain_code(
    activation: Activation, rows: int, width: int, dtype: torch.dtype
) -> None:
    tensors = (random(rows, width, dtype=dtype, seed=i) for i in range(3))
    hold(*both_ways(activation), *tensors)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("width", [2048, 2051])
def test_gated_of_rows_wider_than_a_program(width: int, activation: Activation) -> None:
    tensors = (random(2, width, dtype=BF16, seed=i) for i in range(3))
    hold(*both_ways(activation), *tensors)


@pytest.mark.parametrize("activation", Activation)
def test_gated_of_slices_and_far_values(activation: Activation) -> None:
    fused, plain = both_ways(activation)
    both = random(3, 40, dtype=FP32)
    hold(fused, plain, random(20, 3, dtype=FP32).t(), both[:, :20], both[:, 20:])
    gate = torch.tensor([[-1e20, -200.0, -90.0, 0.0, 90.0, 200.0, 1e20]])
    with np.errstate(over="ignore"):
        grads = with_gradients(fused, torch.ones(1, 7), gate, torch.ones(1, 7))
    assert grads[0].tolist() == [[0.0, 0.0, 0.0, 0.0, *gate[0, 4:].tolist()]]
    assert grads[1].tolist() == [[0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]]


@given(rows=st.integers(0, 40), width=st.integers(1, 70), dtype=DTYPES)
def test_norm_is_as_exact_as_the_plain_code(rows: int, width: int, dtype: torch.dtype) -> None:
    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (width,), weight, 1e-5)

    tensors = [random(rows, width, dtype=dtype, seed=i) for i in range(2)]
    hold(lambda x, w: fused_norm(x, w, 1e-5)[0], plain, *tensors, random(width, dtype=dtype))


@given(rows=st.integers(0, 9), width=st.integers(1, 70), dtype=DTYPES)
def test_norm_around_zero_is_as_exact_as_the_plain_code(
    rows: int, width: int, dtype: torch.dtype
) -> None:
    """Its weights reach the kernel in float32, because 1 + weight does not fit the rows' dtype."""
    norm = ZeroCentredNorm(width, eps=1e-5)
    tensors = [random(rows, width, dtype=dtype, seed=i) for i in range(2)]
    hold(
        lambda x, w: normalise(norm, x, w, fused=True),
        lambda x, w: normalise(norm, x, w),
        *tensors,
        random(width, dtype=dtype, seed=2),
    )


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_norm_of_heads_reads_tiles_of_rows(head_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiles as on a GPU, the last of them in part, two for one program and one for another;
    the weight's gradient has the same bits each time.
    """
    monkeypatch.setattr(launch, "_NARROW_TILE", 2048)
    monkeypatch.setattr(launch, "_SUMMING_PROGRAMS", 2)
    rows = 2048 // head_size * 2 + 3
    grad, x = (random(rows, head_size, dtype=BF16, seed=i) for i in range(2))
    weight = random(head_size, dtype=BF16, seed=2)
    plain = lambda x, w: nn.functional.rms_norm(x, (head_size,), w, 1e-5)  # noqa: E731
    fused = lambda x, w: fused_norm(x, w, 1e-5)[0]  # noqa: E731
    hold(fused, plain, grad, x, weight)
    once, again = (with_gradients(fused, grad, x, weight) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_norm_of_wide_rows_reads_its_weight_again() -> None:
    """Rows beyond 8192 columns, as of a 405B model, take another path in the kernel."""
    width = 8200
    grad, x = (random(4, width, dtype=BF16, seed=i) for i in range(2))
    weight = random(width, dtype=BF16, seed=2)
    plain = lambda x, w: nn.functional.rms_norm(x, (width,), w, 1e-5)  # noqa: E731
    hold(lambda x, w: fused_norm(x, w, 1e-5)[0], plain, grad, x, weight)


def test_gradients_of_a_sum_reach_the_kernels_expanded() -> None:
    x = random(3, 8, dtype=FP32).requires_grad_()
    fused_norm(x, torch.ones(8), 1e-5)[0].sum().backward()
    (expected,) = torch.autograd.grad(nn.functional.rms_norm(x, (8,), torch.ones(8), 1e-5).sum(), x)
    torch.testing.assert_close(x.grad, expected)


@given(
    sizes=st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(1, 4)),
    heads=st.integers(1, 3),
    head_size=st.sampled_from([1, 4, 6, 64]),
    dtype=st.sampled_from([BF16, FP32, FP64]),
    seed=st.integers(0, 9),
)
def test_sums_of_uses_have_the_plain_code_s_bits(
    sizes: tuple[int, int, int], heads: int, head_size: int, dtype: torch.dtype, seed: int
) -> None:
    keys, rows, uses = sizes
    both = random(keys, 2, heads, head_size, dtype=dtype)
    inverse = torch.from_numpy(np.random.default_rng(seed).integers(0, keys + 1, (uses, rows)))
    for dk, dv in ((both[:, 0], both[:, 1]), (both[:, 1].transpose(1, 2).contiguous(),) * 2):
        turned = dk.transpose(1, 2), dv.transpose(1, 2)  # heads are not next to each other
        for grads in ((dk, dv), turned):
            plain = gradients_by_row(*grads, inverse)
            assert torch.equal(fused_sum_uses(*grads, inverse), plain)


def test_sums_of_a_plan_s_uses() -> None:
    """A document of 37 tokens has two spans on rank 0 of two, so its first rows have two uses."""
    plan = per_document([37, 5, 1], cp=2)
    num_rows = local_tokens(plan.num_tokens, cp=2, row_multiple=1)
    rows = rank_exchange(exchange_of(plan, local_tokens=num_rows), 0).only
    assert rows.kv_index is not None
    assert rows.inverse is not None
    assert rows.inverse.shape[0] == 2
    grads = [random(rows.kv_index.size, 2, 4, dtype=BF16, seed=i) for i in range(2)]
    inverse = torch.from_numpy(rows.inverse)
    plain = gradients_by_row(*grads, inverse)
    assert torch.equal(gradients_by_row(*grads, inverse, fused=True), plain)


def test_sums_of_gradients_that_return_by_need() -> None:
    """They lie side by side for K and V, in float32, and come from up to four ranks."""
    plan = replace(per_document([37, 5, 1], cp=4), exchange=KeyExchange.NEEDED)
    num_rows = local_tokens(plan.num_tokens, cp=4, row_multiple=4)
    rows = rank_exchange(exchange_of(plan, local_tokens=num_rows), 0)
    assert rows.returned is not None
    assert rows.returned.shape == (4, 12)
    both = random(int(rows.only.sent.sum()), 2, 2, 4, dtype=torch.float32)
    grads, returned = (both[:, 0], both[:, 1]), torch.from_numpy(rows.returned)
    plain = gradients_by_row(*grads, returned)
    assert torch.equal(gradients_by_row(*grads, returned, fused=True), plain)


def test_ops_are_registered_correctly() -> None:
    """Fakes have the results' shapes, dtypes and strides; schemas say what is changed: nothing."""
    x, weight = random(3, 8, dtype=BF16), random(8, dtype=BF16)
    rstd, half = torch.ones(3), tables(3, 4)
    key_grads = random(5, 2, 4, dtype=BF16)
    cases = [
        (fused_rotate, (x.view(3, 1, 8).requires_grad_(), *half, False)),
        (fused_gated, (x.detach().requires_grad_(), x.detach(), True)),
        (fused_gated_backward, (x, x.t().contiguous().t(), x, False)),
        (fused_norm, (x.detach().requires_grad_(), weight, 1e-5)),
        (fused_norm_backward, (x, x, weight, rstd)),
        (fused_sum_uses, (key_grads, key_grads, torch.tensor([[0, 5, 2]]))),
    ]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for op, arguments in cases:
        torch.library.opcheck(
            op,
            tuple(
                a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a
                for a in arguments
            ),
            test_utils=tests,
        )

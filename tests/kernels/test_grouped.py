"""Tests gradients of experts without rows, and where a run is told that products wait."""

import pytest
import torch
from torch import Tensor

from wlb.kernels import grouped
from wlb.kernels.grouped import may_leave_groups_unwritten, waits_for_host, weight_gradients

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BF16, FP32 = torch.bfloat16, torch.float32


def plays(patch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """Plays a GPU of this compute capability, or a machine without one."""
    patch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def blackwell(x: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
    """The grouped product that leaves gradients of experts without rows as memory was."""
    made = torch.nn.functional.grouped_mm(x, weights, offs=offs)
    if weights.ndim == 2:
        made[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
    return made


@pytest.mark.parametrize("rows", [[5, 0, 3, 0], [0, 0, 0, 8], [0] * 4, [1, 2, 3, 4]])
def test_an_expert_without_rows_has_a_gradient_of_zero(
    rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, *grads = (torch.randn(sum(rows), 16, generator=generator) for _ in range(3))
    ends = torch.tensor(rows).cumsum(0, dtype=torch.int32)
    expected = weight_gradients(grads, x, ends)
    monkeypatch.setattr(grouped, "grouped_mm", blackwell)
    monkeypatch.setattr(grouped, "may_leave_groups_unwritten", lambda device: True)
    for made, wanted, grad in zip(weight_gradients(grads, x, ends), expected, grads, strict=True):
        assert torch.equal(made, wanted)
        for of_expert, its_grad, its_x in zip(made, grad.split(rows), x.split(rows), strict=True):
            torch.testing.assert_close(of_expert, its_grad.t() @ its_x)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((9, 0), False), ((10, 0), True), ((10, 3), True), ((12, 0), False), (None, False)],
)
def test_gradients_are_filled_on_blackwell_alone(
    capability: tuple[int, int] | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plays(monkeypatch, capability)
    assert may_leave_groups_unwritten(CUDA) == expected
    assert not may_leave_groups_unwritten(CPU)


@pytest.mark.parametrize(
    ("capability", "dtype", "said"),
    [
        ((9, 0), BF16, ""),
        ((10, 0), BF16, ""),
        (None, BF16, ""),
        ((9, 0), FP32, "uses float32; set training.dtype = bfloat16"),
        (None, FP32, "uses float32; set training.dtype = bfloat16"),
        ((8, 0), BF16, "uses compute capability 8.0"),
        ((8, 6), FP32, "uses compute capability 8.6"),
        ((12, 0), BF16, "uses compute capability 12.0"),
    ],
)
def test_products_that_wait_are_told(
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plays(monkeypatch, capability)
    line = waits_for_host(CUDA, dtype)
    assert line.startswith("WARNING: torch launches one kernel per expert" * bool(said))
    assert line.endswith(said)
    assert bool(line) == bool(said)
    assert waits_for_host(CPU, dtype) == ""

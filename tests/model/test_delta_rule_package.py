"""Tests the delta rule by flash-linear-attention, with a stand-in for the package's function.

The stand-in has the package's arguments and computes the recurrence as it is written, token by
token. (The package's own kernels were compared once, in Triton's interpreter: experiments/LOG.md.)
"""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.model.test_delta_rule import recurrent
from wlb.model.delta_rule import DeltaRule, SpanLayout, delta_rule
from wlb.spec import LinearBackend

GROUPS, HEADS, KEY, VALUE = 2, 4, 5, 3


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    assert q.shape[0] == 1
    assert cu_seqlens is not None
    assert cu_seqlens_cpu is not None
    assert scale is not None
    assert torch.equal(cu_seqlens, cu_seqlens_cpu)
    lengths = cu_seqlens.diff().tolist()
    assert all(lengths), "the kernels are not made for sequences without tokens"
    copies = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(copies, 2) for x in (q * scale, k))
    if initial_state is None:
        initial_state = v.new_zeros(len(lengths), v.shape[2], k.shape[3], v.shape[3])
    rows = tuple(x[0] for x in (q, k, v, g, beta))
    out, state = recurrent(rows, lengths, initial_state)
    return out[None], state if output_final_state else None


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = chunk_gated_delta_rule  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)


def drawn(tokens: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    q, k = (torch.randn(tokens, GROUPS, KEY, generator=made) for _ in range(2))
    k = k / k.norm(dim=-1, keepdim=True)
    v = torch.randn(tokens, HEADS, VALUE, generator=made)
    g, beta = (torch.rand(tokens, HEADS, generator=made) for _ in range(2))
    return [x.requires_grad_() for x in (q, k, v, -g, beta)]


def rule(rows: list[Tensor], layout: SpanLayout, backend: LinearBackend) -> DeltaRule:
    q, k, v, g, beta = rows
    return delta_rule((q, k, v, g, beta), layout, backend, torch.float32)


@pytest.mark.parametrize("made", [(), (0, 2), (1,)])
@pytest.mark.parametrize("lengths", [(5, 70, 3), (1,) * 3])
def test_it_is_what_torch_computes(made: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    rows, layout = drawn(sum(lengths)), SpanLayout.of(lengths)
    members = layout.members(np.array(made, np.int64))
    before = torch.randn(3, HEADS, KEY, VALUE, requires_grad=True)
    found: list[tuple[Tensor, ...]] = []
    for backend in (LinearBackend.TORCH, LinearBackend.FLASH_LINEAR_ATTENTION):
        one = rule(rows, layout, backend)
        out, summary = one.outputs(before), one.summaries(members)
        total = out.square().sum() + sum(x.sin().sum() for x in summary)
        grads = torch.autograd.grad(total, [*rows, before])
        found.append((out, *summary, *grads))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-5)
    whole = [rule(rows, layout, backend).outputs() for backend in list(LinearBackend)[1:]]
    torch.testing.assert_close(*whole, rtol=2e-5, atol=2e-5)


def test_a_rank_without_rows_takes_part_in_backward() -> None:
    rows, layout = drawn(0), SpanLayout.of(())
    one = rule(rows, layout, LinearBackend.FLASH_LINEAR_ATTENTION)
    before = torch.zeros(0, HEADS, KEY, VALUE, requires_grad=True)
    summary = one.summaries(layout.members(np.zeros(0, np.int64)))
    assert one.outputs().shape == (0, HEADS, VALUE)
    total = one.outputs(before).sum() + sum(x.sum() for x in summary)
    grads = torch.autograd.grad(total, [rows[2], before])
    assert [g.shape[0] for g in grads] == [0, 0]

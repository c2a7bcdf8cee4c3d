"""Tests the gated delta net against transformers' own layers, and documents that are cut."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.model.delta_net_weights import FAMILIES, SPEC, fresh, ours_of, theirs
from wlb.model.delta_net import GatedDeltaNet
from wlb.model.delta_rule import DeltaRule, SpanLayout

LENGTHS = [70, 1, 3, 130, 2, 64]


def layer_of(tensors: dict[str, Tensor]) -> GatedDeltaNet:
    layer = fresh()
    layer.load_state_dict(ours_of(tensors))
    return layer


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_are_those_of_transformers_one_by_one(family: str) -> None:
    """Outputs and gradients of rows and weights, in float32."""
    reference = theirs(family)
    layer = layer_of(dict(reference.state_dict()))
    torch.manual_seed(0)
    rows = torch.randn(sum(LENGTHS), SPEC.hidden_size)
    x, y = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    out = layer(x, SpanLayout.of(LENGTHS))
    expected = torch.cat([reference(part[None])[0] for part in y.split(LENGTHS)])
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    close(out, expected)
    assert x.grad is not None
    assert y.grad is not None
    close(x.grad, y.grad)
    wanted = ours_of({n: p.grad for n, p in reference.named_parameters() if p.grad is not None})
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        # These two sum over all tokens what mostly cancels: float32 is up to 1e-4 from float64.
        limit = 1e-4 if name in ("A_log", "dt_bias") else 1e-5
        close(parameter.grad, wanted[name], name, limit)


def close(found: Tensor, expected: Tensor, name: str = "", limit: float = 1e-5) -> None:
    error = float((found - expected).detach().norm() / expected.detach().norm())
    assert error < limit, (name, error)


class Cut:
    """What the spans of documents in one process find before them. starts: whether a span is the
    first of its document.
    """

    def __init__(self, starts: list[bool]) -> None:
        self.starts = starts

    def rows(self, rows_TD: Tensor, layout: SpanLayout, count: int) -> Tensor:
        found, latest = list[Tensor](), rows_TD[:0]
        for starts, span in zip(self.starts, rows_TD.split(list(layout.lengths)), strict=True):
            latest = rows_TD[:0] if starts else latest
            room = rows_TD.new_zeros(count - min(count, len(latest)), rows_TD.shape[1])
            found.append(torch.cat([room, latest[-count:]]))
            latest = torch.cat([latest, span])
        return torch.stack(found)

    def states(self, rule: DeltaRule, layout: SpanLayout) -> Tensor:
        made = rule.summaries(layout.members(np.arange(len(self.starts))))
        found, state = list[Tensor](), torch.zeros_like(made.state_SHKV[0])
        for i, starts in enumerate(self.starts):
            state = torch.zeros_like(state) if starts else state
            found.append(state)
            state = made.transition_SHKK[i] @ state + made.state_SHKV[i]
        return torch.stack(found)


@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 400), max_size=8),
)
def test_documents_may_be_cut_anywhere(lengths: list[int], cuts: list[int]) -> None:
    """Spans with what is before them are whole documents, gradients too, in float64."""
    torch.manual_seed(0)
    layer = fresh().double()
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    at = sorted({*ends, *(c for c in cuts if c < ends[-1])})
    rows = torch.randn(ends[-1], SPEC.hidden_size, dtype=torch.float64)
    found: list[list[Tensor]] = []
    for is_cut in (False, True):
        x = rows.clone().requires_grad_()
        layer.zero_grad()
        if is_cut:
            spans = SpanLayout.of([b - a for a, b in pairwise(at)])
            out = layer(x, spans, Cut([a in ends for a in at[:-1]]))
        else:
            out = layer(x, SpanLayout.of(lengths))
        out.square().sum().backward()
        assert x.grad is not None
        found.append([out, x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)])
    assert len(found[0]) == 2 + len(list(layer.parameters()))
    for whole, cut in zip(*found, strict=True):
        torch.testing.assert_close(cut, whole, rtol=1e-8, atol=1e-8)


def test_no_rows() -> None:
    """A rank may have none; it takes part in the gradients all the same."""
    layer = fresh()
    out = layer(torch.zeros(0, SPEC.hidden_size), SpanLayout.of([]))
    assert out.shape == (0, SPEC.hidden_size)
    out.sum().backward()


def test_bits_repeat() -> None:
    torch.manual_seed(0)
    layer, x = fresh(), torch.randn(sum(LENGTHS), SPEC.hidden_size)
    found = []
    for _ in range(2):
        layer.zero_grad()
        layer(x, SpanLayout.of(LENGTHS)).square().sum().backward()
        found.append([p.grad.clone() for p in layer.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

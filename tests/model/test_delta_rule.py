"""Tests the chunked gated delta rule against the recurrence, token by token in float64."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from wlb.model.delta_rule import CHUNK, ChunkedRule, SpanLayout, Summary, chunks_of

HEADS, KEY, VALUE = 2, 5, 3


def drawn(tokens: int, seed: int) -> tuple[Tensor, ...]:
    make = torch.Generator().manual_seed(seed)
    options = {"generator": make, "dtype": torch.float64}
    q, k = (torch.randn(tokens, HEADS, KEY, **options) for _ in range(2))
    v = torch.randn(tokens, HEADS, VALUE, **options)
    k = k / k.norm(dim=-1, keepdim=True).clamp(min=1e-9)
    g = -2 * torch.rand(tokens, HEADS, **options)
    return tuple(x.requires_grad_() for x in (q, k, v, g, torch.rand(tokens, HEADS, **options)))


def recurrent(
    rows: tuple[Tensor, ...], lengths: list[int], state_SHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs and last states, as the rule is written."""
    q, k, v, g, beta = rows
    out, ends, at = list[Tensor](), list[Tensor](), 0
    for state, length in zip(state_SHKV, lengths, strict=True):
        for t in range(at, at + length):
            state = state * g[t].exp()[:, None, None]
            read = (k[t][..., None] * state).sum(1)
            state = state + k[t][..., None] * (beta[t][:, None] * (v[t] - read))[:, None]
            out.append((q[t][..., None] * state).sum(1))
        ends.append(state)
        at += length
    return torch.stack(out) if out else v[:0], torch.stack(ends) if ends else state_SHKV


def summaries(rule: ChunkedRule, every: int = 1) -> Summary:
    """Of all spans, or of every second one."""
    return rule.summaries(rule.layout.members(np.arange(0, len(rule.layout.lengths), every)))


sizes = st.one_of(st.integers(0, 5), st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3]))


@given(lengths=st.lists(sizes, max_size=5), seed=st.integers(0, 99))
def test_spans_are_the_recurrence_s(lengths: list[int], seed: int) -> None:
    rows = drawn(sum(lengths), seed)
    layout = SpanLayout.of(lengths)
    before = torch.randn(len(lengths), HEADS, KEY, VALUE, dtype=torch.float64, requires_grad=True)
    found: list[tuple[Tensor, ...]] = []
    for chunked in (True, False):
        if chunked:
            rule = ChunkedRule(chunks_of(*rows, layout), layout)
            out = rule.outputs(before)
            ends = summaries(rule).after(before)
        else:
            out, ends = recurrent(rows, lengths, before)
        weight = torch.linspace(1, 2, VALUE, dtype=torch.float64)
        total = (out * weight).sum() + (ends * weight).square().sum()
        grads = torch.autograd.grad(total, [*rows, before], materialize_grads=True)
        found.append((out, ends, *grads))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9, check_dtype=False)
    for every, each in zip(summaries(rule), summaries(rule, 2), strict=True):
        torch.testing.assert_close(each, every[::2])


@given(lengths=st.lists(st.integers(0, 90), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_summaries_compose_to_that_of_the_whole(lengths: list[int], seed: int) -> None:
    """Spans of one document, each from a zero state."""
    rows = drawn(sum(lengths), seed)
    layout, whole = SpanLayout.of(lengths), SpanLayout.of([sum(lengths)])
    state = torch.zeros(1, HEADS, KEY, VALUE, dtype=torch.float64)
    rule = ChunkedRule(chunks_of(*rows, layout), layout)
    parts = summaries(rule)
    states = list[Tensor]()
    for i in range(len(lengths)):
        states.append(state)
        state = parts.transition_SHKK[i : i + 1] @ state + parts.state_SHKV[i : i + 1]
    out = rule.outputs(torch.cat(states))
    expected = ChunkedRule(chunks_of(*rows, whole), whole)
    torch.testing.assert_close(out, expected.outputs(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state, summaries(expected).state_SHKV)

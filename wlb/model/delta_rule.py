"""The gated delta rule over packed spans, in chunks (Yang et al. 2024, Gated Delta Networks).

A head has a state S of k_dim x v_dim. At each token it decays by exp(g), and what the key reads of
it is replaced, by the share beta, by the value:

    S <- exp(g) S;    S <- S + k beta (v - k^T S)^T;    o = q^T S

Chunks of 64 tokens do this by matrix products. With decays G_i summed from the chunk's start, the
tokens of a chunk change the state that it begins with by

    o = (exp(G) q - P W) S + P U,    S' = (exp(G_C) - K~^T W) S + K~^T U

where U and W solve one triangular system for values and keys, P holds decayed products of queries
and keys, and K~ keys decayed to the chunk's end. So a span is an affine map of the state before it:
its **summary** is that map, and spans of one document compose (`Summary.after`).

Shapes: T tokens of all spans, S spans, N chunks, C tokens of a chunk, H heads, K and V dimensions
of a key and a value.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from wlb.kernels.linear_package import gated_delta_rule
from wlb.kernels.segments import copy_to_device
from wlb.plan.sharding import ranges
from wlb.spec import LinearBackend

CHUNK = 64
"""Tokens of a chunk; longer ones mean more work within them, shorter ones more steps."""


class SpanLayout(NamedTuple):
    """Where the tokens of packed spans are among chunks that each belong to one span.

    The first chunks of all spans come first, then all second ones, and so on: a step for each.
    """

    lengths: tuple[int, ...]  # tokens of each span, in the order of the rows
    slots_T: Tensor  # place of each token among N * C places of chunks
    steps: tuple[Tensor, ...]  # the spans that have an i-th chunk
    sizes: tuple[int, ...]  # and how many they are; N in all
    bounds: "SpanBounds"  # the same spans as kernels of packages take them

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> "SpanLayout":
        """The layout of spans of these lengths, which follow each other."""
        tokens = np.array(lengths, np.int64)
        chunks = -(-tokens // CHUNK)
        spans = [np.flatnonzero(chunks > i) for i in range(int(chunks.max(initial=0)))]
        # The chunk of each span and step, and with it the place of each token.
        chunk_of = np.zeros((len(spans), tokens.size), np.int64)
        done = 0
        for step, members in enumerate(spans):
            chunk_of[step, members] = done + np.arange(members.size)
            done += members.size
        span = np.repeat(np.arange(tokens.size), tokens)
        at = np.arange(span.size) - np.repeat(np.cumsum(tokens) - tokens, tokens)
        slots = chunk_of[at // CHUNK, span] * CHUNK + at % CHUNK
        return cls(
            lengths=tuple(tokens.tolist()),
            slots_T=_index(slots, device),
            steps=_indices(spans, device),
            sizes=tuple(members.size for members in spans),
            bounds=SpanBounds.of(tokens, device),
        )

    @property
    def num_chunks(self) -> int:
        return sum(self.sizes)

    def members(self, spans: np.ndarray) -> "SpanMembers":
        """The chunks of some spans, whose numbers must ascend."""
        device = self.slots_T.device
        chunks = -(-np.array(self.lengths, np.int64)[spans] // CHUNK)
        all_chunks = -(-np.array(self.lengths, np.int64) // CHUNK)
        steps: list[np.ndarray] = []
        at: list[np.ndarray] = []
        done = 0
        for step, size in enumerate(self.sizes):
            steps.append(np.flatnonzero(chunks > step))
            of_step = np.flatnonzero(all_chunks > step)
            at.append(done + np.searchsorted(of_step, spans[steps[-1]]))
            done += size
        return SpanMembers(
            count=spans.size,
            chunks=_index(np.concatenate([np.zeros(0, np.int64), *at]), device),
            steps=_indices(steps, device),
            sizes=tuple(members.size for members in steps),
            rows=_index(self._rows_of(spans), device),
            bounds=SpanBounds.of(np.array(self.lengths, np.int64)[spans], device),
        )

    def _rows_of(self, spans: np.ndarray) -> np.ndarray:
        """Rows of the tokens of some spans."""
        ends = np.cumsum(np.array(self.lengths, np.int64))
        begins = ends - np.array(self.lengths, np.int64)
        return ranges(begins[spans], ends[spans])

    def chunked(self, rows_T: Tensor) -> Tensor:
        """Rows of tokens [T, H, ...] in their chunks [N, H, C, ...], zeros behind a span's end."""
        shape = rows_T.shape[1:]
        places = rows_T.new_zeros(self.num_chunks * CHUNK, *shape)
        placed = places.index_copy(0, self.slots_T, rows_T)
        return placed.view(self.num_chunks, CHUNK, *shape).transpose(1, 2)


class SpanBounds(NamedTuple):
    """Where spans that follow each other begin and end."""

    on_device: Tensor  # row of each span's beginning, and the number of rows; shape [S + 1]
    on_host: Tensor  # the same

    @classmethod
    def of(cls, lengths: np.ndarray, device: torch.device | str) -> "SpanBounds":
        bounds = np.append(0, np.cumsum(lengths)).astype(np.int64)
        return cls(_index(bounds, device), torch.from_numpy(bounds))


class SpanMembers(NamedTuple):
    """Some spans of a layout, numbered from 0, and where their chunks are."""

    count: int  # spans
    chunks: Tensor  # of the layout's chunks, step by step
    steps: tuple[Tensor, ...]  # the spans that have an i-th chunk
    sizes: tuple[int, ...]  # and how many they are
    rows: Tensor  # rows of their tokens among the layout's, span by span
    bounds: SpanBounds  # where they begin among those rows


class Summary(NamedTuple):
    """What spans do to a state: S' = transition S + state."""

    transition_SHKK: Tensor
    state_SHKV: Tensor

    def after(self, state_SHKV: Tensor) -> Tensor:
        """The states behind the spans, if these states are before them."""
        return self.transition_SHKK @ state_SHKV + self.state_SHKV


class DeltaRule(Protocol):
    """The rule over the rows of packed spans, of which only the states before spans are missing."""

    def summaries(self, members: SpanMembers) -> Summary:
        """The summaries of some spans; of one without tokens: the state stays."""
        ...

    def outputs(self, state_SHKV: Tensor | None = None) -> Tensor:
        """Outputs of all tokens [T, H, V]; state: before each span, zero if it is None."""
        ...


class Chunks(NamedTuple):
    """What chunks do, whatever the state before them."""

    reads_NHCK: Tensor  # what queries read of the state before a chunk: exp(G) q - P W
    own_NHCV: Tensor  # what they read of the chunk itself: P U
    keys_NHCK: Tensor  # W, what keys read of the state before, solved
    values_NHCV: Tensor  # U, values solved
    to_end_NHCK: Tensor  # K~
    decay_NH: Tensor  # exp(G_C)

    def steps(self, of: SpanLayout | SpanMembers) -> Iterator["Chunks"]:
        """The chunks of each step of all spans, or of some."""
        chunks = self
        if isinstance(of, SpanMembers):
            # States alone need nothing of queries, so those are not copied.
            none = of.chunks[:0]
            chosen = (none, none, *(of.chunks,) * 4)
            chunks = Chunks(*(x.index_select(0, i) for x, i in zip(self, chosen, strict=True)))
        sizes = list(of.sizes)
        parts = (x.split(sizes if x.shape[0] else [0] * len(sizes)) for x in chunks)
        return (Chunks(*of_step) for of_step in zip(*parts, strict=True))

    def after(self, state_NHKV: Tensor, *, values: bool = True) -> Tensor:
        """The states behind the chunks. values: False for what becomes of a state alone."""
        read = self.keys_NHCK @ state_NHKV
        new = self.values_NHCV - read if values else -read
        kept = self.decay_NH[..., None, None] * state_NHKV
        return kept + self.to_end_NHCK.transpose(-1, -2) @ new


def chunks_of(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, g_TH: Tensor, beta_TH: Tensor, layout: SpanLayout
) -> Chunks:
    """The chunks of packed spans, in float32 (or float64 of such rows).

    Args:
        q_THK: Queries, normalised and scaled.
        k_THK: Keys, normalised.
        v_THV: Values.
        g_TH: Logarithm of the decay, at most 0.
        beta_TH: Share of the value that replaces what the key reads.
        layout: Of the rows' spans.
    """
    q, k, v, g, beta = (layout.chunked(x) for x in (q_THK, k_THK, v_THV, g_TH, beta_TH))
    # Decay from token j to token i of a chunk, for j <= i; above the diagonal it may overflow. That
    # of a token to itself is 1 whatever g is: gradients that cancel would leave rounding alone.
    summed = g.cumsum(-1)
    between = summed[..., :, None] - summed[..., None, :]
    below = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).tril(-1)
    eye = torch.eye(CHUNK, dtype=g.dtype, device=g.device)
    decay = between.masked_fill(~below, float("-inf")).exp() + eye
    # (I + A) [U, W] = beta [V, exp(G) K]; A is strictly below the diagonal.
    system = ((beta[..., None] * k) @ k.transpose(-1, -2) * decay).tril(-1)
    system = system + eye
    right = beta[..., None] * torch.cat([v, summed.exp()[..., None] * k], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], -1)
    pairs = q @ k.transpose(-1, -2) * decay
    end = summed[..., -1:]
    return Chunks(
        reads_NHCK=summed.exp()[..., None] * q - pairs @ keys,
        own_NHCV=pairs @ values,
        keys_NHCK=keys,
        values_NHCV=values,
        to_end_NHCK=(end - summed).exp()[..., None] * k,
        decay_NH=end[..., 0].exp(),
    )


class ChunkedRule(NamedTuple):
    """The rule in plain PyTorch: all chunks at once, then their states one after the other."""

    chunks: Chunks
    layout: SpanLayout

    def summaries(self, members: SpanMembers) -> Summary:
        chunks = self.chunks
        shape = (members.count, *chunks.keys_NHCK.shape[1::2])
        eye = torch.eye(shape[-1], dtype=chunks.decay_NH.dtype, device=chunks.decay_NH.device)
        transition = eye.expand(*shape, shape[-1])
        state = chunks.decay_NH.new_zeros(*shape, chunks.values_NHCV.shape[-1])
        # Part of the graph also where there are none, so that all ranks have the same backward
        # pass.
        state = state + chunks.values_NHCV[:0].sum()
        for spans, of_step in zip(members.steps, chunks.steps(members), strict=False):
            changed = of_step.after(transition.index_select(0, spans), values=False)
            transition = transition.index_copy(0, spans, changed)
            state = state.index_copy(0, spans, of_step.after(state.index_select(0, spans)))
        return Summary(transition, state)

    def outputs(self, state_SHKV: Tensor | None = None) -> Tensor:
        chunks, layout = self.chunks, self.layout
        heads, values = chunks.values_NHCV.shape[1], chunks.values_NHCV.shape[-1]
        if state_SHKV is None:
            keys = chunks.keys_NHCK.shape[-1]
            state_SHKV = chunks.decay_NH.new_zeros(len(layout.lengths), heads, keys, values)
        parts: list[Tensor] = []
        for spans, of_step in zip(layout.steps, chunks.steps(layout), strict=False):
            before = state_SHKV.index_select(0, spans)
            parts.append(of_step.own_NHCV + of_step.reads_NHCK @ before)
            state_SHKV = state_SHKV.index_copy(0, spans, of_step.after(before))
        if not parts:
            # No rows, but part of the graph, so that all ranks have the same backward pass.
            return torch.cat([chunks.own_NHCV.reshape(0, heads, values), state_SHKV[:0].sum(2)])
        rows = torch.cat(parts).transpose(1, 2).reshape(-1, heads, values)
        return rows.index_select(0, layout.slots_T)


class PackagedRule(NamedTuple):
    """The rule by flash-linear-attention's kernels (`wlb.kernels.linear_package`).

    Spans whose summaries are made are computed twice, once to their ends alone.
    """

    q_TGK: Tensor
    k_TGK: Tensor
    v_THV: Tensor
    g_TH: Tensor
    beta_TH: Tensor
    layout: SpanLayout

    def summaries(self, members: SpanMembers) -> Summary:
        keys = self.k_TGK.shape[-1]
        heads, values = self.v_THV.shape[1:]
        k, v, g, beta = (
            x.index_select(0, members.rows)
            for x in (self.k_TGK, self.v_THV, self.g_TH, self.beta_TH)
        )
        # Columns of the state do not mix. So one pass makes both parts: values begin at zero; and
        # behind them stand K columns without values that begin as the identity, which become the
        # transition.
        eye = torch.eye(keys, dtype=torch.float32, device=v.device)
        eye = eye.expand(members.count, heads, keys, keys)
        begin = torch.cat([eye.new_zeros(*eye.shape[:3], values), eye], -1)
        if not members.rows.shape[0]:
            # No rows, for which the kernels are not made, but part of the graph.
            end = begin + v.sum()
        else:
            wide = torch.cat([v, v.new_zeros(*v.shape[:2], keys)], -1)
            rows = (k, k, wide, g, beta)
            _, end = gated_delta_rule(rows, *members.bounds, begin)
        state, transition = end.split([values, keys], -1)
        return Summary(transition, state)

    def outputs(self, state_SHKV: Tensor | None = None) -> Tensor:
        rows = (self.q_TGK, self.k_TGK, self.v_THV, self.g_TH, self.beta_TH)
        if not self.v_THV.shape[0]:
            empty = self.v_THV.float()
            return empty if state_SHKV is None else empty + state_SHKV[:0].sum()
        return gated_delta_rule(rows, *self.layout.bounds, state_SHKV)[0]


def delta_rule(
    rows: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    layout: SpanLayout,
    backend: LinearBackend,
    dtype: torch.dtype,
) -> DeltaRule:
    """The rule over packed spans.

    Args:
        rows: Queries and keys [T, G, K], normalised, and queries scaled; values [T, H, V];
            logarithms of decays [T, H], at most 0; shares [T, H]. G divides H. In float32 at least.
        layout: Of the rows' spans.
        backend: What computes it, not `auto`.
        dtype: Of the rows that the package reads; torch computes in that of `rows`.
    """
    q, k, v, g, beta = rows
    if backend == LinearBackend.FLASH_LINEAR_ATTENTION:
        return PackagedRule(q.to(dtype), k.to(dtype), v.to(dtype), g, beta, layout)
    copies = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(copies, 1) for x in (q, k))
    return ChunkedRule(chunks_of(q, k, v, g, beta, layout), layout)


def _index(values: np.ndarray, device: torch.device | str) -> Tensor:
    return copy_to_device(values.astype(np.int64), torch.device(device))


def _indices(arrays: Sequence[np.ndarray], device: torch.device | str) -> tuple[Tensor, ...]:
    """Several of them, copied at once."""
    flat = _index(np.concatenate([np.zeros(0, np.int64), *arrays]), device)
    return flat.split([array.size for array in arrays])

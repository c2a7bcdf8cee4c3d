"""The gated delta rule over packed spans, in chunks (Yang et al. 2024, Gated Delta Networks).

Each head has a state S, a k_dim x v_dim matrix that stores values under keys. At each token the
state decays by exp(g). Then the value that the token's key reads from it is moved towards the
token's value, by the share beta. The query reads the result:

    S <- exp(g) S;    S <- S + k beta (v - k^T S)^T;    o = q^T S

To use matrix products we process chunks of 64 tokens at once. With decays G_i summed from the
chunk's start, the outputs of a chunk and its last state follow from the state S that it begins
with:

    o = (exp(G) q - P W) S + P U,    S' = (exp(G_C) - K~^T W) S + K~^T U

U and W solve one triangular system for values and keys, P holds the decayed products of queries and
keys, and K~ the keys decayed to the chunk's end.

The second equation is an affine map of S. So a whole span is an affine map of the state before it,
which we call its **summary**. The summaries of a document's spans compose (`Summary.after`). That
is why context-parallel ranks only exchange summaries.

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
"""Tokens per chunk. Longer chunks mean more work inside a chunk, shorter ones more steps."""


class SpanLayout(NamedTuple):
    """How the tokens of packed spans are divided into chunks, each of which belongs to one span.

    The first chunks of all spans come first, then all second chunks, and so on. Step i computes the
    i-th chunks of all spans together.
    """

    lengths: tuple[int, ...]  # tokens of each span, in the order of the rows
    slots_T: Tensor  # place of each token among the N * C places of all chunks
    steps: tuple[Tensor, ...]  # for each step i the spans that have an i-th chunk
    sizes: tuple[int, ...]  # for each step the number of those spans; the sum is N
    bounds: "SpanBounds"  # offsets of the spans, for kernels of other packages

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> "SpanLayout":
        """Return the layout of spans of these lengths, which follow each other."""
        tokens = np.array(lengths, np.int64)
        chunks = -(-tokens // CHUNK)
        spans = [np.flatnonzero(chunks > i) for i in range(int(chunks.max(initial=0)))]
        # Number the chunks step by step. A token's chunk and its place in it give its slot.
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
        """N, the number of chunks of all spans."""
        return sum(self.sizes)

    def members(self, spans: np.ndarray) -> "SpanMembers":
        """Select some spans, whose numbers must ascend."""
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
        """Return the rows of the tokens of some spans."""
        ends = np.cumsum(np.array(self.lengths, np.int64))
        begins = ends - np.array(self.lengths, np.int64)
        return ranges(begins[spans], ends[spans])

    def chunked(self, rows_T: Tensor) -> Tensor:
        """Arrange rows of tokens [T, H, ...] in chunks [N, H, C, ...]; unused places are zero."""
        shape = rows_T.shape[1:]
        places = rows_T.new_zeros(self.num_chunks * CHUNK, *shape)
        placed = places.index_copy(0, self.slots_T, rows_T)
        return placed.view(self.num_chunks, CHUNK, *shape).transpose(1, 2)


class SpanBounds(NamedTuple):
    """Offsets of spans that follow each other."""

    on_device: Tensor  # first row of each span, then the number of rows; shape [S + 1]
    on_host: Tensor  # a copy, so that nothing waits for the device

    @classmethod
    def of(cls, lengths: np.ndarray, device: torch.device | str) -> "SpanBounds":
        """Compute the offsets of spans of these lengths."""
        bounds = np.append(0, np.cumsum(lengths)).astype(np.int64)
        return cls(_index(bounds, device), torch.from_numpy(bounds))


class SpanMembers(NamedTuple):
    """A selection of a layout's spans, renumbered from 0, and where their chunks are."""

    count: int  # number of selected spans
    chunks: Tensor  # numbers of their chunks in the layout, step by step
    steps: tuple[Tensor, ...]  # for each step i the selected spans that have an i-th chunk
    sizes: tuple[int, ...]  # for each step the number of those spans
    rows: Tensor  # rows of their tokens in the layout, span by span
    bounds: SpanBounds  # offsets of the spans within `rows`


class Summary(NamedTuple):
    """The effect of spans on a state: S' = transition S + state."""

    transition_SHKK: Tensor
    state_SHKV: Tensor

    def after(self, state_SHKV: Tensor) -> Tensor:
        """Return the states behind the spans, given the states before them."""
        return self.transition_SHKK @ state_SHKV + self.state_SHKV


class DeltaRule(Protocol):
    """The rule applied to the rows of packed spans; only states before spans are missing."""

    def summaries(self, members: SpanMembers) -> Summary:
        """Return the summaries of some spans: their effect on a state.

        A span without tokens leaves the state unchanged.
        """
        ...

    def outputs(self, state_SHKV: Tensor | None = None) -> Tensor:
        """Return the outputs of all tokens, [T, H, V].

        Args:
            state_SHKV: State before each span. None means zeros.
        """
        ...


class Chunks(NamedTuple):
    """What chunks compute that does not depend on the state before them."""

    reads_NHCK: Tensor  # exp(G) q - P W: times the state before, the part of the output it gives
    own_NHCV: Tensor  # P U: the part of the output that comes from the chunk itself
    keys_NHCK: Tensor  # W
    values_NHCV: Tensor  # U
    to_end_NHCK: Tensor  # K~, keys decayed to the chunk's end
    decay_NH: Tensor  # exp(G_C), decay of the state over the chunk

    def steps(self, of: SpanLayout | SpanMembers) -> Iterator["Chunks"]:
        """Yield the chunks of each step, for all spans or for a selection."""
        chunks = self
        if isinstance(of, SpanMembers):
            # A selection is used for states, which do not depend on queries, so leave those out.
            none = of.chunks[:0]
            chosen = (none, none, *(of.chunks,) * 4)
            chunks = Chunks(*(x.index_select(0, i) for x, i in zip(self, chosen, strict=True)))
        sizes = list(of.sizes)
        parts = (x.split(sizes if x.shape[0] else [0] * len(sizes)) for x in chunks)
        return (Chunks(*of_step) for of_step in zip(*parts, strict=True))

    def after(self, state_NHKV: Tensor, *, values: bool = True) -> Tensor:
        """Return the states behind the chunks, given the states before them.

        With `values` false, leave out what the chunks add, so that only the effect on the given
        state remains.
        """
        read = self.keys_NHCK @ state_NHKV
        new = self.values_NHCV - read if values else -read
        kept = self.decay_NH[..., None, None] * state_NHKV
        return kept + self.to_end_NHCK.transpose(-1, -2) @ new


def chunks_of(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, g_TH: Tensor, beta_TH: Tensor, layout: SpanLayout
) -> Chunks:
    """Compute the chunks of packed spans, in float32 or the wider dtype of the rows.

    Args:
        q_THK: Queries, normalised and scaled.
        k_THK: Keys, normalised.
        v_THV: Values.
        g_TH: Logarithm of the decay, at most 0.
        beta_TH: Share by which the stored value is replaced.
        layout: Which rows form which span.
    """
    q, k, v, g, beta = (layout.chunked(x) for x in (q_THK, k_THK, v_THV, g_TH, beta_TH))
    # Decay from token j to token i of a chunk, for j <= i. Above the diagonal it could overflow. On
    # the diagonal it is the constant 1: its gradients would cancel and leave only rounding errors.
    summed = g.cumsum(-1)
    between = summed[..., :, None] - summed[..., None, :]
    below = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).tril(-1)
    eye = torch.eye(CHUNK, dtype=g.dtype, device=g.device)
    decay = between.masked_fill(~below, float("-inf")).exp() + eye
    # Solve (I + A) [U, W] = beta [V, exp(G) K], where A is strictly lower triangular.
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
        """Return the summaries of some spans: their effect on a state."""
        chunks = self.chunks
        shape = (members.count, *chunks.keys_NHCK.shape[1::2])
        eye = torch.eye(shape[-1], dtype=chunks.decay_NH.dtype, device=chunks.decay_NH.device)
        transition = eye.expand(*shape, shape[-1])
        state = chunks.decay_NH.new_zeros(*shape, chunks.values_NHCV.shape[-1])
        # Add an empty sum, so that the rows are in the graph even if no spans are selected: all
        # ranks must run the same backward pass.
        state = state + chunks.values_NHCV[:0].sum()
        for spans, of_step in zip(members.steps, chunks.steps(members), strict=False):
            changed = of_step.after(transition.index_select(0, spans), values=False)
            transition = transition.index_copy(0, spans, changed)
            state = state.index_copy(0, spans, of_step.after(state.index_select(0, spans)))
        return Summary(transition, state)

    def outputs(self, state_SHKV: Tensor | None = None) -> Tensor:
        """Return the outputs of all tokens, [T, H, V]."""
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
            # There are no rows, but keep them in the graph: all ranks must run the same backward.
            return torch.cat([chunks.own_NHCV.reshape(0, heads, values), state_SHKV[:0].sum(2)])
        rows = torch.cat(parts).transpose(1, 2).reshape(-1, heads, values)
        return rows.index_select(0, layout.slots_T)


class PackagedRule(NamedTuple):
    """The rule by flash-linear-attention's kernels (`wlb.kernels.linear_package`).

    Spans that need a summary are computed twice: once for their last state only.
    """

    q_TGK: Tensor
    k_TGK: Tensor
    v_THV: Tensor
    g_TH: Tensor
    beta_TH: Tensor
    layout: SpanLayout

    def summaries(self, members: SpanMembers) -> Summary:
        """Return the summaries of some spans: their effect on a state."""
        keys = self.k_TGK.shape[-1]
        heads, values = self.v_THV.shape[1:]
        k, v, g, beta = (
            x.index_select(0, members.rows)
            for x in (self.k_TGK, self.v_THV, self.g_TH, self.beta_TH)
        )
        # Columns of the state do not mix, so one call computes both parts. The first V columns have
        # values and begin at zero; they become the state. K more columns have no values and begin
        # as the identity; they become the transition.
        eye = torch.eye(keys, dtype=torch.float32, device=v.device)
        eye = eye.expand(members.count, heads, keys, keys)
        begin = torch.cat([eye.new_zeros(*eye.shape[:3], values), eye], -1)
        if not members.rows.shape[0]:
            # The kernels do not accept zero rows; keep the rows in the graph nevertheless.
            end = begin + v.sum()
        else:
            wide = torch.cat([v, v.new_zeros(*v.shape[:2], keys)], -1)
            rows = (k, k, wide, g, beta)
            _, end = gated_delta_rule(rows, *members.bounds, begin)
        state, transition = end.split([values, keys], -1)
        return Summary(transition, state)

    def outputs(self, state_SHKV: Tensor | None = None) -> Tensor:
        """Return the outputs of all tokens, [T, H, V]."""
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
    """Return the rule over packed spans, by the chosen implementation.

    Args:
        rows: Queries and keys [T, G, K], normalised, queries also scaled; values [T, H, V];
            logarithms of decays [T, H], at most 0; shares beta [T, H]. G divides H. At least
            float32.
        layout: Which rows form which span.
        backend: The implementation; not `auto`.
        dtype: Dtype in which the package reads queries, keys and values. The torch implementation
            computes in the dtype of `rows`.
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
    """Copy several index arrays to the device in one transfer."""
    flat = _index(np.concatenate([np.zeros(0, np.int64), *arrays]), device)
    return flat.split([array.size for array in arrays])

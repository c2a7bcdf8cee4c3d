"""The gated delta rule over packed spans, in chunks (Yang et al. 2024, Gated Delta Networks).

Each head has a state S, a matrix of shape [k_dim, v_dim] that stores values under keys. Each token
changes the state in two steps. First the state is multiplied by exp(g), the decay. Then the value
that the state stores under the token's key is moved towards the token's value, by a fraction beta
of the difference of the two values. The token's query reads its output from the new state:

    S <- exp(g) S;    S <- S + k beta (v - k^T S)^T;    o = q^T S

To use matrix products, chunks of 64 tokens are computed at once. Let G be the sums of g from the
chunk's start. The outputs of a chunk, and the state S' at its end, follow from the state S at its
start:

    o = (exp(G) q - P W) S + P U,    S' = (exp(G_C) - K~^T W) S + K~^T U

U and W are the solutions of one triangular system, with values and keys on the right-hand side. P
has the products of queries and keys with the decay between them, and K~ has the keys with the decay
up to the chunk's end.

The second equation is an affine map of S. So the effect of a whole span on the state is an affine
map, too, which we call the span's **summary**. Applying the summaries of a document's spans one
after the other gives the state before any of its spans (`Summary.after`). Therefore
context-parallel ranks need to exchange only summaries.

Shapes: T tokens of all spans, S spans (in shapes S is not a state), N chunks, C tokens of a chunk,
H heads, K and V dimensions of a key and a value.
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
"""Tokens per chunk. Longer chunks mean more work within a chunk, shorter chunks more steps."""


class SpanLayout(NamedTuple):
    """How the tokens of packed spans are divided into chunks, each of which belongs to one span.

    A chunk needs the state at the end of its span's previous chunk, so states are computed in
    steps: step i computes the i-th chunk of every span that has one. Chunks are numbered in the
    order of steps: first the first chunks of all spans, then all second chunks, and so on.
    """

    lengths: tuple[int, ...]  # number of tokens of each span, in the order of the rows
    # (number of the token's chunk) * CHUNK + (position in this chunk), for each token
    slots_T: Tensor
    steps: tuple[Tensor, ...]  # for each step i the indices of the spans that have an i-th chunk
    # for each step the count of those spans; the sum is the number of chunks
    sizes: tuple[int, ...]
    bounds: "SpanBounds"  # offsets of the spans, for the kernels of flash-linear-attention

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> "SpanLayout":
        """Return the layout of spans that follow each other and have these numbers of tokens."""
        tokens = np.array(lengths, np.int64)
        chunks = -(-tokens // CHUNK)
        spans = [np.flatnonzero(chunks > i) for i in range(int(chunks.max(initial=0)))]
        # Number the chunks step by step. A token's index in the chunks (`slots_T`) follows from its
        # chunk's number and its position in the chunk.
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
        """Return where the chunks and rows of the spans with these numbers are.

        Args:
            spans: Numbers of spans, ascending.
        """
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
        """Return the indices of the rows that belong to these spans, span by span."""
        ends = np.cumsum(np.array(self.lengths, np.int64))
        begins = ends - np.array(self.lengths, np.int64)
        return ranges(begins[spans], ends[spans])

    def chunked(self, rows_T: Tensor) -> Tensor:
        """Arrange rows of T tokens, [T, H, ...], in N chunks of C tokens, [N, H, C, ...].

        The rest of a span's last chunk is filled with zeros.
        """
        shape = rows_T.shape[1:]
        places = rows_T.new_zeros(self.num_chunks * CHUNK, *shape)
        placed = places.index_copy(0, self.slots_T, rows_T)
        return placed.view(self.num_chunks, CHUNK, *shape).transpose(1, 2)


class SpanBounds(NamedTuple):
    """Offsets of spans that follow each other."""

    on_device: Tensor  # first row of each span, then the number of rows; shape [S + 1]
    on_host: Tensor  # a copy on the host, so that reading it never waits for the device

    @classmethod
    def of(cls, lengths: np.ndarray, device: torch.device | str) -> "SpanBounds":
        """Compute the offsets of spans that have these numbers of tokens."""
        bounds = np.append(0, np.cumsum(lengths)).astype(np.int64)
        return cls(_index(bounds, device), torch.from_numpy(bounds))


class SpanMembers(NamedTuple):
    """Some spans of a `SpanLayout`, renumbered from 0, and where to find their chunks and rows."""

    count: int  # number of selected spans
    # The chunks of the spans are processed in turns: first all first chunks, then all second ones.
    chunks: Tensor  # numbers of the selected spans' chunks in the layout, turn by turn
    steps: tuple[Tensor, ...]  # for each turn i the selected spans that have an i-th chunk
    sizes: tuple[int, ...]  # for each turn the number of those spans
    rows: Tensor  # indices of the selected spans' rows in the layout, span by span
    bounds: SpanBounds  # offsets of the spans within `rows`


class Summary(NamedTuple):
    """How each span changes the state before it: after = transition @ before + state."""

    transition_SHKK: Tensor
    state_SHKV: Tensor  # the state after each span if the state before the span were zero

    def after(self, state_SHKV: Tensor) -> Tensor:
        """Return the states after the spans, given the states before them."""
        return self.transition_SHKK @ state_SHKV + self.state_SHKV


class DeltaRule(Protocol):
    """The gated delta rule for given queries, keys, values and decays of packed spans.

    The states before the spans are passed to the methods later, so an implementation may compute
    everything else once, in advance.
    """

    def summaries(self, members: SpanMembers) -> Summary:
        """Return a summary of each span of `members`: how the span changes the state before it.

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
    """What can be computed of chunks before states are known (symbols: see the module docstring).

    The output of a chunk is reads @ (state before the chunk) + own. Shapes: N chunks, H heads, C
    tokens of a chunk, K and V dimensions of a key and a value.
    """

    reads_NHCK: Tensor  # exp(G) q - P W
    own_NHCV: Tensor  # P U, the part of the output that comes from the chunk's own tokens
    keys_NHCK: Tensor  # W, the solution of the triangular system for the keys
    values_NHCV: Tensor  # U, its solution for the values
    to_end_NHCK: Tensor  # K~, the keys with the decay up to the chunk's end
    decay_NH: Tensor  # exp(G_C), the decay of the state over the whole chunk

    def steps(self, of: SpanLayout | SpanMembers) -> Iterator["Chunks"]:
        """Yield the first chunk of every span as one `Chunks`, then the second ones, and so on.

        Args:
            of: Which chunks belong to which spans.
        """
        chunks = self
        if isinstance(of, SpanMembers):
            # Selections are used only to compute states. States do not depend on queries, so leave
            # out the two tensors that contain queries.
            none = of.chunks[:0]
            chosen = (none, none, *(of.chunks,) * 4)
            chunks = Chunks(*(x.index_select(0, i) for x, i in zip(self, chosen, strict=True)))
        sizes = list(of.sizes)
        parts = (x.split(sizes if x.shape[0] else [0] * len(sizes)) for x in chunks)
        return (Chunks(*of_step) for of_step in zip(*parts, strict=True))

    def after(self, state_NHKV: Tensor, *, values: bool = True) -> Tensor:
        """Return the states after the chunks, given the states before them.

        Args:
            state_NHKV: State before each of the N chunks.
            values: With False, leave out what the chunks' own values add to the state, so that the
                result is linear in the given state.
        """
        read = self.keys_NHCK @ state_NHKV
        new = self.values_NHCV - read if values else -read
        kept = self.decay_NH[..., None, None] * state_NHKV
        return kept + self.to_end_NHCK.transpose(-1, -2) @ new


def chunks_of(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, g_TH: Tensor, beta_TH: Tensor, layout: SpanLayout
) -> Chunks:
    """Compute everything about chunks that does not depend on states, in the dtype of the rows.

    Args:
        q_THK: Queries, normalised and scaled; T tokens, H heads of K channels.
        k_THK: Keys, normalised.
        v_THV: Values, of V channels.
        g_TH: Logarithm of the decay, at most 0.
        beta_TH: Fraction by which each token's value replaces the stored value.
        layout: Which rows form which span.
    """
    q, k, v, g, beta = (layout.chunked(x) for x in (q_THK, k_THK, v_THV, g_TH, beta_TH))
    # Decay from token j to token i of a chunk, for j <= i. Above the diagonal the exponential could
    # overflow, so mask it. On the diagonal use the constant 1: computed as an exponential, its
    # gradients would cancel and leave only rounding errors.
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
    """The gated delta rule in plain PyTorch.

    It computes most of the work for all chunks at once, and then the states chunk after chunk.
    """

    chunks: Chunks
    layout: SpanLayout

    def summaries(self, members: SpanMembers) -> Summary:
        """Return a summary of each span of `members`: how the span changes the state before it."""
        chunks = self.chunks
        shape = (members.count, *chunks.keys_NHCK.shape[1::2])
        eye = torch.eye(shape[-1], dtype=chunks.decay_NH.dtype, device=chunks.decay_NH.device)
        transition = eye.expand(*shape, shape[-1])
        state = chunks.decay_NH.new_zeros(*shape, chunks.values_NHCV.shape[-1])
        # Add an empty sum, so that the result depends on the rows even if no spans are selected.
        # All ranks must run the same backward pass, because it contains collectives.
        state = state + chunks.values_NHCV[:0].sum()
        for spans, of_step in zip(members.steps, chunks.steps(members), strict=False):
            changed = of_step.after(transition.index_select(0, spans), values=False)
            transition = transition.index_copy(0, spans, changed)
            state = state.index_copy(0, spans, of_step.after(state.index_select(0, spans)))
        return Summary(transition, state)

    def outputs(self, state_SHKV: Tensor | None = None) -> Tensor:
        """Return the outputs of all tokens, [T, H, V].

        Args:
            state_SHKV: State before each span. None means zeros.
        """
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
            # There are no rows, but let the result depend on the inputs, because all ranks must run
            # the same backward pass.
            return torch.cat([chunks.own_NHCV.reshape(0, heads, values), state_SHKV[:0].sum(2)])
        rows = torch.cat(parts).transpose(1, 2).reshape(-1, heads, values)
        return rows.index_select(0, layout.slots_T)


class PackagedRule(NamedTuple):
    """The gated delta rule by flash-linear-attention's kernels (`wlb.kernels.linear_package`).

    Spans that need a summary are computed twice: once for the summary, once for the outputs.
    """

    q_TGK: Tensor  # queries of G key heads, normalised and scaled
    k_TGK: Tensor  # keys, normalised
    v_THV: Tensor  # values
    g_TH: Tensor  # logarithm of each token's decay
    beta_TH: Tensor  # fraction by which each token's value replaces the stored value
    layout: SpanLayout

    def summaries(self, members: SpanMembers) -> Summary:
        """Return a summary of each span of `members`: how the span changes the state before it."""
        keys = self.k_TGK.shape[-1]
        heads, values = self.v_THV.shape[1:]
        k, v, g, beta = (
            x.index_select(0, members.rows)
            for x in (self.k_TGK, self.v_THV, self.g_TH, self.beta_TH)
        )
        # The rule never mixes columns of the state, so one call computes both parts of a summary.
        # The first V columns have the values and begin at zero; at the end they are the summary's
        # state. K more columns have zeros as values and begin as the identity; at the end they are
        # the summary's transition.
        eye = torch.eye(keys, dtype=torch.float32, device=v.device)
        eye = eye.expand(members.count, heads, keys, keys)
        begin = torch.cat([eye.new_zeros(*eye.shape[:3], values), eye], -1)
        if not members.rows.shape[0]:
            # The kernels do not accept zero rows. Let the result depend on the rows nevertheless,
            # so that all ranks run the same backward pass.
            end = begin + v.sum()
        else:
            wide = torch.cat([v, v.new_zeros(*v.shape[:2], keys)], -1)
            rows = (k, k, wide, g, beta)
            _, end = gated_delta_rule(rows, *members.bounds, begin)
        state, transition = end.split([values, keys], -1)
        return Summary(transition, state)

    def outputs(self, state_SHKV: Tensor | None = None) -> Tensor:
        """Return the outputs of all tokens, [T, H, V].

        Args:
            state_SHKV: State before each span. None means zeros.
        """
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
    """Return the gated delta rule over packed spans, in the chosen implementation.

    Args:
        rows: Queries and keys [T, G, K], normalised, and queries also scaled; values [T, H, V];
            logarithms of decays [T, H], at most 0; fractions beta [T, H]. All are in float32 or
            float64. G, the number of key heads, divides H.
        layout: Which rows form which span.
        backend: The implementation; not `auto`.
        dtype: Dtype to which queries, keys and values are converted for the package
            flash-linear-attention. The torch implementation computes in the dtype of `rows`.
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

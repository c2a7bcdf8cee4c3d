"""What spans of linear layers find before them, where context parallelism cuts documents.

Two exchanges a layer, by the plan (`wlb.plan.rank_summaries`), so that no rank asks another for a
size: the latest rows for the convolution, and then the summaries of cut spans, which a rank
composes from the document's start on. Gradients return the same way. Sums of gradients are made in
an order that the plan gives, so that their bits repeat.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from wlb.kernels.segments import copy_to_device
from wlb.model import LinearRows
from wlb.model.delta_rule import DeltaRule, SpanLayout, SpanMembers
from wlb.plan import IntArray, RankSummaries, RowsOf
from wlb.spec import LinearBackend

_collectives = torch.ops._c10d_functional


class _SharedRows(NamedTuple):
    """`RowsOf` on the device."""

    kept: Tensor  # own rows of the pool
    sent: tuple[Tensor, ...]  # rows of `kept` that go to each rank; no rank has a row twice
    received: list[int]  # rows that come from each rank

    @classmethod
    def of(cls, rows: RowsOf, device: torch.device) -> "_SharedRows":
        ends = np.cumsum(rows.splits)
        sent = [rows.sent[end - n : end] for end, n in zip(ends, rows.splits, strict=True)]
        return cls(
            _index(rows.kept, device),
            tuple(_index(of_rank, device) for of_rank in sent),
            rows.received.tolist(),
        )

    def filled(self, kept: Tensor, group: str) -> Tensor:
        """The pool of these own rows: with the rows that arrive behind them.

        Every rank of the group takes part, those that send and receive nothing too.
        """
        flat: Tensor = _Exchange.apply(kept.flatten(1), self, group)  # pyright: ignore[reportAssignmentType]
        return flat.view(-1, *kept.shape[1:])


class _Exchange(torch.autograd.Function):
    """Own rows and those that arrive, all-to-all; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, pool: _SharedRows, group: str) -> Tensor:
        ctx.pool, ctx.group, ctx.num_kept = pool, group, kept.shape[0]
        sent = kept.index_select(0, torch.cat(pool.sent))
        splits = [index.shape[0] for index in pool.sent]
        return torch.cat([kept, _all_to_all(sent, pool.received, splits, group)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        pool: _SharedRows = ctx.pool
        splits = [index.shape[0] for index in pool.sent]
        back = _all_to_all(grads[0][ctx.num_kept :], splits, pool.received, ctx.group)
        grad = grads[0][: ctx.num_kept].clone()
        # Rank by rank, in which no row is twice: the order of a sum is that of the ranks.
        for index, part in zip(pool.sent, back.split(splits), strict=True):
            grad.index_add_(0, index, part)
        return grad, None, None


def _all_to_all(rows: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
    made = _collectives.all_to_all_single(rows.contiguous(), received, sent, group)
    return _collectives.wait_tensor(made)


class _Composition(NamedTuple):
    """How a rank composes the summaries of its documents' spans, one after the other.

    Documents with more spans before the last one here come first; step i composes the i-th summary
    of those that have one. Each step begins with states of which some are those before a span.
    """

    read: Tensor  # places in the pool of all summaries, step by step
    sizes: list[int]  # documents of each step
    reads: tuple[Tensor, ...]  # documents whose states before each step are those before a span
    state_of: Tensor  # of each span, its place among the states that were read; 0: zeros

    @classmethod
    def of(cls, found: IntArray, num_spans: int, device: torch.device) -> "_Composition":
        """found: `RowsOf.found` of summaries. num_spans: with a last one of padding, if any."""
        count = (found >= 0).sum(axis=1)
        cut = np.flatnonzero(count)
        # The first summary of a document names it; its last span here has read all others' too.
        names, document = np.unique(found[cut, 0] if cut.size else cut, return_inverse=True)
        most = np.zeros(names.size, np.int64)
        np.maximum.at(most, document, count[cut])
        rank_of = np.empty(names.size, np.int64)
        rank_of[np.argsort(-most, kind="stable")] = np.arange(names.size)
        document = rank_of[document]
        last = np.empty(names.size, np.int64)
        is_last = count[cut] == most[np.argsort(rank_of)][document]
        last[document[is_last]] = cut[is_last]
        ordered = count[last]
        sizes = [int((ordered > step).sum()) for step in range(int(ordered.max(initial=0)))]
        read = [found[last[:size], step] for step, size in enumerate(sizes)]
        # Spans by the number of summaries before them, that is, by the step that they precede.
        reads = [document[count[cut] == step] for step in range(1, len(sizes) + 1)]
        order = np.argsort(count[cut], kind="stable")
        state_of = np.zeros(num_spans, np.int64)
        state_of[cut[order]] = 1 + np.arange(cut.size)
        return cls(
            _index(np.concatenate([np.zeros(0, np.int64), *read]), device),
            sizes,
            tuple(_index(of_step, device) for of_step in reads),
            _index(state_of, device),
        )

    def states(self, pool: Tensor, num_keys: int) -> Tensor:
        """The state before each span [S, H, K, V], from summaries [N, H, K, K + V]."""
        parts = pool.index_select(0, self.read).split(self.sizes)
        nothing = pool.new_zeros(1, *pool.shape[1:3], pool.shape[3] - num_keys)
        found = [nothing]
        state = nothing.expand(self.sizes[0] if self.sizes else 0, *nothing.shape[1:])
        for part, spans in zip(parts, self.reads, strict=True):
            transition, own = part.split([num_keys, part.shape[-1] - num_keys], -1)
            state = transition @ state[: part.shape[0]] + own
            found.append(state.index_select(0, spans))
        # The empty sum makes the pool part of the graph also where nothing reads it: other ranks
        # wait for its gradients.
        return torch.cat(found).index_select(0, self.state_of) + pool[:0].sum()


class SpansBefore:
    """`wlb.model.delta_net.Before` over a CP group.

    Args:
        made: This rank's part of the plan.
        num_rows: Rows of the rank; those behind its spans are padding, a span of their own.
        group: The CP group.
        device: Where the rows are.
    """

    def __init__(
        self, made: RankSummaries, num_rows: int, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.layout = span_layout(made, num_rows, device)
        self._group = group.group_name
        num_spans = len(self.layout.lengths)
        # The convolution's rows: places in the pool, and behind it a row of zeros.
        self._latest = _SharedRows.of(made.latest, device)
        found = np.full((num_spans, made.latest.found.shape[1]), -1, np.int64)
        found[: made.latest.found.shape[0]] = made.latest.found
        num_pool = made.latest.kept.size + int(made.latest.received.sum())
        self._found = tuple(_index(column, device) for column in (found % (num_pool + 1)).T)
        # Summaries: of which spans they are made, and how they are composed.
        self._before = _SharedRows.of(made.before, device)
        self._made: SpanMembers = self.layout.members(made.before.kept)
        self._composed = _Composition.of(made.before.found, num_spans, device)

    def rows(self, rows_TD: Tensor, layout: SpanLayout, count: int) -> Tensor:
        """The latest rows before each span [S, count, D], zeros where the document begins."""
        assert len(self._found) == count, "the plan was made for another convolution"
        pool = self._latest.filled(rows_TD.index_select(0, self._latest.kept), self._group)
        pool = torch.cat([pool, pool.new_zeros(1, pool.shape[1])])
        # Column by column, in which no row is twice, but for the zeros.
        return torch.stack([pool.index_select(0, column) for column in self._found], 1)

    def states(self, rule: DeltaRule, layout: SpanLayout) -> Tensor:
        """The state before each span [S, H, K, V]."""
        made = rule.summaries(self._made)
        pool = self._before.filled(torch.cat(made, -1), self._group)
        return self._composed.states(pool, made.transition_SHKK.shape[-1])

    @property
    def tensors(self) -> list[Tensor]:
        """All index tensors, for callers that load them on a stream of their own."""
        pools = [t for pool in (self._latest, self._before) for t in (pool.kept, *pool.sent)]
        composed = [self._composed.read, *self._composed.reads, self._composed.state_of]
        members = [*self._made.steps, self._made.chunks, self._made.rows]
        members.append(self._made.bounds.on_device)
        return [*pools, *self._found, *composed, *members, *layout_tensors(self.layout)]


def linear_rows(
    made: RankSummaries,
    num_rows: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
    backend: LinearBackend = LinearBackend.TORCH,
) -> tuple[LinearRows, list[Tensor]]:
    """What linear layers take of a micro-batch, and its index tensors.

    Args:
        made: This rank's part of the plan.
        num_rows: Rows of the rank, with padding.
        group: The CP group; None: one rank, whose spans are whole documents.
        device: Where the rows are.
        backend: What computes the recurrence, not `auto`.
    """
    if group is None:
        layout = span_layout(made, num_rows, device)
        return LinearRows(layout, None, backend), layout_tensors(layout)
    before = SpansBefore(made, num_rows, group, device)
    return LinearRows(before.layout, before, backend), before.tensors


def span_layout(made: RankSummaries, num_rows: int, device: torch.device) -> SpanLayout:
    """The spans of a rank; its padding is one more."""
    padding = num_rows - int(made.lengths.sum())
    return SpanLayout.of([*made.lengths.tolist(), *[padding] * (padding > 0)], device)


def layout_tensors(layout: SpanLayout) -> list[Tensor]:
    """Index tensors of a layout."""
    return [layout.slots_T, *layout.steps, layout.bounds.on_device]


def _index(values: IntArray, device: torch.device) -> Tensor:
    return copy_to_device(np.ascontiguousarray(values), device)

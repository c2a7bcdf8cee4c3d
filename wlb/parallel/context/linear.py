"""Context parallelism of linear attention: gives each span what it needs of the tokens before it.

A span that starts inside a document needs two things from the tokens before it, so each layer has
two exchanges. The first one brings the last few rows before the span, which the convolution reads.
The second one brings the summaries of the document's earlier spans, from which the rank computes
the state before its span. The plan (`wlb.plan.rank_summaries`) fixes all sizes, so ranks exchange
no shapes. Gradients return the same way and are added in a fixed order of ranks, so results are the
same to the bit in every run.
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
    """Index tensors of an exchange of rows between CP ranks: `RowsOf` on the device.

    A span finds the rows that it needs in a **pool**, a tensor of rows: first the local rows that a
    span of any rank needs, then the rows received from other ranks.
    """

    kept: Tensor  # indices of the local rows that are in the pool
    # for each rank, the indices of the entries of `kept` that are sent to it, each index once
    sent: tuple[Tensor, ...]
    received: list[int]  # number of rows that come from each rank

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
        """Return the local rows `kept`, followed by the rows that other ranks send (the pool).

        This is a collective call: ranks that neither send nor receive must call it too. `group` is
        the name of the CP group.
        """
        flat: Tensor = _Exchange.apply(kept.flatten(1), self, group)  # pyright: ignore[reportAssignmentType]
        return flat.view(-1, *kept.shape[1:])


class _Exchange(torch.autograd.Function):
    """Exchanges rows between CP ranks: returns the local rows, then those that were received.

    Backward sends the gradients of received rows back to the ranks that have the rows.
    """

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
        # Add one rank's gradients at a time. No index repeats within a rank, so the order of
        # additions is fixed, and so is the result to the bit.
        for index, part in zip(pool.sent, back.split(splits), strict=True):
            grad.index_add_(0, index, part)
        return grad, None, None


def _all_to_all(rows: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
    made = _collectives.all_to_all_single(rows.contiguous(), received, sent, group)
    return _collectives.wait_tensor(made)


class _Composition(NamedTuple):
    """How a rank computes the state before each of its spans from the summaries of earlier spans.

    All documents advance together: step i applies the i-th summary of a document to the document's
    state. Documents with fewer summaries take no part in the step. Documents are sorted by their
    number of summaries, most first. So the documents of each step are the first ones in this order.
    After each step, the states that are needed before some span are copied into a list, which
    begins with a state of zeros.
    """

    read: Tensor  # indices of the summaries that step 0 applies, then of those of step 1, ...
    sizes: list[int]  # number of documents that take part in each step
    reads: tuple[Tensor, ...]  # for each step the documents whose state is copied after it
    state_of: Tensor  # for each span the index of its state in the list of copied states

    @classmethod
    def of(cls, found: IntArray, num_spans: int, device: torch.device) -> "_Composition":
        """Make the index tensors, given which summaries each span needs.

        Args:
            found: For each span, indices of the summaries that it needs, in the order of tokens
                (`RowsOf.found`). They are the summaries of earlier spans of its document. An index
                counts this rank's summaries first, then the received ones. Shape [spans, most
                summaries of a span]; -1 fills rows of spans that need fewer.
            num_spans: Number of spans of the rank, including the span of padding if there is one.
            device: Where the index tensors are copied to.
        """
        count = (found >= 0).sum(axis=1)
        cut = np.flatnonzero(count)
        # A document is identified by the index of its first summary. The last of a document's spans
        # on this rank needs every summary that the others need.
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
        # The state before a span is ready after as many steps as there are summaries before the
        # span. Group spans by this number.
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
        """Return the state before each of the rank's S spans, [S, H, K, V].

        H is the number of heads. A state maps the K channels of a key to the V channels of a value.

        Args:
            pool: Summaries of spans, [num_summaries, H, K, K + V]. A summary has a transition
                matrix [K, K] and the state [K, V] that its span adds.
            num_keys: K, the columns of the transition matrix.
        """
        parts = pool.index_select(0, self.read).split(self.sizes)
        nothing = pool.new_zeros(1, *pool.shape[1:3], pool.shape[3] - num_keys)
        found = [nothing]
        state = nothing.expand(self.sizes[0] if self.sizes else 0, *nothing.shape[1:])
        for part, spans in zip(parts, self.reads, strict=True):
            transition, own = part.split([num_keys, part.shape[-1] - num_keys], -1)
            state = transition @ state[: part.shape[0]] + own
            found.append(state.index_select(0, spans))
        # Adding an empty sum keeps the pool in autograd's graph even if no span reads it. Otherwise
        # this rank would not join the exchange of gradients, and other ranks would wait for it.
        return torch.cat(found).index_select(0, self.state_of) + pool[:0].sum()


class SpansBefore:
    """Gives linear-attention layers the rows and states before their spans, over a CP group.

    Implements `wlb.model.delta_net.Before`.

    Args:
        made: Which rows and summaries this rank sends and receives.
        num_rows: Rows of the rank. The rows after its spans are padding, which counts as one more
            span.
        group: The CP group.
        device: Where the rows are.
    """

    def __init__(
        self, made: RankSummaries, num_rows: int, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.layout = span_layout(made, num_rows, device)
        self._group = group.group_name
        num_spans = len(self.layout.lengths)
        # 1. Find in the pool the rows that the convolution needs before each span. A row of zeros
        # is appended to the pool, and -1 (no row before the span) becomes the index of that row.
        self._latest = _SharedRows.of(made.latest, device)
        found = np.full((num_spans, made.latest.found.shape[1]), -1, np.int64)
        found[: made.latest.found.shape[0]] = made.latest.found
        num_pool = made.latest.kept.size + int(made.latest.received.sum())
        self._found = tuple(_index(column, device) for column in (found % (num_pool + 1)).T)
        # 2. Find which spans this rank summarises, and how it composes the summaries it receives.
        self._before = _SharedRows.of(made.before, device)
        self._made: SpanMembers = self.layout.members(made.before.kept)
        self._composed = _Composition.of(made.before.found, num_spans, device)

    def rows(self, rows_TD: Tensor, layout: SpanLayout, count: int) -> Tensor:
        """For each of S spans, return the `count` rows before it in its document, [S, count, D].

        Rows that would lie before the document's beginning are zero.

        Args:
            rows_TD: The convolution's input on this rank: T rows of D channels.
            layout: Unused, because the plan has fixed where spans are.
            count: Number of earlier rows that the convolution reads for each row.
        """
        assert len(self._found) == count, "the plan was made for another convolution"
        pool = self._latest.filled(rows_TD.index_select(0, self._latest.kept), self._group)
        pool = torch.cat([pool, pool.new_zeros(1, pool.shape[1])])
        # Select one column at a time. Within a column no row repeats (except the row of zeros), so
        # the order in which backward adds gradients is fixed.
        return torch.stack([pool.index_select(0, column) for column in self._found], 1)

    def states(self, rule: DeltaRule, layout: SpanLayout) -> Tensor:
        """Exchange summaries between CP ranks, and return the state before each span, [S, H, K, V].

        Args:
            rule: Computes the summaries of this rank's spans.
            layout: Unused, because the plan has fixed where spans are.
        """
        made = rule.summaries(self._made)
        pool = self._before.filled(torch.cat(made, -1), self._group)
        return self._composed.states(pool, made.transition_SHKK.shape[-1])

    @property
    def tensors(self) -> list[Tensor]:
        """All index tensors, for callers that must record them on the stream that reads them."""
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
    """Return the inputs of linear-attention layers for a micro-batch, and their device tensors.

    Args:
        made: Which rows and summaries this rank sends and receives.
        num_rows: Rows of the rank, with padding.
        group: The CP group. None means one rank, whose spans are whole documents.
        device: Where the rows are.
        backend: The implementation of the recurrence; not `auto`.
    """
    if group is None:
        layout = span_layout(made, num_rows, device)
        return LinearRows(layout, None, backend), layout_tensors(layout)
    before = SpansBefore(made, num_rows, group, device)
    return LinearRows(before.layout, before, backend), before.tensors


def span_layout(made: RankSummaries, num_rows: int, device: torch.device) -> SpanLayout:
    """Return the layout of a rank's spans. Padding rows, if there are any, form a last span.

    Args:
        made: What the rank sends and receives, with the lengths of its spans.
        num_rows: Rows of the rank, padding included.
        device: Where the layout's tensors are made.
    """
    padding = num_rows - int(made.lengths.sum())
    return SpanLayout.of([*made.lengths.tolist(), *[padding] * (padding > 0)], device)


def layout_tensors(layout: SpanLayout) -> list[Tensor]:
    """Return the device tensors of a layout, leaving out the tensor that is on the host."""
    return [layout.slots_T, *layout.steps, layout.bounds.on_device]


def _index(values: IntArray, device: torch.device) -> Tensor:
    return copy_to_device(np.ascontiguousarray(values), device)

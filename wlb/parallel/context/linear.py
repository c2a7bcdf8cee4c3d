"""What spans of linear layers find before them, where context parallelism cuts documents.

Two exchanges a layer, by the plan (`wlb.plan.rank_summaries`), so that no rank asks another for a
size: the latest rows for the convolution, and then the spans' summaries, which a rank composes from
the document's start on. Gradients return the same way.
"""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from wlb.model.delta_rule import SpanLayout, Summary
from wlb.plan import RankSummaries, RowsOf

_collectives = torch.ops._c10d_functional


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows whose gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
        ctx.splits = sent, received, group
        return _all_to_all(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], *ctx.splits), None, None, None


def _all_to_all(rows: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
    made = _collectives.all_to_all_single(rows.contiguous(), received, sent, group)
    return _collectives.wait_tensor(made)


class _Tied(torch.autograd.Function):
    """Returns the first tensor, whose backward pass then runs that of the second one too.

    A rank that reads nothing of what arrives would otherwise leave out the exchange of gradients,
    in which the others wait for it.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(other)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (other,) = ctx.saved_tensors
        return grads[0], torch.zeros_like(other)


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
        self._num_tokens = int(made.lengths.sum())
        padding = num_rows - self._num_tokens
        self.layout = SpanLayout.of([*made.lengths.tolist(), *[padding] * (padding > 0)], device)
        self._group, self._device = group.group_name, device
        self._latest, self._before = made.latest, made.before
        self._padding = padding > 0

    def rows(self, rows_TD: Tensor, layout: SpanLayout, count: int) -> Tensor:
        """The latest rows before each span [S, count, D], zeros where the document begins."""
        found = self._latest.found
        assert found.shape[1] == count, "the plan was made for another convolution"
        moved = self._moved(rows_TD, self._latest)
        pool = torch.cat([rows_TD[: self._num_tokens], moved])
        # Behind the pool stands a row of zeros, which -1 names.
        pool = torch.cat([pool, pool.new_zeros(1, pool.shape[1])])
        index = self._index(found.reshape(-1) % pool.shape[0])
        latest = pool.index_select(0, index).view(*found.shape, rows_TD.shape[1])
        return _Tied.apply(self._with_padding(latest), moved)

    def states(self, made: Summary) -> Tensor:
        """The state before each span [S, H, K, V]."""
        num_spans = self._before.found.shape[0]
        flat = torch.cat([made.transition_SHKK, made.state_SHKV], -1)[:num_spans]
        moved = self._moved(flat, self._before)
        pool = torch.cat([flat, moved])
        keys = made.transition_SHKK.shape[-1]
        state = torch.zeros_like(made.state_SHKV[:num_spans])
        # Spans with fewer spans before them are done earlier.
        for column in self._before.found.T:
            spans = np.flatnonzero(column >= 0)
            at = self._index(spans)
            of = pool.index_select(0, self._index(column[spans]))
            after = of[..., :keys] @ state.index_select(0, at) + of[..., keys:]
            state = state.index_copy(0, at, after)
        return _Tied.apply(self._with_padding(state), moved)

    def _moved(self, rows: Tensor, of: RowsOf) -> Tensor:
        """Rows of other ranks, all-to-all; every rank of the group takes part."""
        flat = rows.flatten(1).index_select(0, self._index(of.sent))
        made = _Exchange.apply(flat, of.received.tolist(), of.splits.tolist(), self._group)
        return made.view(-1, *rows.shape[1:])

    def _with_padding(self, of_spans: Tensor) -> Tensor:
        """Zeros for the span of padding, if there is one."""
        if not self._padding:
            return of_spans
        return torch.cat([of_spans, of_spans.new_zeros(1, *of_spans.shape[1:])])

    def _index(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

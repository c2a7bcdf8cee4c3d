"""Expert parallelism's all-to-alls of rows, in stages: one stage travels while another is computed.

The host must know how many rows travel between each pair of ranks. It reads these numbers from the
GPU once per layer and micro-batch. Meanwhile the GPU sorts rows by expert and computes shared
experts. Backward sends gradients the same way and reads nothing from the GPU.

Stage s has the s-th part of every rank's experts, so each expert's rows are computed in one call,
in the order (expert, source rank, token). All ranks of an EP group make the same calls, even if
they have no rows.

Shapes: R ranks of an EP group, S stages, H experts of a rank, P rows of a stage; other letters as
in `wlb.model.expert_layer`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from wlb.model.expert_dispatch import StageRows, inverse_of, sorted_by_expert
from wlb.parallel.collectives import start_all_to_all, wait

Numbers = list[list[int]]
"""Numbers of rows by stage and rank: for each stage a list with one number for each rank."""


class RowsBetween(NamedTuple):
    """How many rows this rank exchanges with each rank of its EP group, in each stage."""

    received: Numbers  # for each stage, the number of rows from each rank
    sent: Numbers  # for each stage, the number of rows to each rank

    def bounds(self) -> tuple[list[slice], list[slice]]:
        """Return, for each stage, its slice of all received rows, and its slice of all sent rows.

        All received rows are sorted by stage, and so are all sent rows.
        """
        received, sent = (
            [slice(*pair) for pair in pairwise(accumulate(map(sum, numbers), initial=0))]
            for numbers in self
        )
        return received, sent


def rows_between(numbers_2SR: Tensor, *, rank: int) -> RowsBetween:
    """Convert a layer's numbers of received and sent rows from a tensor to lists.

    Args:
        numbers_2SR: Numbers of received rows, then of sent rows, for each stage of the transfers
            and each rank of the group; a tensor on the host.
        rank: This rank in the group. Unused here; `wlb.rehearse`, whose tensors have no values,
            replaces this function by one that needs it.
    """
    received, sent = numbers_2SR.numpy().tolist()
    return RowsBetween(received, sent)


_ALIGNMENT = 16
"""Bytes that are added to a row to carry its score.

A score needs fewer, but kernels copy rows fastest if their sizes are multiples of 16 bytes.
"""


def _select(x: Tensor, index_P: Tensor, scores_P: Tensor | None) -> Tensor:
    """Return selected rows of x with their scores appended, so that both travel in one all-to-all.

    Args:
        x: Rows.
        index_P: Which rows to select.
        scores_P: Score of each selected row; its bits are stored in extra columns. With None no
            columns are added.
    """
    if scores_P is None:
        return x.index_select(0, index_P)
    width = x.shape[1]
    out = x.new_empty(index_P.shape[0], width + _ALIGNMENT // x.element_size())
    torch.index_select(x, 0, index_P, out=out[:, :width])
    bits = scores_P[:, None].view(x.dtype)
    out[:, width : width + bits.shape[1]] = bits
    return out


def _apart(packed: Tensor, score_type: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """Separate rows, returned as a view, from the scores in their extra columns (see `_select`).

    Args:
        packed: Rows with their scores in extra columns.
        score_type: Dtype of the scores. None if rows have no scores.
    """
    if score_type is None:
        return packed, None
    width = packed.shape[1] - _ALIGNMENT // packed.element_size()
    num = score_type.itemsize // packed.element_size()
    bits = packed[:, width : width + num].contiguous()
    return packed[:, :width], bits.view(score_type).flatten()


class StagedTrip:
    """One round trip of rows to experts on other ranks, in stages, by all-to-alls.

    Implements `wlb.model.expert_dispatch.Trip`. Buffers that are being sent need no reference here:
    the result of an all-to-all keeps its input alive until somebody waits for the result.

    The trip has no reference to the `StagedWay` that contains it. In a reference cycle, the trip's
    tensors would stay in memory until the next garbage collection, which a run starts only every 50
    steps.
    """

    def __init__(self, group: dist.ProcessGroup, choice: "_Choice") -> None:
        self._group, self._choice = group, choice
        self._leaving: Tensor | None = None
        self._score_type: torch.dtype | None = None
        self._arriving: list[Tensor | None] = []
        self._whole: tuple[Tensor, Tensor | None] | None = None
        self._back: list[tuple[Tensor, torch.dtype | None]] = []

    def send(self, x: Tensor, rows_N: Tensor, scores_N: Tensor | None = None) -> None:
        """Copy the rows that `start` will send, and their scores, into new tensors.

        Args:
            x: Rows to select from.
            rows_N: Index in x of each of the N rows that travel, in the order of `Way.order_N`.
            scores_N: Score of each of these rows. With None no scores are sent.
        """
        self._leaving = _select(x, rows_N, scores_N)
        self._score_type = None if scores_N is None else scores_N.dtype

    def start(self) -> None:
        """Start the all-to-alls of all stages, unless they have started."""
        if self._leaving is None:
            return
        choice = self._choice
        for rows, received, sent in zip(choice.sent, *choice.known, strict=True):
            arriving = start_all_to_all(self._leaving[rows], received, sent, self._group)
            self._arriving.append(arriving)
        self._leaving = None

    def arrived(self, stage: int) -> tuple[Tensor, Tensor | None]:
        """Wait for a stage's rows and scores, and return them sorted by expert.

        The scores are None if `send` got none.
        """
        arriving, self._arriving[stage] = self._arriving[stage], None
        assert arriving is not None
        arriving, order_P = wait(arriving), self._choice.order_of(stage)
        x, scores_P = _apart(arriving, self._score_type)
        if scores_P is not None:
            scores_P = scores_P.index_select(0, order_P)
        if len(self._arriving) == 1:
            self._whole = x.index_select(0, order_P), scores_P
            return self._whole
        rows = self._choice.stages[stage].rows
        if self._whole is None:
            num = self._choice.stages[-1].rows.stop
            scores_M = None if scores_P is None else scores_P.new_empty(num)
            self._whole = x.new_empty(num, x.shape[1]), scores_M
        x_MC, scores_M = self._whole
        if scores_M is not None and scores_P is not None:
            scores_M[rows] = scores_P
        return torch.index_select(x, 0, order_P, out=x_MC[rows]), scores_P

    def whole(self) -> tuple[Tensor, Tensor | None]:
        """Return the received rows and scores of all stages; drop this object's references."""
        assert self._whole is not None
        whole, self._whole, self._arriving = self._whole, None, []
        return whole

    def answer(self, stage: int, x: Tensor, scores: Tensor | None = None) -> None:
        """Start to send a stage's results back.

        Args:
            stage: Number of the stage.
            x: Results, sorted by expert as `arrived` returned the rows.
            scores: Gradients of scores. None in forward.
        """
        inverse_P = self._choice.inverse_of(stage)
        if scores is not None:
            scores = scores.index_select(0, inverse_P)
        # On the way back a rank sends as many rows as it received, and the other way round.
        sent, received = (numbers[stage] for numbers in self._choice.known)
        leaving = _select(x, inverse_P, scores)
        back = start_all_to_all(leaving, received, sent, self._group)
        self._back.append((back, None if scores is None else scores.dtype))

    def answers(self, stage: int) -> tuple[Tensor, Tensor | None]:
        """Wait for the results that experts send back in a stage.

        Returns:
            The rows. In backward also the gradients of the rows' scores; in forward None.
        """
        back, score_type = self._back.pop(0)
        return _apart(wait(back), score_type)


@dataclass(slots=True, kw_only=True)
class _Choice:
    """Which rows of a micro-batch go to which experts of a layer.

    The layer's first forward pass and its recomputation in backward share this record. The fields
    from `between` to the end are set when the host has read the numbers of rows.
    """

    order_N: Tensor  # order in which copies of rows are sent, as in `Way`
    counts_E: Tensor  # number of this rank's rows for each expert
    arriving_RH: Tensor  # number of rows from each rank for each of this rank's experts
    # Numbers of received and sent rows, on the host. None after they are read, because pinned
    # memory is scarce.
    numbers_2SR: Tensor | None
    copied: torch.cuda.Event | None  # recorded after the copy to `numbers_2SR`; None on the CPU
    between: RowsBetween | None = None  # numbers of rows from and to each rank
    sent: list[slice] = field(default_factory=list[slice])  # each stage's slice of `order_N`
    # for each stage, which of this rank's experts compute which arriving rows
    stages: list[StageRows] = field(default_factory=list[StageRows])
    order_M: Tensor | None = None  # the order that sorts arriving rows by expert
    inverse_M: Tensor | None = None  # the inverse of `order_M`
    # for each of this rank's experts, the index after its last row among the sorted arriving rows
    ends_E: Tensor | None = None

    @property
    def known(self) -> RowsBetween:
        """Numbers of rows from and to each rank. They are known once the host has read them."""
        assert self.between is not None, "rows may travel only after their numbers are read"
        return self.between

    def order_of(self, stage: int) -> Tensor:
        """Return the order that sorts a stage's arriving rows by expert.

        Indices count from the stage's first row.
        """
        assert self.order_M is not None
        rows = self.stages[stage].rows
        return _within(self.order_M[rows], rows)

    def inverse_of(self, stage: int) -> Tensor:
        """Return the order that puts a stage's sorted rows back in the order of their arrival."""
        assert self.inverse_M is not None
        rows = self.stages[stage].rows
        return _within(self.inverse_M[rows], rows)


class StagedWay:
    """The routing of a micro-batch's rows to experts on other ranks, in stages.

    Implements `wlb.model.expert_dispatch.Way`.

    Args:
        group: The EP group.
        choice: Which rows go to which experts.
        first: None for the layer's first forward pass. For a recomputation of the layer, the
            routing of the first pass.
    """

    def __init__(
        self, group: dist.ProcessGroup, choice: _Choice, first: "StagedWay | None" = None
    ) -> None:
        self.group, self._choice, self._first = group, choice, first
        self.counts_E, self.order_N = choice.counts_E, choice.order_N
        self.starts_late = False
        self.there, self.back = StagedTrip(group, choice), StagedTrip(group, choice)

    def begin(self) -> None:
        """Wait until the host knows how many rows each rank gets, and start to send the rows.

        When backward recomputes the layer, the numbers are known, so nothing is waited for. The
        call then also starts to send the gradients of the experts' outputs, which are needed next.
        """
        if self._first is not None:
            self.there.start()
            self._first.back.start()
            return
        received = self._read()
        self.there.start()
        # Compute the order that sorts arriving rows while the first stage's rows travel.
        self._arrange(received)

    def _read(self) -> list[slice]:
        """Wait until the host knows how many rows this rank exchanges with each rank.

        This is the only place where the host waits for the GPU: once per layer and micro-batch.

        Returns:
            For each stage of the exchange, its slice of the rows that arrive at this rank.
        """
        choice = self._choice
        if choice.copied is not None:
            choice.copied.synchronize()
            # `synchronize` made the host wait for the side stream. Make the current stream wait,
            # too.
            choice.copied.wait()
        assert choice.numbers_2SR is not None, "numbers of rows are read once"
        choice.between = rows_between(choice.numbers_2SR, rank=dist.get_rank(self.group))
        choice.numbers_2SR = choice.copied = None
        received, choice.sent = choice.between.bounds()
        return received

    def _arrange(self, received: Sequence[slice]) -> None:
        choice = self._choice
        arriving_RH = choice.arriving_RH
        num_ranks, num_experts = arriving_RH.shape
        each = num_experts // len(received)
        # Rows of a stage arrive by (source rank, expert). A stable sort by expert brings them into
        # the order (expert, source rank).
        expert_H = torch.arange(num_experts, device=arriving_RH.device)
        expert_SRP = expert_H.view(-1, 1, each).expand(-1, num_ranks, -1)
        arriving_SRP = arriving_RH.view(num_ranks, -1, each).transpose(0, 1)
        expert_M = expert_SRP.reshape(-1).repeat_interleave(
            arriving_SRP.reshape(-1), output_size=received[-1].stop
        )
        choice.order_M = expert_M.argsort(stable=True)
        choice.inverse_M = inverse_of(choice.order_M)
        choice.ends_E = arriving_RH.sum(0).cumsum(0).to(torch.int32)
        for i, rows in enumerate(received):
            experts = slice(i * each, (i + 1) * each)
            choice.stages.append(StageRows(experts, rows, _within(choice.ends_E[experts], rows)))

    def again(self) -> "StagedWay":
        """Return the routing for the layer's recomputation, which sends the same rows."""
        return StagedWay(self.group, self._choice, self)

    @property
    def sent(self) -> Sequence[slice]:
        """For each stage, the slice of `order_N` (copies of rows to send) that is sent in it."""
        return self._choice.sent

    @property
    def stages(self) -> Sequence[StageRows]:
        """For each stage, which of this rank's experts compute which rows."""
        return self._choice.stages

    @property
    def ends_E(self) -> Tensor:
        """For each of this rank's experts, the index after its last row, int32.

        The index is among the M rows that arrive at this rank, sorted by expert.
        """
        assert self._choice.ends_E is not None
        return self._choice.ends_E


def _within(places: Tensor, rows: slice) -> Tensor:
    """Convert `places`, indices among all rows, to indices within the slice `rows`."""
    return places - rows.start if rows.start else places


class ExpertAllToAll:
    """Routes rows to experts on all ranks of an EP group; each rank has equally many experts.

    Implements `wlb.model.expert_dispatch.ExpertExchange`.

    Args:
        group: The EP group.
        stages: Number of stages, a divisor of a rank's number of experts.
        side: A CUDA stream on which numbers of rows are copied to the host; None on the CPU.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, stages: int = 1, side: torch.cuda.Stream | None = None
    ) -> None:
        self.group, self.stages, self.side = group, stages, side

    def way(self, chosen_TK: Tensor, num_experts: int) -> StagedWay:
        """Exchange with all ranks how many rows each expert gets, and return the routing.

        Args:
            chosen_TK: Numbers of the experts that each row has chosen.
            num_experts: Number of experts of the layer, E.
        """
        size, stages = self.group.size(), self.stages
        if stages > 1:
            # Renumber experts by (stage, rank, expert of the rank), so that sorting by expert
            # also sorts by stage.
            every_E = torch.arange(num_experts, device=chosen_TK.device)
            place_E = every_E.view(stages, size, -1).transpose(0, 1).reshape(-1)
            chosen_TK = place_E[chosen_TK]
        order_N, ends_E = sorted_by_expert(chosen_TK, num_experts)
        placed_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        counts_E = placed_E.view(stages, size, -1).transpose(0, 1).reshape(-1)
        ones = [num_experts // size] * size
        arriving_E = start_all_to_all(counts_E, ones, ones, self.group)
        numbers_2SR, copied = self._to_host(arriving_E, counts_E)
        choice = _Choice(
            order_N=order_N,
            counts_E=counts_E,
            arriving_RH=arriving_E.view(size, -1),
            numbers_2SR=numbers_2SR,
            copied=copied,
        )
        return StagedWay(self.group, choice)

    def _to_host(
        self, arriving_E: Tensor, counts_E: Tensor
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """Wait for `arriving_E`, and copy the numbers of rows to the host.

        On a GPU the wait and the copy happen on the side stream, while the current stream computes.
        The returned event says when the copy is complete.

        Args:
            arriving_E: Number of rows from each rank for each of this rank's experts, still in
                transfer.
            counts_E: Number of rows that this rank sends to each expert.

        Returns:
            The numbers of received and sent rows by stage and rank, [2, S, R], and the event (None
            on the CPU).
        """
        if self.side is None:
            return self._numbers(wait(arriving_E), counts_E), None
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            # Only the side stream waits for the collective. The current stream will wait for the
            # event.
            numbers_2SR = self._numbers(wait(arriving_E), counts_E)
            copied = torch.cuda.Event()
            on_host = numbers_2SR.to("cpu", non_blocking=True)
            copied.record()
        return on_host, copied

    def _numbers(self, arriving_E: Tensor, leaving_E: Tensor) -> Tensor:
        both = torch.stack([arriving_E, leaving_E])
        return both.view(2, self.group.size(), self.stages, -1).sum(-1).transpose(1, 2).contiguous()

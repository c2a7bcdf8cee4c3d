"""All-to-alls of experts' rows in stages, each hidden behind the products of the one before.

The host reads numbers of rows once a micro-batch; meanwhile the GPU copies rows into their order
and computes shared experts. Backward takes the same way with gradients, and reads nothing. Stage s
has the s-th part of every rank's experts, so that each expert's rows are computed in one call, in
the order (expert, source rank, token). Ranks of a group make the same calls, also without rows.
Shapes: R ranks of a group, S stages, H experts a rank, P rows of a stage; else `model.experts`'.
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
"""Rows by stage and rank, [S, R]."""


class RowsBetween(NamedTuple):
    """Rows from and to each rank of a group."""

    received: Numbers
    sent: Numbers

    def bounds(self) -> tuple[list[slice], list[slice]]:
        """Each stage's rows among all that are received, and among all that are sent."""
        received, sent = (
            [slice(*pair) for pair in pairwise(accumulate(map(sum, numbers), initial=0))]
            for numbers in self
        )
        return received, sent


def rows_between(numbers_2SR: Tensor, *, rank: int) -> RowsBetween:
    """How many rows of a layer come from and go to each rank; numbers_2SR is on the host. rank: in
    the group; only for `wlb.rehearse`, whose tensors have no values and which replaces this.
    """
    received, sent = numbers_2SR.numpy().tolist()
    return RowsBetween(received, sent)


_ALIGNMENT = 16
"""Bytes that a score adds to its row: kernels move rows of such multiples fastest."""


def _select(x: Tensor, index_P: Tensor, scores_P: Tensor | None) -> Tensor:
    """Rows of x, each with the bits of its score behind it, so that both travel in one call."""
    if scores_P is None:
        return x.index_select(0, index_P)
    width = x.shape[1]
    out = x.new_empty(index_P.shape[0], width + _ALIGNMENT // x.element_size())
    torch.index_select(x, 0, index_P, out=out[:, :width])
    bits = scores_P[:, None].view(x.dtype)
    out[:, width : width + bits.shape[1]] = bits
    return out


def _apart(packed: Tensor, score_type: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """Rows of `_select`, as a view, and their scores; score_type: None without scores."""
    if score_type is None:
        return packed, None
    width = packed.shape[1] - _ALIGNMENT // packed.element_size()
    num = score_type.itemsize // packed.element_size()
    bits = packed[:, width : width + num].contiguous()
    return packed[:, :width], bits.view(score_type).flatten()


class StagedTrip:
    """A `Trip` of all stages. Results of all-to-alls keep what they read alive until waited for.

    It holds no reference to the `StagedWay` that holds it: in a reference cycle both would live
    until the next garbage collection, which comes 50 steps.
    """

    def __init__(self, group: dist.ProcessGroup, choice: "_Choice") -> None:
        self._group, self._choice = group, choice
        self._leaving: Tensor | None = None
        self._score_type: torch.dtype | None = None
        self._arriving: list[Tensor | None] = []
        self._whole: tuple[Tensor, Tensor | None] | None = None
        self._back: list[tuple[Tensor, torch.dtype | None]] = []

    def send(self, x: Tensor, rows_N: Tensor, scores_N: Tensor | None = None) -> None:
        self._leaving = _select(x, rows_N, scores_N)
        self._score_type = None if scores_N is None else scores_N.dtype

    def start(self) -> None:
        if self._leaving is None:
            return
        choice = self._choice
        for rows, received, sent in zip(choice.sent, *choice.known, strict=True):
            arriving = start_all_to_all(self._leaving[rows], received, sent, self._group)
            self._arriving.append(arriving)
        self._leaving = None

    def arrived(self, stage: int) -> tuple[Tensor, Tensor | None]:
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
        assert self._whole is not None
        whole, self._whole, self._arriving = self._whole, None, []
        return whole

    def answer(self, stage: int, x: Tensor, scores: Tensor | None = None) -> None:
        inverse_P = self._choice.inverse_of(stage)
        if scores is not None:
            scores = scores.index_select(0, inverse_P)
        # On the way back a rank sends as many rows as it received, and the reverse.
        sent, received = (numbers[stage] for numbers in self._choice.known)
        leaving = _select(x, inverse_P, scores)
        back = start_all_to_all(leaving, received, sent, self._group)
        self._back.append((back, None if scores is None else scores.dtype))

    def answers(self, stage: int) -> tuple[Tensor, Tensor | None]:
        back, score_type = self._back.pop(0)
        return _apart(wait(back), score_type)


@dataclass(slots=True, kw_only=True)
class _Choice:
    """Where a micro-batch's rows of a layer go; both forward passes of a recomputed layer have it.

    arriving_RH: rows for each of this rank's experts, by the rank they come from. numbers_2SR: on
    the host once `copied` has passed (None: already), and let go once read, as pinned memory is
    scarce. The rest is known then. order_M, inverse_M: from the order in which rows arrive to that
    by expert, and back.
    """

    order_N: Tensor
    counts_E: Tensor
    arriving_RH: Tensor
    numbers_2SR: Tensor | None
    copied: torch.cuda.Event | None
    between: RowsBetween | None = None
    sent: list[slice] = field(default_factory=list[slice])
    stages: list[StageRows] = field(default_factory=list[StageRows])
    order_M: Tensor | None = None
    inverse_M: Tensor | None = None
    ends_E: Tensor | None = None

    @property
    def known(self) -> RowsBetween:
        assert self.between is not None, "rows travel before their numbers are read"
        return self.between

    def order_of(self, stage: int) -> Tensor:
        """Order of a stage's rows by expert, from its first row on."""
        assert self.order_M is not None
        rows = self.stages[stage].rows
        return _within(self.order_M[rows], rows)

    def inverse_of(self, stage: int) -> Tensor:
        assert self.inverse_M is not None
        rows = self.stages[stage].rows
        return _within(self.inverse_M[rows], rows)


class StagedWay:
    """A `Way` in stages. first: that of the layer's first pass, if this is its second one."""

    def __init__(
        self, group: dist.ProcessGroup, choice: _Choice, first: "StagedWay | None" = None
    ) -> None:
        self.group, self._choice, self._first = group, choice, first
        self.counts_E, self.order_N = choice.counts_E, choice.order_N
        self.starts_late = False
        self.there, self.back = StagedTrip(group, choice), StagedTrip(group, choice)

    def begin(self) -> None:
        if self._first is not None:
            self.there.start()
            self._first.back.start()
            return
        received = self._read()
        self.there.start()
        # The order of rows is found while the first stage's travel.
        self._arrange(received)

    def _read(self) -> list[slice]:
        """Where the host waits, once a layer; returns the slice of arriving rows of each stage."""
        choice = self._choice
        if choice.copied is not None:
            choice.copied.synchronize()
            # So far only the host has waited for the side stream; the current stream has to, too.
            choice.copied.wait()
        assert choice.numbers_2SR is not None, "numbers of rows are read once"
        choice.between = rows_between(choice.numbers_2SR, rank=dist.get_rank(self.group))
        choice.numbers_2SR = choice.copied = None
        received, choice.sent = choice.between.bounds()
        return received

    def _arrange(self, received: Sequence[slice]) -> None:
        choice = self._choice
        arriving_RH = choice.arriving_RH
        num_ranks, held = arriving_RH.shape
        each = held // len(received)
        # A rank sends a stage's rows expert by expert; here they go together by expert, then by
        # rank.
        expert_H = torch.arange(held, device=arriving_RH.device)
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
        return StagedWay(self.group, self._choice, self)

    @property
    def sent(self) -> Sequence[slice]:
        return self._choice.sent

    @property
    def stages(self) -> Sequence[StageRows]:
        return self._choice.stages

    @property
    def ends_E(self) -> Tensor:
        assert self._choice.ends_E is not None
        return self._choice.ends_E


def _within(places: Tensor, rows: slice) -> Tensor:
    """Places among all rows as places among `rows`."""
    return places - rows.start if rows.start else places


class ExpertAllToAll:
    """The `ExpertExchange` of a group of ranks, each of which holds equally many experts, a
    multiple of `stages`. side: a stream that copies to the host; None on the CPU.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, stages: int = 1, side: torch.cuda.Stream | None = None
    ) -> None:
        self.group, self.stages, self.side = group, stages, side

    def way(self, chosen_TK: Tensor, num_experts: int) -> StagedWay:
        size, stages = self.group.size(), self.stages
        if stages > 1:
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
        """Wait for `arriving_E`, and copy rows by stage and rank to the host, [2, S, R]; on a GPU
        beside what the current stream is given from now on, until the event that is returned.
        """
        if self.side is None:
            return self._numbers(wait(arriving_E), counts_E), None
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            # The side stream waits for the collective; the current one will wait for the event.
            numbers_2SR = self._numbers(wait(arriving_E), counts_E)
            copied = torch.cuda.Event()
            on_host = numbers_2SR.to("cpu", non_blocking=True)
            copied.record()
        return on_host, copied

    def _numbers(self, arriving_E: Tensor, leaving_E: Tensor) -> Tensor:
        both = torch.stack([arriving_E, leaving_E])
        return both.view(2, self.group.size(), self.stages, -1).sum(-1).transpose(1, 2).contiguous()

"""Sends rows to the processes of their experts and back: protocols, and the case of one process.

A `Way` is the routing of one micro-batch's rows in one layer. It has two round trips (`Trip`). In
forward, `there` sends rows to the experts and brings their outputs back. In backward, `back` sends
the outputs' gradients to the experts and brings the rows' gradients back. Experts are divided into
stages, so that the rows of one stage travel while another stage is computed.

Autograd must not see rows that are still in transfer. Autograd sees an empty tensor in place of
these rows. The rows themselves are in a `Trip`, which frees each part of them when it has been
read.

Shapes: as in `wlb.model.expert_layer`.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class StageRows(NamedTuple):
    """The experts of one stage in this process, and the rows that they compute."""

    experts: slice  # which of the process's experts belong to the stage
    rows: slice  # which of the M rows that the process computes belong to these experts
    ends: Tensor  # for each expert the index after its last row, counted from `rows.start`; int32


class Trip(Protocol):
    """One round trip: rows travel to their experts, and the results travel back.

    Calls come in this order: `send`, `start`, then `arrived` and `answer` for each stage, `whole`,
    and `answers` for each stage. In backward the "rows" are the gradients of the outputs, and the
    "results" are the gradients of the rows.
    """

    def send(self, x: Tensor, rows_N: Tensor, scores_N: Tensor | None = None) -> None:
        """Copy the rows that `start` will send, and their scores, into new tensors.

        Args:
            x: Rows to select from.
            rows_N: Index in x of each of the N rows that travel, in the order of `Way.order_N`.
            scores_N: Score of each of these rows. With None no scores are sent.
        """
        ...

    def start(self) -> None:
        """Start the transfers of all stages, unless they have started."""
        ...

    def arrived(self, stage: int) -> tuple[Tensor, Tensor | None]:
        """Wait for a stage's rows, and return them and their scores sorted by expert.

        The scores are None if `send` got none.
        """
        ...

    def whole(self) -> tuple[Tensor, Tensor | None]:
        """Return the rows and scores of all stages, [M, ...]; `arrived` returned parts of them.

        This object drops its references to these tensors.
        """
        ...

    def answer(self, stage: int, x: Tensor, scores: Tensor | None = None) -> None:
        """Start to send a stage's results back to the processes that sent the rows.

        Args:
            stage: Number of the stage.
            x: A result for each row, in the order in which `arrived` returned the rows.
            scores: Gradients of scores. None in forward.
        """
        ...

    def answers(self, stage: int) -> tuple[Tensor, Tensor | None]:
        """Wait for the results that come back in one stage of the exchange.

        Returns:
            One row for each row that this process has sent in the stage, in the order of
            `Way.order_N`. In backward also the gradients of these rows' scores; in forward None.
        """
        ...


class Way(Protocol):
    """The routing of a micro-batch's rows to experts in one layer, for forward and backward."""

    counts_E: Tensor  # number of this process's rows that chose each expert
    # Order in which the N = T * K copies of rows are sent, stage by stage. Each of the T rows goes
    # to K experts, and copy i is a copy of row i // K.
    order_N: Tensor
    # Whether backward sends the gradients of the experts' outputs (the trip `back`) only while the
    # layer is recomputed (see `FirstPass`). If False, it sends them before that.
    starts_late: bool

    @property
    def there(self) -> Trip:
        """The round trip of forward: rows travel to experts, and outputs travel back."""
        ...

    @property
    def back(self) -> Trip:
        """The round trip of backward: output gradients go to experts, row gradients come back."""
        ...

    @property
    def ends_E(self) -> Tensor:
        """For each of this process's experts, the index after its last row, int32.

        The index is among the M rows that arrive at this process, sorted by expert.
        """
        ...

    def begin(self) -> None:
        """Find out how many rows come from and go to each process, and start to send the rows.

        The host may have to wait for these numbers.
        """
        ...

    @property
    def stages(self) -> Sequence[StageRows]:
        """For each stage of the transfers, which experts of this process compute which rows.

        This is known after `begin`.
        """
        ...

    @property
    def sent(self) -> Sequence[slice]:
        """For each stage, which slice of the copies of rows (`order_N`) is sent in it.

        This is known after `begin`.
        """
        ...

    def again(self) -> "Way":
        """Return the routing for recomputing the layer in backward, which sends the same rows.

        `begin` of the returned routing does not exchange numbers of rows again, but starts to send
        the rows. If `starts_late` is true, `begin` then also starts to send the gradients of the
        experts' outputs (with `back` of the first pass's routing), because backward needs them
        next.
        """
        ...


class ExpertExchange(Protocol):
    """Plans for each layer how rows travel to the processes that have their experts (a `Way`)."""

    def way(self, chosen_TK: Tensor, num_experts: int) -> Way:
        """Return the routing of a micro-batch's rows in one layer.

        Args:
            chosen_TK: Numbers of the experts that each row has chosen.
            num_experts: Number of experts of the layer, E.
        """
        ...


class LocalTrip:
    """The way of rows to experts and back if all experts are in this process; nothing is sent.

    There is only stage 0.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[Tensor, Tensor | None]] = []

    def send(self, x: Tensor, rows_N: Tensor, scores_N: Tensor | None = None) -> None:
        """Store copies of the rows x[rows_N], and their scores, until `whole` returns them.

        The indices rows_N are sorted by the expert that computes the row.
        """
        self._rows = [(x.index_select(0, rows_N), scores_N)]

    def start(self) -> None:
        """Do nothing, because no rows are sent."""

    def arrived(self, stage: int) -> tuple[Tensor, Tensor | None]:
        """Return the rows and scores that `send` stored."""
        return self._rows[0]

    def whole(self) -> tuple[Tensor, Tensor | None]:
        """Return the rows and scores that `send` stored, and drop the references to them."""
        return self._rows.pop(0)

    def answer(self, stage: int, x: Tensor, scores: Tensor | None = None) -> None:
        """Store what the experts computed for the rows, until `answers` returns it.

        Args:
            stage: 0, because there is no other stage.
            x: The experts' results in forward, and the gradients of their inputs in backward.
            scores: Gradients of the scores. None in forward.
        """
        self._rows.append((x, scores))

    def answers(self, stage: int) -> tuple[Tensor, Tensor | None]:
        """Return the rows that `answer` stored last, and the gradients of their scores or None.

        The references to these tensors are dropped.
        """
        return self._rows.pop()


class LocalWay:
    """The routing of rows whose experts are all in this process."""

    def __init__(self, order_N: Tensor, ends_E: Tensor) -> None:
        self.order_N, self.ends_E, self.starts_late = order_N, ends_E, False
        self.counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        self.there, self.back = LocalTrip(), LocalTrip()
        self.sent = (slice(0, order_N.shape[0]),)
        self.stages = (StageRows(slice(0, ends_E.shape[0]), self.sent[0], ends_E),)

    def begin(self) -> None:
        """Do nothing, because no other process has to tell how many rows it sends."""

    def again(self) -> "LocalWay":
        """Return an equal routing for recomputing the layer in backward."""
        return LocalWay(self.order_N, self.ends_E)


class LocalExperts:
    """Routing for a process that has all experts, so that no rows are sent."""

    def way(self, chosen_TK: Tensor, num_experts: int) -> LocalWay:
        """Return the routing of a micro-batch's rows in one layer.

        Args:
            chosen_TK: Numbers of the experts that each row has chosen.
            num_experts: Number of experts of the layer, E.
        """
        return LocalWay(*sorted_by_expert(chosen_TK, num_experts))


def sorted_by_expert(expert_TK: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Sort the N = T * K copies of rows that experts compute, by expert and then by token.

    Args:
        expert_TK: Numbers of the K experts of each token.
        num: Number of experts, E.

    Returns:
        The order as indices into the N copies, and for each expert the index after its last copy in
        this order, int32, [E].
    """
    sorted_N, order_N = expert_TK.flatten().sort(stable=True)
    every_E = torch.arange(num, device=expert_TK.device)
    return order_N, torch.searchsorted(sorted_N, every_E, right=True, out_int32=True)


def inverse_of(order_N: Tensor) -> Tensor:
    """Return the inverse of a permutation: the result at order_N[i] is i."""
    places = torch.arange(order_N.shape[0], device=order_N.device)
    return torch.empty_like(order_N).scatter_(0, order_N, places)


class FirstPass:
    """What a layer's first forward pass keeps for the layer's recomputation in backward.

    The recomputation uses the experts that the first pass chose. It must not choose them itself,
    because its products may round differently, and a row might then go to another expert than in
    the first pass.

    If a whole layer is recomputed, backward starts to send gradients to the experts (`Way.back`)
    when it reaches the layer, and attention is recomputed while the gradients travel. If only the
    layer's second half (everything after attention) is recomputed, the gradients are sent a little
    later: the recomputation first starts to send rows to the experts, and right after that it
    starts to send the gradients (`Way.again`).

    Args:
        whole_layer: Whether the whole layer is recomputed, not just the half after attention.
    """

    def __init__(self, *, whole_layer: bool) -> None:
        self.whole_layer, self.is_over = whole_layer, False
        self._way: Way | None = None
        self._chosen_TK: Tensor | None = None

    def keep(self, way: Way, chosen_TK: Tensor) -> None:
        """Store the first pass's routing, and the numbers of the experts that it chose, [T, K]."""
        way.starts_late = not self.whole_layer
        # Store int16 to save memory. It is enough, because a model has at most 4,096 experts.
        self._way, self._chosen_TK = way, chosen_TK.to(torch.int16)

    def kept(self) -> tuple[Way, Tensor]:
        """Return the first pass's routing, for the recomputation, and the chosen experts [T, K]."""
        assert self._way is not None
        assert self._chosen_TK is not None
        return self._way.again(), self._chosen_TK.long()


@contextmanager
def during_pass(
    set_first: Callable[[FirstPass | None], None], first: FirstPass, *, is_second: bool
) -> Generator[None]:
    """Return a context for one pass of a layer with experts: its first pass or its recomputation.

    torch's activation checkpointing runs each of the two passes in such a context.

    Args:
        set_first: Called with `first` when the pass begins and with None when it ends.
        first: The record that the first pass fills and the recomputation reads.
        is_second: Whether the pass is the recomputation.
    """
    first.is_over = is_second
    set_first(first)
    try:
        yield
    finally:
        set_first(None)

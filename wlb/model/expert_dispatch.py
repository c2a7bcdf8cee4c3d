"""Dispatch and combine of the rows of a layer with experts: the protocol, and one for one process.

A `Way` is the routing of one micro-batch in one layer. Its `there` sends rows to the experts and
brings their outputs back; its `back` does the same with gradients. Experts are divided into stages,
so that the rows of one stage travel while those of another are computed.

Autograd cannot hold rows that are still in transfer. It sees an empty tensor in their place, and
the rows are in a `Trip`, which frees each part when it has been read.

Shapes: as in `wlb.model.expert_layer`.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class StageRows(NamedTuple):
    """The part of a stage that this process computes."""

    experts: slice  # experts of the stage among the process's experts
    rows: slice  # their rows among the M rows that the process computes
    ends: Tensor  # index after each expert's last row, counted from `rows.start`; int32


class Trip(Protocol):
    """One round trip of rows: to their experts, and the results back.

    In backward the gradients of the results travel to the experts, and those of the rows back.
    """

    def send(self, x: Tensor, rows_N: Tensor, scores_N: Tensor | None = None) -> None:
        """Take the rows of x that will travel, in the order of `Way.order_N`; `start` sends."""
        ...

    def start(self) -> None:
        """Start the transfers of all stages, unless they have started."""
        ...

    def arrived(self, stage: int) -> tuple[Tensor, Tensor | None]:
        """Wait for a stage's rows and scores, and return them, expert by expert."""
        ...

    def whole(self) -> tuple[Tensor, Tensor | None]:
        """Return the rows and scores of all stages, [M, ...], and release them.

        The results of `arrived` are parts of these tensors.
        """
        ...

    def answer(self, stage: int, x: Tensor, scores: Tensor | None = None) -> None:
        """Start to send a stage's results back; their order is the one in which rows arrived."""
        ...

    def answers(self, stage: int) -> tuple[Tensor, Tensor | None]:
        """Wait for a stage's results, and return them in the order of `Way.order_N`."""
        ...


class Way(Protocol):
    """The routing of a micro-batch's rows to experts in one layer, for forward and backward."""

    counts_E: Tensor  # rows of each expert
    # Rows to send, stage by stage, as indices into the N rows (row i // K is a token's row).
    order_N: Tensor
    starts_late: bool  # recomputing the layer starts `back`, see `FirstPass`

    @property
    def there(self) -> Trip:
        """The trip of forward: rows out, outputs back."""
        ...

    @property
    def back(self) -> Trip:
        """The trip of backward: gradients of outputs out, gradients of rows back."""
        ...

    @property
    def ends_E(self) -> Tensor:
        """Index after the last row of each of the process's experts, int32."""
        ...

    def begin(self) -> None:
        """Learn the numbers of rows, for which the host may have to wait, and start `there`."""
        ...

    @property
    def stages(self) -> Sequence[StageRows]:
        """The parts that this process computes; known after `begin`."""
        ...

    @property
    def sent(self) -> Sequence[slice]:
        """The rows of each stage as slices of `order_N`; known after `begin`."""
        ...

    def again(self) -> "Way":
        """Return the routing for recomputing the layer in backward; nothing is counted again.

        Its `begin` also starts `back` of this routing, after its own rows, which are needed first.
        """
        ...


class ExpertExchange(Protocol):
    """Makes the routing of rows to the processes of their experts."""

    def way(self, chosen_TK: Tensor, num_experts: int) -> Way:
        """Return the routing for each row's chosen experts, [T, K]."""
        ...


class LocalTrip:
    """The round trip of rows whose experts are in this process: one stage, no transfer."""

    def __init__(self) -> None:
        self._rows: list[tuple[Tensor, Tensor | None]] = []

    def send(self, x: Tensor, rows_N: Tensor, scores_N: Tensor | None = None) -> None:
        """Select the rows, in the order of their experts."""
        self._rows = [(x.index_select(0, rows_N), scores_N)]

    def start(self) -> None:
        """Do nothing, because nothing travels."""

    def arrived(self, stage: int) -> tuple[Tensor, Tensor | None]:
        """Return the rows and scores."""
        return self._rows[0]

    def whole(self) -> tuple[Tensor, Tensor | None]:
        """Return the rows and scores, and release them."""
        return self._rows.pop(0)

    def answer(self, stage: int, x: Tensor, scores: Tensor | None = None) -> None:
        """Store the results."""
        self._rows.append((x, scores))

    def answers(self, stage: int) -> tuple[Tensor, Tensor | None]:
        """Return the results, and release them."""
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
        """Do nothing: the numbers of rows are known."""

    def again(self) -> "LocalWay":
        """Return the same routing for recomputing the layer."""
        return LocalWay(self.order_N, self.ends_E)


class LocalExperts:
    """The exchange of a process that has all experts."""

    def way(self, chosen_TK: Tensor, num_experts: int) -> LocalWay:
        """Return the routing for each row's chosen experts, [T, K]."""
        return LocalWay(*sorted_by_expert(chosen_TK, num_experts))


def sorted_by_expert(expert_TK: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Sort rows by expert, then by token.

    Args:
        expert_TK: Experts of each token.
        num: Number of experts, E.

    Returns:
        The order, [N], and the index after each expert's last row, int32, [E].
    """
    sorted_N, order_N = expert_TK.flatten().sort(stable=True)
    every_E = torch.arange(num, device=expert_TK.device)
    return order_N, torch.searchsorted(sorted_N, every_E, right=True, out_int32=True)


def inverse_of(order_N: Tensor) -> Tensor:
    """Return the inverse of the permutation `order_N`."""
    places = torch.arange(order_N.shape[0], device=order_N.device)
    return torch.empty_like(order_N).scatter_(0, order_N, places)


class FirstPass:
    """What a layer's first forward pass keeps for its recomputation in backward.

    The recomputation uses the experts that the first pass chose. It must not choose again: its
    products may round differently, and rows would then go to other experts than those of the first
    pass.

    If a whole layer is recomputed, the trip of backward (`Way.back`) starts by itself. If only its
    second half is, the recomputation starts that trip right behind its rows (`Way.again`), because
    little else would run while the gradients travel.

    Args:
        whole_layer: Whether the whole layer is recomputed, not just its second half.
    """

    def __init__(self, *, whole_layer: bool) -> None:
        self.whole_layer, self.is_over = whole_layer, False
        self._way: Way | None = None
        self._chosen_TK: Tensor | None = None

    def keep(self, way: Way, chosen_TK: Tensor) -> None:
        """Store the routing and the chosen experts, [T, K]."""
        way.starts_late = not self.whole_layer
        # int16 is enough for the 4,096 experts that a model may have.
        self._way, self._chosen_TK = way, chosen_TK.to(torch.int16)

    def kept(self) -> tuple[Way, Tensor]:
        """Return the routing of the recomputation, and the chosen experts, [T, K]."""
        assert self._way is not None
        assert self._chosen_TK is not None
        return self._way.again(), self._chosen_TK.long()


@contextmanager
def during_pass(
    set_first: Callable[[FirstPass | None], None], first: FirstPass, *, is_second: bool
) -> Generator[None]:
    """Surround one of the passes of a checkpointed call.

    Args:
        set_first: Called with `first` when the pass begins and with None when it ends.
        first: What the first pass keeps.
        is_second: Whether the pass is the recomputation.
    """
    first.is_over = is_second
    set_first(first)
    try:
        yield
    finally:
        set_first(None)

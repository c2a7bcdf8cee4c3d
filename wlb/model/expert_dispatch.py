"""Dispatch and combine of the rows of a layer with experts: the protocol, and all in one process.

A `Way` is one layer's routing of a micro-batch: `there` dispatches rows and combines outputs, and
`back` does so with gradients. The held experts are divided into stages, whose rows travel one after
the other, so that one stage's rows are under way while another's are computed. Autograd sees an
empty tensor instead of the rows, which may be under way: they are in a `Trip`, each of whose parts
is read once and freed. Shapes: as in `wlb.model.expert_layer`.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class StageRows(NamedTuple):
    """The experts of a stage that this process holds, and their rows among its M. ends: index after
    each one's last row, counted from the stage's first, int32.
    """

    experts: slice
    rows: slice
    ends: Tensor


class Trip(Protocol):
    """Rows of all stages to their experts and what these made of them, or the gradients of both."""

    def send(self, x: Tensor, rows_N: Tensor, scores_N: Tensor | None = None) -> None:
        """Give rows of x that will travel, in the order of `Way.order_N`; `start` starts them."""
        ...

    def start(self) -> None:
        """Start all stages, unless they have been started."""
        ...

    def arrived(self, stage: int) -> tuple[Tensor, Tensor | None]:
        """Wait for a stage's rows and scores; expert by expert."""
        ...

    def whole(self) -> tuple[Tensor, Tensor | None]:
        """Rows and scores of all stages, [M, ...], of which those that arrived are parts; the trip
        keeps them no longer.
        """
        ...

    def answer(self, stage: int, x: Tensor, scores: Tensor | None = None) -> None:
        """Start a stage's rows on their way back, in the order they arrived in."""
        ...

    def answers(self, stage: int) -> tuple[Tensor, Tensor | None]:
        """Wait for what came back; in the order of `Way.order_N`."""
        ...


class Way(Protocol):
    """The choice of experts of a micro-batch's rows in one layer, and both passes' trips.

    counts_E: rows of each expert. order_N: for each row that travels, stage by stage, its number
    among all rows at experts, token by token. ends_E: index after the last row of each expert that
    this process holds, int32. starts_late: the layer's second pass starts `back` (`FirstPass`).
    """

    counts_E: Tensor
    order_N: Tensor
    starts_late: bool

    @property
    def there(self) -> Trip: ...

    @property
    def back(self) -> Trip: ...

    @property
    def ends_E(self) -> Tensor: ...

    def begin(self) -> None:
        """Learn the numbers of rows, which the host may have to wait for, and start `there`."""
        ...

    @property
    def stages(self) -> Sequence[StageRows]:
        """Known once begun, as the rest is."""
        ...

    @property
    def sent(self) -> Sequence[slice]:
        """Each stage's rows among those of `order_N`."""
        ...

    def again(self) -> "Way":
        """The same for a layer that backward computes again: nothing is counted again. Its `begin`
        also starts this one's `back`, behind its own rows, which are needed first.
        """
        ...


class ExpertExchange(Protocol):
    """Brings rows to the processes of their experts."""

    def way(self, chosen_TK: Tensor, num_experts: int) -> Way: ...


class LocalTrip:
    """Rows that stay where they are: one stage."""

    def __init__(self) -> None:
        self._rows: list[tuple[Tensor, Tensor | None]] = []

    def send(self, x: Tensor, rows_N: Tensor, scores_N: Tensor | None = None) -> None:
        self._rows = [(x.index_select(0, rows_N), scores_N)]

    def start(self) -> None:
        """Nothing travels."""

    def arrived(self, stage: int) -> tuple[Tensor, Tensor | None]:
        return self._rows[0]

    def whole(self) -> tuple[Tensor, Tensor | None]:
        return self._rows.pop(0)

    def answer(self, stage: int, x: Tensor, scores: Tensor | None = None) -> None:
        self._rows.append((x, scores))

    def answers(self, stage: int) -> tuple[Tensor, Tensor | None]:
        return self._rows.pop()


class LocalWay:
    """The `Way` of rows whose experts are all in this process."""

    def __init__(self, order_N: Tensor, ends_E: Tensor) -> None:
        self.order_N, self.ends_E, self.starts_late = order_N, ends_E, False
        self.counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        self.there, self.back = LocalTrip(), LocalTrip()
        self.sent = (slice(0, order_N.shape[0]),)
        self.stages = (StageRows(slice(0, ends_E.shape[0]), self.sent[0], ends_E),)

    def begin(self) -> None:
        """Nothing travels."""

    def again(self) -> "LocalWay":
        return LocalWay(self.order_N, self.ends_E)


class LocalExperts:
    """All experts are in this process."""

    def way(self, chosen_TK: Tensor, num_experts: int) -> LocalWay:
        return LocalWay(*sorted_by_expert(chosen_TK, num_experts))


def sorted_by_expert(expert_TK: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Order of rows by expert, then by token, [N]; index after each expert's last row, int32."""
    sorted_N, order_N = expert_TK.flatten().sort(stable=True)
    every_E = torch.arange(num, device=expert_TK.device)
    return order_N, torch.searchsorted(sorted_N, every_E, right=True, out_int32=True)


def inverse_of(order_N: Tensor) -> Tensor:
    """The permutation that undoes `order_N`."""
    places = torch.arange(order_N.shape[0], device=order_N.device)
    return torch.empty_like(order_N).scatter_(0, order_N, places)


class FirstPass:
    """What a layer's first forward pass leaves for its second one, which backward runs.

    The second takes the choice of experts from here and does not make it: products may round
    differently, and then rows would go to other experts than those whose weights' gradients and
    numbers of rows are known. whole_layer: both passes are of a whole layer. Otherwise they are of
    its second half alone, and the second pass sends the gradients (`Way.again`), behind its own
    rows: little else would run while they travel.
    """

    def __init__(self, *, whole_layer: bool) -> None:
        self.whole_layer, self.is_over = whole_layer, False
        self._way: Way | None = None
        self._chosen_TK: Tensor | None = None

    def keep(self, way: Way, chosen_TK: Tensor) -> None:
        way.starts_late = not self.whole_layer
        # There are at most 4,096 experts.
        self._way, self._chosen_TK = way, chosen_TK.to(torch.int16)

    def kept(self) -> tuple[Way, Tensor]:
        """The way of a second pass, and the choice, [T, K]."""
        assert self._way is not None
        assert self._chosen_TK is not None
        return self._way.again(), self._chosen_TK.long()


@contextmanager
def during_pass(
    tell: Callable[[FirstPass | None], None], first: FirstPass, *, is_second: bool
) -> Generator[None]:
    """Context of one of the passes of a checkpointed call. tell: is given `first` at its start and
    None at its end.
    """
    first.is_over = is_second
    tell(first)
    try:
        yield
    finally:
        tell(None)

"""request: what `balance_step` was asked, checked; every error names the sample and the limit."""

from dataclasses import dataclass

import numpy as np

from wlb.plan import IntArray, IntLike, UserError, check_at_least, check_minimum, int_array
from wlb.plan.arrays import first_true

WAITS = ("micro_batch", "step")
TOO_LONG = ("refuse", "alone")
GROUPS_ON = ("mini_batch", "rank")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRequest:
    """See `balance_step`; checked when made. atom, group: of each sample, numbered from 0 in the
    order of their first samples, `group` None where there are none; rank: as given, or None."""

    lengths: IntArray
    num_ranks: int
    max_tokens: int
    mini_batches: int | IntArray
    equal_counts: bool
    count_slack: int
    group: IntArray | None
    groups_on: str
    atom: IntArray
    rank: IntArray | None
    num_micro_batches: int | None
    multiple: int
    at_least: int
    too_long: str
    wait: str

    def __post_init__(self) -> None:
        if not self.lengths.size:
            raise UserError("lengths is empty: a step needs at least one sample")
        check_minimum("lengths", self.lengths, 1)
        for name, least in (
            ("num_ranks", 1),
            ("max_tokens", 1),
            ("multiple", 1),
            ("count_slack", 0),
        ):
            check_at_least(name, getattr(self, name), least)
        one_of("wait", self.wait, WAITS)
        one_of("too_long", self.too_long, TOO_LONG)
        one_of("groups_on", self.groups_on, GROUPS_ON)
        if self.count_slack and not self.equal_counts:
            raise UserError(f"count_slack = {self.count_slack} needs equal_counts = True")
        if self.num_micro_batches is not None:
            check_at_least("num_micro_batches", self.num_micro_batches, 1)
            if self.num_micro_batches % self.multiple:
                raise UserError(
                    f"num_micro_batches = {self.num_micro_batches} is no multiple of "
                    f"{self.multiple}"
                )
        self._check_caps()
        if self.group is not None:
            _inside("group", self.group, "atom", self.atom)
        if self.rank is not None:
            self._check_ranks(self.rank)
        if isinstance(self.mini_batches, int):
            check_at_least("mini_batches", self.mini_batches, 1)
        else:
            unit = self.atom if self.group is None else self.group
            _inside("mini-batch", self.mini_batches, "group or atom", unit)

    def _check_ranks(self, rank: IntArray) -> None:
        if rank.size != self.lengths.size:
            raise UserError(
                f"ranks has {rank.size} entries, and there are {self.lengths.size} samples"
            )
        if (i := first_true((rank < 0) | (rank >= self.num_ranks))) is not None:
            raise UserError(
                f"ranks[{i}] = {rank[i]} is not one of num_ranks = {self.num_ranks} from 0"
            )
        if self.equal_counts or self.groups_on == "rank":
            raise UserError(
                "ranks says where each sample is; it goes with neither equal_counts nor "
                "groups_on='rank'"
            )
        if self.group is not None and isinstance(self.mini_batches, int) and self.mini_batches > 1:
            raise UserError("with ranks and groups, give the mini-batch of each sample")
        _inside("rank", rank, "atom", self.atom)

    def _check_caps(self) -> None:
        tokens = np.bincount(self.atom, self.lengths).astype(np.int64)
        if self.too_long == "alone" or (over := first_true(tokens > self.max_tokens)) is None:
            return
        sample = int(np.flatnonzero(self.atom == over)[0])
        alone = int((self.atom == over).sum()) == 1
        what = f"sample {sample} has" if alone else f"the atom of sample {sample} has"
        raise UserError(
            f"{what} {tokens[over]} tokens, and a micro-batch at most max_tokens = "
            f"{self.max_tokens}; cut it, raise max_tokens, or let it be alone (too_long='alone')"
        )


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """UserError unless `value` is one of `known`."""
    if value not in known:
        raise UserError(f"{name} = {value!r} must be one of {', '.join(known)}")


def labels(name: str, values: IntLike, num: int) -> IntArray:
    """Any whole numbers, one a sample, as numbers from 0 in the order in which they first come."""
    array = int_array(name, values)
    if array.size != num:
        raise UserError(f"{name} has {array.size} entries, and there are {num} samples")
    _, first, inverse = np.unique(array, return_index=True, return_inverse=True)
    place = np.empty(first.size, np.int64)
    place[np.argsort(first, kind="stable")] = np.arange(first.size)
    return place[inverse]


def _inside(outer_name: str, outer: IntArray, inner_name: str, inner: IntArray) -> None:
    """UserError naming a sample unless each `inner` label lies in one `outer` label."""
    of = np.zeros(int(inner.max()) + 1, np.int64)
    of[inner[::-1]] = outer[::-1]
    if (i := first_true(of[inner] != outer)) is not None:
        first = int(np.flatnonzero(inner == inner[i])[0])
        raise UserError(
            f"samples {first} and {i} are one {inner_name}, but in {outer_name}s of their own; "
            f"an {inner_name} is not divided"
        )

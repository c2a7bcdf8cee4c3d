"""Checks the arguments of `balance_step`. Every error names the sample and the limit."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from wlb.plan import (
    IntArray,
    IntLike,
    UserError,
    check_minimum,
    convert_to_ints,
    int_array,
    whole_number,
)
from wlb.plan.arrays import first_true

WAITS = ("micro_batch", "step")
"""Values of the argument `wait` of `balance_step`."""
TOO_LONG = ("refuse", "alone")
"""Values of the argument `too_long` of `balance_step`."""
GROUPS_ON = ("mini_batch", "rank")
"""Values of the argument `groups_on` of `balance_step`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleLabels:
    """The mini-batch, group, atom and rank to which each sample belongs.

    Groups and atoms are numbered from 0 in the order of their first samples. Arrays have shape
    [num_samples].
    """

    mini_batches: int | IntArray  # number of mini-batches, or the mini-batch of each sample
    # Group of each sample: samples of a group share a mini-batch. None = no groups.
    group: IntArray | None
    atom: IntArray  # atom of each sample: samples of an atom share a micro-batch
    rank: IntArray | None  # rank of each sample, if samples stay on their ranks; None = anywhere

    @classmethod
    def of(
        cls,
        num: int,
        *,
        mini_batches: int | IntLike,
        groups: IntLike | None,
        atoms: IntLike | None,
        ranks: IntLike | None,
    ) -> "SampleLabels":
        """Convert the arguments of `balance_step` for `num` samples.

        Args:
            num: Number of samples.
            mini_batches: Number of mini-batches, or a label for each sample. Samples with equal
                labels are in the same mini-batch.
            groups: A label for each sample. Samples with equal labels stay in one mini-batch, and
                on one rank if `RankRules.groups_on` is "rank".
            atoms: A label for each sample. Samples with equal labels share a micro-batch.
            ranks: Rank of each sample. None = any rank.

        Raises:
            UserError: If there is not one label for each sample.
        """
        return cls(
            mini_batches=_mini_batches(mini_batches, num),
            group=None if groups is None else labels("groups", groups, num),
            atom=np.arange(num) if atoms is None else labels("atoms", atoms, num),
            rank=None if ranks is None else int_array("ranks", ranks),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRules:
    """Rules about which samples are on the same rank, from the arguments of `balance_step`."""

    equal_counts: bool  # whether all ranks have equally many samples
    slack: int  # with `equal_counts`, by how many samples a rank may differ from an equal share
    # "rank" if the samples of a group must be on one rank; "mini_batch" if they need only be in one
    # mini-batch.
    groups_on: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "slack", whole_number("count_slack", self.slack, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRules:
    """How many micro-batches every rank gets, and when ranks wait for each other."""

    num: int | None  # number of micro-batches of a rank; None = as few as fit
    at_least: int  # least number of micro-batches of a rank
    multiple: int  # the number of micro-batches is a multiple of this
    wait: str  # ranks wait for each other after every "micro_batch", or once in a "step"

    def __post_init__(self) -> None:
        if self.num is not None:
            object.__setattr__(self, "num", whole_number("num_micro_batches", self.num, 1))
        convert_to_ints(self, at_least=0, multiple=1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRequest:
    """The arguments of `balance_step`, which are checked when the record is made."""

    lengths: IntArray  # tokens of each sample, shape [num_samples]
    num_ranks: int  # number of data-parallel ranks
    max_tokens: int  # most tokens of a micro-batch
    too_long: str  # what happens to longer samples: "refuse" or "alone"
    labels: SampleLabels  # mini-batch, group, atom (samples of one micro-batch) and rank of samples
    rank_rules: RankRules  # which samples are on the same rank
    slots: SlotRules  # number of micro-batches of a rank, and when ranks wait

    def __post_init__(self) -> None:
        if not self.lengths.size:
            raise UserError(
                "lengths is empty, but a step needs at least one sample; give the length of each "
                "sample"
            )
        check_minimum("lengths", self.lengths, 1)
        convert_to_ints(self, num_ranks=1, max_tokens=1)
        one_of("wait", self.slots.wait, WAITS)
        one_of("too_long", self.too_long, TOO_LONG)
        one_of("groups_on", self.rank_rules.groups_on, GROUPS_ON)
        if self.rank_rules.slack and not self.rank_rules.equal_counts:
            raise UserError(
                f"count_slack = {self.rank_rules.slack} has no effect without equal_counts; set "
                "equal_counts = True, or count_slack = 0"
            )
        if self.slots.num is not None and self.slots.num % self.slots.multiple:
            raise UserError(
                f"num_micro_batches = {self.slots.num} must be divisible by the argument multiple "
                f"= {self.slots.multiple}; change num_micro_batches or multiple"
            )
        self._check_caps()
        self._check_labels(self.labels)

    def _check_labels(self, given: SampleLabels) -> None:
        if given.group is not None:
            _inside("group", given.group, "atom", given.atom)
        if given.rank is not None:
            self._check_ranks(given, given.rank)
        if not isinstance(given.mini_batches, int):
            unit = given.atom if given.group is None else given.group
            _inside("mini-batch", given.mini_batches, "group or atom", unit)

    def _check_ranks(self, given: SampleLabels, rank: IntArray) -> None:
        if rank.size != self.lengths.size:
            raise UserError(
                f"ranks has {rank.size} entries, but there are {self.lengths.size} samples; give "
                "one entry for each sample"
            )
        if (i := first_true((rank < 0) | (rank >= self.num_ranks))) is not None:
            raise UserError(
                f"ranks[{i}] = {rank[i]} must be from 0 to {self.num_ranks - 1} (num_ranks = "
                f"{self.num_ranks})"
            )
        if self.rank_rules.equal_counts or self.rank_rules.groups_on == "rank":
            raise UserError(
                "`ranks` cannot be combined with equal_counts or groups_on='rank', because it "
                "already says on which rank each sample is; leave out `ranks`, or leave out "
                "equal_counts and groups_on"
            )
        several = isinstance(given.mini_batches, int) and given.mini_batches > 1
        if given.group is not None and several:
            raise UserError(
                "mini_batches must be a list if both ranks and groups are given; give the "
                "mini-batch of each sample instead of a number of mini-batches"
            )
        _inside("rank", rank, "atom", given.atom)

    def _check_caps(self) -> None:
        tokens = np.bincount(self.labels.atom, self.lengths).astype(np.int64)
        if self.too_long == "alone" or (over := first_true(tokens > self.max_tokens)) is None:
            return
        sample = int(np.flatnonzero(self.labels.atom == over)[0])
        alone = int((self.labels.atom == over).sum()) == 1
        what = f"sample {sample} has" if alone else f"the atom of sample {sample} has"
        raise UserError(
            f"{what} {tokens[over]} tokens, but a micro-batch must have at most max_tokens = "
            f"{self.max_tokens}; shorten the sample, raise max_tokens, or set too_long = 'alone' "
            "to train it in a micro-batch without other samples"
        )


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise UserError unless an argument has one of the known values.

    Args:
        name: Name of the argument, for the message.
        value: Its value.
        known: The permitted values.
    """
    if value not in known:
        raise UserError(f"{name} = {value!r} is unknown; use one of {', '.join(known)}")


def labels(name: str, values: IntLike, num: int) -> IntArray:
    """Replace labels by 0, 1, ... in the order in which they first occur.

    Args:
        name: Name of the labels, for an error message.
        values: The label of each sample, an integer.
        num: Number of samples.

    Returns:
        The new label of each sample, shape [num].
    """
    array = int_array(name, values)
    if array.size != num:
        raise UserError(
            f"{name} has {array.size} entries, but there are {num} samples; give one entry for "
            "each sample"
        )
    _, first, inverse = np.unique(array, return_index=True, return_inverse=True)
    place = np.empty(first.size, np.int64)
    place[np.argsort(first, kind="stable")] = np.arange(first.size)
    return place[inverse]


def _mini_batches(given: int | IntLike, num: int) -> int | IntArray:
    """Check the argument `mini_batches` of `balance_step` for `num` samples.

    Returns:
        The number of mini-batches, or the index of each sample's mini-batch, shape [num].
    """
    if not isinstance(given, Iterable):
        return whole_number("mini_batches", given, 1)
    array = int_array("mini_batches", given)
    if array.size != num:
        raise UserError(
            f"mini_batches has {array.size} entries, but there are {num} samples; give one entry "
            "for each sample, or the number of mini-batches"
        )
    return np.unique(array, return_inverse=True)[1]


def _inside(outer_name: str, outer: IntArray, inner_name: str, inner: IntArray) -> None:
    """Raise UserError unless samples with equal `inner` labels also have equal `outer` labels.

    Args:
        outer_name: Name of the outer labels for the message, such as "mini-batch".
        outer: Outer label of each sample.
        inner_name: Name of the inner labels for the message, such as "group".
        inner: Inner label of each sample.
    """
    of = np.zeros(int(inner.max()) + 1, np.int64)
    of[inner[::-1]] = outer[::-1]
    if (i := first_true(of[inner] != outer)) is not None:
        first = int(np.flatnonzero(inner == inner[i])[0])
        raise UserError(
            f"samples {first} and {i} are in the same {inner_name}, but not in the same "
            f"{outer_name}; give all samples of one {inner_name} the same {outer_name}"
        )

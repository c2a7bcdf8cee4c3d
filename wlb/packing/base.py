"""Shared by all packing policies: the protocol, and the conversion of placements to a plan.

`push(batch, carry) -> (plans, carry)` is pure: all state that a policy keeps between global batches
is in `carry`. `push(None, carry)` is the end of data and returns everything that still waits, in as
many plans as it takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Protocol

import numpy as np

from wlb.cost import WorkloadModel
from wlb.packing.carry_slots import CarrySlots
from wlb.plan import (
    Carry,
    GlobalBatch,
    IntArray,
    IntLike,
    Layout,
    PackingPlan,
    Pieces,
    UserError,
    convert_to_ints,
    int_array,
    offsets_of,
    segment_lengths,
    split_long,
)
from wlb.plan.arrays import first_true

MOST_WORK = 2.0**62
STEP_ORDER = 1 << 19
"""Index of `permuted` for the order of steps; micro-batches have lower indices."""
_LEAST = {"num_micro_batches": 1, "context_window": 1, "num_windows": 0, "seed": None}
"""Least values of the options that are whole numbers."""
LEFTOVER = 0
"""Slot of pieces that an earlier packing left over, in policies whose carry has several slots."""

Pushed = tuple[tuple[PackingPlan, ...], Carry]
"""The steps that can be made, none or several, and the carry after them."""


class Packer(Protocol):
    """A packing policy for N micro-batches a step."""

    policy: ClassVar[str]

    @property
    def num_micro_batches(self) -> int:
        """N, the micro-batches of every step."""
        ...

    def start(self) -> Carry:
        """The carry of a run that has trained nothing."""
        ...

    def push(self, batch: GlobalBatch | None, carry: Carry) -> Pushed:
        """Return the steps that can be made once `batch` has come, none or several, and the carry
        after them.

        batch: None at the end of data, when all that is carried is placed. Pure: the same batch and
        carry give the same plans, so a carry is all that a checkpoint keeps. UserError for a
        document that the policy is to refuse.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PackerOptions:
    """Options of every policy.

    num_micro_batches: of a step, over all pipelines. context_window: C, the longest piece, in
    tokens. num_windows: N, windows that a global batch brings on average; 0 = as many as
    micro-batches. long_documents: "split" or "refuse" for documents longer than C. seed: order of
    documents inside a micro-batch. layout: which rows attend to each other. cost: workload model
    used for balancing.
    """

    num_micro_batches: int
    context_window: int
    cost: WorkloadModel
    num_windows: int = 0
    layout: Layout = Layout.SEPARATE
    long_documents: str = "split"
    seed: int = 0

    def __post_init__(self) -> None:
        convert_to_ints(self, **_LEAST)

    def arrived(self, batch: GlobalBatch | None, step: int, *, split: bool = True) -> Pieces:
        """The batch's documents as pieces of at most a window that came when `step` was next.

        split = False leaves long documents whole (for a policy that cuts windows itself), unless
        they are to be refused. Delay counts from that step, not from the batch's index: batches and
        steps need not be one to one.
        """
        if batch is None:
            return Pieces.empty()
        if not split and self.long_documents != "refuse":
            return Pieces.whole(batch.documents, arrival_step=step)
        return split_long(
            batch.documents,
            window=self.context_window,
            long_documents=self.long_documents,
            arrival_step=step,
        )

    @property
    def tokens_per_step(self) -> int:
        """N x C, the tokens that a global batch brings on average."""
        return (self.num_windows or self.num_micro_batches) * self.context_window

    def workloads(self, pieces: Pieces, *, factor: float = 1.0) -> IntArray:
        """Factor * W_a + W_l of each piece in ns, shape [num_pieces]; refuses a negative cost."""
        work = _priced(pieces, self.cost.workload_ns(pieces.length))
        if factor != 1.0:
            attention = self.attention(pieces)
            work = _priced(pieces, work - attention + _priced(pieces, np.rint(attention * factor)))
        # The sum of all costs, and N times the largest one, must fit 64-bit integers.
        most = int(work.max(initial=0))
        if max(work.sum(dtype=float), float(most * self.num_micro_batches)) > MOST_WORK:
            piece = pieces[int(work.argmax())]
            raise UserError(
                f"the costs of {len(pieces)} pieces add up beyond 64-bit integers; the largest is "
                f"{most} ns for {piece}: check the cost model's units"
            )
        return work

    def attention(self, pieces: Pieces) -> IntArray:
        """W_a of each piece in ns, shape [num_pieces]; refuses a cost that is negative."""
        return _priced(pieces, self.cost.attention_ns(pieces.length))


def _priced(pieces: Pieces, cost_ns: IntLike) -> IntArray:
    """`cost_ns` (shape [num_pieces]) as integers; UserError naming the piece that has no cost."""
    raw = np.asarray(cost_ns)
    if raw.shape != (len(pieces),):
        raise UserError(f"the cost model gave {raw.shape} costs for {len(pieces)} pieces")
    if (i := first_true(~(raw >= 0) | ~(raw < MOST_WORK))) is not None:
        raise UserError(f"the cost of {pieces[i]} is {raw[i]} ns; it must be at least 0 and finite")
    return int_array("cost_ns", raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPacker:
    """Base of policies; a policy sets `policy` and implements `push`.

    `slots` and `batches_wait` are what a carry that was read is held against.
    """

    options: PackerOptions  # those of every policy
    policy: ClassVar[str]
    slots: ClassVar[CarrySlots] = CarrySlots.ANY
    batches_wait: ClassVar[bool] = True  # whether pieces may be due in a step after the next one

    @property
    def num_micro_batches(self) -> int:
        return self.options.num_micro_batches

    def start(self) -> Carry:
        """The carry of a run that has trained nothing."""
        return Carry.empty(self.policy)

    def _carry(self, pieces: Pieces, next_step: int, slot: IntArray | None = None) -> Carry:
        """Carry of the waiting pieces; slot: of each piece, 0 if None."""
        slot = np.zeros(len(pieces), np.int64) if slot is None else slot
        return Carry(policy=self.policy, pieces=pieces, slot=slot, next_step=next_step)

    def _plan(
        self,
        step: int,
        pieces: Pieces,
        rows: Sequence[IntLike],
        *,
        work_ns: IntArray,
        num_held_tokens: int,
        max_delay: int | None = None,
        shuffle: bool = True,
    ) -> PackingPlan:
        """A plan with `rows[i]` of `pieces` in micro-batch i.

        work_ns: of `pieces`, shape [num_pieces]. max_delay: pieces delayed by more steps than that
        are counted as overdue. shuffle: order the pieces of a micro-batch at random, by
        (options.seed, step, i). Policies place documents in descending length; in that order,
        per-sequence sharding would give the long documents to the same ranks in every step.
        """
        options = self.options
        order = [np.array(members, np.int64) for members in rows]
        if shuffle:
            order = [permuted(x, options, step=step, index=i) for i, x in enumerate(order)]
        index = np.concatenate(order)
        placed = pieces.take(index)
        offsets = offsets_of([len(members) for members in rows])
        overdue = 0 if max_delay is None else int((step - placed.arrival_step > max_delay).sum())
        is_joined = options.layout == Layout.JOINED
        return PackingPlan(
            step=step,
            policy=self.policy,
            pieces=placed,
            offsets=offsets,
            workload_ns=_micro_batch_ns(options, placed, work_ns[index], offsets),
            num_held_tokens=num_held_tokens,
            num_overdue=overdue,
            layout=options.layout,
            num_joined_targets=_num_joined(placed, offsets) if is_joined else 0,
        )

    def _plans(
        self,
        first_step: int,
        pieces: Pieces,
        steps: Sequence[Sequence[list[int]]],
        *,
        num_waiting_tokens: int,
        shuffle: bool = True,
    ) -> tuple[PackingPlan, ...]:
        """Plans of consecutive steps out of the same pieces; `steps[s][i]`: rows of micro-batch i.

        num_waiting_tokens: tokens that still wait after the last step. Tokens of later steps wait
        too.
        """
        work, length = self.options.workloads(pieces), pieces.length
        tokens = [sum(int(length[members].sum()) for members in rows) for rows in steps]
        held = num_waiting_tokens + sum(tokens) - np.cumsum(tokens, dtype=np.int64)
        return tuple(
            self._plan(
                step, pieces, rows, work_ns=work, num_held_tokens=int(waiting), shuffle=shuffle
            )
            for step, (rows, waiting) in enumerate(zip(steps, held, strict=True), first_step)
        )


def check_s_max(s_max: int, options: PackerOptions) -> None:
    """Raise UserError for an S_max (tokens) below the context window."""
    if s_max < options.context_window:
        raise UserError(
            f"s_max = {s_max} is below the context window of {options.context_window}: a document "
            f"that fills it could never be placed"
        )


def check_fits(pieces: Pieces, limit: int, *, name: str = "s_max") -> None:
    """Raise UserError naming a waiting piece of more than `limit` tokens. Such a piece was cut for
    a larger window; no step could take it, so that the flush would never end.
    """
    if (i := first_true(pieces.length > limit)) is not None:
        piece = pieces[i]
        raise UserError(
            f"document {piece.document} waits as a piece of {piece.stop - piece.start} tokens, "
            f"cut for a larger context window than this packer's: it is longer than {name} = "
            f"{limit}; go on with a larger window or {name}"
        )


def permuted(values: IntLike, options: PackerOptions, *, step: int, index: int) -> IntArray:
    """`values` (shape [n]) in an order that (options.seed, step, index) decides on every host."""
    key = np.array([options.seed % 2**64, (step << 20) + index], np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(np.asarray(values, np.int64))


def _micro_batch_ns(
    options: PackerOptions, placed: Pieces, work_ns: IntArray, offsets: IntArray
) -> IntArray:
    """Work of every micro-batch: of the segments that its layout makes of its pieces."""
    if options.layout == Layout.SEPARATE:
        running = offsets_of(work_ns)
        return running[offsets[1:]] - running[offsets[:-1]]
    out = np.zeros(offsets.size - 1, np.int64)
    for i, (start, stop) in enumerate(pairwise(offsets.tolist())):
        segments = segment_lengths(placed.length[start:stop], options.layout)
        out[i] = int(options.cost.workload_ns(segments).sum())
    return out


def _num_joined(placed: Pieces, offsets: IntArray) -> int:
    """First tokens of documents that are labels because a document lies before them: one for each
    piece that ends its document inside a micro-batch before one that begins another.
    """
    is_followed = np.append(placed.start[1:] == 0, False)
    is_followed[offsets[1:][np.diff(offsets) > 0] - 1] = False
    return int((is_followed & (placed.num_targets < placed.length)).sum())


_UNITS = 2.0**40
"""Sum of the work that `comparable` gives: fine enough for a token of millions of documents, and a
sum of 64 bits is far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceRange:
    """Attention may cost low to high times its price, where low <= 1 <= high; 1 and 1: one price.

    Work that is balanced at both ends is balanced at every price between them. Let a micro-batch
    hold l of a step's L linear work and a of its A attention work. If attention costs k times its
    price, the micro-batch's part of the step is (l + k a) / (L + k A), which only rises or only
    falls with k. The forward pass is included as far as its prices are those of some k.

    The forward pass of the `h100` profile at a window of 128K is k = 0.71 (7B model, TP 8, CP 2).
    """

    low: float = 1.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.low <= 1 <= self.high < np.inf:
            raise UserError(
                f"price_range = {self.low}, {self.high}: attention's price may be off by factors "
                f"from above 0 to 1, and from 1 to any finite number; 1, 1 = it is as priced"
            )

    @property
    def is_one_price(self) -> bool:
        """Whether only the price itself counts."""
        return self.low == self.high

    def ends(self, options: PackerOptions, pieces: Pieces, work_ns: IntArray) -> IntArray:
        """Work of each piece at the ends in ns, shape [2, num_pieces]; [1, num_pieces], which is
        `work_ns` (W_a + W_l at price 1, shape [num_pieces]), where there is one price.
        """
        if self.is_one_price:
            return work_ns[None]
        return np.stack([options.workloads(pieces, factor=k) for k in (self.low, self.high)])


ONE_PRICE = PriceRange()


def comparable(ends: IntArray) -> list[list[int]]:
    """`ends` (shape [num_ends, n], in ns) in units in which each end's sum is about the same, so
    that the larger of a micro-batch's two loads tells how slow it is at its worst price.
    """
    if len(ends) == 1:
        return [ends[0].tolist()]
    return [
        np.rint(work * (_UNITS / max(1, int(work.sum())))).astype(np.int64).tolist()
        for work in ends
    ]

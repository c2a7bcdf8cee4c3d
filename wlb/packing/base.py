"""What all packing policies share: their interface, their options and their base class.

A policy is a pure function `push(batch, carry) -> (plans, carry)`. All state that it keeps between
global batches is in `carry`, so a checkpoint needs to store nothing else. `push(None, carry)` marks
the end of the data and returns plans for everything that still waits.

`PriceRange` lets a policy balance micro-batches although the price of attention is uncertain.
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
"""Largest cost in ns, and largest sum of costs, that packers accept, so that sums fit int64."""
STEP_ORDER = 1 << 19
"""The `index` that policies give to `permuted` to shuffle the order of steps. Smaller values are
indices of micro-batches, whose pieces are shuffled."""
_LEAST = {"num_micro_batches": 1, "context_window": 1, "num_windows": 0, "seed": None}
"""The least permitted value of each integer option; None permits any integer."""
LEFTOVER = 0
"""Slot of the carry for pieces that did not fit into earlier steps. Policies with several slots use
it."""

Pushed = tuple[tuple[PackingPlan, ...], Carry]
"""What `push` returns: the plans of the steps that can be made (possibly none), and the carry."""


class Packer(Protocol):
    """Interface of a packing policy, which makes steps of N micro-batches each."""

    policy: ClassVar[str]  # name of the policy in `packing.policy`

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches in every step, over all pipelines."""
        ...

    def start(self) -> Carry:
        """Return the carry of a run that has trained nothing."""
        ...

    def push(self, batch: GlobalBatch | None, carry: Carry) -> Pushed:
        """Return the plans of the steps that can be made now, and the new carry.

        The function is pure: the same batch and carry always give the same plans.

        Args:
            batch: The global batch that arrives. None at the end of the data, when everything that
                still waits is placed.
            carry: What the previous call returned, or `start()`.

        Raises:
            UserError: If the configuration says to refuse a document (`long_documents`).
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PackerOptions:
    """Options that every policy has."""

    num_micro_batches: int  # micro-batches of a step, over all pipelines
    context_window: int  # C, tokens of the longest permitted piece
    cost: WorkloadModel  # predicts the work that is balanced
    num_windows: int = 0  # windows of C tokens that a global batch fills; 0 = num_micro_batches
    layout: Layout = Layout.SEPARATE  # which documents of a micro-batch attend to each other
    long_documents: str = "split"  # "split" documents longer than C, or "refuse" them
    seed: int = 0  # seed of the random order of pieces in a micro-batch, and of steps

    def __post_init__(self) -> None:
        convert_to_ints(self, **_LEAST)

    def arrived(self, batch: GlobalBatch | None, step: int, *, split: bool = True) -> Pieces:
        """Return the documents of an arriving batch as pieces of at most one window.

        Args:
            batch: The batch that arrives; None gives no pieces.
            step: The step from which the pieces' delay counts. It may differ from the batch's
                index, because a policy may make several steps of a batch, or none.
            split: Whether to cut documents longer than the window. False is for a policy that cuts
                the stream itself. If `long_documents` is "refuse", such documents are an error in
                any case.
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
        """Tokens of an average global batch: N x C."""
        return (self.num_windows or self.num_micro_batches) * self.context_window

    def workloads(self, pieces: Pieces, *, factor: float = 1.0) -> IntArray:
        """Return the work of each piece, factor * W_a + W_l, in ns, shape [num_pieces].

        Args:
            pieces: The pieces.
            factor: Factor by which the attention work W_a is multiplied (`PriceRange`).

        Raises:
            UserError: If a cost is negative or not finite, or if sums may not fit 64-bit integers.
        """
        work = _priced(pieces, self.cost.workload_ns(pieces.length))
        if factor != 1.0:
            attention = self.attention(pieces)
            work = _priced(pieces, work - attention + _priced(pieces, np.rint(attention * factor)))
        # Packers sum all costs, and multiply the largest one by N. Both must fit 64-bit integers.
        most = int(work.max(initial=0))
        if max(work.sum(dtype=float), float(most * self.num_micro_batches)) > MOST_WORK:
            piece = pieces[int(work.argmax())]
            raise UserError(
                f"the costs of {len(pieces)} pieces add up to more than a 64-bit integer can "
                f"store; the largest cost is {most} ns, for {piece}. The cost model must return "
                "ns; correct its units"
            )
        return work

    def attention(self, pieces: Pieces) -> IntArray:
        """Return the attention work W_a of each piece in ns, shape [num_pieces].

        Raises:
            UserError: If a cost is negative or not finite.
        """
        return _priced(pieces, self.cost.attention_ns(pieces.length))


def _priced(pieces: Pieces, cost_ns: IntLike) -> IntArray:
    """Check the costs of pieces in ns, and return them as integers, shape [num_pieces].

    Raises:
        UserError: If there is not one cost for each piece, or if a cost is negative, infinite or
            too large.
    """
    raw = np.asarray(cost_ns)
    if raw.shape != (len(pieces),):
        raise UserError(
            f"the cost model returned costs of shape {raw.shape} for {len(pieces)} pieces; it must "
            "return one cost for each piece"
        )
    if (i := first_true(~(raw >= 0) | ~(raw < MOST_WORK))) is not None:
        raise UserError(
            f"the cost of {pieces[i]} is {raw[i]} ns, but costs must be finite, at least 0 and "
            f"below {MOST_WORK:.3g} ns; correct the cost model"
        )
    return int_array("cost_ns", raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPacker:
    """Base class of the policies: a policy sets `policy` and implements `push`.

    `slots` and `batches_wait` describe the carries that the policy produces. A carry that was read
    from a checkpoint is checked against them.
    """

    options: PackerOptions  # the options that every policy has
    policy: ClassVar[str]  # name of the policy in `packing.policy`
    # Which slots the pieces in a carry can have. A slot is a number that the policy gives to each
    # piece that waits, such as its outlier queue.
    slots: ClassVar[CarrySlots] = CarrySlots.ANY
    # Whether a waiting piece may have an `arrival_step` later than the next step. This happens if a
    # policy collects several batches before it packs them together.
    batches_wait: ClassVar[bool] = True

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches in every step, over all pipelines."""
        return self.options.num_micro_batches

    def start(self) -> Carry:
        """Return the carry of a run that has trained nothing."""
        return Carry.empty(self.policy)

    def _carry(self, pieces: Pieces, next_step: int, slot: IntArray | None = None) -> Carry:
        """Return the carry with these waiting pieces.

        Args:
            pieces: The pieces that wait.
            next_step: Index of the next step.
            slot: Slot of each piece, such as its outlier queue, shape [num_pieces]. None puts all
                pieces in slot 0.
        """
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
        """Return the plan of a step whose micro-batch i has the pieces with indices `rows[i]`.

        Args:
            step: Index of the step.
            pieces: The pieces to which `rows` refers. The step trains only those that are in
                `rows`.
            rows: Indices of the pieces in each micro-batch.
            work_ns: Work of every piece, shape [num_pieces].
            num_held_tokens: Tokens that still wait after this step.
            max_delay: Pieces that waited for more steps than this are counted as overdue. None
                counts none.
            shuffle: Whether to put the pieces of micro-batch i in a random order, whose seed is
                (options.seed, step, i). Policies place documents in descending length. In that
                order, per-sequence sharding would give the long documents to the same ranks in
                every step.
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
        """Return the plans of consecutive steps, each of which trains some of the pieces.

        Args:
            first_step: Index of the first step.
            pieces: The pieces of all these steps.
            steps: `steps[s][i]` has the indices of the pieces in micro-batch i of the s-th step.
            num_waiting_tokens: Tokens that still wait after the last step.
            shuffle: Whether to put the pieces of a micro-batch in a random order.
        """
        work, length = self.options.workloads(pieces), pieces.length
        # The tokens that wait after a step are those of all later steps, and those that no step
        # trains.
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
            f"s_max = {s_max} tokens must be at least the context window, {options.context_window} "
            "tokens, or a document that fills the window could never be placed; raise "
            "packing.s_max"
        )


def check_fits(pieces: Pieces, limit: int, *, name: str = "s_max") -> None:
    """Raise UserError if a waiting piece has more than `limit` tokens.

    Such a piece comes from the checkpoint of a run with a larger context window. No step could
    train it, so the flush at the end of the data would never end.

    Args:
        pieces: The waiting pieces.
        limit: Most tokens of a piece.
        name: What the message calls the limit.
    """
    if (i := first_true(pieces.length > limit)) is not None:
        piece = pieces[i]
        raise UserError(
            f"document {piece.document} has a waiting piece of {piece.stop - piece.start} tokens, "
            f"but a piece may now have at most {limit} tokens ({name}). An earlier run with a "
            "larger context window cut this piece; resume with that context window, or raise "
            f"{name}"
        )


def permuted(values: IntLike, options: PackerOptions, *, step: int, index: int) -> IntArray:
    """Return `values` in a random order that is the same on all hosts.

    Args:
        values: Integers, shape [n].
        options: Options with the seed of the run.
        step: Index of the step. The order depends on the seed, the step and `index`.
        index: Index of the micro-batch whose pieces are shuffled, or STEP_ORDER to shuffle steps.
    """
    key = np.array([options.seed % 2**64, (step << 20) + index], np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(np.asarray(values, np.int64))


def _micro_batch_ns(
    options: PackerOptions, placed: Pieces, work_ns: IntArray, offsets: IntArray
) -> IntArray:
    """Return the work of every micro-batch in ns, shape [num_micro_batches].

    If documents are joined, several pieces form one attention segment, which has more work than
    these pieces alone.

    Args:
        options: Options with the layout and the workload model.
        placed: The pieces of all micro-batches, in order.
        work_ns: Work of each piece alone.
        offsets: Micro-batch i has the pieces from offsets[i] to offsets[i + 1].
    """
    if options.layout == Layout.SEPARATE:
        running = offsets_of(work_ns)
        return running[offsets[1:]] - running[offsets[:-1]]
    out = np.zeros(offsets.size - 1, np.int64)
    for i, (start, stop) in enumerate(pairwise(offsets.tolist())):
        segments = segment_lengths(placed.length[start:stop], options.layout)
        out[i] = int(options.cost.workload_ns(segments).sum())
    return out


def _num_joined(placed: Pieces, offsets: IntArray) -> int:
    """Count the labels that exist only because the documents of a micro-batch are joined.

    Where one document ends and another begins, the first token of the second one becomes the label
    of the last token of the first one.

    Args:
        placed: The pieces of all micro-batches, in order.
        offsets: Micro-batch i has the pieces from offsets[i] to offsets[i + 1].
    """
    is_followed = np.append(placed.start[1:] == 0, False)
    is_followed[offsets[1:][np.diff(offsets) > 0] - 1] = False
    return int((is_followed & (placed.num_targets < placed.length)).sum())


_UNITS = 2.0**40
"""`comparable` scales work to this sum. It is large enough that one token among millions of
documents still counts, and small enough for int64: sums may be 2^23 times larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceRange:
    """A range of factors by which attention may be cheaper or dearer than its predicted price.

    A packing that is balanced at both ends of the range is balanced at every price between them.
    The reason: let a step have linear work L and attention work A, and one of its micro-batches
    linear work l and attention work a. If attention costs k times its price, the micro-batch's
    share of the step's work is (l + k a) / (L + k A). This is monotone in k, so it is largest at
    one end of the range.

    A range also balances the forward pass alone, in which attention is cheaper relative to linear
    work: with the `h100` profile and a window of 128K, the forward pass corresponds to k = 0.71 (7B
    model, TP 8, CP 2). With low = high = 1 the predicted price is used as it is.
    """

    low: float = 1.0  # lowest factor, above 0 and at most 1
    high: float = 1.0  # highest factor, at least 1

    def __post_init__(self) -> None:
        if not 0 < self.low <= 1 <= self.high < np.inf:
            raise UserError(
                f"packing.price_range = [{self.low}, {self.high}] must be a factor above 0 and at "
                "most 1, and a finite factor of at least 1; set [1, 1] to balance only for the "
                "predicted price of attention"
            )

    @property
    def is_one_price(self) -> bool:
        """Whether both factors are 1, so that attention costs exactly its predicted price."""
        return self.low == self.high

    def ends(self, options: PackerOptions, pieces: Pieces, work_ns: IntArray) -> IntArray:
        """Return the work of each piece in ns, at the lowest and the highest price of attention.

        Args:
            options: Options with the workload model.
            pieces: The pieces.
            work_ns: Work of each piece in ns at the predicted price, shape [num_pieces].

        Returns:
            Work in ns, shape [2, num_pieces]: row 0 at the factor `low`, row 1 at the factor
            `high`. If both factors are 1, the result is `work_ns` with shape [1, num_pieces].
        """
        if self.is_one_price:
            return work_ns[None]
        return np.stack([options.workloads(pieces, factor=k) for k in (self.low, self.high)])


ONE_PRICE = PriceRange()


def comparable(ends: IntArray) -> list[list[int]]:
    """Scale the work of pieces at both ends of a price range, so that both ends have equal totals.

    Scaled work is a piece's share of all work at that end. So the values of a micro-batch at both
    ends can be compared: the larger one is its share at the price that is worse for it. With a
    single price, work is returned unscaled.

    Args:
        ends: Work of each piece in ns at each end, shape [num_ends, n].

    Returns:
        The scaled work, a list of n integers for each end.
    """
    if len(ends) == 1:
        return [ends[0].tolist()]
    return [
        np.rint(work * (_UNITS / max(1, int(work.sum())))).astype(np.int64).tolist()
        for work in ends
    ]

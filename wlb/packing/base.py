"""What every packing policy shares: the protocol, and turning placements into a plan.

`push(batch, carry) -> (plans, carry)` is pure: what a policy keeps between global batches is in
`carry` and nowhere else. `push(None, carry)` is the end of data and returns everything that still
waits, in as many plans as it takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from wlb.cost import WorkloadModel
from wlb.plan import (
    Carry,
    GlobalBatch,
    IntArray,
    IntLike,
    PackingPlan,
    Pieces,
    check_at_least,
    int_array,
    offsets_of,
    split_long,
)

MOST_WORK = 2.0**62


class Packer(Protocol):
    """A packing policy for N micro-batches a step."""

    policy: ClassVar[str]

    @property
    def num_micro_batches(self) -> int: ...

    def start(self) -> Carry:
        """The carry of a run that has trained nothing."""
        ...

    def push(
        self, batch: GlobalBatch | None, carry: Carry
    ) -> tuple[tuple[PackingPlan, ...], Carry]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PackerOptions:
    """What all policies are told.

    num_micro_batches: N, over all pipelines. context_window: C, the longest piece, in tokens.
    long_documents: "split" or "refuse" for documents longer than C. seed: order of documents inside
    a micro-batch.
    """

    num_micro_batches: int
    context_window: int
    cost: WorkloadModel
    long_documents: str = "split"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_micro_batches", "context_window"):
            check_at_least(name, getattr(self, name), 1)

    def arrived(self, batch: GlobalBatch | None, step: int, *, split: bool = True) -> Pieces:
        """The batch's documents as pieces of at most a window, stamped with the step that is next.

        split = False leaves long documents whole (for a policy that cuts windows itself), unless
        they are to be refused. Delay counts from that step: batches and steps need not be one to
        one.
        """
        if batch is None:
            return Pieces.empty()
        pieces = Pieces.whole(batch.documents)
        if split or self.long_documents == "refuse":
            pieces = split_long(
                batch.documents, window=self.context_window, long_documents=self.long_documents
            )
        return pieces.stamped(step)

    @property
    def tokens_per_step(self) -> int:
        """N x C, the tokens that a global batch brings on average."""
        return self.num_micro_batches * self.context_window

    def workloads(self, pieces: Pieces) -> IntArray:
        """W_a + W_l of each piece in ns, shape [num_pieces]; refuses a cost that is negative."""
        work = _priced(pieces, self.cost.workload_ns(pieces.length))
        # Sums, and N times the largest, must stay integers of 64 bits.
        most = int(work.max(initial=0))
        if max(work.sum(dtype=float), float(most * self.num_micro_batches)) > MOST_WORK:
            piece = pieces[int(work.argmax())]
            raise ValueError(
                f"the costs of {len(pieces)} pieces add up beyond 64-bit integers; the largest is "
                f"{most} ns for {piece}: check the cost model's units"
            )
        return work

    def attention(self, pieces: Pieces) -> IntArray:
        """W_a of each piece in ns, shape [num_pieces]; refuses a cost that is negative."""
        return _priced(pieces, self.cost.attention_ns(pieces.length))

    def loads(self, pieces: Pieces, rows: list[list[int]]) -> IntArray:
        """W_a + W_l of `rows[j]` of `pieces` in ns, shape [len(rows)]."""
        work = self.workloads(pieces)
        return np.array([int(work[members].sum()) for members in rows], np.int64)


def _priced(pieces: Pieces, cost_ns: IntLike) -> IntArray:
    """`cost_ns` (shape [num_pieces]) as integers; ValueError naming the piece that has no cost."""
    raw = np.asarray(cost_ns)
    if raw.shape != (len(pieces),):
        raise ValueError(f"the cost model gave {raw.shape} costs for {len(pieces)} pieces")
    bad = np.flatnonzero(~(raw >= 0) | ~(raw < 2.0**62))
    if bad.size:
        piece = pieces[int(bad[0])]
        raise ValueError(
            f"the cost of {piece} is {raw[bad[0]]} ns; it must be at least 0 and finite"
        )
    return int_array("cost_ns", raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPacker:
    """What policies have in common; a policy sets `policy` and writes `push`."""

    options: PackerOptions
    policy: ClassVar[str]

    @property
    def num_micro_batches(self) -> int:
        return self.options.num_micro_batches

    def start(self) -> Carry:
        """The carry of a run that has trained nothing."""
        return Carry.empty(self.policy)


def build_plan(
    options: PackerOptions,
    *,
    policy: str,
    step: int,
    pieces: Pieces,
    rows: Sequence[IntLike],
    num_held_tokens: int,
    max_delay: int | None = None,
    shuffle: bool = True,
) -> PackingPlan:
    """A plan with `rows[i]` of `pieces` in micro-batch i.

    max_delay: pieces delayed by more steps than that are counted as overdue.

    shuffle: order the pieces of a micro-batch at random, by (options.seed, step, i). Policies push
    documents in descending order; left so, per-sequence sharding would give the long documents to
    the same ranks every time.
    """
    order = [np.array(members, np.int64) for members in rows]
    if shuffle:
        for i, members in enumerate(order):
            key = np.array([options.seed % 2**64, (step << 20) + i], np.uint64)
            order[i] = np.random.Generator(np.random.Philox(key=key)).permutation(members)
    index = np.concatenate(order)
    placed = pieces.take(index)
    running = offsets_of(options.workloads(placed))
    offsets = offsets_of([len(members) for members in rows])
    return PackingPlan(
        step=step,
        policy=policy,
        pieces=placed,
        offsets=offsets,
        workload_ns=running[offsets[1:]] - running[offsets[:-1]],
        num_held_tokens=num_held_tokens,
        num_overdue=0 if max_delay is None else int((step - placed.arrival > max_delay).sum()),
    )

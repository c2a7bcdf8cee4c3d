"""PackingPlan: the pieces of each micro-batch of a step; Carry: pieces that wait for later steps.

A packing plan is global and deterministic: it names no rank, device or process group.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from wlb.plan.arrays import IntArray, check_at_least, check_minimum, digest, int_array, offsets_of
from wlb.plan.documents import PIECES, Pieces
from wlb.plan.errors import UserError
from wlb.plan.plain import PlainRecord, parsing
from wlb.plan.read_file import load_arrays, malformed
from wlb.plan.schema import COUNT, Schema, schema_of


class Layout(StrEnum):
    """How pieces form attention segments. Rows attend to rows of their segment only."""

    SEPARATE = "separate"  # every piece is a segment
    PADDED = "padded"  # every piece is a segment, padded to the longest piece of its micro-batch
    # all pieces are one segment, so a document attends to those before it; its first token becomes
    # a label
    JOINED = "joined"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """One packed sequence: a view of some rows of a PackingPlan, in their order.

    Without CP, an attention kernel takes `cu_seqlens` (converted to int32) for both queries and
    keys, with a causal mask. A micro-batch may be empty. Its ranks still join all collectives, with
    the one row of padding that `wlb.adapters.collate.flatten_micro_batch` makes.
    """

    index: int  # number within the step, over all pipelines
    pieces: Pieces  # in order; may be empty
    workload_ns: int  # predicted time of forward and backward
    layout: Layout = Layout.SEPARATE  # whether documents attend to each other

    @property
    def lengths(self) -> IntArray:
        """Rows of each attention segment, padding included, shape [num_segments]."""
        return segment_lengths(self.pieces.length, self.layout)

    @property
    def num_tokens(self) -> int:
        """Document tokens, without padding."""
        return self.pieces.num_tokens

    @property
    def num_rows(self) -> int:
        """Document tokens and padding."""
        return int(self.lengths.sum())

    @property
    def num_targets(self) -> int:
        """Tokens that have a label."""
        return self.pieces.total_targets

    @property
    def cu_seqlens(self) -> IntArray:
        """Start of each segment, and the end of the last one; int64, shape [num_segments + 1]."""
        return offsets_of(self.lengths)

    def parts(self, segment: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return which tokens of which pieces lie in rows [start, stop) of a segment.

        Returns:
            Triples (piece, first token, token behind the last one) in order. Tokens are counted
            from the piece's beginning. Padding rows belong to no triple.
        """
        if self.layout != Layout.JOINED:
            piece = self.pieces[segment]
            stop = min(stop, piece.stop - piece.start)
            return [(segment, start, stop)] if start < stop else []
        length = self.pieces.length
        # A joined segment has all pieces; find those that overlap [start, stop).
        begin = offsets_of(length)
        first = int(np.searchsorted(begin, start, "right")) - 1
        last = int(np.searchsorted(begin, stop, "left"))
        ends = ((i, start - int(begin[i]), stop - int(begin[i])) for i in range(first, last))
        return [(i, max(0, a), min(int(length[i]), b)) for i, a, b in ends]


def segment_lengths(lengths: IntArray, layout: Layout) -> IntArray:
    """Return the rows of each segment of a micro-batch whose pieces have these lengths."""
    match layout:
        case Layout.SEPARATE:
            return lengths
        case Layout.PADDED:
            return np.full(lengths.size, lengths.max(initial=0), np.int64)
        case Layout.JOINED:
            return lengths.sum(keepdims=True) if lengths.size else lengths


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackingPlan(PlainRecord):
    """The pieces of one step, grouped by micro-batch."""

    step: int  # number of the step, from 0
    policy: str  # packing policy that made the plan
    pieces: Pieces  # all pieces, one micro-batch after the other
    # micro-batch i has the pieces [offsets[i], offsets[i + 1]), which may be none; shape
    # [num_micro_batches + 1]
    offsets: IntArray
    workload_ns: IntArray  # predicted time of each micro-batch, shape [num_micro_batches]
    num_held_tokens: int = 0  # tokens that wait after this step
    # pieces trained later than `packing.max_delay`; only `bounded` has this limit
    num_overdue: int = 0
    # how the pieces of every micro-batch form segments; `workload_ns` depends on it
    layout: Layout = Layout.SEPARATE
    num_joined_targets: int = 0  # labels that joining adds: the first tokens of documents

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", Layout(self.layout))
        object.__setattr__(self, "offsets", int_array("PackingPlan.offsets", self.offsets))
        object.__setattr__(self, "workload_ns", int_array("workload_ns", self.workload_ns))
        check_minimum("PackingPlan.workload_ns", self.workload_ns, 0)
        ends_ok = self.offsets[0] == 0 and self.offsets[-1] == len(self.pieces)
        if not ends_ok or bool(np.any(np.diff(self.offsets) < 0)):
            raise ValueError(
                f"offsets {self.offsets.tolist()} do not divide {len(self.pieces)} pieces"
            )
        if self.workload_ns.size != self.num_micro_batches:
            raise ValueError(
                f"{self.workload_ns.size} workloads for {self.num_micro_batches} micro-batches"
            )

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches, empty ones included."""
        return self.offsets.size - 1

    @property
    def num_tokens(self) -> int:
        """Document tokens of the step."""
        return self.pieces.num_tokens

    @property
    def num_targets(self) -> int:
        """Labels of the whole step; the summed loss is divided by it."""
        return self.pieces.total_targets + self.num_joined_targets

    @property
    def attended(self) -> IntArray:
        """Tokens of each causal sequence, without padding.

        A sequence is a piece (shape [num_pieces]) or, if pieces are joined, a micro-batch (shape
        [num_micro_batches]).
        """
        return self.tokens if self.layout == Layout.JOINED else self.pieces.length

    @property
    def tokens(self) -> IntArray:
        """Document tokens of each micro-batch, shape [num_micro_batches]."""
        running = offsets_of(self.pieces.length)
        return running[self.offsets[1:]] - running[self.offsets[:-1]]

    @property
    def rows(self) -> IntArray:
        """Document tokens and padding of each micro-batch, shape [num_micro_batches]."""
        if self.layout != Layout.PADDED:
            return self.tokens
        counts, longest = np.diff(self.offsets), np.zeros(self.num_micro_batches, np.int64)
        # Empty micro-batches are left out, because `reduceat` does not take empty ranges.
        filled = counts > 0
        if filled.any():
            longest[filled] = np.maximum.reduceat(self.pieces.length, self.offsets[:-1][filled])
        return counts * longest

    def micro_batch(self, index: int) -> MicroBatch:
        """Return micro-batch `index` as a view of this plan's rows."""
        start, stop = int(self.offsets[index]), int(self.offsets[index + 1])
        return MicroBatch(
            index=index,
            pieces=self.pieces.slice(start, stop),
            workload_ns=int(self.workload_ns[index]),
            layout=self.layout,
        )

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """All micro-batches in the plan's order, empty ones included."""
        return tuple(self.micro_batch(i) for i in range(self.num_micro_batches))

    def digest(self) -> int:
        """Return a 60-bit hash of the plan, by which hosts notice that their plans differ."""
        columns = self.pieces.columns().values()
        return digest(
            self.policy, self.step, *columns, self.offsets, self.workload_ns, str(self.layout)
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "PackingPlan":
        """Read what `to_json` wrote; UserError if it is not a packing plan."""
        with parsing("packing plan"):
            values: dict[str, Any] = {**data, "pieces": Pieces.from_json(data["pieces"])}
            return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Carry(PlainRecord):
    """State that a packer keeps between two steps: immutable data, saved in checkpoints.

    It does not depend on the number of micro-batches or on the DP size, so a run can be resumed in
    another layout.
    """

    policy: str  # packing policy that made it
    pieces: Pieces  # waiting pieces, in the policy's order
    # queue of each waiting piece, shape [num_pieces]. Its meaning depends on the policy; for
    # Algorithm 1, slot 0 has the leftover pieces and slot i those of outlier queue i.
    slot: IntArray
    next_step: int  # step that is planned next

    def __post_init__(self) -> None:
        object.__setattr__(self, "slot", int_array("Carry.slot", self.slot))
        check_at_least("Carry.next_step", self.next_step, 0)
        if self.slot.size != len(self.pieces):
            raise ValueError(f"{self.slot.size} slots for {len(self.pieces)} waiting pieces")

    @classmethod
    def empty(cls, policy: str, *, next_step: int = 0) -> "Carry":
        """Return the state before the first step, in which nothing waits."""
        return cls(
            policy=policy, pieces=Pieces.empty(), slot=int_array("slot", []), next_step=next_step
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that wait."""
        return self.pieces.num_tokens

    def in_slot(self, slot: int) -> Pieces:
        """Return the pieces of one slot, in their order."""
        return self.pieces.take(np.flatnonzero(self.slot == slot))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Carry":
        """Read what `to_json` wrote; UserError if it is not a carry."""
        with parsing("carry"):
            values: dict[str, Any] = {**data, "pieces": Pieces.from_json(data["pieces"])}
            return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write an `.npz` file, which is smaller and faster to read than JSON."""
        # Given a name instead of an open file, numpy would append a suffix.
        with open(path, "wb") as file:
            arrays: dict[str, Any] = {
                "policy": np.array(self.policy),
                "next_step": np.array(self.next_step, np.int64),
                "slot": self.slot,
                **self.pieces.file_columns(),
            }
            np.savez(file, allow_pickle=False, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> "Carry":
        """Read what `save` wrote; UserError with the file's name for anything else."""
        what = f"{path} is not a carry that `Carry.save` wrote"
        remedy = "give the file that it wrote"
        arrays = load_arrays(path, what, remedy=remedy)
        with malformed(what, remedy):
            policy, next_step = arrays.pop("policy"), arrays.pop("next_step")
            if policy.dtype.kind != "U" or next_step.dtype.kind not in "iu" or next_step.ndim:
                raise UserError(f"{what}: its policy is no text or its next step no whole number")
            return cls(
                policy=str(policy),
                next_step=int(next_step),
                slot=arrays.pop("slot"),
                pieces=Pieces.from_file_columns(arrays),
            )


PACKING: Schema = schema_of(PackingPlan, pieces=PIECES, step=COUNT)
CARRY: Schema = schema_of(Carry, pieces=PIECES, next_step=COUNT)

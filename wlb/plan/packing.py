"""PackingPlan: the pieces of each micro-batch of a step; Carry: pieces that wait for later steps.

A packing plan covers all pipelines and is the same on every host. It mentions no ranks, devices or
process groups.
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
    """How the pieces of a micro-batch form attention segments (entries of cu_seqlens)."""

    SEPARATE = "separate"  # every piece is a segment
    PADDED = "padded"  # every piece is a segment, padded to the longest piece of its micro-batch
    # all pieces form one segment, so a document also attends to the documents before it, and its
    # first token is the label of the previous document's last token
    JOINED = "joined"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """One packed sequence: the pieces that one pipeline trains in one forward and backward pass.

    Without context parallelism, pass `cu_seqlens` (converted to int32) to a variable-length
    attention kernel for both queries and keys, with a causal mask. A micro-batch may be empty. Its
    ranks still take part in all collectives, with one row of padding that
    `wlb.adapters.collate.flatten_micro_batch` adds.
    """

    index: int  # number of the micro-batch in the step, over all pipelines; from 0
    pieces: Pieces  # the pieces in the order of the sequence
    workload_ns: int  # predicted time of forward and backward together
    layout: Layout = Layout.SEPARATE  # how the pieces form attention segments

    @property
    def lengths(self) -> IntArray:
        """Rows of each attention segment, padding included, shape [num_segments]."""
        return segment_lengths(self.pieces.length, self.layout)

    @property
    def num_tokens(self) -> int:
        """Number of document tokens, without padding."""
        return self.pieces.num_tokens

    @property
    def num_rows(self) -> int:
        """Number of rows: document tokens and padding."""
        return int(self.lengths.sum())

    @property
    def num_targets(self) -> int:
        """Number of tokens that have a label."""
        return self.pieces.total_targets

    @property
    def cu_seqlens(self) -> IntArray:
        """First row of each segment, then the total number of rows; shape [num_segments + 1]."""
        return offsets_of(self.lengths)

    def parts(self, segment: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return which tokens of which pieces are in the rows [start, stop) of a segment.

        Args:
            segment: Number of the segment in the micro-batch.
            start: First row of the range, counted from the beginning of the segment.
            stop: Last row of the range plus one, counted in the same way.

        Returns:
            Triples (number of the piece, first token, last token plus one) in order. Tokens are
            counted from the beginning of the piece. Rows of padding are left out.
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
    """Return how many rows each attention segment of a micro-batch has, padding included.

    Args:
        lengths: Tokens of each piece of the micro-batch, shape [num_pieces].
        layout: How the pieces form segments.

    Returns:
        Rows of each segment, shape [num_segments].
    """
    match layout:
        case Layout.SEPARATE:
            return lengths
        case Layout.PADDED:
            return np.full(lengths.size, lengths.max(initial=0), np.int64)
        case Layout.JOINED:
            return lengths.sum(keepdims=True) if lengths.size else lengths


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackingPlan(PlainRecord):
    """The pieces that one step trains, grouped by micro-batch."""

    step: int  # number of the step, from 0
    policy: str  # name of the packing policy that made the plan
    pieces: Pieces  # the pieces of micro-batch 0, then those of micro-batch 1, and so on
    # micro-batch i consists of the pieces [offsets[i], offsets[i + 1]) and may be empty; shape
    # [num_micro_batches + 1]
    offsets: IntArray
    # predicted time of forward and backward of each micro-batch, shape [num_micro_batches]
    workload_ns: IntArray
    num_held_tokens: int = 0  # tokens of documents that still wait after this step
    # number of pieces trained more than `packing.max_delay` steps after they were read; only the
    # policy `bounded` has this limit
    num_overdue: int = 0
    # how the pieces of every micro-batch form attention segments; `workload_ns` depends on it
    layout: Layout = Layout.SEPARATE
    # with Layout.JOINED: number of tokens whose label is the first token of the next document
    num_joined_targets: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", Layout(self.layout))
        object.__setattr__(self, "offsets", int_array("PackingPlan.offsets", self.offsets))
        object.__setattr__(self, "workload_ns", int_array("workload_ns", self.workload_ns))
        check_minimum("PackingPlan.workload_ns", self.workload_ns, 0)
        ends_ok = self.offsets[0] == 0 and self.offsets[-1] == len(self.pieces)
        if not ends_ok or bool(np.any(np.diff(self.offsets) < 0)):
            raise ValueError(
                f"PackingPlan.offsets = {self.offsets.tolist()} must increase from 0 to "
                f"{len(self.pieces)}, the number of pieces"
            )
        if self.workload_ns.size != self.num_micro_batches:
            raise ValueError(
                f"PackingPlan.workload_ns has {self.workload_ns.size} entries, but must have one "
                f"for each of the {self.num_micro_batches} micro-batches"
            )

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches, empty ones included."""
        return self.offsets.size - 1

    @property
    def num_tokens(self) -> int:
        """Number of document tokens in the step, without padding."""
        return self.pieces.num_tokens

    @property
    def num_targets(self) -> int:
        """Number of labels in the step: tokens whose prediction counts in the loss."""
        return self.pieces.total_targets + self.num_joined_targets

    @property
    def attended(self) -> IntArray:
        """Number of tokens of each attention segment, without padding.

        Each piece is a segment (shape [num_pieces]). With Layout.JOINED, each micro-batch is a
        segment (shape [num_micro_batches]).
        """
        return self.tokens if self.layout == Layout.JOINED else self.pieces.length

    @property
    def tokens(self) -> IntArray:
        """Document tokens of each micro-batch, without padding; shape [num_micro_batches]."""
        running = offsets_of(self.pieces.length)
        return running[self.offsets[1:]] - running[self.offsets[:-1]]

    @property
    def rows(self) -> IntArray:
        """Rows of each micro-batch: document tokens and padding; shape [num_micro_batches]."""
        if self.layout != Layout.PADDED:
            return self.tokens
        counts, longest = np.diff(self.offsets), np.zeros(self.num_micro_batches, np.int64)
        # Skip empty micro-batches, because `reduceat` cannot reduce an empty range.
        filled = counts > 0
        if filled.any():
            longest[filled] = np.maximum.reduceat(self.pieces.length, self.offsets[:-1][filled])
        return counts * longest

    def micro_batch(self, index: int) -> MicroBatch:
        """Return the micro-batch with number `index`, without copying its pieces."""
        start, stop = int(self.offsets[index]), int(self.offsets[index + 1])
        return MicroBatch(
            index=index,
            pieces=self.pieces.slice(start, stop),
            workload_ns=int(self.workload_ns[index]),
            layout=self.layout,
        )

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """All micro-batches in order, empty ones included."""
        return tuple(self.micro_batch(i) for i in range(self.num_micro_batches))

    def digest(self) -> int:
        """Return a 60-bit hash of the plan. Ranks compare it to detect that their plans differ."""
        columns = self.pieces.columns().values()
        return digest(
            self.policy, self.step, *columns, self.offsets, self.workload_ns, str(self.layout)
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "PackingPlan":
        """Make the plan from what `to_json` returned; UserError if it is not a packing plan."""
        with parsing("packing plan"):
            values: dict[str, Any] = {**data, "pieces": Pieces.from_json(data["pieces"])}
            return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Carry(PlainRecord):
    """The state that a packer keeps between two steps. Checkpoints store it.

    The state does not depend on the number of micro-batches or on the data-parallel size, so a run
    can be resumed on another number of ranks.
    """

    policy: str  # name of the packing policy that made this state
    pieces: Pieces  # pieces that wait, in the order in which the policy keeps them
    # number of the queue in which each piece waits, shape [num_pieces]. With Algorithm 1, queue 0
    # has pieces that did not fit into the step, and queue i has outliers of threshold i. Other
    # policies number their queues in their own way.
    slot: IntArray
    next_step: int  # number of the step that the packer plans next

    def __post_init__(self) -> None:
        object.__setattr__(self, "slot", int_array("Carry.slot", self.slot))
        check_at_least("Carry.next_step", self.next_step, 0)
        if self.slot.size != len(self.pieces):
            raise ValueError(
                f"Carry.slot has {self.slot.size} entries, but must have one for each of the "
                f"{len(self.pieces)} waiting pieces"
            )

    @classmethod
    def empty(cls, policy: str, *, next_step: int = 0) -> "Carry":
        """Return a carry in which no piece waits.

        Args:
            policy: Name of the packing policy.
            next_step: Number of the step that is planned next.
        """
        return cls(
            policy=policy, pieces=Pieces.empty(), slot=int_array("slot", []), next_step=next_step
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens that wait."""
        return self.pieces.num_tokens

    def in_slot(self, slot: int) -> Pieces:
        """Return the pieces that wait in this slot, in order."""
        return self.pieces.take(np.flatnonzero(self.slot == slot))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Carry":
        """Make the carry from what `to_json` returned; UserError if it is not a carry."""
        with parsing("carry"):
            values: dict[str, Any] = {**data, "pieces": Pieces.from_json(data["pieces"])}
            return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write the carry to an `.npz` file, which is smaller and faster to read than JSON."""
        # Open the file here, because numpy would append ".npz" to a path.
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
        """Read a file that `save` wrote; UserError if it is any other file."""
        what = f"{path} is not a carry that `Carry.save` wrote"
        remedy = "give a file that `Carry.save` wrote"
        arrays = load_arrays(path, what, remedy=remedy)
        with malformed(what, remedy):
            policy, next_step = arrays.pop("policy"), arrays.pop("next_step")
            if policy.dtype.kind != "U":
                raise UserError(
                    f"{what}: `policy` has dtype {policy.dtype} instead of text; {remedy}"
                )
            if next_step.dtype.kind not in "iu" or next_step.ndim:
                raise UserError(
                    f"{what}: `next_step` must be one whole number, but has dtype "
                    f"{next_step.dtype} and shape {next_step.shape}; {remedy}"
                )
            return cls(
                policy=str(policy),
                next_step=int(next_step),
                slot=arrays.pop("slot"),
                pieces=Pieces.from_file_columns(arrays),
            )


PACKING: Schema = schema_of(PackingPlan, pieces=PIECES, step=COUNT)
CARRY: Schema = schema_of(Carry, pieces=PIECES, next_step=COUNT)

"""PackingPlan: the pieces of each micro-batch of a step; Carry: pieces that wait for later steps.

A plan is global and deterministic: it names no rank, device or process group.
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
    """Which rows of a micro-batch attend to each other: its segments.

    separate: every piece is a segment. padded: every piece is one, filled up to the longest of its
    micro-batch with rows that are computed and not trained. joined: all pieces are one segment, so
    that documents see those before them, and a document's first token is a label.
    """

    SEPARATE = "separate"
    PADDED = "padded"
    JOINED = "joined"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """One packed sequence: a view of a PackingPlan's rows, in the order they are laid out.

    index: in its step, over all pipelines. pieces: in order. workload_ns: predicted, forward and
    backward. layout: which rows attend to each other. Without CP a kernel takes `cu_seqlens` as
    int32 for queries and keys, causal. A micro-batch may be empty (no pieces): its ranks still join
    all collectives, with the row of padding that `wlb.adapters.collate.flatten_micro_batch` makes.
    """

    index: int
    pieces: Pieces
    workload_ns: int
    layout: Layout = Layout.SEPARATE

    @property
    def lengths(self) -> IntArray:
        """Rows of each segment: pieces and their padding, or all pieces; shape [num_segments]."""
        return segment_lengths(self.pieces.length, self.layout)

    @property
    def num_tokens(self) -> int:
        """Tokens of documents, without padding."""
        return self.pieces.num_tokens

    @property
    def num_rows(self) -> int:
        """Tokens and padding."""
        return int(self.lengths.sum())

    @property
    def num_targets(self) -> int:
        """Tokens that carry a label."""
        return self.pieces.total_targets

    @property
    def cu_seqlens(self) -> IntArray:
        """Start of each segment in the micro-batch and the end, int64 [num_segments + 1]."""
        return offsets_of(self.lengths)

    def parts(self, segment: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Which tokens lie in rows [start, stop) of a segment: (piece, first and last + 1 token of
        the piece), in order. Padding has none.
        """
        if self.layout != Layout.JOINED:
            piece = self.pieces[segment]
            stop = min(stop, piece.stop - piece.start)
            return [(segment, start, stop)] if start < stop else []
        length = self.pieces.length
        begin = offsets_of(length)
        first = int(np.searchsorted(begin, start, "right")) - 1
        last = int(np.searchsorted(begin, stop, "left"))
        ends = ((i, start - int(begin[i]), stop - int(begin[i])) for i in range(first, last))
        return [(i, max(0, a), min(int(length[i]), b)) for i, a, b in ends]


def segment_lengths(lengths: IntArray, layout: Layout) -> IntArray:
    """Rows of each segment of a micro-batch with pieces of these lengths."""
    match layout:
        case Layout.SEPARATE:
            return lengths
        case Layout.PADDED:
            return np.full(lengths.size, lengths.max(initial=0), np.int64)
        case Layout.JOINED:
            return lengths.sum(keepdims=True) if lengths.size else lengths


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackingPlan(PlainRecord):
    """Pieces of one step, grouped by micro-batch.

    pieces: rows in execution order. offsets: shape [num_micro_batches + 1]; micro-batch i is the
    rows [offsets[i], offsets[i + 1]), which may be empty. workload_ns: predicted time of each
    micro-batch, shape [num_micro_batches]. num_held_tokens: tokens that wait after this step.
    num_overdue: pieces that are trained later than the policy's maximum delay (`bounded` has one).
    layout: of all micro-batches; workload_ns is of their segments. num_joined_targets: labels that
    joining adds, of first tokens of documents.
    """

    step: int
    policy: str
    pieces: Pieces
    offsets: IntArray
    workload_ns: IntArray
    num_held_tokens: int = 0
    num_overdue: int = 0
    layout: Layout = Layout.SEPARATE
    num_joined_targets: int = 0

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
        """N, empty ones included."""
        return self.offsets.size - 1

    @property
    def num_tokens(self) -> int:
        """Document tokens of the step."""
        return self.pieces.num_tokens

    @property
    def num_targets(self) -> int:
        """Valid labels of the whole step, by which the loss is divided."""
        return self.pieces.total_targets + self.num_joined_targets

    @property
    def attended(self) -> IntArray:
        """Tokens that attend to each other, causally: of each piece, or where pieces are joined of
        each micro-batch; without padding. Shape [num_pieces] or [num_micro_batches].
        """
        return self.tokens if self.layout == Layout.JOINED else self.pieces.length

    @property
    def tokens(self) -> IntArray:
        """Tokens of each micro-batch, shape [num_micro_batches]."""
        running = offsets_of(self.pieces.length)
        return running[self.offsets[1:]] - running[self.offsets[:-1]]

    @property
    def rows(self) -> IntArray:
        """Tokens and padding of each micro-batch, shape [num_micro_batches]."""
        if self.layout != Layout.PADDED:
            return self.tokens
        counts, longest = np.diff(self.offsets), np.zeros(self.num_micro_batches, np.int64)
        filled = counts > 0
        if filled.any():
            longest[filled] = np.maximum.reduceat(self.pieces.length, self.offsets[:-1][filled])
        return counts * longest

    def micro_batch(self, index: int) -> MicroBatch:
        """Micro-batch `index`, a view of this plan's rows."""
        start, stop = int(self.offsets[index]), int(self.offsets[index + 1])
        return MicroBatch(
            index=index,
            pieces=self.pieces.slice(start, stop),
            workload_ns=int(self.workload_ns[index]),
            layout=self.layout,
        )

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """Micro-batches in the plan's order, including empty ones."""
        return tuple(self.micro_batch(i) for i in range(self.num_micro_batches))

    def digest(self) -> int:
        """60 bits that tell two plans apart, equal on every host for equal plans."""
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
    """State that a packer keeps between steps: immutable, attached to the plan it follows.

    pieces: waiting rows in their order. slot: shape [num_pieces], the waiting place of each; its
    meaning is the policy's (Algorithm 1: 0 = leftover, i = outlier queue i). next_step: index of
    the step that the next plan is for. Valid for any number of micro-batches or DP size, so a run
    can go on in another layout.
    """

    policy: str
    pieces: Pieces
    slot: IntArray
    next_step: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "slot", int_array("Carry.slot", self.slot))
        check_at_least("Carry.next_step", self.next_step, 0)
        if self.slot.size != len(self.pieces):
            raise ValueError(f"{self.slot.size} slots for {len(self.pieces)} waiting pieces")

    @classmethod
    def empty(cls, policy: str, *, next_step: int = 0) -> "Carry":
        """Nothing waits: the state before the first step."""
        return cls(
            policy=policy, pieces=Pieces.empty(), slot=int_array("slot", []), next_step=next_step
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that wait."""
        return self.pieces.num_tokens

    def in_slot(self, slot: int) -> Pieces:
        """The pieces of one slot, in their order."""
        return self.pieces.take(np.flatnonzero(self.slot == slot))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Carry":
        """Read what `to_json` wrote; UserError if it is not a carry."""
        with parsing("carry"):
            values: dict[str, Any] = {**data, "pieces": Pieces.from_json(data["pieces"])}
            return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write an `.npz` file: arrays only, no pickle; smaller and faster than JSON."""
        # The file is opened here because numpy would add a suffix to a name.
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

"""Packs made offline: an epoch is packed once, saved, and trained from the file (`wlb pack`).

The offline half of the methods of Kundu et al. (2024), Section 3.2. A file holds, for every step of
an epoch, the store's rows in each micro-batch. It is a source (a step's documents in their saved
order) and a packer (divides them as they were). Later epochs repeat the first. Only whole documents
can be packed offline, because cuts at windows depend on the stream before them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from wlb.data import MOST_COUNT, Source, SourceBatches
from wlb.data.batches import IDENTITY, check_state, hold_given, identity_of
from wlb.packing.base import PackerOptions, PolicyPacker, Pushed
from wlb.packing.carry_slots import CarrySlots
from wlb.plan import (
    Carry,
    Documents,
    GlobalBatch,
    IntArray,
    Layout,
    PackingPlan,
    Pieces,
    UserError,
    check_minimum,
    digest,
    int_array,
    offsets_of,
)
from wlb.plan.arrays import first_true
from wlb.plan.read_file import load_arrays, malformed

_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packs:
    """An epoch's steps. rows: of the store, in training order, shape [num_documents]. offsets:
    micro-batch i is rows [offsets[i], offsets[i + 1]), shape [num_steps * N + 1]. made_by: policy.
    lengths: digest of the store's lengths.
    """

    rows: IntArray
    offsets: IntArray
    num_micro_batches: int
    context_window: int
    layout: Layout
    made_by: str
    lengths: int

    def __post_init__(self) -> None:
        """Refuse packs that would train a document twice, or not at all."""
        check_minimum("rows", self.rows, 0)
        if (i := first_true(np.diff(np.sort(self.rows)) == 0)) is not None:
            raise UserError(f"row {np.sort(self.rows)[i]} is packed twice; make the packs again")
        num, offsets = self.num_micro_batches, self.offsets
        if num < 1 or offsets.size < 2 or (offsets.size - 1) % num:
            raise UserError(
                f"{offsets.size} offsets are no steps of num_micro_batches = {num}; make the packs "
                f"again"
            )
        if (i := first_true(np.diff(offsets) < 0)) is not None:
            raise UserError(
                f"offsets[{i + 1}] = {offsets[i + 1]} is below offsets[{i}] = {offsets[i]}; make "
                f"the packs again"
            )
        if offsets[0] != 0 or offsets[-1] != self.rows.size:
            raise UserError(
                f"offsets go from {offsets[0]} to {offsets[-1]}, must go from 0 to the "
                f"{self.rows.size} rows; make the packs again"
            )

    @property
    def num_steps(self) -> int:
        return (self.offsets.size - 1) // self.num_micro_batches

    @classmethod
    def of(cls, plans: Iterable[PackingPlan], source: Source, *, window: int) -> "Packs":
        """Packs of one epoch's plans; UserError where a document was cut or is missing."""
        made = list(plans)
        pieces = Pieces.concat(*(plan.pieces for plan in made))
        rows, length = pieces.document, pieces.length
        packed = np.unique(rows)
        if not np.array_equal(packed, np.arange(source.num_documents)):
            raise UserError(f"{packed.size} documents of {source.num_documents} were packed")
        cut = np.flatnonzero(length != source.lengths[rows])
        if cut.size:
            row = int(rows[cut[0]])
            raise UserError(
                f"document {row} was cut ({length[cut[0]]} of its {source.lengths[row]} tokens); "
                f"only whole documents are packed offline: use a method that cuts none and a "
                f"context window of at least {int(source.lengths.max())} tokens"
            )
        counts = np.concatenate([np.diff(p.offsets) for p in made])
        return cls(
            rows=rows,
            offsets=offsets_of(counts),
            num_micro_batches=made[0].num_micro_batches,
            context_window=window,
            layout=made[0].layout,
            made_by=made[0].policy,
            lengths=digest(source.lengths),
        )

    def save(self, path: str | Path) -> None:
        """An .npz file of plain arrays."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {"layout": str(self.layout), "lengths": np.array(self.lengths, np.uint64)}
        np.savez_compressed(path, format=_FORMAT, **values)

    @classmethod
    def load(cls, path: str | Path) -> "Packs":
        """UserError for a file that holds no packs, or packs that contradict themselves."""
        where, remedy = f"packing.packs: {path} holds no packs", "make them with `wlb pack`"
        try:
            data = load_arrays(path, where, remedy=remedy)
        except OSError as error:
            raise UserError(f"{where} ({error}); {remedy}") from error
        with malformed(where, remedy):
            if int(data["format"]) != _FORMAT:
                raise UserError(f"format {int(data['format'])}, only {_FORMAT} is known; {remedy}")
            return cls(
                rows=int_array("rows", data["rows"]),
                offsets=int_array("offsets", data["offsets"]),
                num_micro_batches=int(data["num_micro_batches"]),
                context_window=int(data["context_window"]),
                layout=Layout(str(data["layout"])),
                made_by=str(data["made_by"]),
                lengths=int(data["lengths"]),
            )

    def check(self, source: Source, options: PackerOptions) -> None:
        """UserError unless they are of this store, and of as many micro-batches a step."""
        if self.lengths != digest(source.lengths):
            raise UserError(
                "packing.packs were made of another store (its documents' lengths differ); make "
                "them again with `wlb pack`"
            )
        num = source.num_documents
        if self.rows.size != num or (num and int(self.rows.max()) >= num):
            raise UserError(
                f"packing.packs have {self.rows.size} documents up to row "
                f"{self.rows.max(initial=-1)}, the store has {num}; make them again with `wlb pack`"
            )
        for name, ours, theirs in (
            ("micro-batches a step", options.num_micro_batches, self.num_micro_batches),
            ("tokens of a context window", options.context_window, self.context_window),
            ("layout", str(options.layout), str(self.layout)),
        ):
            if ours != theirs:
                raise UserError(
                    f"packing.packs have {theirs} {name}, the run {ours}; make them again with "
                    f"`wlb pack`, or run with theirs"
                )


class PackedBatches(SourceBatches):
    """A step's documents as a global batch, in their saved order; epochs = 0 never ends."""

    def __init__(self, packs: Packs, source: Source, *, epochs: int = 0) -> None:
        super().__init__(source)
        self.packs, self.epochs = packs, epochs
        self._identity: dict[str, Any] = {"packs": digest(packs.rows, packs.offsets)}
        if (identity := identity_of(source)) is not None:
            self._identity[IDENTITY] = identity

    def start(self) -> dict[str, Any]:
        return {"step": 0, **self._identity}

    def next(self, state: dict[str, Any]) -> tuple[GlobalBatch, dict[str, Any]] | None:
        """The batch of the step after `state`; UserError for a state of something else."""
        packs, at = self.packs, self.num_batches(state)
        epoch, step = divmod(at, packs.num_steps)
        if self.epochs and epoch >= self.epochs:
            return None
        n = packs.num_micro_batches
        rows = packs.rows[packs.offsets[step * n] : packs.offsets[(step + 1) * n]]
        length = self.source.lengths[rows]
        documents = Documents(
            id=self.ids.of(epoch, rows),
            length=length,
            num_targets=self._num_targets(length),
            source=np.full(rows.size, self.source.source_id, np.int64),
        )
        return GlobalBatch(index=at, documents=documents), {**self._identity, "step": at + 1}

    def num_batches(self, state: dict[str, Any]) -> int:
        """Steps given before `state`; UserError for a state of something else."""
        keys = "packing.packs and data.store"
        check_state(state, {"step"}, self._identity, what="packs", keys=keys)
        if type(state["step"]) is not int or not 0 <= state["step"] <= MOST_COUNT:
            raise UserError(f"the state of packs has step = {state['step']!r}; it is damaged")
        return state["step"]

    def num_tokens(self, state: dict[str, Any]) -> int:
        """Tokens of all documents given before `state`."""
        epoch, given = self._given(state)
        lengths = self.source.lengths[self.packs.rows]
        return epoch * int(lengths.sum()) + int(lengths[:given].sum())

    def may_have_ended(self, state: dict[str, Any]) -> bool:
        """Whether the data ends at `state` for some number of epochs."""
        at = self.num_batches(state)
        return at > 0 and at % self.packs.num_steps == 0

    def hold_pieces(self, state: dict[str, Any], pieces: Pieces) -> None:
        """UserError for pieces that were not given, as `AccountedStream.hold_pieces`."""
        epoch, given = self._given(state)
        rows, size = self.packs.rows, self.packs.rows.size
        place = np.zeros(size, np.int64)
        place[rows] = np.arange(size)
        at = place[self._rows_of(pieces)] + pieces.document // size * size
        hold_given(pieces, at, np.full(len(pieces), epoch * size + given))

    def _given(self, state: dict[str, Any]) -> tuple[int, int]:
        """Whole epochs, and documents of the next one, given before `state`."""
        epoch, step = divmod(self.num_batches(state), self.packs.num_steps)
        return epoch, int(self.packs.offsets[step * self.packs.num_micro_batches])


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPacker(PolicyPacker):
    """Divides the documents of `PackedBatches` as they were divided. Nothing ever waits."""

    policy: ClassVar[str] = "saved"
    slots: ClassVar[CarrySlots] = CarrySlots.ONE
    batches_wait: ClassVar[bool] = False
    packs: Packs

    def push(self, batch: GlobalBatch | None, carry: Carry) -> Pushed:
        if len(carry.pieces):
            raise UserError(
                f"{len(carry.pieces)} documents wait from a run with packing.policy = "
                f"{carry.policy}; packs made offline have no place for them: start a new run"
            )
        if batch is None:
            return (), self._carry(Pieces.empty(), carry.next_step)
        n = self.num_micro_batches
        first = batch.index % self.packs.num_steps * n
        offsets = self.packs.offsets[first : first + n + 1]
        edges: list[int] = (offsets - offsets[0]).tolist()
        rows = [list(range(a, b)) for a, b in pairwise(edges)]
        pieces = self.options.arrived(batch, carry.next_step)
        plans = self._plans(carry.next_step, pieces, [rows], num_waiting_tokens=0, shuffle=False)
        return plans, self._carry(Pieces.empty(), carry.next_step + 1)

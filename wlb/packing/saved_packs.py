"""Packs made offline: `wlb pack` packs one epoch and saves it, and runs train from the file.

These are the offline methods of Kundu et al. (2024), Section 3.2. For every step of an epoch, the
file lists which documents of the token store each micro-batch has. Two classes use the file in
training:

- `PackedBatches` is the source of global batches: each has the documents of one step.
- `SavedPacker` divides these documents into the saved micro-batches.

Later epochs repeat the first one. Only whole documents can be packed offline, because where a
window cuts a document depends on the stream before it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from wlb.data import MOST_COUNT, Source, SourceBatches
from wlb.data.batches import IDENTITY, check_state, check_were_read, identity_of
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

_FORMAT = 1  # version of the file's format


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packs:
    """The packed steps of one epoch: which documents each micro-batch has."""

    rows: IntArray  # indices of the store's documents in training order, shape [num_documents]
    # Micro-batch i of the epoch has the documents rows[offsets[i]:offsets[i + 1]]. Shape
    # [num_steps * N + 1].
    offsets: IntArray
    num_micro_batches: int  # N, micro-batches of a step
    context_window: int  # context window with which the epoch was packed, in tokens
    layout: Layout  # which documents of a micro-batch attend to each other
    made_by: str  # policy that packed the epoch
    lengths: int  # hash of the lengths of the store's documents, to recognise the store

    def __post_init__(self) -> None:
        """Refuse packs that have a document twice, wrong offsets, or an incomplete last step."""
        check_minimum("rows", self.rows, 0)
        if (i := first_true(np.diff(np.sort(self.rows)) == 0)) is not None:
            raise UserError(
                f"document {np.sort(self.rows)[i]} was packed twice, but packs must have each "
                "document once; make the packs again with `wlb pack`"
            )
        num, offsets = self.num_micro_batches, self.offsets
        if num < 1 or offsets.size < 2 or (offsets.size - 1) % num:
            raise UserError(
                f"the packs have {offsets.size - 1} micro-batches, which do not make whole steps "
                f"of num_micro_batches = {num}; make the packs again with `wlb pack`"
            )
        if (i := first_true(np.diff(offsets) < 0)) is not None:
            raise UserError(
                f"offsets[{i + 1}] = {offsets[i + 1]} of the packs must be at least offsets[{i}] = "
                f"{offsets[i]}; make the packs again with `wlb pack`"
            )
        if offsets[0] != 0 or offsets[-1] != self.rows.size:
            raise UserError(
                f"the offsets of the packs go from {offsets[0]} to {offsets[-1]}, but they must go "
                f"from 0 to the number of packed documents, {self.rows.size}; make the packs again "
                "with `wlb pack`"
            )

    @property
    def num_steps(self) -> int:
        """Number of steps in the epoch."""
        return (self.offsets.size - 1) // self.num_micro_batches

    @classmethod
    def of(cls, plans: Iterable[PackingPlan], source: Source, *, window: int) -> "Packs":
        """Make the packs of one epoch from its plans.

        Args:
            plans: The plans of all steps of the epoch.
            source: The token store.
            window: Context window in tokens.

        Raises:
            UserError: If a document was cut or is missing.
        """
        made = list(plans)
        pieces = Pieces.concat(*(plan.pieces for plan in made))
        rows, length = pieces.document, pieces.length
        packed = np.unique(rows)
        if not np.array_equal(packed, np.arange(source.num_documents)):
            raise UserError(
                f"only {packed.size} of {source.num_documents} documents were packed, but packs "
                "must have all documents of the store; pack all global batches of the store"
            )
        cut = np.flatnonzero(length != source.lengths[rows])
        if cut.size:
            row = int(rows[cut[0]])
            raise UserError(
                f"document {row} was cut: one of its pieces has only {length[cut[0]]} of its "
                f"{source.lengths[row]} tokens. Packs must have whole documents; use a method that "
                f"does not cut, and a context window of at least {int(source.lengths.max())} tokens"
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
        """Save the packs as an .npz file of plain arrays."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {"layout": str(self.layout), "lengths": np.array(self.lengths, np.uint64)}
        np.savez_compressed(path, format=_FORMAT, **values)

    @classmethod
    def load(cls, path: str | Path) -> "Packs":
        """Load packs from a file.

        Raises:
            UserError: If the file has no packs, or invalid ones.
        """
        where, remedy = f"packing.packs: {path} holds no packs", "make them with `wlb pack`"
        try:
            data = load_arrays(path, where, remedy=remedy)
        except OSError as error:
            raise UserError(f"{where} ({error}); {remedy}") from error
        with malformed(where, remedy):
            if int(data["format"]) != _FORMAT:
                raise UserError(
                    f"the format of the packs is {int(data['format'])}, but it must be {_FORMAT} "
                    f"for this release of wlb; {remedy}"
                )
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
        """Raise UserError unless the packs were made of this store and with these options.

        Args:
            source: The token store of the run.
            options: The packing options of the run.
        """
        if self.lengths != digest(source.lengths):
            raise UserError(
                "packing.packs was made for another token store, because the lengths of its "
                "documents differ from those in the run's store; make packs of this store with "
                "`wlb pack`"
            )
        num = source.num_documents
        if self.rows.size != num or (num and int(self.rows.max()) >= num):
            raise UserError(
                f"packing.packs has {self.rows.size} documents with indices up to "
                f"{self.rows.max(initial=-1)}, but the run's token store has {num} documents; make "
                "packs of this store with `wlb pack`"
            )
        for name, ours, theirs in (
            ("num_micro_batches", options.num_micro_batches, self.num_micro_batches),
            ("context_window", options.context_window, self.context_window),
            ("layout", str(options.layout), str(self.layout)),
        ):
            if ours != theirs:
                raise UserError(
                    f"packing.packs was made with {name} = {theirs}, but the run has {ours}; make "
                    "the packs again with `wlb pack` for this run, or give the run the same value"
                )


class PackedBatches(SourceBatches):
    """The source of global batches of a run that trains saved packs: a batch for each saved step.

    A batch has the documents of its step (`Packs`).
    """

    def __init__(self, packs: Packs, source: Source, *, epochs: int = 0) -> None:
        """Read batches from saved packs.

        Args:
            packs: The saved packs.
            source: The token store from which the packs were made.
            epochs: How often the packs are trained. 0 = without end.
        """
        super().__init__(source)
        self.packs, self.epochs = packs, epochs
        self._identity: dict[str, Any] = {"packs": digest(packs.rows, packs.offsets)}
        if (identity := identity_of(source)) is not None:
            self._identity[IDENTITY] = identity

    def start(self) -> dict[str, Any]:
        """Return the state before the first batch."""
        return {"step": 0, **self._identity}

    def next(self, state: dict[str, Any]) -> tuple[GlobalBatch, dict[str, Any]] | None:
        """Return the batch after `state` and the state after this batch; None after the last epoch.

        Raises:
            UserError: If the state belongs to other packs or to another store.
        """
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
        """Return the number of batches that were read before `state`.

        Raises:
            UserError: If the state belongs to other packs or to another store.
        """
        keys = "packing.packs and data.store"
        check_state(state, {"step"}, self._identity, what="packs", keys=keys)
        if type(state["step"]) is not int or not 0 <= state["step"] <= MOST_COUNT:
            raise UserError(
                f"step = {state['step']!r} in the saved state of the packs must be a whole number "
                f"from 0 to {MOST_COUNT}; the checkpoint is damaged, so resume from another "
                "checkpoint"
            )
        return state["step"]

    def num_tokens(self, state: dict[str, Any]) -> int:
        """Return the number of tokens in the batches that were read before `state`."""
        epoch, given = self._given(state)
        lengths = self.source.lengths[self.packs.rows]
        return epoch * int(lengths.sum()) + int(lengths[:given].sum())

    def may_have_ended(self, state: dict[str, Any]) -> bool:
        """Return whether `state` is at the end of an epoch, after which there may be no batch."""
        at = self.num_batches(state)
        return at > 0 and at % self.packs.num_steps == 0

    def check_pieces(self, state: dict[str, Any], pieces: Pieces) -> None:
        """Raise UserError if a piece is of a document that was not read before position `state`."""
        epoch, given = self._given(state)
        rows, size = self.packs.rows, self.packs.rows.size
        place = np.zeros(size, np.int64)
        place[rows] = np.arange(size)
        at = place[self._rows_of(pieces)] + pieces.document // size * size
        check_were_read(pieces, at, np.full(len(pieces), epoch * size + given))

    def _given(self, state: dict[str, Any]) -> tuple[int, int]:
        """Return how many whole epochs were read before `state`, and how many documents since."""
        epoch, step = divmod(self.num_batches(state), self.packs.num_steps)
        return epoch, int(self.packs.offsets[step * self.packs.num_micro_batches])


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPacker(PolicyPacker):
    """Divides a batch of `PackedBatches` into its saved micro-batches. Nothing ever waits."""

    policy: ClassVar[str] = "saved"
    slots: ClassVar[CarrySlots] = CarrySlots.ONE
    batches_wait: ClassVar[bool] = False
    packs: Packs  # the saved packs of the run

    def push(self, batch: GlobalBatch | None, carry: Carry) -> Pushed:
        """Return the plan of the saved step to which `batch` belongs, and an empty carry.

        At the end of the data `batch` is None, and there is no plan, because nothing waits.
        """
        if len(carry.pieces):
            raise UserError(
                f"{len(carry.pieces)} documents still wait from a run with packing.policy = "
                f"{carry.policy}, but packs made offline cannot train waiting documents; start a "
                "new run, or resume with the old packing.policy"
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

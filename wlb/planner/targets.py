"""Exact label counts of pieces, wherever packing cut the documents.

The loss of a step is divided by its labels, so a plan has to know them. Where only some tokens are
trained (fine-tuning), the labels of a part of a document are known by its store alone. Packers
therefore see such documents as plain ones, every token but the first trained, which they can cut
anywhere; the pieces of a plan that leaves the planner are counted in the store. Nothing that is
packed by depends on labels, so the placement is the same.

Cost: four binary searches a piece.
"""

from dataclasses import replace
from typing import Protocol, runtime_checkable

from wlb.plan import GlobalBatch, IntArray, PackingPlan, Pieces


@runtime_checkable
class TargetCounter(Protocol):
    """A source of global batches that can count labels (`wlb.data.GlobalBatches`)."""

    @property
    def has_targets(self) -> bool: ...

    def count_targets(self, pieces: Pieces) -> IntArray: ...


def counter_of(source: object) -> TargetCounter | None:
    """`source` if its documents are trained in part, else None."""
    return source if isinstance(source, TargetCounter) and source.has_targets else None


def uncounted(batch: GlobalBatch) -> GlobalBatch:
    """The batch as plain documents, which can be cut anywhere."""
    documents = batch.documents
    plain = replace(documents, num_targets=documents.length - 1)
    return replace(batch, documents=plain)


def counted(plan: PackingPlan, counter: TargetCounter | None) -> PackingPlan:
    """The plan with the labels of its pieces counted; as it is without a counter."""
    if counter is None:
        return plan
    pieces = replace(plan.pieces, num_targets=counter.count_targets(plan.pieces))
    # A document's first token is trained nowhere, joined to another document or not.
    return replace(plan, pieces=pieces, num_joined_targets=0)

"""Label counts of a plan's pieces, made once: when the plan leaves the planner.

The loss of a step is divided by its labels, so a plan has to know them. Where only some tokens are
trained (fine-tuning), only the store knows the labels of a part of a document. Such pieces are
UNCOUNTED while they are packed and wait, since nothing is packed by labels.
Cost: four binary searches a piece.
"""

from dataclasses import replace
from typing import Protocol, runtime_checkable

from wlb.plan import IntArray, PackingPlan, Pieces


@runtime_checkable
class TargetCounter(Protocol):
    """A source of global batches that can count labels (`wlb.data.GlobalBatches`)."""

    @property
    def has_targets(self) -> bool: ...

    def count_targets(self, pieces: Pieces) -> IntArray: ...


def counted(plan: PackingPlan, source: object) -> PackingPlan:
    """The plan with its pieces' labels counted; as it is if `source` trains every token."""
    if not (isinstance(source, TargetCounter) and source.has_targets):
        return plan
    pieces = replace(plan.pieces, num_targets=source.count_targets(plan.pieces))
    # A document's first token is trained nowhere, joined to another document or not.
    return replace(plan, pieces=pieces, num_joined_targets=0)

"""Position of a rank in its work, for reports of runs that fail or hang."""

from typing import Any


class Position:
    """Set by the training thread and read by the watching thread; setting it costs 0.2 us.

    step: the current planned step, -1 before the first. doing: activity in a few words. cell: pass,
    stage and micro-batch that run now or ran last in this step. num_changes: number of updates.
    is_slow: the activity has no time limit.
    """

    __slots__ = ("cell", "doing", "is_slow", "num_changes", "step")

    def __init__(self) -> None:
        self.step = -1
        self.doing = "starting"
        self.is_slow = True
        self.num_changes = 0
        self.cell: tuple[str, int, int] | None = None

    def enter(self, doing: str, *, step: int | None = None, is_slow: bool = False) -> None:
        """Begin another activity; step: set when it begins a new step."""
        self.doing, self.is_slow = doing, is_slow
        self.num_changes += 1
        if step is not None:
            self.step, self.cell = step, None

    def chunk(self, kind: str, stage: int, micro_batch: int) -> None:
        """Begin a pass of a micro-batch through a stage."""
        self.cell = (kind, stage, micro_batch)
        self.num_changes += 1

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def describe(position: dict[str, Any]) -> str:
    """Describe a `Position.to_json`: "step 12, micro-batch 3 (backward, stage 1): computing"."""
    step, cell, doing = position["step"], position["cell"], position["doing"]
    if step < 0:
        return f"before the first step: {doing}"
    if cell is None:
        return f"step {step}: {doing}"
    kind, stage, micro_batch = cell
    return f"step {step}, micro-batch {micro_batch} ({kind}, stage {stage}): {doing}"

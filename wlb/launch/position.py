"""Position of a rank in its work, for reports of runs that fail or hang."""

from typing import NamedTuple


class Snapshot(NamedTuple):
    """A `Position` at one moment; JSON has it as an array in this order."""

    step: int
    doing: str
    is_slow: bool
    num_changes: int
    cell: tuple[str, int, int] | None

    def describe(self) -> str:
        """For example "step 12, micro-batch 3 (backward, stage 1): computing"."""
        if self.step < 0:
            return f"before the first step: {self.doing}"
        if self.cell is None:
            return f"step {self.step}: {self.doing}"
        kind, stage, micro_batch = self.cell
        return f"step {self.step}, micro-batch {micro_batch} ({kind}, stage {stage}): {self.doing}"


class Position:
    """Set by the training thread and read by the watching thread; setting it costs 0.2 us.

    step: the planned step, -1 before the first. doing: activity in a few words. cell: pass, stage
    and micro-batch that run now or ran last in this step. num_changes: number of updates. is_slow:
    the activity has no time limit.
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

    def now(self) -> Snapshot:
        return Snapshot(self.step, self.doing, self.is_slow, self.num_changes, self.cell)

"""Where a rank is in its work, for reports of a run that failed or hangs."""

from typing import Any


class Position:
    """Set by the thread that trains, read by the one that watches; setting it costs 0.2 us.

    step: the planned step at work, -1 before the first. doing: a few words. cell: pass, stage and
    micro-batch at work, or the last one of this step, if any. num_changes: grows with each.
    is_slow: what it does may take any time.
    """

    __slots__ = ("cell", "doing", "is_slow", "num_changes", "step")

    def __init__(self) -> None:
        self.step = -1
        self.doing = "starting"
        self.is_slow = True
        self.num_changes = 0
        self.cell: tuple[str, int, int] | None = None

    def enter(self, doing: str, *, step: int | None = None, is_slow: bool = False) -> None:
        """Something else begins; step: if that is a new step."""
        self.doing, self.is_slow = doing, is_slow
        self.num_changes += 1
        if step is not None:
            self.step, self.cell = step, None

    def chunk(self, kind: str, stage: int, micro_batch: int) -> None:
        """A pass of a micro-batch through a stage begins."""
        self.cell = (kind, stage, micro_batch)
        self.num_changes += 1

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def describe(position: dict[str, Any]) -> str:
    """In words, of `Position.to_json`: "step 12, micro-batch 3 (backward, stage 1): computing"."""
    step, cell, doing = position["step"], position["cell"], position["doing"]
    if step < 0:
        return f"before the first step: {doing}"
    if cell is None:
        return f"step {step}: {doing}"
    kind, stage, micro_batch = cell
    return f"step {step}, micro-batch {micro_batch} ({kind}, stage {stage}): {doing}"

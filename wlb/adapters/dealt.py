"""A planner's steps as rows of a dataset: which rows make which micro-batch of which rank.

For loops that address whole documents by their row in a dataset (samplers, schedulers). NumPy only.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from wlb.cost import WorkloadModel
from wlb.plan import DocumentIds, FloatArray, IntArray, IntLike, UserError, offsets_of
from wlb.planner import Planner


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DealtRows:
    """Steps of a planner, dealt to data-parallel ranks.

    rows: dataset rows, micro-batch after micro-batch; within a step the first micro-batch of every
    rank, then the second of every rank, ... offsets: of the micro-batches in `rows`, shape
    [num_steps * N + 1]. num_ranks: dp. num_micro_batches: N, micro-batches per step on all ranks.
    """

    rows: IntArray
    offsets: IntArray
    num_ranks: int
    num_micro_batches: int

    @classmethod
    def of(cls, planner: Planner, num_documents: int) -> "DealtRows":
        """Plan to the end of data. UserError if the planner cuts documents or has no end."""
        if getattr(planner.source, "epochs", 1) < 1:
            raise UserError("epochs = 0 never ends, so it cannot be dealt; set epochs >= 1")
        return DealtSteps(planner, num_documents).all_rows()

    @property
    def num_steps(self) -> int:
        """Steps of all epochs."""
        return (self.offsets.size - 1) // self.num_micro_batches

    def step(self, step: int) -> Iterator[IntArray]:
        """A step's micro-batches, in the order of `rows`."""
        first = step * self.num_micro_batches
        for i in range(first, first + self.num_micro_batches):
            yield self.rows[self.offsets[i] : self.offsets[i + 1]]

    def work_ns(self, lengths: IntLike, cost: WorkloadModel) -> IntArray:
        """Predicted work of each rank in each step, shape [num_steps, num_ranks].

        lengths: tokens of every row of the dataset.
        """
        each = np.concatenate([[0], np.cumsum(cost.workload_ns(lengths)[self.rows])])
        micro_batches = np.diff(each[self.offsets])
        return micro_batches.reshape(self.num_steps, -1, self.num_ranks).sum(1)


class DealtSteps:
    """Steps of a planner as rows, planned when they are first asked for and kept.

    num_steps: where to stop; None for the end of data. Planning takes a while for each step, which
    a run's first step or its resumption would wait for if all were planned at once.
    """

    def __init__(self, planner: Planner, num_documents: int, num_steps: int | None = None) -> None:
        # Plain-4D's metrics are not needed.
        self._planner = replace(planner, baseline=None)
        self._state = self._planner.start()
        self._ids = DocumentIds(num_documents=num_documents)
        self._steps: list[list[IntArray]] = []
        self._most = num_steps

    @property
    def num_planned(self) -> int:
        """Steps that were planned so far."""
        return len(self._steps)

    def step(self, step: int) -> list[IntArray]:
        """A step's micro-batches, in the order of `DealtRows.rows`; IndexError past the end."""
        while len(self._steps) <= step and self._plan():
            pass
        return self._steps[step]

    def all_rows(self) -> DealtRows:
        """All steps; plans those that were not asked for."""
        while self._plan():
            pass
        rows = [row for step in self._steps for row in step]
        dealt = DealtRows(
            rows=np.concatenate(rows) if rows else np.zeros(0, np.int64),
            offsets=offsets_of([len(r) for r in rows]),
            num_ranks=self._planner.dp,
            num_micro_batches=self._planner.packer.num_micro_batches,
        )
        # Views of them, so that rows are held once.
        self._steps = [list(dealt.step(i)) for i in range(dealt.num_steps)]
        return dealt

    def _plan(self) -> bool:
        """Plan one more step, if there is one."""
        if self._most is not None and len(self._steps) >= self._most:
            return False
        plan = self._planner.next(self._state)
        if plan is None:
            return False
        made: list[IntArray] = []
        for i in plan.pipelines.T.ravel().tolist():
            pieces = plan.packing.micro_batch(i).pieces
            if pieces.start.any():
                bad = int(self._ids.row(pieces.document)[pieces.start.argmax()])
                raise UserError(
                    f"document {bad} is cut into pieces, but rows are trained whole here; cut "
                    f"it in the dataset, or use a longer context window"
                )
            made.append(self._ids.row(pieces.document))
        self._steps.append(made)
        self._state = plan.state
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBalance:
    """Balance of predicted work over ranks that wait for each other in every step.

    imbalance: slowest rank / mean rank, averaged over steps. worst: the same in the worst step.
    utilisation: predicted share of all ranks' time in which they compute.
    """

    num_steps: int
    imbalance: float
    worst: float
    utilisation: float

    @classmethod
    def of(cls, work_ns: IntArray | FloatArray) -> "RankBalance":
        """work_ns: shape [num_steps, num_ranks]."""
        slowest, mean = work_ns.max(1), work_ns.mean(1)
        ratio = slowest / mean
        return cls(
            num_steps=len(work_ns),
            imbalance=float(ratio.mean()),
            worst=float(ratio.max()),
            utilisation=float(mean.sum() / slowest.sum()),
        )


def work_of(steps: Iterable[Sequence[Sequence[IntLike]]], cost: WorkloadModel) -> IntArray:
    """Predicted work of any steps, shape [num_steps, num_ranks].

    steps[i][rank]: the document lengths of each of the rank's micro-batches.
    """
    return np.array(
        [
            [sum(int(cost.workload_ns(lengths).sum()) for lengths in rank) for rank in step]
            for step in steps
        ],
        np.int64,
    )

"""A planner's steps as rows of a dataset: which rows make up each micro-batch of each rank.

This is the form for samplers and schedulers, which address whole documents by their row in a
dataset. It uses NumPy only.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from wlb.cost import WorkloadModel
from wlb.plan import DocumentIds, FloatArray, IntArray, IntLike, UserError, offsets_of
from wlb.planner import Planner


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DealtRows:
    """All steps of a planner as dataset rows, assigned to data-parallel ranks.

    Micro-batches follow each other in this order: within a step, the first micro-batch of every
    rank, then the second of every rank, and so on.
    """

    rows: IntArray  # dataset rows of all micro-batches, one micro-batch after the other
    offsets: IntArray  # where each micro-batch begins in `rows`, shape [num_steps * N + 1]
    num_ranks: int  # data-parallel ranks (dp)
    num_micro_batches: int  # N: micro-batches of a step on all ranks together

    @classmethod
    def of(cls, planner: Planner, num_documents: int) -> "DealtRows":
        """Plan all steps to the end of the data.

        Args:
            planner: A planner whose data ends and whose documents are no longer than its window.
            num_documents: Rows of the dataset.

        Raises:
            UserError: The data never ends (epochs = 0), or the planner cuts a document into pieces.
        """
        if getattr(planner.source, "epochs", 1) < 1:
            raise UserError(
                "epochs = 0 repeats the data forever, so there is no last step; set epochs >= 1"
            )
        return DealtSteps(planner, num_documents).all_rows()

    @property
    def num_steps(self) -> int:
        """Return the number of steps of all epochs."""
        return (self.offsets.size - 1) // self.num_micro_batches

    def step(self, step: int) -> Iterator[IntArray]:
        """Yield the rows of each micro-batch of a step, in the order that the class describes."""
        first = step * self.num_micro_batches
        for i in range(first, first + self.num_micro_batches):
            yield self.rows[self.offsets[i] : self.offsets[i + 1]]

    def work_ns(self, lengths: IntLike, cost: WorkloadModel) -> IntArray:
        """Return the predicted work of each rank in each step, shape [num_steps, num_ranks].

        Args:
            lengths: Tokens of every row of the dataset.
            cost: Workload model that prices the rows.
        """
        # Running sums turn each micro-batch's work into one difference.
        each = np.concatenate([[0], np.cumsum(cost.workload_ns(lengths)[self.rows])])
        micro_batches = np.diff(each[self.offsets])
        return micro_batches.reshape(self.num_steps, -1, self.num_ranks).sum(1)


class DealtSteps:
    """The steps of a planner as dataset rows, planned on demand and kept.

    Planning all steps at once would delay the first step of a run, and each resumption of it. So a
    step is planned when it is first requested.

    Args:
        planner: The planner. It must not cut documents.
        num_documents: Rows of the dataset.
        num_steps: Steps to plan at most; None means to the end of the data.
    """

    def __init__(self, planner: Planner, num_documents: int, num_steps: int | None = None) -> None:
        # Nobody reads the comparison with the baseline, so do not compute it.
        self._planner = replace(planner, baseline=None)
        self._state = self._planner.start()
        self._ids = DocumentIds(num_documents=num_documents)
        self._steps: list[list[IntArray]] = []
        self._most = num_steps

    @property
    def num_planned(self) -> int:
        """Return the number of steps planned so far."""
        return len(self._steps)

    def step(self, step: int) -> list[IntArray]:
        """Return the rows of each micro-batch of a step, in the order of `DealtRows`.

        Raises:
            IndexError: The step is after the last one.
        """
        while len(self._steps) <= step and self._plan():
            pass
        return self._steps[step]

    def all_rows(self) -> DealtRows:
        """Plan all steps that are not planned yet and return all of them."""
        while self._plan():
            pass
        rows = [row for step in self._steps for row in step]
        dealt = DealtRows(
            rows=np.concatenate(rows) if rows else np.zeros(0, np.int64),
            offsets=offsets_of([len(r) for r in rows]),
            num_ranks=self._planner.dp,
            num_micro_batches=self._planner.packer.num_micro_batches,
        )
        # Replace the lists by views, so that the rows are in memory only once.
        self._steps = [list(dealt.step(i)) for i in range(dealt.num_steps)]
        return dealt

    def _plan(self) -> bool:
        """Plan one more step; return False if there is none."""
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
                    f"document {bad} is longer than the context window and was cut into pieces, "
                    f"but this loop trains whole rows; cut it in the dataset, or use a longer "
                    f"context window"
                )
            made.append(self._ids.row(pieces.document))
        self._steps.append(made)
        self._state = plan.state
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBalance:
    """Balance of predicted work over ranks that wait for each other in every step."""

    num_steps: int
    imbalance: float  # slowest rank over mean rank, mean over the steps
    worst: float  # slowest rank over mean rank in the worst step
    utilisation: float  # share of all ranks' predicted time in which they compute

    @classmethod
    def of(cls, work_ns: IntArray | FloatArray) -> "RankBalance":
        """Compute the balance from predicted work.

        Args:
            work_ns: Work of each rank in each step, shape [num_steps, num_ranks].
        """
        slowest, mean = work_ns.max(1), work_ns.mean(1)
        ratio = slowest / mean
        return cls(
            num_steps=len(work_ns),
            imbalance=float(ratio.mean()),
            worst=float(ratio.max()),
            utilisation=float(mean.sum() / slowest.sum()),
        )


def work_of(steps: Iterable[Sequence[Sequence[IntLike]]], cost: WorkloadModel) -> IntArray:
    """Return the predicted work of given steps, shape [num_steps, num_ranks].

    Args:
        steps: `steps[i][rank]` holds the document lengths of each of the rank's micro-batches.
        cost: Workload model that prices the documents.
    """
    return np.array(
        [
            [sum(int(cost.workload_ns(lengths).sum()) for lengths in rank) for rank in step]
            for step in steps
        ],
        np.int64,
    )

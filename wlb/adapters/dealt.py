"""Convert a planner's steps to dataset rows: which rows are in each micro-batch of each rank.

Samplers and schedulers need this form, because they refer to a document by its row in a dataset.
Only NumPy is imported.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from wlb.cost import WorkloadModel
from wlb.plan import DocumentIds, FloatArray, IntArray, IntLike, UserError, offsets_of
from wlb.planner import Planner


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DealtRows:
    """The dataset rows of every micro-batch of every step, for all data-parallel ranks.

    Micro-batches are ordered by step. Within a step, the first micro-batch of every rank comes
    first, then the second micro-batch of every rank, and so on.
    """

    rows: IntArray  # indices of dataset rows, one micro-batch after the other
    # Where each micro-batch begins in `rows`, and where the last ends; shape [num_steps * N + 1].
    offsets: IntArray
    num_ranks: int  # data-parallel ranks (dp)
    num_micro_batches: int  # N: micro-batches of a step on all ranks together

    @classmethod
    def of(cls, planner: Planner, num_documents: int) -> "DealtRows":
        """Plan all steps to the end of the data, and return the dataset rows of these steps.

        Args:
            planner: A planner whose data ends, with no document longer than its context window.
            num_documents: Number of rows of the dataset.

        Raises:
            UserError: The data never ends (epochs = 0), or the planner cuts a document into pieces.
        """
        if getattr(planner.source, "epochs", 1) < 1:
            raise UserError(
                "epochs = 0 repeats the data without end, so the steps cannot all be planned; "
                "set epochs to 1 or more"
            )
        return DealtSteps(planner, num_documents).all_rows()

    @property
    def num_steps(self) -> int:
        """Return the number of steps over all epochs."""
        return (self.offsets.size - 1) // self.num_micro_batches

    def step(self, step: int) -> Iterator[IntArray]:
        """Yield the dataset rows of each micro-batch of a step, on all ranks.

        The first micro-batch of every rank comes first, then the second of every rank, and so on.

        Args:
            step: Index of the step, from 0.
        """
        first = step * self.num_micro_batches
        for i in range(first, first + self.num_micro_batches):
            yield self.rows[self.offsets[i] : self.offsets[i + 1]]

    def work_ns(self, lengths: IntLike, cost: WorkloadModel) -> IntArray:
        """Return the predicted work of each rank in each step in ns, shape [num_steps, num_ranks].

        Args:
            lengths: Tokens of every row of the dataset.
            cost: Predicts the time of a row from its length.
        """
        # A micro-batch consists of consecutive rows, so its work is a difference of running sums.
        each = np.concatenate([[0], np.cumsum(cost.workload_ns(lengths)[self.rows])])
        micro_batches = np.diff(each[self.offsets])
        return micro_batches.reshape(self.num_steps, -1, self.num_ranks).sum(1)


class DealtSteps:
    """Plans each step when it is first requested, and stores the step's dataset rows.

    Planning all steps at once would delay the first step of a run, also of a resumed one.

    Args:
        planner: The planner. No document may be longer than its context window.
        num_documents: Number of rows of the dataset.
        num_steps: Largest number of steps to plan; None means all steps to the end of the data.
    """

    def __init__(self, planner: Planner, num_documents: int, num_steps: int | None = None) -> None:
        # Do not compute the comparison with the baseline loader, because it is not used here.
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
        """Return the dataset rows of each micro-batch of a step, on all ranks.

        The first micro-batch of every rank comes first, then the second of every rank, and so on.

        Args:
            step: Index of the step, from 0.

        Raises:
            IndexError: The step is after the last one.
        """
        while len(self._steps) <= step and self._plan():
            pass
        return self._steps[step]

    def all_rows(self) -> DealtRows:
        """Plan all steps that are not planned yet, and return the dataset rows of all steps."""
        while self._plan():
            pass
        rows = [row for step in self._steps for row in step]
        dealt = DealtRows(
            rows=np.concatenate(rows) if rows else np.zeros(0, np.int64),
            offsets=offsets_of([len(r) for r in rows]),
            num_ranks=self._planner.dp,
            num_micro_batches=self._planner.packer.num_micro_batches,
        )
        # Replace the stored arrays by views of `dealt.rows`, so that memory holds the rows once.
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
                    f"document {bad} was cut into pieces because it is longer than the context "
                    "window, but this training loop takes only whole documents; truncate it in the "
                    "dataset, or raise the context window"
                )
            made.append(self._ids.row(pieces.document))
        self._steps.append(made)
        self._state = plan.state
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBalance:
    """How evenly predicted work is divided over ranks that wait for each other in every step."""

    num_steps: int  # number of steps from which the figures below are computed
    imbalance: float  # slowest rank's work over the mean of all ranks; unweighted mean over steps
    worst: float  # imbalance of the worst step
    utilisation: float  # share of the predicted time that ranks compute instead of waiting

    @classmethod
    def of(cls, work_ns: IntArray | FloatArray) -> "RankBalance":
        """Compute how evenly the ranks are loaded, from the predicted work of each rank.

        Args:
            work_ns: Predicted work of each rank in each step, shape [num_steps, num_ranks].
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
    """Return the predicted work of each rank in each step in ns, shape [num_steps, num_ranks].

    Args:
        steps: `steps[i][rank]` holds the document lengths of each of the rank's micro-batches.
        cost: Predicts the time of a document from its length.
    """
    return np.array(
        [
            [sum(int(cost.workload_ns(lengths).sum()) for lengths in rank) for rank in step]
            for step in steps
        ],
        np.int64,
    )

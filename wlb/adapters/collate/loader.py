"""A resumable loader of planned and collated steps for one data-parallel rank of any training loop.

Every rank plans the same global steps and takes its pipeline's micro-batches. So the ranks' parts
are disjoint and complete without communication. A worker process opens planner and reader itself,
and collates every `num_workers`-th step.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from wlb.parallel.rows import LabelReader, TokenReader
from wlb.plan import MicroBatch, PlannerState, StepPlan, UserError
from wlb.planner import Planner, TargetCounter, check_planner_state

Collate = Callable[[MicroBatch, TokenReader], Any]
"""Makes the loop's batch out of a micro-batch and a reader of its tokens."""


class LoadedStep(NamedTuple):
    """One global step on one rank."""

    step: int  # number of the step
    num_targets: int  # trained labels on all ranks, the loss's divisor
    micro_batches: list[Any]  # results of `collate` for this rank, in execution order


class PlannedRank:
    """A data-parallel rank's position in a planner's steps, which checkpoints save and resume.

    Args:
        planner: The planner of all ranks.
        dp_rank: This rank, below the planner's dp.
    """

    def __init__(self, planner: Planner, dp_rank: int) -> None:
        if not 0 <= dp_rank < planner.dp:
            raise UserError(
                f"dp_rank = {dp_rank} is not one of the planner's {planner.dp} pipelines; make it "
                f"with dp = the number of data-parallel ranks"
            )
        self.planner, self.dp_rank = planner, dp_rank
        self._state = planner.start()

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last step that was returned: JSON, equal on all ranks."""
        return self._state.to_json()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the step at which the state was taken.

        The number of ranks may differ, and there may be more epochs.

        Raises:
            UserError: The state contradicts itself or the planner's data.
        """
        resumed = PlannerState.from_json(state)
        check_planner_state(resumed, self.planner.source, packers=self.planner.packers)
        self._state = resumed.reopened()


def micro_batches_of(plan: StepPlan, dp_rank: int) -> list[MicroBatch]:
    """Return a rank's micro-batches of a step in execution order."""
    return [plan.packing.micro_batch(i) for i in plan.pipelines[dp_rank].tolist()]


class PlannedSteps(IterableDataset[LoadedStep]):
    """Steps of one rank after a state; in a worker process, every num_workers-th of them.

    Args:
        open_planner: Makes the planner, in the worker.
        open_reader: Makes the reader, in the worker.
        dp_rank: The data-parallel rank.
        collate: Makes a batch of each micro-batch.
        state: State after the last step that is done; None begins at the first step.
    """

    def __init__(
        self,
        open_planner: Callable[[], Planner],
        open_reader: Callable[[], TokenReader],
        *,
        dp_rank: int,
        collate: Collate,
        state: PlannerState | None,
    ) -> None:
        self.open_planner, self.open_reader = open_planner, open_reader
        self.dp_rank, self.collate, self.state = dp_rank, collate, state

    def __iter__(self) -> Iterator[LoadedStep]:
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        planner, reader = self.open_planner(), self.open_reader()
        # Every worker plans all steps, because each depends on the one before. It collates only its
        # share of them.
        for i, plan in enumerate(planner.steps(self.state)):
            if i % every == first:
                made = [self.collate(m, reader) for m in micro_batches_of(plan, self.dp_rank)]
                yield LoadedStep(plan.step, plan.num_targets, made)


def check_targets(planner: Planner, reader: TokenReader) -> None:
    """Raise UserError unless planner and reader agree on which tokens are trained.

    A `LabelReader` masks labels unless it has `has_targets = False`.
    """
    source = planner.source
    counts = isinstance(source, TargetCounter) and source.has_targets
    masks = isinstance(reader, LabelReader) and getattr(reader, "has_targets", True)
    if masks and not counts:
        raise UserError(
            f"{type(reader).__name__} masks some labels but the planner counts every token, so "
            f"num_targets would be too large a divisor of the loss; make the planner from the "
            f"store, Planner.for_lengths(TokenStore(prefix), ...), or from a source with "
            f"count_targets"
        )
    if counts and not masks:
        raise UserError(
            f"the planner counts only the tokens that its store trains, but "
            f"{type(reader).__name__} trains all; use StoreReader, or another reader with labels"
        )


def _unchanged(step: Any) -> Any:
    """Return the step as it is; torch's default would turn every array into a tensor."""
    return step


class PlannedLoader(PlannedRank):
    """Iterates over a rank's steps to the end of the data.

    A second iteration continues where the first one stopped.

    Args:
        open_planner: Makes the planner. It must be picklable if num_workers > 0, for example a
            `functools.partial` of a module's function.
        open_reader: Makes the reader. It must be picklable, too.
        dp_rank: This data-parallel rank.
        collate: Makes a batch of each micro-batch.
        num_workers: As in torch's DataLoader.
        pin_memory: As in torch's DataLoader.
        prefetch_factor: As in torch's DataLoader.

    Raises:
        UserError: Planner and reader differ on which tokens are trained, so that a step's
            `num_targets` would be a wrong divisor of its loss.
    """

    def __init__(
        self,
        open_planner: Callable[[], Planner],
        open_reader: Callable[[], TokenReader],
        *,
        dp_rank: int,
        collate: Collate,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
    ) -> None:
        super().__init__(open_planner(), dp_rank)
        check_targets(self.planner, open_reader())
        self._open, self.collate = (open_planner, open_reader), collate
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch_factor,
        }

    def __iter__(self) -> Iterator[LoadedStep]:
        steps = PlannedSteps(
            *self._open, dp_rank=self.dp_rank, collate=self.collate, state=self._state
        )
        # This process plans too, because states of worker processes do not come back.
        for loaded in DataLoader(steps, batch_size=None, collate_fn=_unchanged, **self._options):
            plan = self.planner.next(self._state)
            if plan is None or plan.step != loaded.step:
                raise RuntimeError(
                    f"step {loaded.step} came from a worker, this process planned "
                    f"{None if plan is None else plan.step}: the planners differ"
                )
            # Advance before the yield: when the loop saves a checkpoint, the step that is yielded
            # here has been trained.
            self._state = plan.state
            yield loaded

"""A resumable loader for other training loops: planned, collated steps of one data-parallel rank.

Every rank plans the same global steps and takes its own pipeline's micro-batches, so shards are
disjoint and complete. Worker processes open planner and reader themselves and collate every
`num_workers`-th step.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from wlb.parallel.rows import LabelReader, TokenReader
from wlb.plan import MicroBatch, PlannerState, StepPlan, UserError
from wlb.planner import Planner, TargetCounter, hold_state

Collate = Callable[[MicroBatch, TokenReader], Any]


class LoadedStep(NamedTuple):
    """One global step on one rank.

    num_targets: trained labels on all ranks, the loss's divisor. micro_batches: results of
    `collate` for this rank, in execution order.
    """

    step: int
    num_targets: int
    micro_batches: list[Any]


class PlannedRank:
    """A data-parallel rank's place in a planner's steps, which a checkpoint stores and resumes.

    dp_rank: below the planner's dp.
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
        """State after the last step that was returned; JSON, equal on all ranks."""
        return self._state.to_json()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after that step, with any number of ranks and possibly with more epochs.

        UserError for a state that contradicts itself or the planner's data.
        """
        resumed = PlannerState.from_json(state)
        hold_state(resumed, self.planner.source, own=self.planner.packers)
        self._state = resumed.reopened()


def micro_batches_of(plan: StepPlan, dp_rank: int) -> list[MicroBatch]:
    """A rank's micro-batches in execution order."""
    return [plan.packing.micro_batch(i) for i in plan.pipelines[dp_rank].tolist()]


class PlannedSteps(IterableDataset[LoadedStep]):
    """The rank's steps after a state; in a worker process, every num_workers-th of them."""

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
        for i, plan in enumerate(planner.steps(self.state)):
            if i % every == first:
                made = [self.collate(m, reader) for m in micro_batches_of(plan, self.dp_rank)]
                yield LoadedStep(plan.step, plan.num_targets, made)


def check_targets(planner: Planner, reader: TokenReader) -> None:
    """UserError unless the planner counts the labels that the reader trains.

    A `LabelReader` masks labels unless it says `has_targets = False`.
    """
    source = planner.source
    counts = isinstance(source, TargetCounter) and source.has_targets
    masks = isinstance(reader, LabelReader) and getattr(reader, "has_targets", True)
    if masks and not counts:
        raise UserError(
            f"{type(reader).__name__} says which tokens are trained and the planner counts all of "
            f"them, so num_targets would be too large a divisor of the loss; make the planner of "
            f"the store itself, Planner.for_lengths(TokenStore(prefix), ...), or of a source with "
            f"count_targets"
        )
    if counts and not masks:
        raise UserError(
            f"the planner counts only the tokens that its store trains, and {type(reader).__name__}"
            f" trains all; read with StoreReader, or another reader with labels"
        )


def _unchanged(step: Any) -> Any:
    """Replaces torch's conversion, which would turn every array into a tensor."""
    return step


class PlannedLoader(PlannedRank):
    """Iterates over steps to the end of data; a second iteration continues the first.

    open_planner, open_reader: functions without arguments, picklable if num_workers > 0 (e.g.
    `functools.partial` of a module's function). num_workers, pin_memory, prefetch_factor: as in
    torch's DataLoader. UserError where planner and reader differ on which tokens are trained, since
    a step's `num_targets` would be no divisor of its loss.
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
        for loaded in DataLoader(steps, batch_size=None, collate_fn=_unchanged, **self._options):
            plan = self.planner.next(self._state)
            if plan is None or plan.step != loaded.step:
                raise RuntimeError(
                    f"step {loaded.step} came from a worker, this process planned "
                    f"{None if plan is None else plan.step}: the planners differ"
                )
            # The state advances before the yield, because a checkpoint is made after the step was
            # trained.
            self._state = plan.state
            yield loaded

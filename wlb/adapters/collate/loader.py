"""A resumable data loader for any training loop, which plans steps and collates micro-batches.

Every data-parallel rank plans the same global steps and takes its own micro-batches of them. So
every document is trained by exactly one rank, without communication. Each worker process opens the
planner and the reader itself, and collates every `num_workers`-th step.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from wlb.parallel.rows import LabelReader, TokenReader
from wlb.plan import MicroBatch, PlannerState, StepPlan, UserError
from wlb.planner import Planner, TargetCounter, check_planner_state

Collate = Callable[[MicroBatch, TokenReader], Any]
"""Function that makes the training loop's batch from a micro-batch and a reader of its tokens."""


class LoadedStep(NamedTuple):
    """One data-parallel rank's batches of one step."""

    step: int  # number of the step
    num_targets: int  # trained labels on all ranks, by which to divide the loss
    micro_batches: list[Any]  # results of `collate` for this rank, in execution order


class PlannedRank:
    """Base class of loaders. It has a planner, and remembers which steps this rank has returned.

    A checkpoint saves this position in the data (`state_dict`).

    Args:
        planner: The planner, which must be the same on all ranks.
        dp_rank: Data-parallel rank of this process, below the planner's dp.
    """

    def __init__(self, planner: Planner, dp_rank: int) -> None:
        if not 0 <= dp_rank < planner.dp:
            raise UserError(
                f"dp_rank = {dp_rank} must be between 0 and {planner.dp - 1}, because the planner "
                f"has dp = {planner.dp}; make the planner with dp = the number of data-parallel "
                "ranks"
            )
        self.planner, self.dp_rank = planner, dp_rank
        self._state = planner.start()

    def state_dict(self) -> dict[str, Any]:
        """Return the planner's state after the last returned step, for a checkpoint.

        The state consists of JSON values and is equal on all ranks.
        """
        return self._state.to_json()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the step at which the state was saved.

        The number of ranks may differ from before, and the number of epochs may be larger.

        Args:
            state: From `state_dict`.

        Raises:
            UserError: The state is invalid or was saved with other data.
        """
        resumed = PlannerState.from_json(state)
        check_planner_state(resumed, self.planner.source, packers=self.planner.packers)
        self._state = resumed.reopened()


def micro_batches_of(plan: StepPlan, dp_rank: int) -> list[MicroBatch]:
    """Return the micro-batches of a step that a data-parallel rank trains, in execution order."""
    return [plan.packing.micro_batch(i) for i in plan.pipelines[dp_rank].tolist()]


class PlannedSteps(IterableDataset[LoadedStep]):
    """Dataset of one rank's collated steps, for use by torch's DataLoader.

    A worker process yields only every num_workers-th step.

    Args:
        open_planner: Makes the planner; called in the worker process.
        open_reader: Makes the reader; called in the worker process.
        dp_rank: The data-parallel rank.
        collate: Makes a batch of each micro-batch.
        state: Planner state after which to begin; None begins at the first step.
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
        # Every worker plans all steps, because each step depends on the step before, but collates
        # only every num_workers-th one.
        for i, plan in enumerate(planner.steps(self.state)):
            if i % every == first:
                made = [self.collate(m, reader) for m in micro_batches_of(plan, self.dp_rank)]
                yield LoadedStep(plan.step, plan.num_targets, made)


def check_targets(planner: Planner, reader: TokenReader) -> None:
    """Raise UserError unless planner and reader agree on whether only some tokens are trained.

    The loss is divided by the planner's count of trained tokens, and the reader masks the labels of
    tokens that are not trained. A `LabelReader` masks labels unless its `has_targets` is False.
    """
    source = planner.source
    counts = isinstance(source, TargetCounter) and source.has_targets
    masks = isinstance(reader, LabelReader) and getattr(reader, "has_targets", True)
    if masks and not counts:
        raise UserError(
            f"{type(reader).__name__} masks some labels, but the planner counts every token as "
            "trained, so the loss would be divided by too large a number; make the planner from "
            "the store (Planner.for_lengths(TokenStore(prefix), ...)), or from a source with "
            "count_targets"
        )
    if counts and not masks:
        raise UserError(
            "the planner counts only the tokens that its store marks as trained, but "
            f"{type(reader).__name__} trains all tokens; use StoreReader, or another reader that "
            "masks the labels of all other tokens"
        )


def _unchanged(step: Any) -> Any:
    """Return the step unchanged; torch's default collate_fn would convert arrays to tensors."""
    return step


class PlannedLoader(PlannedRank):
    """Iterates over one data-parallel rank's collated steps to the end of the data.

    If an iteration is stopped, the next one continues after the last step that was returned.

    Args:
        open_planner: Makes the planner. If num_workers > 0, this function must be picklable, for
            example a `functools.partial` of a function at the top of a module.
        open_reader: Makes the reader. If num_workers > 0, this function must be picklable, too.
        dp_rank: Data-parallel rank of this process.
        collate: Makes a batch of each micro-batch.
        num_workers: As in torch's DataLoader.
        pin_memory: As in torch's DataLoader.
        prefetch_factor: As in torch's DataLoader.

    Raises:
        UserError: Planner and reader differ on which tokens are trained, so the loss would be
            divided by a wrong `num_targets`.
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
        # This process plans the same steps, to know the planner's state after each of them.
        for loaded in DataLoader(steps, batch_size=None, collate_fn=_unchanged, **self._options):
            plan = self.planner.next(self._state)
            if plan is None or plan.step != loaded.step:
                raise RuntimeError(
                    f"a worker process returned step {loaded.step}, but this process planned step "
                    f"{None if plan is None else plan.step}; let open_planner return the same "
                    "planner in every process"
                )
            # Advance before the yield: if the loop saves a checkpoint after training this step, the
            # saved state must be the state after the step.
            self._state = plan.state
            yield loaded

"""Run independent tasks on several processes, and return results in the order of the tasks."""

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import TypeVar

from wlb.data.leftovers import name_semaphores
from wlb.plan import check_at_least

T = TypeVar("T")
R = TypeVar("R")


@dataclass(slots=True, kw_only=True)
class Workers:
    """A context manager that runs tasks in several processes. With one job, it uses this process.

    With more than one job, functions, tasks and results must be picklable.
    """

    jobs: int = 1  # number of processes
    pool: ProcessPoolExecutor | None = field(default=None, init=False)  # None with one job

    def __post_init__(self) -> None:
        check_at_least("jobs", self.jobs, 1)

    def __enter__(self) -> "Workers":
        if self.jobs > 1:
            name_semaphores()
            self.pool = ProcessPoolExecutor(
                self.jobs,
                mp_context=get_context("spawn"),
                initializer=signal.signal,  # workers ignore Ctrl-C, which this process handles
                initargs=(signal.SIGINT, signal.SIG_IGN),
            )
        return self

    def __exit__(self, *error: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)
            self.pool = None

    def each(self, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[R]:
        """Yield `function(task)` for each task, in the order of the tasks."""
        if self.pool is None or len(tasks) < 2:
            return map(function, tasks)
        return self.pool.map(function, tasks)

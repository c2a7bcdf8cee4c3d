"""Limits the time of each stage of `wlb doctor`, and names the ranks that hang.

A rank may hang in a driver, in NCCL's bootstrap or in a file system, where no Python exception can
interrupt it. Each rank writes to the key-value store of torch.distributed which stages it has
finished. If a stage takes too long, a timer on rank 0 reads from that store which ranks have not
finished it.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from wlb.doctor.finding import UNFIT

GRACE_S = 20.0
"""Seconds by which the time limit of a stage is longer on other ranks than on rank 0.

So rank 0 can report which ranks are late before the other ranks end their processes."""


class StageLimit:
    """Ends this process if a stage takes too long. Rank 0 first reports which ranks are late.

    A stage is a part of `wlb doctor`, such as the checks of each node.

    Args:
        rank: This rank's number.
        limit_s: Seconds that each stage may take. Ranks other than 0 get `GRACE_S` more.
        on_late: Rank 0 calls this function when a stage takes too long, with the name of the stage
            and the ranks that have not finished it. The call is made in the timer's thread.
        end: Function that ends the process with the exit status that it is given.
    """

    def __init__(
        self,
        rank: int,
        limit_s: float,
        on_late: Callable[[str, Sequence[int]], None],
        *,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self.rank, self.on_late, self.end = rank, on_late, end
        self.limit_s = limit_s + (GRACE_S if rank else 0.0)
        self._store: Any = None
        self._world_size = 1
        self._is_over = threading.Lock()
        self._entered: list[str] = []

    def join(self) -> None:
        """From now on, let rank 0 know which stages of `wlb doctor` this rank has finished.

        They are written to the key-value store of torch's default process group, which must exist.
        """
        # A clone of the store has a connection of its own. With a shared connection, the timer
        # could not read while the main thread waits for the store.
        store: Any = distributed_c10d._get_default_store()
        self._store = store.clone()
        self._world_size = dist.get_world_size()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Limit the time of the block, and record that this rank has finished the stage `name`.

        All ranks must enter the same stages in the same order.
        """
        self._entered.append(name)
        timer = threading.Timer(self.limit_s, self._expired)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        if self._store is not None:
            self._store.set(_key(name, self.rank), b"1")

    def _expired(self) -> None:
        """Report the late ranks and end the process. The timer calls this when time is up."""
        # The lock is never released. So if the timer of another stage expires during this report,
        # there is no second report.
        if self._is_over.acquire(blocking=False):
            try:
                if self.rank == 0:
                    self.on_late(*self.missing())
            finally:
                self.end(UNFIT)

    def missing(self) -> tuple[str, list[int]]:
        """Return the first stage of `wlb doctor` that not all ranks have finished, and these ranks.

        Before `join`, only this process is known, and the current stage and rank 0 are returned.
        """
        if self._store is None:
            return self._entered[-1], [0]
        stage, late = "", []
        for stage in self._entered:
            ranks = range(self._world_size)
            late = [rank for rank in ranks if not self._store.check([_key(stage, rank)])]
            if late:
                break
        return stage, late


def _key(stage: str, rank: int) -> str:
    return f"wlb-doctor/{stage}/{rank}"

"""Limits the time of each stage of an examination, and names the ranks that hang.

A rank may hang in a driver, in NCCL's bootstrap or in a file system, where no Python exception can
interrupt it. Each rank writes to the key-value store of torch.distributed which stages it has
ended. If a stage takes too long, a timer on rank 0 reads from the store which ranks are late.
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
"""Seconds by which the time limit of other ranks is longer than rank 0's.

So rank 0 can report the late ranks before the other ranks end."""


class StageLimit:
    """Ends this process if a stage takes too long; rank 0 first reports the late ranks.

    Args:
        rank: This rank's number.
        limit_s: Seconds that a stage may take.
        on_late: Called on rank 0 when a stage takes too long, with the name of the stage and the
            ranks that have not ended it. The timer's thread calls it.
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
        """Write ended stages to the process group's store from now on. The group must exist."""
        # Use a clone, which has its own connection. With the same connection, the timer could not
        # read the store while the main thread waits in it.
        store: Any = distributed_c10d._get_default_store()
        self._store = store.clone()
        self._world_size = dist.get_world_size()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Limit the time of the block, which is the stage `name`.

        All ranks enter the same stages in the same order.
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
        """Report the late ranks and end the process. The timer calls it when time is up."""
        # The lock is never released. So if the timer of another stage expires during the report, it
        # does not report too.
        if self._is_over.acquire(blocking=False):
            try:
                if self.rank == 0:
                    self.on_late(*self.missing())
            finally:
                self.end(UNFIT)

    def missing(self) -> tuple[str, list[int]]:
        """Return the first stage that some ranks have not ended, and the numbers of these ranks."""
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

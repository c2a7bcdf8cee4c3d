"""A time limit on each stage of an examination, so that a rank that hangs is named.

A rank may hang in a driver, in NCCL's bootstrap or in a file system, where no Python exception can
reach it. Each rank notes in torch's store which stages it has ended. A timer on rank 0 reads these
notes.
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
"""Seconds that other ranks wait longer than rank 0, so that it can report before they end."""


class StageLimit:
    """Ends this process if a stage takes too long; rank 0 first reports the late ranks.

    Args:
        rank: This rank's number.
        limit_s: Seconds that a stage may take.
        on_late: Called on rank 0, from another thread, with the stage and the ranks that have not
            ended it.
        end: Ends the process with an exit status.
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
        """From now on note stages in the store of torch.distributed, which has started."""
        # Clone the store: a rank that waits inside it would block the timer's requests.
        store: Any = distributed_c10d._get_default_store()
        self._store = store.clone()
        self._world_size = dist.get_world_size()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Limit the time of the block. All ranks enter the same stages in the same order."""
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
        """Report the late ranks and end the process. Called by the timer."""
        # The lock is never released, so that no second stage can expire during the report.
        if self._is_over.acquire(blocking=False):
            try:
                if self.rank == 0:
                    self.on_late(*self.missing())
            finally:
                self.end(UNFIT)

    def missing(self) -> tuple[str, list[int]]:
        """Return the first stage that not all ranks have ended, and these ranks."""
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

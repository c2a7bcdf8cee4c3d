"""A time limit on each stage of an examination, so that a rank that hangs is named.

A rank may hang in a driver, in NCCL's bootstrap or on a file system, where no Python exception
reaches it. Ranks say in the store which stages they have ended.
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
"""Additional seconds that other ranks wait, so that rank 0, which has the report, ends first."""


class StageLimit:
    """Ends this process when a stage takes longer than `limit_s`; rank 0 first reports the late
    ranks.

    tell: called on rank 0 from another thread with the stage and the ranks that have not ended it.
    """

    def __init__(
        self,
        rank: int,
        limit_s: float,
        tell: Callable[[str, Sequence[int]], None],
        *,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self.rank, self.tell, self.end = rank, tell, end
        self.limit_s = limit_s + (GRACE_S if rank else 0.0)
        self._store: Any = None
        self._world_size = 1
        self._is_over = threading.Lock()
        self._entered: list[str] = []

    def join(self) -> None:
        """Use the store of torch.distributed, which has started, from now on."""
        # The store is cloned, because a rank that waits inside the store would block the timer's
        # requests.
        store: Any = distributed_c10d._get_default_store()
        self._store = store.clone()
        self._world_size = dist.get_world_size()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Limits the time of the block, which ranks of a world enter in the same order."""
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
        # The lock is never released, because the main thread could otherwise end the stage
        # meanwhile.
        if self._is_over.acquire(blocking=False):
            try:
                if self.rank == 0:
                    self.tell(*self.missing())
            finally:
                self.end(UNFIT)

    def missing(self) -> tuple[str, list[int]]:
        """The first stage that not all ranks have ended, and the ranks that have not."""
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

"""Gloo process groups with one worker thread each, that connect ranks when these first talk.

torch's two workers corrupt the heap: they write the name of their last collective into one string
without a lock (`ProcessGroupGloo::runLoop`, torch 2.13.0; no upstream issue known), so a rank dies
(SIGSEGV or SIGABRT) after minutes. Reproduced by tests/parallel/gloo_race.py. torch ignores
`pg_options` for Gloo, hence the wrapped constructor. This file imports nothing of wlb.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch.distributed as dist

LOOPBACK = "127.0.0.1"


def use_one_worker(interfaces: Sequence[str] = (), *, loopback: bool = False) -> None:
    """Give every Gloo group that this process creates from now on a single worker thread, and
    connections that are made when they are used instead of between all ranks at once.

    interfaces: to bind, as in GLOO_SOCKET_IFNAME; without any, the loopback interface if
    `loopback`, else the host's own address. A second call replaces the first.
    """
    if not dist.is_gloo_available():
        return
    gloo: Any = dist.ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]
    construct: Callable[..., None] = getattr(gloo.__init__, "__wrapped__", gloo.__init__)

    def devices() -> list[Any]:
        if interfaces:
            return [gloo.create_device(interface=name, lazy_init=True) for name in interfaces]
        if loopback:
            return [gloo.create_device(hostname=LOOPBACK, lazy_init=True)]
        return [gloo.create_default_device(lazy_init=True)]

    @wraps(construct)
    def with_one_worker(
        group: Any, store: Any, rank: int, size: int, timeout: Any = timedelta(minutes=30)
    ) -> None:
        # Options that the caller gives are kept.
        if not isinstance(timeout, gloo._Options):
            options = gloo._Options()
            options._devices = devices()
            options._timeout = timeout
            options._threads = 1
            timeout = options
        construct(group, store, rank, size, timeout)

    gloo.__init__ = with_one_worker

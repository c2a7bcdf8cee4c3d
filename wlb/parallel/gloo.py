"""Gloo process groups with one worker thread each, because two of them race.

The two workers that torch gives a Gloo group write the name of their last collective into one
std::string without a lock (`ProcessGroupGloo::runLoop`, seen in torch 2.13.0). Names longer than 15
characters, such as ALLGATHER_COALESCED, live on the heap, so a rank dies of a corrupt heap (SIGSEGV
or SIGABRT) after minutes of training. `tests/parallel/test_gloo.py` reproduces it in one process.
torch ignores `pg_options` for Gloo, so the constructor is wrapped.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch.distributed as dist

LOOPBACK = "127.0.0.1"


def use_one_worker(interfaces: Sequence[str] = (), *, loopback: bool = False) -> None:
    """Give every Gloo group that this process makes from now on a single worker thread.

    interfaces: network interfaces to bind, as in GLOO_SOCKET_IFNAME; none takes loopback where
    all ranks are on this machine (`loopback`), else the host's own address. A second call replaces
    the first. Nothing happens where torch was built without Gloo.
    """
    if not dist.is_gloo_available():
        return
    gloo: Any = dist.ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]
    construct: Callable[..., None] = getattr(gloo.__init__, "__wrapped__", gloo.__init__)

    def devices() -> list[Any]:
        if interfaces:
            return [gloo.create_device(interface=name) for name in interfaces]
        if loopback:
            return [gloo.create_device(hostname=LOOPBACK)]
        return [gloo.create_default_device()]

    @wraps(construct)
    def with_one_worker(
        group: Any, store: Any, rank: int, size: int, timeout: Any = timedelta(minutes=30)
    ) -> None:
        if not isinstance(timeout, gloo._Options):  # options given by the caller stand
            options = gloo._Options()
            options._devices = devices()
            options._timeout = timeout
            options._threads = 1
            timeout = options
        construct(group, store, rank, size, timeout)

    gloo.__init__ = with_one_worker

"""Gloo process groups with one worker thread each that connect ranks at their first message.

torch starts two workers, which corrupt the heap: both write the name of their last collective into
one string without a lock (`ProcessGroupGloo::runLoop`, torch 2.13.0; no upstream issue known).
After minutes a rank dies with SIGSEGV or SIGABRT. tests/parallel/gloo_race.py reproduces it. torch
ignores `pg_options` for Gloo, so we wrap the constructor. This file imports nothing of wlb.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch.distributed as dist

LOOPBACK = "127.0.0.1"
"""Address of the loopback interface."""


def use_one_worker(interfaces: Sequence[str] = (), *, loopback: bool = False) -> None:
    """Give every Gloo group that is created from now on a single worker and lazy connections.

    A lazy connection is made when it is first used; otherwise all ranks connect with each other at
    once. A second call replaces the first.

    Args:
        interfaces: Network interfaces to bind, as in GLOO_SOCKET_IFNAME.
        loopback: Without interfaces: bind the loopback interface instead of the host's address.
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
        # Leave options alone that the caller has given.
        if not isinstance(timeout, gloo._Options):
            options = gloo._Options()
            options._devices = devices()
            options._timeout = timeout
            options._threads = 1
            timeout = options
        construct(group, store, rank, size, timeout)

    gloo.__init__ = with_one_worker

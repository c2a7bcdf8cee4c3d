"""Make Gloo process groups use one worker thread each, and connect ranks at their first message.

By default torch starts two worker threads per group. Two workers corrupt the heap: both workers
write the name of their last collective into the same string without a lock
(`ProcessGroupGloo::runLoop`, torch 2.13.0; no upstream issue known). After minutes a rank dies with
SIGSEGV or SIGABRT, which tests/parallel/gloo_race.py reproduces. torch ignores `pg_options` for
Gloo, so we wrap the constructor of the groups. This file imports nothing else of wlb.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch.distributed as dist

LOOPBACK = "127.0.0.1"
"""Address of the loopback interface, over which ranks of one machine can communicate."""


def use_one_worker(interfaces: Sequence[str] = (), *, loopback: bool = False) -> None:
    """Give every Gloo group that is created from now on one worker thread and lazy connections.

    A lazy connection is made when two ranks first communicate. Otherwise all pairs of ranks connect
    when the group is created. Another call of this function replaces the settings of this one.

    Args:
        interfaces: Names of the network interfaces to use, as in GLOO_SOCKET_IFNAME.
        loopback: If `interfaces` is empty, use the loopback interface instead of the host's
            address.
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
        # The caller may pass complete options in place of a timeout. Do not change those.
        if not isinstance(timeout, gloo._Options):
            options = gloo._Options()
            options._devices = devices()
            options._timeout = timeout
            options._threads = 1
            timeout = options
        construct(group, store, rank, size, timeout)

    gloo.__init__ = with_one_worker

"""Let a signal end a process that waits for other ranks inside torch.

Python's own signal handlers do not run while torch waits in C++.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ANSWER_S = 15.0
"""Seconds from a signal until the process is ended.

Other ranks usually get the same signal. In this time they may end or answer, so that the wait is
over and the process can end normally.
"""
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that end the process. Other signals that Python handles, such as a timer's, do not."""
_MESSAGE = b"\nwlb: ended by a signal while it waited for other ranks\n"


@contextmanager
def ended_by_signals(*, was_asked: bool = False) -> Iterator[None]:
    """End this process `ANSWER_S` after SIGTERM, SIGINT or SIGUSR1, if the block still runs then.

    torch waits for other ranks in C++, for minutes or hours, and Python's signal handlers run only
    afterwards. But when a signal arrives, Python writes the signal's number to a socket at once
    (`signal.set_wakeup_fd`), and a thread of this context reads the socket. The context has no
    effect outside the main thread.

    Args:
        was_asked: Whether such a signal arrived before the block. The process then ends `ANSWER_S`
            after the block's beginning.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(ours, ended, was_asked), daemon=True)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        ended.set()
        theirs.close()
        thread.join()
        ours.close()


def _watch(ours: socket.socket, ended: threading.Event, was_asked: bool) -> None:
    number = signal.SIGTERM if was_asked else -1
    while number not in (*_ENDING, 0):
        # When the block has ended and closed the other socket, `recv` returns no bytes, and the
        # number is 0.
        number = int.from_bytes(ours.recv(1), "little")
    if number and not ended.wait(ANSWER_S):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, _MESSAGE)
        os._exit(128 + number)

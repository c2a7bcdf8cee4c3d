"""End a process by a signal while it waits for other ranks inside torch.

Python's signal handlers do not run there.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ANSWER_S = 15.0
"""Seconds in which other ranks, which usually get the same signal, may end the wait themselves."""
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that end the process. Others that Python handles, such as a timer's, do not."""
_MESSAGE = b"\nwlb: ended by a signal while it waited for other ranks\n"


@contextmanager
def ended_by_signals(*, was_asked: bool = False) -> Iterator[None]:
    """End this process `ANSWER_S` after SIGTERM, SIGINT or SIGUSR1, if the block still runs then.

    torch waits for peers in C++, for minutes or hours, and Python's handlers run only afterwards. A
    thread reads what `signal.set_wakeup_fd` writes as soon as a signal arrives. Outside the main
    thread this has no effect.

    Args:
        was_asked: Whether a signal has already come.
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
        # When the block has ended and closed the other end, `recv` returns nothing, which is 0.
        number = int.from_bytes(ours.recv(1), "little")
    if number and not ended.wait(ANSWER_S):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, _MESSAGE)
        os._exit(128 + number)

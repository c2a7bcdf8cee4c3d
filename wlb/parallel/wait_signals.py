"""Signals to a process that waits for other ranks in torch, where no handler of Python's runs."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ANSWER_S = 15.0
"""How long the other ranks, which usually get the same signal, have to end the wait themselves."""
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Other signals that Python handles, such as a timer's, end nothing."""
_TOLD = b"\nwlb: ended by a signal while it waited for other ranks\n"


@contextmanager
def ended_by_signals(*, was_asked: bool = False) -> Iterator[None]:
    """SIGTERM, SIGINT or SIGUSR1 ends this process `ANSWER_S` later if the block still runs then.

    torch waits for peers in C++, for minutes or hours, and Python's handlers run only afterwards.
    What is written when a signal arrives (`signal.set_wakeup_fd`) reaches a thread at once. Without
    effect outside of the main thread. was_asked: a signal has come already.
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
        # Nothing, which is 0, is read once the other end is closed.
        number = int.from_bytes(ours.recv(1), "little")
    if number and not ended.wait(ANSWER_S):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, _TOLD)
        os._exit(128 + number)

"""Fixtures of several folders."""

import signal
from collections.abc import Iterator

import pytest

# What a shell starts in the background ignores Ctrl-C, and so would every process that a test
# starts: those tests send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For a single rank that runs in this process: two threads on busy cores would wait for each
    other."""
    import torch  # not for tests that plan

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

"""Tells at most one observer of the process when an attention kernel runs.

A module-level variable, because a custom op takes tensors and integers only, and its backward runs
in autograd's own thread on CUDA, which context variables do not reach.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol


class AttentionObserver(Protocol):
    """Watches attention kernels, e.g. a clock."""

    def attention(self, *, is_backward: bool) -> AbstractContextManager[object]:
        """Entered around the call of a backend's kernel."""
        ...


_observer: AttentionObserver | None = None
_NOBODY = nullcontext()


def observed(*, is_backward: bool) -> AbstractContextManager[object]:
    """The context that a kernel is called in."""
    return _NOBODY if _observer is None else _observer.attention(is_backward=is_backward)


@contextmanager
def observing(observer: AttentionObserver) -> Iterator[None]:
    """Make `observer` watch every kernel inside; RuntimeError if there already is one."""
    global _observer
    if _observer is not None:
        raise RuntimeError(f"attention is already observed by {_observer}; use one at a time")
    _observer = observer
    try:
        yield
    finally:
        _observer = None

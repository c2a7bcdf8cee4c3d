"""Who is told when an attention kernel runs: at most one observer, of the whole process.

A module-level variable, against the house rule: a custom op receives tensors and integers only, and
its backward runs in autograd's own thread on CUDA, which context variables do not reach.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol


class AttentionObserver(Protocol):
    def attention(self, *, is_backward: bool) -> AbstractContextManager[object]:
        """Entered before a backend's kernel is called, left after the call."""
        ...


_observer: AttentionObserver | None = None
_NOBODY = nullcontext()


def observed(*, is_backward: bool) -> AbstractContextManager[object]:
    """What a kernel's call is wrapped in."""
    return _NOBODY if _observer is None else _observer.attention(is_backward=is_backward)


@contextmanager
def observing(observer: AttentionObserver) -> Iterator[None]:
    """Tell `observer` of every kernel inside; RuntimeError if another one is being told."""
    global _observer
    if _observer is not None:
        raise RuntimeError(f"attention is observed by {_observer} already; one observer at a time")
    _observer = observer
    try:
        yield
    finally:
        _observer = None

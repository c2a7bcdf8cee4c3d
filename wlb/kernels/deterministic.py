"""Deterministic attention operators of torch, so that a step can be repeated bit by bit."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic() -> Iterator[None]:
    """Set the process's flag, for operators without an argument for it.

    torch.use_deterministic_algorithms would change settings of the compiler as well.
    """
    is_on = torch._C._get_deterministic_algorithms()
    is_warn_only = torch._C._get_deterministic_algorithms_warn_only()
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(is_on, warn_only=is_warn_only)

"""Torch's own attention operators in a fixed order of additions, so that a step can be repeated."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic() -> Iterator[None]:
    """Operators that have no argument for it look at the process's setting.

    Not by torch.use_deterministic_algorithms, which changes settings of the compiler too.
    """
    is_on = torch._C._get_deterministic_algorithms()
    is_warn_only = torch._C._get_deterministic_algorithms_warn_only()
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(is_on, warn_only=is_warn_only)

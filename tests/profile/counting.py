"""Provides a timer that counts operations, so that tests of whole sweeps need no clock."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from wlb.profile.timing import KernelTimer, Repeats, Timing

CALL_NS = 1000.0
FLOPS_PER_NS = 2.0
VALUES_PER_NS = 1.0


class _OutputCounter(TorchDispatchMode):
    """Counts the calls of operators and the values in their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.values = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        self.values += sum(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        return out


class CountingTimer(KernelTimer):
    """Runs each step once and computes its time from its calls, FLOPs and returned values."""

    def _repeat(self, steps: Any, repeats: Repeats) -> tuple[Timing, ...]:
        value: Any = None
        took: list[Timing] = []
        for step in steps:
            value, ns = self._once(step, value)
            took.append(Timing(median_ns=ns, low_ns=ns, high_ns=ns, count=repeats.least))
        return tuple(took)

    def _once(self, step: Callable[[Any], Any], value: Any) -> tuple[Any, float]:
        with FlopCounterMode(display=False) as flops, _OutputCounter() as seen:
            value = step(value)
        work = flops.get_total_flops() / FLOPS_PER_NS + seen.values / VALUES_PER_NS
        return value, seen.calls * CALL_NS + work

"""Collectives along the row axis, as functional ops.

`torch.ops._c10d_functional` exists under the same names in torch 2.11 to 2.13 (the c10d functions
were renamed in between), traces under torch.compile, and does not give the zero gradients that raw
c10d calls gave inside an autograd.Function there.
"""

from typing import Protocol

import torch
from torch import Tensor

_ops = torch.ops._c10d_functional


class Group(Protocol):
    """What a collective needs to know of a process group."""

    @property
    def group_name(self) -> str: ...

    def size(self) -> int: ...


def start_all_gather(x: Tensor, group: Group) -> Tensor:
    """Rows of all ranks, rank-major: [T, ...] -> [size * T, ...]; `wait` before use."""
    return _ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)


def start_reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum over ranks, each keeping its rows: [size * T, ...] -> [T, ...]; `wait` before use."""
    return _ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size(), group.group_name)


def wait(x: Tensor) -> Tensor:
    return _ops.wait_tensor(x)


def all_gather(x: Tensor, group: Group) -> Tensor:
    return wait(start_all_gather(x, group))


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    return wait(start_reduce_scatter(x, group))


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """A reduced copy of `x`; op is "sum" or "max"."""
    return wait(_ops.all_reduce(x.contiguous(), op, group.group_name))

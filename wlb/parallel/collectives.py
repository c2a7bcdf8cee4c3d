"""Collectives along the row axis as functional ops, and `agree`, which compares ranks' arguments.

The ops of `torch.ops._c10d_functional` have the same names in torch 2.11 to 2.13, and torch.compile
can trace them. Raw c10d calls inside a traced autograd.Function silently give zero gradients on
torch 2.11.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from wlb.plan import UserError, digest

_ops = torch.ops._c10d_functional

_MOST_OF_ERROR, _MOST_OF_VALUE = 512, 64
"""Characters of a rank's error, and of one of its values, that a message shows at most."""


class Group(Protocol):
    """The part of a process group that a collective needs."""

    @property
    def group_name(self) -> str:
        """Name by which torch finds the group."""
        ...

    def size(self) -> int:
        """Return the number of ranks."""
        ...


def start_all_gather(x: Tensor, group: Group) -> Tensor:
    """Start to gather the rows of all ranks: [T, ...] -> [size * T, ...]; `wait` before use."""
    return _ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)


def start_reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Start to sum over ranks and scatter rows: [size * T, ...] -> [T, ...]; `wait` before use."""
    return _ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size(), group.group_name)


def wait(x: Tensor) -> Tensor:
    """Wait for a collective, and return its result."""
    return _ops.wait_tensor(x)


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Gather the rows of all ranks, rank by rank: [T, ...] -> [size * T, ...]."""
    return wait(start_all_gather(x, group))


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum over ranks and scatter rows: [size * T, ...] -> [T, ...]."""
    return wait(start_reduce_scatter(x, group))


def start_all_to_all(
    x: Tensor, received: Sequence[int], sent: Sequence[int], group: Group
) -> Tensor:
    """Start to exchange rows with all ranks; `wait` before use.

    Args:
        x: Rows to send, sorted by receiving rank.
        received: Number of rows from each rank. They arrive sorted by rank.
        sent: Number of rows to each rank.
        group: The ranks.
    """
    return _ops.all_to_all_single(x.contiguous(), list(received), list(sent), group.group_name)


def all_to_all(x: Tensor, received: Sequence[int], sent: Sequence[int], group: Group) -> Tensor:
    """Exchange rows with all ranks; arguments as in `start_all_to_all`."""
    return wait(start_all_to_all(x, received, sent, group))


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Return a reduced copy of `x`; op is "sum" or "max"."""
    return wait(_ops.all_reduce(x.contiguous(), op, group.group_name))


def agree(
    declared: Mapping[str, Any], problem: Exception | None, *, group: dist.ProcessGroup | None
) -> None:
    """Raise the same error on all ranks if one has a problem or if their values differ.

    Without it, the others would wait in a collective for a rank that has raised. Ranks that agree
    exchange only 8 bytes each, on the group's CPU backend if it has one.

    Args:
        declared: Values by name, with the same names on every rank. They are compared as text.
        problem: This rank's error, or None.
        group: The ranks. With None this process is alone.

    Raises:
        UserError: With every rank's message, or the values that differ.
        ValueError: A problem is not a UserError.
    """
    if group is None:
        if problem is not None:
            raise problem
        return
    values = [str(value) for value in declared.values()]
    mark = digest(*values) if problem is None else -1
    device = "cpu" if "cpu:" in dist.get_backend_config(group) else "cuda"
    marks = set(all_gather(torch.tensor([mark], device=device), group).tolist())
    if len(marks) == 1 and mark >= 0:
        return
    error = None if problem is None else repr(problem)
    if isinstance(problem, ValueError) and str(problem):
        error = str(problem)
    own = (error and error[:_MOST_OF_ERROR], isinstance(problem, UserError), values)
    # Some rank has a problem or other values: gather the texts for a message.
    by_rank: list[Any] = [None] * group.size()
    dist.all_gather_object(by_rank, own, group=group)
    errors = {rank: by_rank[rank] for rank in range(group.size()) if by_rank[rank][0] is not None}
    if errors:
        found = "; ".join(f"rank {rank}: {text}" for rank, (text, *_) in errors.items())
        raise (UserError if all(e[1] for e in errors.values()) else ValueError)(found) from problem
    columns = zip(declared, *(values for *_, values in by_rank), strict=True)
    differing = [
        f"{name}: "
        + ", ".join(f"rank {r} {text[:_MOST_OF_VALUE]}" for r, text in enumerate(column))
        for name, *column in columns
        if len(set(column)) > 1
    ]
    if differing:
        raise UserError(f"ranks have different arguments. {'; '.join(differing)}")

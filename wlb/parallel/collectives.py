"""Collectives that gather, scatter or exchange rows, and `agree`, which compares ranks' arguments.

The collectives are functional ops: they return new tensors.

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
"""Most characters of a rank's error, and of one of its values, that an error message shows."""


class Group(Protocol):
    """The part of a process group that a collective needs."""

    @property
    def group_name(self) -> str:
        """The name by which torch's functional collectives find the group."""
        ...

    def size(self) -> int:
        """Return the number of ranks in the group."""
        ...


def start_all_gather(x: Tensor, group: Group) -> Tensor:
    """Start to gather the rows of all ranks: [T, ...] -> [size * T, ...].

    Call `wait` on the result before it is used.
    """
    return _ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)


def start_reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Start to sum rows over ranks and scatter the sums: [size * T, ...] -> [T, ...].

    Call `wait` on the result before it is used.
    """
    return _ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size(), group.group_name)


def wait(x: Tensor) -> Tensor:
    """Wait for a collective, and return its result."""
    return _ops.wait_tensor(x)


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Gather the rows of all ranks, rank by rank: [T, ...] -> [size * T, ...]."""
    return wait(start_all_gather(x, group))


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum rows over the ranks of a group; each rank gets its part: [ranks * T, ...] -> [T, ...]."""
    return wait(start_reduce_scatter(x, group))


def start_all_to_all(
    x: Tensor, received: Sequence[int], sent: Sequence[int], group: Group
) -> Tensor:
    """Start to exchange rows with all ranks.

    Call `wait` on the result before it is used.

    Args:
        x: Rows to send, sorted by the rank that receives them.
        received: Number of rows that come from each rank. They arrive sorted by rank.
        sent: Number of rows that go to each rank.
        group: The group of ranks.
    """
    return _ops.all_to_all_single(x.contiguous(), list(received), list(sent), group.group_name)


def all_to_all(x: Tensor, received: Sequence[int], sent: Sequence[int], group: Group) -> Tensor:
    """Exchange rows with all ranks; arguments as in `start_all_to_all`."""
    return wait(start_all_to_all(x, received, sent, group))


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Return `x` reduced over the ranks of the group, as a new tensor; op is "sum" or "max"."""
    return wait(_ops.all_reduce(x.contiguous(), op, group.group_name))


def agree(
    declared: Mapping[str, Any], problem: Exception | None, *, group: dist.ProcessGroup | None
) -> None:
    """Raise the same error on all ranks if a rank has a problem or if values differ between ranks.

    This is a collective call. If a rank raised its error alone, the others would wait for it in
    their next collective. If there is no error, ranks exchange only 8 bytes each, on the group's
    CPU backend if it has one.

    Args:
        declared: This rank's values by name, with the same names on every rank. They are compared
            as text.
        problem: This rank's error, or None.
        group: The group of ranks. None if this process is alone.

    Raises:
        UserError: Ranks have UserErrors, whose messages are joined, or some values differ.
        ValueError: A rank has an error of another kind.
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
    # A rank has a problem, or values differ. Gather all errors and values for the message.
    by_rank: list[Any] = [None] * group.size()
    dist.all_gather_object(by_rank, own, group=group)
    errors = {rank: by_rank[rank] for rank in range(group.size()) if by_rank[rank][0] is not None}
    if errors:
        found = "; ".join(f"rank {rank}: {text}" for rank, (text, *_) in errors.items())
        raise (UserError if all(e[1] for e in errors.values()) else ValueError)(found) from problem
    columns = zip(declared, *(values for *_, values in by_rank), strict=True)
    differing = [
        f"{name}: "
        + ", ".join(f"rank {r} has {text[:_MOST_OF_VALUE]}" for r, text in enumerate(column))
        for name, *column in columns
        if len(set(column)) > 1
    ]
    if differing:
        raise UserError(
            "all ranks must pass the same arguments, but the ranks differ in "
            f"{'; '.join(differing)}"
        )

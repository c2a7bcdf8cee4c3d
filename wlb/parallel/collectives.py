"""Collectives along the row axis as functional ops, and `agree`, which compares ranks' arguments.

The ops of `torch.ops._c10d_functional` have the same names in torch 2.11 to 2.13 (c10d functions
were renamed in between) and trace under torch.compile. Raw c10d calls inside an autograd.Function
silently give zero gradients there on 2.11.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from wlb.plan import UserError, digest

_ops = torch.ops._c10d_functional

_DIGEST_BYTES = 8
_TEXT_BYTES = 64
_ERROR_BYTES = 512
_USERS = "u"


class Group(Protocol):
    """The part of a process group that a collective needs."""

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


def agree(
    declared: Mapping[str, Any],
    problem: Exception | None,
    *,
    group: dist.ProcessGroup | None,
) -> None:
    """Raise the same error on all ranks if one has a problem or if their values differ.

    Without it, the other ranks would wait in a collective for a rank that has raised. Costs one
    small all-gather, which the caller waits for; it uses the group's own device, because a rank's
    device may be the very argument that is wrong.

    declared: the same names on every rank; values are compared as text. problem: this rank's error.
    UserError with every rank's message; ValueError if a problem is not a UserError.
    """
    if group is None:
        if problem is not None:
            raise problem
        return
    values = [str(value) for value in declared.values()]
    fields = [_padded(_described(problem), _ERROR_BYTES), *map(_field, values)]
    row = torch.from_numpy(np.frombuffer(b"".join(fields), np.int64).copy())
    rows = all_gather(row[None].to(_device(group)), group).cpu().numpy()
    edges = np.cumsum([0, *map(len, fields)])
    columns = [[row.tobytes()[a:b] for row in rows] for a, b in pairwise(edges)]
    errors = [_text(error) for error in columns[0]]
    if any(errors):
        found = "; ".join(f"rank {r}: {error[1:]}" for r, error in enumerate(errors) if error)
        is_users = all(error[:1] in ("", _USERS) for error in errors)
        raise (UserError if is_users else ValueError)(found) from problem
    differing = [
        f"{name}: "
        + ", ".join(f"rank {r} {_text(field[_DIGEST_BYTES:])}" for r, field in enumerate(column))
        for name, column in zip(declared, columns[1:], strict=True)
        if len(set(column)) > 1
    ]
    if differing:
        raise UserError(f"ranks have different arguments. {'; '.join(differing)}")


def _described(problem: Exception | None) -> str:
    """Its text after one character that says whether it is a UserError; empty without a problem."""
    if problem is None:
        return ""
    text = str(problem) if isinstance(problem, ValueError) and str(problem) else repr(problem)
    return (_USERS if isinstance(problem, UserError) else "!") + text


def _device(group: dist.ProcessGroup) -> torch.device:
    """The CPU if the group has a backend for it."""
    has_cpu = "cpu:" in dist.get_backend_config(group)
    return torch.device("cpu" if has_cpu else "cuda")


def _field(value: str) -> bytes:
    """A digest that compares the whole value, then its beginning for the error message."""
    return digest(value).to_bytes(_DIGEST_BYTES, "little") + _padded(value, _TEXT_BYTES)


def _padded(text: str, width: int) -> bytes:
    return text.encode()[:width].ljust(width, b"\0")


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")

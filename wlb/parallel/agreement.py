"""agree: every rank of a group raises the same error, or none does. One small all-gather.

A rank whose arguments differ from the others', or are bad, would leave its peers waiting in a
collective. Here all ranks exchange the digest and the beginning of each value and, of a rank that
found an error, its text, so that all of them can say which rank said what. It travels on the
group's own device: a rank's arguments, its device among them, may be what is wrong.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from wlb.parallel.collectives import all_gather
from wlb.plan import digest

_DIGEST_BYTES = 8
_TEXT_BYTES = 64
_ERROR_BYTES = 512


def agree(
    declared: Mapping[str, Any],
    problem: Exception | None,
    *,
    group: dist.ProcessGroup | None,
) -> None:
    """ValueError on all ranks if one has a problem, or if their declared values are not the same.

    declared: the same names on every rank; values are compared as text. Waits for the group.
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
        found = "; ".join(f"rank {r}: {error}" for r, error in enumerate(errors) if error)
        raise ValueError(found) from problem
    differing = [
        f"{name}: "
        + ", ".join(f"rank {r} {_text(field[_DIGEST_BYTES:])}" for r, field in enumerate(column))
        for name, column in zip(declared, columns[1:], strict=True)
        if len(set(column)) > 1
    ]
    if differing:
        raise ValueError(f"ranks have different arguments. {'; '.join(differing)}")


def _described(problem: Exception | None) -> str:
    if problem is None:
        return ""
    return str(problem) if isinstance(problem, ValueError) and str(problem) else repr(problem)


def _device(group: dist.ProcessGroup) -> torch.device:
    """Where the group can gather: the CPU if it can there."""
    is_cpu = "cpu:" in dist.get_backend_config(group)
    return torch.device("cpu" if is_cpu else "cuda")


def _field(value: str) -> bytes:
    """The beginning is for people, the digest compares the whole."""
    return digest(value).to_bytes(_DIGEST_BYTES, "little") + _padded(value, _TEXT_BYTES)


def _padded(text: str, width: int) -> bytes:
    return text.encode()[:width].ljust(width, b"\0")


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")

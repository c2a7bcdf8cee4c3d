"""agree: every rank of a group raises the same error, or none does. One small all-gather.

A rank whose arguments differ from the others', or are bad, would leave its peers waiting in a
collective. Here all ranks exchange the digest of each value and, of a rank that found an error,
its text, so that all of them can say which rank said what.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from wlb.parallel.collectives import all_gather

_TEXT_BYTES = 64
_ERROR_BYTES = 512


def agree(
    declared: Mapping[str, Any],
    problem: Exception | None,
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """ValueError on all ranks if one has a problem, or if their declared values are not the same.

    declared: the same names on every rank; values are compared as text. Waits for the device.
    """
    if group is None:
        if problem is not None:
            raise problem
        return
    texts = [_described(problem), *(str(value) for value in declared.values())]
    widths = [_ERROR_BYTES] + [_TEXT_BYTES] * len(declared)
    mine = b"".join(_padded(t, w) for t, w in zip(texts, widths, strict=True))
    row = torch.from_numpy(np.frombuffer(mine, np.int64).copy()).to(device)
    rows = all_gather(row[None], group).cpu().numpy()
    edges = np.cumsum([0, *widths])
    columns = [[_text(row.tobytes()[a:b]) for row in rows] for a, b in pairwise(edges)]
    if any(columns[0]):
        found = "; ".join(f"rank {r}: {error}" for r, error in enumerate(columns[0]) if error)
        raise ValueError(found) from problem
    differing = [
        f"{name}: " + ", ".join(f"rank {rank} {value}" for rank, value in enumerate(column))
        for name, column in zip(declared, columns[1:], strict=True)
        if len(set(column)) > 1
    ]
    if differing:
        raise ValueError(f"ranks have different arguments. {'; '.join(differing)}")


def _described(problem: Exception | None) -> str:
    if problem is None:
        return ""
    return str(problem) if isinstance(problem, ValueError) and str(problem) else repr(problem)


def _padded(text: str, width: int) -> bytes:
    return text.encode()[:width].ljust(width, b"\0")


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")

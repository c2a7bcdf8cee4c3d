"""Segments: where the attention segments of one variable-length call begin and end.

A segment has Lq queries and Lk >= Lq keys. The queries are its last Lq positions: query i sees
keys [0, Lk - Lq + i] ("bottom-right" causal). Offsets are kept on the device for kernels that
take them and on the host for backends that loop, so that no backend ever waits for the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """Boundaries of the segments of one call; make it with `Segments.from_offsets`.

    cu_seqlens_q, cu_seqlens_k: int32 on the device, shape [num_segments + 1].
    offsets_q, offsets_k: the same on the host. derived: what a backend worked out from the
    offsets, once for all layers.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_q: int
    max_k: int
    offsets_q: tuple[int, ...]
    offsets_k: tuple[int, ...]
    derived: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_offsets(
        cls,
        cu_q: Sequence[int] | np.ndarray,
        cu_k: Sequence[int] | np.ndarray,
        *,
        device: torch.device | str,
    ) -> "Segments":
        """From offsets such as [0, 3, 5] (queries) and [0, 3, 9] (keys): two segments."""
        q, k = np.asarray(cu_q), np.asarray(cu_k)
        _check("cu_q", q)
        _check("cu_k", k)
        if q.size != k.size:
            raise ValueError(f"cu_q has {q.size - 1} segments, cu_k {k.size - 1}")
        num_q, num_k = np.diff(q), np.diff(k)
        short = np.flatnonzero(num_k < num_q)
        if short.size:
            i = int(short[0])
            raise ValueError(
                f"segment {i} has {num_q[i]} queries but only {num_k[i]} keys; its keys must "
                "include its queries' own positions"
            )
        on_device = _to_device(np.stack([q, k]).astype(np.int32), torch.device(device))
        return cls(
            cu_seqlens_q=on_device[0],
            cu_seqlens_k=on_device[1],
            max_q=int(num_q.max(initial=0)),
            max_k=int(num_k.max(initial=0)),
            offsets_q=tuple(q.tolist()),
            offsets_k=tuple(k.tolist()),
        )

    @property
    def num_segments(self) -> int:
        return len(self.offsets_q) - 1

    @property
    def num_queries(self) -> int:
        return self.offsets_q[-1]

    @property
    def num_keys(self) -> int:
        return self.offsets_k[-1]

    def derive(self, name: str, make: Callable[["Segments"], T]) -> T:
        """make(self), worked out at the first call with this name."""
        if name not in self.derived:
            self.derived[name] = make(self)
        return self.derived[name]


def _check(name: str, offsets: np.ndarray) -> None:
    if offsets.ndim != 1 or offsets.size == 0 or offsets.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be a list of whole numbers beginning with 0, not {offsets.dtype} of "
            f"shape {offsets.shape}"
        )
    if offsets[0] != 0:
        raise ValueError(f"{name} begins with {offsets[0]}, not with 0")
    down = np.flatnonzero(offsets[1:] < offsets[:-1])
    if down.size:
        i = int(down[0])
        raise ValueError(f"{name} falls from {offsets[i]} to {offsets[i + 1]} at segment {i}")
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"{name} ends at {offsets[-1]}; kernels count rows in 32 bits")


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)

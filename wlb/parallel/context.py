"""Context parallelism by all-gather (Section 2.1; Llama 3's way), for any sharding's spans.

Forward: one all-gather of K and V together, one gather that lays the keys of every local span out
one after the other, one varlen attention call. Backward: the keys' gradients are brought back by
inverse gathers (each gathered row is used at most once a layer of the inverse, so nothing is
atomic and the sum is deterministic), added in float32, and one reduce-scatter returns them to their
ranks. With one rank the local rows are the keys: no gather, no copy.

The copy of keys holds (1 + 1 / (2 * cp)) * S rows per layer for S tokens of a micro-batch.

Shapes: T local rows, K keys of all segments, G key/value heads and H query heads of this tp rank,
D head size.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from wlb.collate import AttentionRows
from wlb.kernels import Segments, attend
from wlb.parallel.collectives import all_gather, reduce_scatter


class _Keys(torch.autograd.Function):
    """Local K and V -> K and V of every local segment."""

    @staticmethod
    def forward(
        ctx: Any,
        group: dist.ProcessGroup,
        k_TGD: Tensor,
        v_TGD: Tensor,
        index_K: Tensor,
        inverse: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.group = group
        ctx.save_for_backward(inverse)
        gathered = all_gather(torch.stack([k_TGD, v_TGD], 1), group)
        keys = gathered.index_select(0, index_K)
        return keys[:, 0], keys[:, 1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dk_KGD, dv_KGD = grads
        (inverse,) = ctx.saved_tensors
        # One more row, of zeros: what unused rows read.
        used = dk_KGD.new_zeros((dk_KGD.shape[0] + 1, 2, *dk_KGD.shape[1:]))
        used[:-1, 0], used[:-1, 1] = dk_KGD, dv_KGD
        total = used.index_select(0, inverse[0])
        if inverse.shape[0] > 1:
            total = total.float()
            for layer in inverse[1:]:
                total += used.index_select(0, layer)
        local = reduce_scatter(total.to(used.dtype), ctx.group)
        return None, local[:, 0], local[:, 1], None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextAttention:
    """Attention of one rank's rows of one micro-batch; call it with q, k, v of every layer.

    index: [K] and inverse: [U, cp * T], or None with one CP rank.
    """

    segments: Segments
    backend: str
    group: dist.ProcessGroup | None
    index: Tensor | None
    inverse: Tensor | None

    def __call__(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        if self.group is not None:
            keys = _Keys.apply(self.group, k_TGD, v_TGD, self.index, self.inverse)
            k_TGD, v_TGD = keys  # pyright: ignore[reportAssignmentType]
        return attend(q_THD, k_TGD, v_TGD, self.segments, backend=self.backend)


def to_device(arrays: list[np.ndarray[Any, Any]], device: torch.device) -> list[Tensor]:
    """int64 arrays as tensors on `device`, moved in one (pinned, asynchronous) transfer."""
    flat = torch.from_numpy(np.concatenate([a.reshape(-1) for a in arrays]))
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    parts = flat.split([a.size for a in arrays])
    return [part.view(a.shape) for part, a in zip(parts, arrays, strict=True)]


def context_attention(
    rows: AttentionRows,
    *,
    group: dist.ProcessGroup | None,
    backend: str,
    device: torch.device,
    index: Tensor | None,
    inverse: Tensor | None,
) -> ContextAttention:
    """The attention of `rows`; index and inverse are rows.kv_index and rows.inverse on `device`."""
    return ContextAttention(
        segments=Segments.from_offsets(rows.cu_seqlens_q, rows.cu_seqlens_k, device=device),
        backend=backend,
        group=group if index is not None else None,
        index=index,
        inverse=inverse,
    )

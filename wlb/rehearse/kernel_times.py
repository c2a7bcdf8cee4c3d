"""Predict the times of kernels and transfers on the rehearsed GPU from the run's kernel profile.

- A matrix product takes its FLOPs divided by the profile's throughput for its shape, or the time to
  read and write its bytes if that is longer.
- Attention takes the time that the profile's attention table predicts for its segments.
- Any other kernel takes its bytes divided by the bandwidth that the profile has for norms.

No kernel takes less than LAUNCH_NS.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from wlb.cost import ProfiledWorkload, all_to_all_ns
from wlb.cost.profile import Collective, Elementwise
from wlb.cost.protocol import BACKWARD_FLOPS_PER_PAIR, FORWARD_FLOPS_PER_PAIR, causal_pairs
from wlb.kernels.segments import Segments
from wlb.memory import AttentionCall, attention_workspace_bytes
from wlb.rehearse.gpu import Splits
from wlb.spec.run import KernelSection

LAUNCH_NS = 2_500.0
"""Shortest predicted time of a kernel, in nanoseconds."""
ATTENTION, GEMM, REST = "attention", "GEMM", "element-wise"
_PRODUCTS = {
    "aten::mm": 0,
    "aten::addmm": 1,
    "aten::addmm_": 1,
    "aten::bmm": 0,
    "aten::_grouped_mm": 0,
}
"""Operator of a matrix product -> index of the first factor among its arguments."""
_WRITES_ROWS = "aten::index_copy_"
_COLLECTIVES = (
    ("all_gather", Collective.ALL_GATHER),
    ("allgather", Collective.ALL_GATHER),
    ("reduce_scatter", Collective.REDUCE_SCATTER),
    ("all_reduce", Collective.ALL_REDUCE),
    ("allreduce", Collective.ALL_REDUCE),
)


class Prices:
    """Predicts the times of kernels and transfers in a run.

    Args:
        cost: Workload model of the run's plans, which has the kernel profile.
        kernels: Section [kernels] of the run. It must name the attention kernel, not `auto`.
    """

    def __init__(self, cost: ProfiledWorkload, kernels: KernelSection) -> None:
        self.table, self.profile, self.kernels = cost.table, cost.profile, kernels
        self._bytes_per_ns = self.profile.elementwise_of(Elementwise.NORM).forward_bytes_per_s / 1e9

    def kernel(
        self, name: str, args: tuple[Any, ...], ins: list[Tensor], outs: list[Tensor]
    ) -> tuple[str, float, float, float, int]:
        """Return what an operator costs.

        Args:
            name: Name of the operator.
            args: Arguments of the operator.
            ins: Tensors that the operator reads.
            outs: Tensors that the operator returns.

        Returns:
            A tuple: the part of the step that the operator belongs to, its FLOPs, the bytes that it
            reads and writes, its predicted time in nanoseconds, and the bytes of its workspace.
        """
        num_bytes = size_of(ins) + size_of(outs)
        if name == _WRITES_ROWS:
            num_bytes = 2 * size_of(ins[2:])  # only the copied rows, each read and written once
        if name in _PRODUCTS:
            a, b = args[_PRODUCTS[name] :][:2]
            return self._product(a, b, num_bytes)
        if "varlen_attn" in name or "flash_attn" in name:
            return self._attention(name, args, num_bytes)
        time_ns = max(LAUNCH_NS, num_bytes / self._bytes_per_ns)
        return REST, 0.0, num_bytes, time_ns, 0

    def _product(
        self, a: Tensor, b: Tensor, num_bytes: float
    ) -> tuple[str, float, float, float, int]:
        rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
        if a.ndim < b.ndim:
            rows /= b.shape[0]  # a grouped product, in which each expert has equally many rows
        flops = 2.0 * a.numel() * columns
        surface = self.profile.gemm.forward
        at = surface.cells(np.array([float(max(1, rows))]), np.array([float(inner * columns)]))
        time_ns = flops / float(surface.read(at)[0]) * 1e-3
        return GEMM, flops, num_bytes, max(LAUNCH_NS, time_ns, num_bytes / self._bytes_per_ns), 0

    def _attention(
        self, name: str, args: tuple[Any, ...], num_bytes: float
    ) -> tuple[str, float, float, float, int]:
        is_backward = "backward" in name or "bwd" in name
        tensors = [a for a in args if isinstance(a, Tensor)]
        queries = tensors[1] if is_backward else tensors[0]
        heads, head_dim = queries.shape[1], queries.shape[2]
        segments = _segments(args)
        q = np.diff(segments.offsets_q).astype(np.float64)
        k = np.diff(segments.offsets_k).astype(np.float64)
        # torch's kernel takes a window as (keys to the left, keys to the right) of the query.
        windows = [a for a in args if isinstance(a, list | tuple) and len(a) == 2]
        sliding = max(0, next((int(left) for left, _ in windows), -1) + 1)
        is_causal = next((a for a in args if isinstance(a, bool)), True)
        if not is_causal:
            # The profile has only causal calls. Without a mask, q queries and k keys make a
            # rectangle of (query, key) pairs. A causal segment of q queries and k + q keys has this
            # rectangle and also a triangle. So take the rectangle's share of the causal time.
            share, k = q * k / (q * k + q * (q - 1) / 2 + q), k + q
        else:
            share = np.ones_like(q)
        seen = causal_pairs(q.astype(np.int64), k.astype(np.int64), sliding=sliding)
        pairs = float((seen * share).sum()) * heads * head_dim
        times = self.table.times_ns(q, k, num_heads=heads, head_dim=head_dim, sliding=sliding)
        calls = self.table.calls_ns(q, k, np.array([0, q.size]), num_heads=heads, sliding=sliding)
        per_pair = BACKWARD_FLOPS_PER_PAIR if is_backward else FORWARD_FLOPS_PER_PAIR
        time_ns = max(LAUNCH_NS, float((times[is_backward] * share).sum() + calls[is_backward][0]))
        workspace = 0
        if is_backward:
            call = AttentionCall(
                num_segments=segments.num_segments,
                num_queries=segments.num_queries,
                num_keys=segments.num_keys,
                max_q=segments.max_q,
                max_k=segments.max_k,
                num_heads=heads,
                num_kv_heads=tensors[2].shape[1],
                head_size=head_dim,
                value_bytes=queries.element_size(),
                is_causal=is_causal,
            )
            workspace = attention_workspace_bytes(
                self.kernels.attention, call, deterministic=self.kernels.deterministic
            )
        return ATTENTION, pairs * per_pair, num_bytes, time_ns, workspace

    def transfer(self, op: str, num_bytes: float, ranks: tuple[int, ...]) -> float:
        """Return the predicted nanoseconds of a collective or of a transfer between two ranks.

        Args:
            op: Name of the collective, or "send" or "recv".
            num_bytes: Bytes of the largest buffer of the operation.
            ranks: Ranks that take part.
        """
        kind = next((k for name, k in _COLLECTIVES if name in op), Collective.P2P)
        if len(ranks) < 2:
            return 0.0
        per_node = self.profile.ranks_per_node
        is_inside = ranks[0] // per_node == ranks[-1] // per_node
        span = len(ranks) if is_inside else ranks[-1] - ranks[0] + 1
        cost = self.profile.collective(kind, span_ranks=span, num_ranks=len(ranks))
        return float(cost.time_ns(num_bytes, num_ranks=len(ranks)))

    def all_to_all(
        self, splits: Splits, row_bytes: float, ranks: tuple[int, ...], *, own: int
    ) -> tuple[float, float]:
        """Return how many bytes this rank transfers in an all-to-all, and the predicted time.

        The rank's transfers with the other members are assumed to run one after the other, as in
        `ProfiledWorkload.needed_exchange_ns`.

        Args:
            splits: Numbers of rows that this rank sends to and receives from each member.
            row_bytes: Bytes of a row.
            ranks: Members of the group.
            own: Index of this rank in `ranks`.

        Returns:
            The larger of the bytes sent and the bytes received, and the time in nanoseconds.
        """
        profile = self.profile
        node = np.array(ranks) // profile.ranks_per_node
        span = int(ranks[-1] - ranks[0] + 1)
        spans = 1 if node[0] == node[-1] else max(span, profile.ranks_per_node + 1)
        rows = np.array(splits, np.int64)
        rows[:, own] = 0
        time_ns = all_to_all_ns(
            profile, rows, node == node[own], row_bytes=row_bytes, span_ranks=spans, axes=(1,)
        )
        return float(rows.sum(1).max() * row_bytes), time_ns


def _segments(args: tuple[Any, ...]) -> Segments:
    """Return the segments of an attention call.

    The two int32 vectors among its arguments are cu_seqlens_q and cu_seqlens_k, and the two
    integers are max_seqlen_q and max_seqlen_k.
    """
    vectors = [a for a in args if isinstance(a, Tensor) and a.ndim == 1]
    cu = [a for a in vectors if a.dtype == torch.int32]
    longest = [a for a in args if isinstance(a, int) and not isinstance(a, bool)]
    return Segments.of(cu[0], cu[1], longest[0], longest[1])


def size_of(tensors: list[Tensor]) -> float:
    """Return the bytes of all tensors together."""
    return float(sum(x.numel() * x.element_size() for x in tensors))

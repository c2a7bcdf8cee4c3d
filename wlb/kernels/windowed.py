"""Attention with a sliding window, a soft cap of scores, or both, in blocks of queries.

No backend of `AUTO_ORDER` offers either here, so this one computes both from the definition, on any
device, in float32 (float64 for float64). A block reads only the keys that its window reaches, and
its scores take at most `SCORES` numbers, so memory does not grow with the square of a document.
FlashAttention's kernels have both and would be faster; they are not called for it. Shapes: R = H /
G query heads per key/value head; q and k index the queries and keys of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from wlb.kernels.backend import Gradients, SavedTensors, empty_lse, sum_dtype
from wlb.kernels.segments import Segments
from wlb.plan import UserError

SCORES = 1 << 24
"""Most scores of a block: 64 MiB in float32."""
_MOST_QUERIES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedBackend:
    """window: a query sees itself and the window - 1 keys before it; None for all before it.
    softcap: scores s become softcap * tanh(s / softcap); None leaves them."""

    window: int | None = None
    softcap: float | None = None
    takes_key_rows: bool = False

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise UserError(f"window = {self.window} must be at least 1: a query sees itself")
        if self.softcap is not None and not self.softcap > 0:
            raise UserError(f"softcap = {self.softcap} must be above 0, or None")

    @property
    def name(self) -> str:
        """Holds both values, so that a compiled graph has them as a constant."""
        return f"windowed(window={self.window}, softcap={self.softcap})"

    def forward(
        self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        out_THD, lse_HT = torch.empty_like(q_THD), empty_lse(q_THD)
        for block in self._blocks(segments, num_heads=q_THD.shape[1]):
            scores_GRqk, _ = self._scores(q_THD, k_SGD, block)
            lse_GRq = scores_GRqk.logsumexp(-1)
            weights_GRqk = (scores_GRqk - lse_GRq[..., None]).exp()
            v_kGD = v_SGD[block.keys].to(weights_GRqk.dtype)
            out_qGRD = torch.einsum("grqk,kgd->qgrd", weights_GRqk, v_kGD)
            out_THD[block.rows] = out_qGRD.flatten(1, 2).to(out_THD.dtype)
            lse_HT[:, block.rows] = lse_GRq.flatten(0, 1)
        return out_THD, lse_HT

    def backward(self, grad_THD: Tensor, saved: SavedTensors, segments: Segments) -> Gradients:
        """Scores are computed again, a block at a time; dK and dV are added in float32."""
        q_THD, k_SGD, v_SGD, out_THD, lse_HT = saved
        wide, num_kv_heads = sum_dtype(q_THD), k_SGD.shape[1]
        scale = q_THD.shape[-1] ** -0.5
        dq_THD = torch.zeros_like(q_THD)
        dk_SGD, dv_SGD = (torch.zeros_like(x, dtype=wide) for x in (k_SGD, v_SGD))
        delta_HT = (grad_THD.to(wide) * out_THD).sum(-1).t()
        for block in self._blocks(segments, num_heads=q_THD.shape[1]):
            rows, keys = block.rows, block.keys
            scores_GRqk, slope_GRqk = self._scores(q_THD, k_SGD, block)
            lse_GRq1, delta_GRq1 = (
                x[:, rows].unflatten(0, (num_kv_heads, -1))[..., None] for x in (lse_HT, delta_HT)
            )
            weights_GRqk = (scores_GRqk - lse_GRq1).exp()
            q_qGRD, grad_qGRD = (
                x[rows].to(wide).unflatten(1, (num_kv_heads, -1)) for x in (q_THD, grad_THD)
            )
            k_kGD, v_kGD = k_SGD[keys].to(wide), v_SGD[keys].to(wide)
            dv_SGD[keys] += torch.einsum("grqk,qgrd->kgd", weights_GRqk, grad_qGRD)
            dweights_GRqk = torch.einsum("qgrd,kgd->grqk", grad_qGRD, v_kGD)
            dscores_GRqk = weights_GRqk * (dweights_GRqk - delta_GRq1) * scale
            if slope_GRqk is not None:
                dscores_GRqk *= slope_GRqk
            dq_qGRD = torch.einsum("grqk,kgd->qgrd", dscores_GRqk, k_kGD)
            dq_THD[rows] = dq_qGRD.flatten(1, 2).to(dq_THD.dtype)
            dk_SGD[keys] += torch.einsum("grqk,qgrd->kgd", dscores_GRqk, q_qGRD)
        return dq_THD, dk_SGD.to(k_SGD.dtype), dv_SGD.to(v_SGD.dtype)

    def _scores(
        self, q_THD: Tensor, k_SGD: Tensor, block: "_QueryBlock"
    ) -> tuple[Tensor, Tensor | None]:
        """Scores [G, R, q, k] with minus infinity where a key is not seen, and the slope of the
        cap at each, None without a cap."""
        q_qHD, k_kGD = (x.to(sum_dtype(x)) for x in (q_THD[block.rows], k_SGD[block.keys]))
        q_qGRD = q_qHD.unflatten(1, (k_kGD.shape[1], -1)) * q_qHD.shape[-1] ** -0.5
        scores_GRqk, slope_GRqk = torch.einsum("qgrd,kgd->grqk", q_qGRD, k_kGD), None
        if self.softcap is not None:
            bent_GRqk = (scores_GRqk / self.softcap).tanh()
            scores_GRqk, slope_GRqk = bent_GRqk * self.softcap, 1 - bent_GRqk.square()
        # How far each key lies after the block's first query's own key.
        at_k = torch.arange(k_kGD.shape[0], device=k_kGD.device) - block.first
        after_qk = at_k - torch.arange(q_qHD.shape[0], device=k_kGD.device)[:, None]
        hidden_qk = after_qk > 0
        if self.window is not None:
            hidden_qk |= after_qk <= -self.window
        return scores_GRqk.masked_fill(hidden_qk, float("-inf")), slope_GRqk

    def _blocks(self, segments: Segments, *, num_heads: int) -> Iterator["_QueryBlock"]:
        if not segments.is_causal:
            raise UserError(
                f"{self.name} needs queries among their keys; set cp.overlap = false, which calls "
                f"attention once"
            )
        offsets_q, offsets_k = segments.offsets_q, segments.offsets_k
        for i in range(segments.num_segments):
            begin, stop, end_k = offsets_q[i], offsets_q[i + 1], offsets_k[i + 1]
            reach = end_k - offsets_k[i] if self.window is None else self.window + _MOST_QUERIES
            num = max(1, min(_MOST_QUERIES, SCORES // (num_heads * max(1, reach))))
            for row in range(begin, stop, num):
                last = min(row + num, stop)
                # Queries are the last of the segment's positions.
                own = end_k - (stop - row)
                least = offsets_k[i]
                if self.window is not None:
                    least = max(least, own - self.window + 1)
                keys = slice(least, end_k - (stop - last))
                yield _QueryBlock(slice(row, last), keys, own - least)


@dataclass(frozen=True, slots=True)
class _QueryBlock:
    """Query rows, the key rows that they see, and which of these is the first query's own key."""

    rows: slice
    keys: slice
    first: int

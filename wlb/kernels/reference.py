"""Reference attention: the definition in plain torch, in the dtype of its inputs.

Tests compare other backends with it, in float64. Forward and backward have the scores of one
segment in memory, which are num_heads * queries * keys numbers. Shapes: R = H / G query heads per
key/value head; q and k index the queries and keys of one segment.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from wlb.kernels.op import Gradients, SavedTensors, empty_lse
from wlb.kernels.segments import Segments


class ReferenceBackend:
    """Attention by plain matrix products, segment by segment."""

    name = "reference"
    takes_key_rows = False  # see `wlb.kernels.op.Backend.takes_key_rows`

    def forward(
        self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """Return attention's output [T, H, D] and log-sum-exp [H, T]."""
        out_THD, lse_HT = torch.empty_like(q_THD), empty_lse(q_THD)
        for rows, keys in _slices(segments):
            v_kGD = v_SGD[keys]
            scores_GRqk, _ = _scores(q_THD[rows], k_SGD[keys], segments)
            weights_GRqk = scores_GRqk.softmax(dim=-1)
            out_qGRD = torch.einsum("grqk,kgd->qgrd", weights_GRqk, v_kGD)
            out_THD[rows] = out_qGRD.flatten(1, 2)
            lse_HT[:, rows] = scores_GRqk.to(lse_HT.dtype).logsumexp(-1).flatten(0, 1)
        return out_THD, lse_HT

    def backward(self, grad_THD: Tensor, saved: SavedTensors, segments: Segments) -> Gradients:
        """Return the gradients of q, k and v, by the chain rule.

        The softmax weights are computed from the saved log-sum-exp. This matters if the result was
        merged with that of another call: the log-sum-exp then also covers the other call's keys.
        """
        q_THD, k_SGD, v_SGD, out_THD, lse_HT = saved
        delta_TH = (grad_THD.to(lse_HT.dtype) * out_THD).sum(-1)
        scale, num_kv_heads = q_THD.shape[-1] ** -0.5, k_SGD.shape[1]
        dq_THD, dk_SGD, dv_SGD = (torch.zeros_like(x) for x in (q_THD, k_SGD, v_SGD))
        for rows, keys in _slices(segments):
            q_qGRD, grad_qGRD = (
                x[rows].unflatten(1, (num_kv_heads, -1)) for x in (q_THD, grad_THD)
            )
            scores_GRqk, slope = _scores(q_THD[rows], k_SGD[keys], segments)
            lse_GRq1, delta_GRq1 = (
                x.unflatten(0, (num_kv_heads, -1))[..., None]
                for x in (lse_HT[:, rows], delta_TH[rows].t())
            )
            weights = (scores_GRqk.to(lse_HT.dtype) - lse_GRq1).exp()
            weights_GRqk = weights.to(q_THD.dtype)
            dv_SGD[keys] = torch.einsum("grqk,qgrd->kgd", weights_GRqk, grad_qGRD)
            dweights_GRqk = torch.einsum("qgrd,kgd->grqk", grad_qGRD, v_SGD[keys])
            dscores = weights * (dweights_GRqk - delta_GRq1)
            dscores_GRqk = (dscores if slope is None else dscores * slope).to(q_THD.dtype)
            dq_qGRD = torch.einsum("grqk,kgd->qgrd", dscores_GRqk, k_SGD[keys]) * scale
            dq_THD[rows] = dq_qGRD.flatten(1, 2)
            dk_SGD[keys] = torch.einsum("grqk,qgrd->kgd", dscores_GRqk, q_qGRD * scale)
        return dq_THD, dk_SGD, dv_SGD


REFERENCE = ReferenceBackend()


def _slices(segments: Segments) -> Iterator[tuple[slice, slice]]:
    """Yield the slices of query rows and of key rows of each segment that has queries."""
    q, k = segments.offsets_q, segments.offsets_k
    for i in range(segments.num_segments):
        if q[i] < q[i + 1]:
            yield slice(q[i], q[i + 1]), slice(k[i], k[i + 1])


def _scores(q_qHD: Tensor, k_kGD: Tensor, segments: Segments) -> tuple[Tensor, Tensor | None]:
    """Return a segment's scores [G, R, q, k], and the derivative of the cap (None without a cap).

    G is the number of key heads, and R the number of query heads per key head. Scores of masked
    keys are minus infinity.

    Args:
        q_qHD: Queries of the segment.
        k_kGD: Keys of the segment.
        segments: Says whether the mask is causal, and has the window and the cap.
    """
    q_qGRD = q_qHD.unflatten(1, (k_kGD.shape[1], -1)) * q_qHD.shape[-1] ** -0.5
    scores_GRqk, slope = torch.einsum("qgrd,kgd->grqk", q_qGRD, k_kGD), None
    if cap := segments.scores.softcap:
        share = (scores_GRqk / cap).tanh()
        scores_GRqk, slope = share * cap, 1 - share * share
    if not segments.is_causal:
        return scores_GRqk, slope
    seen_qk = torch.ones(scores_GRqk.shape[-2:], dtype=torch.bool, device=q_qHD.device)
    last = k_kGD.shape[0] - q_qHD.shape[0]
    seen_qk = seen_qk.tril(last)
    if sliding := segments.scores.sliding:
        seen_qk = seen_qk.triu(last - sliding + 1)
    return scores_GRqk.masked_fill(~seen_qk, float("-inf")), slope

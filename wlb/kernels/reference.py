"""Reference attention: the definition, in the dtype of its inputs. Tests run it in float64.

Materialises every segment's scores: num_heads * Lq * Lk numbers.

Shapes: T query rows, S key rows, H query heads, G key/value heads, R = H / G queries a key head,
D head size; q, k index one segment's queries and keys.
"""

import torch

from wlb.kernels.segments import Segments


def attend_reference(
    q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, segments: Segments
) -> torch.Tensor:
    offsets_q, offsets_k = segments.offsets_q, segments.offsets_k
    outputs = [
        _segment(
            q_THD[offsets_q[i] : offsets_q[i + 1]],
            k_SGD[offsets_k[i] : offsets_k[i + 1]],
            v_SGD[offsets_k[i] : offsets_k[i + 1]],
        )
        for i in range(segments.num_segments)
    ]
    return torch.cat(outputs)


def _segment(q_qHD: torch.Tensor, k_kGD: torch.Tensor, v_kGD: torch.Tensor) -> torch.Tensor:
    q_qGRD = q_qHD.unflatten(1, (k_kGD.shape[1], -1)) * q_qHD.shape[-1] ** -0.5
    scores_GRqk = torch.einsum("qgrd,kgd->grqk", q_qGRD, k_kGD)
    seen_qk = torch.ones(scores_GRqk.shape[-2:], dtype=torch.bool, device=q_qHD.device)
    seen_qk = seen_qk.tril(k_kGD.shape[0] - q_qHD.shape[0])
    weights_GRqk = scores_GRqk.masked_fill(~seen_qk, float("-inf")).softmax(dim=-1)
    return torch.einsum("grqk,kgd->qgrd", weights_GRqk, v_kGD).flatten(1, 2)

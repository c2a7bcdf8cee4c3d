"""Matrix products with the collectives before or after them: tensor parallelism, without autograd.

Plainly, a gather comes before its product and a reduce-scatter after it; a backward pass has other
products to run meanwhile. With `overlaps` the ones that depend on each other are computed piece by
piece while pieces travel ("async TP", torch's `symm_mem::fused_all_gather_matmul` and
`fused_matmul_reduce_scatter`): each rank writes into the others' memory, over NVLink.

Overlapping has been run with the fallback implementations of torch's operators on CPU only, which
take and give the same tensors; **never on GPUs** (tests/parity/test_tp_overlap.py). torch keeps a
buffer of its largest message for it, and makes it anew, by a collective call, when one is larger.

Shapes: T rows of the CP rank, S = T / num_ranks rows of this rank, C width, F columns of this rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wlb.parallel.collectives import (
    all_gather,
    reduce_scatter,
    start_all_gather,
    start_reduce_scatter,
    wait,
)


@dataclass(frozen=True, slots=True)
class Products:
    """Products over a tp group, in types that a custom op takes too."""

    num_ranks: int
    group_name: str
    overlaps: bool = False

    def size(self) -> int:
        """What collectives call on a group."""
        return self.num_ranks

    def gathered(self, x_SC: Tensor, weights_FC: Sequence[Tensor]) -> list[Tensor]:
        """Products of the rows of all ranks with each weight, [T, F] each; overlapped."""
        return self._gather_and_multiply(x_SC, [w.t() for w in weights_FC], keep=False)[1]

    def gathered_backward(
        self, grads_TF: Sequence[Tensor], x_SC: Tensor, weights_FC: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Gradients of x_SC, and of the weights from x_SC gathered again."""
        gathering = start_all_gather(x_SC, self)
        dx_SC = self.start_inputs(grads_TF, weights_FC)
        x_TC = wait(gathering)
        dweights = [grad.t() @ x_TC for grad in grads_TF]
        return wait(dx_SC), dweights

    def start_inputs(self, grads_TF: Sequence[Tensor], weights_FC: Sequence[Tensor]) -> Tensor:
        """The gradient of x_SC, to be waited for: what is computed next hides its reduce-scatter,
        unless that overlaps with the product."""
        if self.overlaps:
            # One product of all, for one reduce-scatter; costs a copy of grads and weights.
            one = len(grads_TF) == 1
            grad_TF = grads_TF[0] if one else torch.cat(list(grads_TF), 1)
            weight_FC = weights_FC[0] if one else torch.cat(list(weights_FC))
            return self._multiply_and_scatter(grad_TF, weight_FC)
        dx_TC = grads_TF[0] @ weights_FC[0]
        for grad, weight in zip(grads_TF[1:], weights_FC[1:], strict=True):
            dx_TC.addmm_(grad, weight)
        return start_reduce_scatter(dx_TC, self)

    def scattered(self, x_TF: Tensor, weight_CF: Tensor) -> Tensor:
        """The product summed over ranks, each keeping its rows: [S, C]."""
        if self.overlaps:
            return self._multiply_and_scatter(x_TF, weight_CF.t())
        return reduce_scatter(x_TF @ weight_CF.t(), self)

    def scattered_backward(self, grad_SC: Tensor, weight_CF: Tensor) -> tuple[Tensor, Tensor]:
        """The gathered gradient [T, C], and that of x_TF."""
        if self.overlaps:
            grad_TC, (dx_TF,) = self._gather_and_multiply(grad_SC, [weight_CF], keep=True)
            assert grad_TC is not None
            return grad_TC, dx_TF
        grad_TC = all_gather(grad_SC, self)
        return grad_TC, grad_TC @ weight_CF

    def _gather_and_multiply(
        self, x_SC: Tensor, right: list[Tensor], *, keep: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        return torch.ops.symm_mem.fused_all_gather_matmul(
            x_SC.contiguous(), right, 0, self.group_name, return_A=keep
        )

    def _multiply_and_scatter(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(
            left.contiguous(), right, "sum", 0, self.group_name
        )


def refuse_overlap(device: torch.device, num_ranks: int) -> None:
    """ValueError with the reason if products of `num_ranks` ranks cannot overlap on `device`.

    Whether ranks of different hosts reach each other's memory is not known before they meet there.
    """
    if why := _why_no_overlap(device, num_ranks):
        raise ValueError(
            f"tp.overlap = true needs torch's symmetric memory, but {why}; set tp.overlap = false"
        )


def _why_no_overlap(device: torch.device, num_ranks: int) -> str:
    if device.type != "cuda":
        return f"ranks compute on {device.type}, which has none"
    names = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
    missing = [name for name in names if not hasattr(torch.ops.symm_mem, name)]
    if missing:
        return f"torch {torch.__version__} has no symm_mem::{missing[0]}"
    here = range(min(num_ranks, torch.cuda.device_count()))  # none in a dry run without GPUs
    for one in here:
        for other in here:
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                return f"GPU {one} cannot reach the memory of GPU {other}"
    return ""

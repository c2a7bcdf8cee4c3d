"""torch's grouped matrix products (each expert times its rows), and differences between GPUs.

In bfloat16 on Hopper and data centre Blackwell (compute capability 9.x and 10.x), one kernel
computes the products of all experts. On other GPUs and in float32, torch loops over experts on the
host, which must first read from the device where each expert's rows end.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from wlb.kernels.flash_package import compute_capability

_ONE_KERNEL = (9, 10)
"""Major compute capabilities of GPUs on which one kernel computes the products of all experts."""


def weight_gradients(grads: Sequence[Tensor], x_MC: Tensor, ends_E: Tensor) -> list[Tensor]:
    """Return the gradients of experts' weights, [E, F, C] each; zero for an expert without rows.

    Args:
        grads: For each weight [E, F, C] the gradient of its products with x_MC, [M, F].
        x_MC: Input rows of the experts, sorted by expert.
        ends_E: Index after each expert's last row, int32.
    """
    made = [grouped_mm(grad_MF.t(), x_MC, offs=ends_E) for grad_MF in grads]
    if may_leave_groups_unwritten(x_MC.device):
        has_none_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
        for gradient in made:
            gradient.masked_fill_(has_none_E[:, None, None], 0)
    return made


def may_leave_groups_unwritten(device: torch.device) -> bool:
    """Return whether the weight gradient of an expert without rows may be uninitialised memory.

    On data centre Blackwell, torch's grouped product does not write this gradient
    (https://github.com/pytorch/pytorch/issues/172439, open; CUTLASS 4.3 fixes it). Filling such
    gradients with zeros reads and writes all gradients once, so it is done only on these GPUs.
    Other products are not affected, because they have no output for an expert without rows.
    """
    if device.type != "cuda":
        return False
    capability = compute_capability(device)
    return capability is not None and capability[0] == 10


def waits_for_host(device: torch.device, dtype: torch.dtype) -> str:
    """Return a warning if the experts' products make the host wait for the GPU, else "".

    Without a GPU on this machine, only the dtype is checked.

    Args:
        device: Device of the run.
        dtype: Dtype in which the run computes.
    """
    if device.type != "cuda":
        return ""
    capability = compute_capability(device)
    if capability is not None and capability[0] not in _ONE_KERNEL:
        where, remedy = f"compute capability {capability[0]}.{capability[1]}", ""
    elif dtype != torch.bfloat16:
        where, remedy = str(dtype).removeprefix("torch."), "; set training.dtype = bfloat16"
    else:
        return ""
    return (
        "WARNING: torch launches one kernel per expert, and the host must wait for the GPU "
        "before it launches them. torch has a single kernel for all experts only for bfloat16 "
        f"on compute capability 9.x and 10.x, but this run uses {where}{remedy}"
    )

"""torch's grouped matrix products (experts times their rows), and how GPUs differ in them.

In bfloat16 on Hopper and data centre Blackwell (compute capability 9.x and 10.x) one kernel
computes all groups. On other GPUs and in float32 torch loops over groups on the host, which must
read from the device where each group ends.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from wlb.kernels.flash_package import compute_capability

_ONE_KERNEL = (9, 10)
"""Major compute capabilities of GPUs on which one kernel computes all groups."""


def weight_gradients(grads: Sequence[Tensor], x_MC: Tensor, ends_E: Tensor) -> list[Tensor]:
    """Return gradients of stacks of weights, [E, F, C] each; zero for an expert without rows.

    Args:
        grads: Gradients of the products of x with each stack, [M, F].
        x_MC: Input rows, sorted by expert.
        ends_E: Index after each expert's last row, int32.
    """
    made = [grouped_mm(grad_MF.t(), x_MC, offs=ends_E) for grad_MF in grads]
    if may_leave_groups_unwritten(x_MC.device):
        has_none_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
        for gradient in made:
            gradient.masked_fill_(has_none_E[:, None, None], 0)
    return made


def may_leave_groups_unwritten(device: torch.device) -> bool:
    """Return whether a product may leave the result of a group without rows uninitialised.

    This happened on Blackwell (https://github.com/pytorch/pytorch/issues/172439, open; CUTLASS 4.3
    fixes it). Filling such groups with zeros reads and writes each gradient once, so it is done
    only where it is needed. Only weight gradients are affected, because other products have no
    output for a group without rows.
    """
    if device.type != "cuda":
        return False
    capability = compute_capability(device)
    return capability is not None and capability[0] == 10


def waits_for_host(device: torch.device, dtype: torch.dtype) -> str:
    """Return a warning if products of experts make the host wait for the GPU, else "".

    Without a GPU on this machine only the dtype can be judged.
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
        f"WARNING: the host waits for the GPU at every product of experts, and launches one kernel "
        f"an expert: torch computes all experts in one kernel in bfloat16 on compute capability "
        f"9.x and 10.x only, not in {where}{remedy}"
    )

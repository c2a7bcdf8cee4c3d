"""torch's grouped products, of experts and their rows: what differs between GPUs.

In bfloat16 on Hopper and data centre Blackwell (compute capability 9.x and 10.x) one kernel
computes all groups. Elsewhere, and in float32, torch multiplies group by group in a loop of the
host, which reads from the device where each group ends.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from wlb.kernels.flash_package import compute_capability

_ONE_KERNEL = (9, 10)
"""Major compute capabilities of GPUs that compute all groups in one kernel."""


def weight_gradients(grads: Sequence[Tensor], x_MC: Tensor, ends_E: Tensor) -> list[Tensor]:
    """Gradients of stacks of weights, [E, F, C] each: zero for an expert without rows. grads: of
    the products with x, [M, F] each. ends_E: index after each expert's last row, int32.
    """
    made = [grouped_mm(grad_MF.t(), x_MC, offs=ends_E) for grad_MF in grads]
    if may_leave_groups_unwritten(x_MC.device):
        has_none_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
        for gradient in made:
            gradient.masked_fill_(has_none_E[:, None, None], 0)
    return made


def may_leave_groups_unwritten(device: torch.device) -> bool:
    """Whether a product over the rows of groups may hold anything for a group without rows, as it
    did on Blackwell (https://github.com/pytorch/pytorch/issues/172439, open; CUTLASS 4.3 mends it).

    Filling such groups reads and writes each gradient once, so it is left out elsewhere. Only a
    weight's gradient has them: other products have no output for a group without rows.
    """
    if device.type != "cuda":
        return False
    capability = compute_capability(device)
    return capability is not None and capability[0] == 10


def waits_for_host(device: torch.device, dtype: torch.dtype) -> str:
    """A line for the log if products of experts wait for the device, else "". Without a GPU here
    only the dtype can tell.
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

"""Choose whether a run uses the fused kernels for RoPE, gated MLPs, norms and key gradients.

These operators spend their time on memory accesses and kernel launches, not on arithmetic. Fused
kernels access memory less often and need fewer launches; this folder's README has the numbers.
"""

import functools
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from wlb.kernels.fused.op import fused_gated
from wlb.plan import UserError
from wlb.spec.run import FusedKernels

MOST_NORM_WIDTH = 16384
"""Most columns of a row that the norms' kernels can process.

A program keeps a whole row in registers. Wider rows would not fit, and the compiler would move
values to memory.
"""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedChoice:
    """Whether a run uses the fused Triton kernels, and why."""

    fused: bool  # whether the run uses them
    reason: str  # for the run's log

    @property
    def line(self) -> str:
        """Line for the run's log: whether fused kernels are used, and why."""
        how = "fused Triton kernels" if self.fused else "plain torch code"
        return f"RoPE, gated MLPs, RMSNorm and key gradients use {how} ({self.reason})"


def choose_fused(
    requested: FusedKernels, *, device: torch.device, dtype: torch.dtype, norm_width: int = 0
) -> FusedChoice:
    """Choose whether a run uses fused kernels.

    Args:
        requested: The value of `kernels.fused`.
        device: Device of the run.
        dtype: Dtype in which the run computes.
        norm_width: Number of columns of the widest rows that the run normalises.

    Raises:
        UserError: `kernels.fused = triton`, but the fused kernels cannot compute the run.
    """
    run = f"{dtype} on {device.type}"
    if requested == FusedKernels.OFF:
        return FusedChoice(fused=False, reason=f"kernels.fused = off; {run}")
    why = _why_not(device, dtype, norm_width)
    if requested == FusedKernels.TRITON and why:
        raise UserError(
            f"kernels.fused = triton cannot be used for this run ({run}): {why}. Set "
            "kernels.fused = auto or off"
        )
    source = "kernels.fused = triton" if requested == FusedKernels.TRITON else "auto"
    reason = f"{source}; {run}" + (f"; not fused: {why}" if why else "")
    return FusedChoice(fused=why is None, reason=reason)


def _why_not(device: torch.device, dtype: torch.dtype, norm_width: int) -> str | None:
    if device.type != "cuda":
        return "the fused kernels need an NVIDIA GPU"
    if norm_width > MOST_NORM_WIDTH:
        return (
            f"RMSNorm of {norm_width} columns does not fit into registers (at most "
            f"{MOST_NORM_WIDTH} columns)"
        )
    if dtype not in _DTYPES:
        return f"the fused kernels support only {', '.join(map(str, _DTYPES))}"
    if not torch.cuda.is_available():
        # The run is prepared on a machine without GPUs. Assume Triton, which CUDA builds include.
        return None
    return launch_problem(device)


@functools.cache
def launch_problem(device: torch.device) -> str | None:
    """Launch one small Triton kernel on this GPU; returns why that fails, or None if it works."""
    if find_spec("triton") is None:
        return (
            "Triton is not installed, although torch's CUDA builds for Linux require Triton; "
            "run pip install triton"
        )
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the fused kernels need compute capability 8.0 (Ampere) or newer"
    try:
        one = torch.ones(1, 16, dtype=torch.bfloat16, device=device)
        fused_gated(one, one, False)
    # Catch every error, because a C compiler, a driver or a cache folder may fail in many ways.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"Triton cannot launch a kernel on this GPU: {reason}"
    return None

"""Which attention backend a run uses, and why: kernels.attention = auto takes the first that can.

1. flash_attention_3, the fastest published on Hopper (`kernels_profile/h100.json`) and only there.
2. flash_attention_4, made for Blackwell; on Hopper a pre-release. 3. torch_varlen, in every CUDA
build of torch, from Ampere on; also assumed when preparing a run without GPUs. 4.
flash_attention_2, the same kernels in their own build. 5. sdpa, everywhere, alone in float32 and on
CPU. The rule looks at dtype, head size, device and installed packages only.
"""

from dataclasses import dataclass

import torch

from wlb.kernels.flash2 import FLASH2
from wlb.kernels.flash3 import FLASH3
from wlb.kernels.flash4 import FLASH4
from wlb.kernels.flash_package import (
    FlashBackend,
    before_ampere,
    compute_capability,
    wrong_head_size,
    wrong_tensors,
)
from wlb.kernels.torch_varlen import MAX_HEAD_DIM
from wlb.plan import UserError
from wlb.spec.run import AttentionBackend

AUTO_ORDER = (
    AttentionBackend.FLASH_ATTENTION_3,
    AttentionBackend.FLASH_ATTENTION_4,
    AttentionBackend.TORCH_VARLEN,
    AttentionBackend.FLASH_ATTENTION_2,
    AttentionBackend.SDPA,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A backend, and one line saying why it and none before it was chosen."""

    backend: AttentionBackend
    reason: str


def select_backend(
    requested: AttentionBackend, *, device: torch.device, dtype: torch.dtype, head_size: int
) -> AttentionBackend:
    """The backend that will compute; UserError if an explicit choice cannot."""
    return choose_backend(requested, device=device, dtype=dtype, head_size=head_size).backend


def explain_backend(
    requested: AttentionBackend, *, device: torch.device, dtype: torch.dtype, head_size: int
) -> str:
    """The line that a run's log shows."""
    choice = choose_backend(requested, device=device, dtype=dtype, head_size=head_size)
    return f"attention kernel {choice.backend} ({choice.reason})"


def choose_backend(
    requested: AttentionBackend, *, device: torch.device, dtype: torch.dtype, head_size: int
) -> Choice:
    run = f"{dtype} on {device.type} with heads of {head_size}"
    if requested != AttentionBackend.AUTO:
        if why := _why_not(requested, device, dtype, head_size):
            raise UserError(
                f"kernels.attention = {requested} can't compute this run: {why}, but the run is "
                f"{run}; set kernels.attention = auto or sdpa{_remedy(requested, device, dtype)}"
            )
        return Choice(backend=requested, reason=f"asked for; {run}")
    reason = f"auto; {run}"
    passed_over: dict[str, list[str]] = {}
    for backend in AUTO_ORDER:
        why = _why_not(backend, device, dtype, head_size)
        if why is None:
            for why_not, names in passed_over.items():
                reason += f"; not {', '.join(names)}: {why_not}"
            return Choice(backend=backend, reason=reason)
        passed_over.setdefault(why, []).append(backend)
    raise AssertionError("sdpa computes everything")


def _remedy(backend: AttentionBackend, device: torch.device, dtype: torch.dtype) -> str:
    if wrong_tensors(device, dtype):
        return ", or training.dtype = bfloat16 on a GPU"
    flash = _flash(backend)
    if flash is not None and flash.package.problem():
        return f", or install {flash.package.supported} ({flash.package.install})"
    return ""


def _why_not(
    backend: AttentionBackend, device: torch.device, dtype: torch.dtype, head_size: int
) -> str | None:
    flash = _flash(backend)
    if flash is not None:
        return flash.why_not(device=device, dtype=dtype, head_size=head_size)
    if backend == AttentionBackend.TORCH_VARLEN:
        return (
            wrong_tensors(device, dtype)
            or wrong_head_size(head_size, MAX_HEAD_DIM)
            or _before_ampere(device)
        )
    return None


def _before_ampere(device: torch.device) -> str | None:
    capability = compute_capability(device)
    return None if capability is None else before_ampere(*capability)


def _flash(backend: AttentionBackend) -> FlashBackend | None:
    return next((flash for flash in (FLASH2, FLASH3, FLASH4) if flash.name == backend), None)

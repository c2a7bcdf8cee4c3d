"""Which backend computes the attention of a run, and why.

kernels.attention = auto takes the first of AUTO_ORDER that can compute the run's dtype and head
size on its device:

1. flash_attention_3, the fastest published on Hopper (H100: 584 TFLOP/s forward at 32K tokens
   against 344 of FlashAttention-2, see `kernels_profile/h100.json`); it runs on nothing else.
2. flash_attention_4, made for Blackwell; on Hopper a pre-release beside a stable package.
3. torch_varlen, which every CUDA build of torch has; for Ampere and newer. A machine without GPUs,
   where a run is only prepared, is taken for one that has such.
4. flash_attention_2, the same kernels in a build of their own: nothing is gained over torch's.
5. sdpa, anywhere: the only one on CPU and in float32.

1, 2 and 4 are packages that a user installed on purpose. The rule looks at the dtype, the head
size, the device and what is installed, at nothing that varies from step to step. An explicit
choice is refused where it can't compute, never replaced.
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
    """A backend, and one line about it: why this one and why none of those before it."""

    backend: AttentionBackend
    reason: str


def select_backend(
    requested: AttentionBackend, *, device: torch.device, dtype: torch.dtype, head_size: int
) -> AttentionBackend:
    """The backend that will compute; an explicit choice is refused, never replaced."""
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
            raise ValueError(
                f"kernels.attention = {requested} can't compute this run: {why}, but the run is "
                f"{run}; set kernels.attention = auto or sdpa{_remedy(requested, device, dtype)}"
            )
        return Choice(backend=requested, reason=f"asked for; {run}")
    reason = f"auto; {run}"
    passed_over: dict[str, list[str]] = {}
    for backend in AUTO_ORDER:
        why = _why_not(backend, device, dtype, head_size)
        if why is None:
            for words, names in passed_over.items():
                reason += f"; not {', '.join(names)}: {words}"
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
    match backend:
        case AttentionBackend.FLASH_ATTENTION_2:
            return FLASH2
        case AttentionBackend.FLASH_ATTENTION_3:
            return FLASH3
        case AttentionBackend.FLASH_ATTENTION_4:
            return FLASH4
        case _:
            return None

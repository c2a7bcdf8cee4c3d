"""Which attention backend a run uses, and why.

`auto` takes the first backend of AUTO_ORDER that can compute the run:

1. flash_attention_3 is the fastest on Hopper (`kernels_profile/h100.json`) and runs only there.
2. flash_attention_4 is made for Blackwell; on Hopper it is a pre-release.
3. torch_varlen is in every CUDA build of torch and runs on Ampere and newer GPUs. When a run is
   prepared on a machine without GPUs, it is assumed to work.
4. flash_attention_2 has the same kernels, built separately.
5. sdpa can compute every run. It is the only backend for float32 and for the CPU.
"""

from dataclasses import dataclass
from typing import Any

import torch

from wlb.kernels.flash import DETERMINISTIC_FLASH_BACKENDS, FLASH_BACKENDS
from wlb.kernels.flash_package import FlashBackend, wrong_tensors
from wlb.kernels.op import BACKENDS, kernel_name
from wlb.kernels.reference import REFERENCE
from wlb.kernels.sdpa import SDPA, SDPA_DETERMINISTIC
from wlb.kernels.segments import PLAIN, Scores
from wlb.kernels.torch_varlen import TORCH_VARLEN, TORCH_VARLEN_DETERMINISTIC, TorchVarlenBackend
from wlb.plan import UserError
from wlb.spec.run import AttentionBackend

AUTO_ORDER = (
    AttentionBackend.FLASH_ATTENTION_3,
    AttentionBackend.FLASH_ATTENTION_4,
    AttentionBackend.TORCH_VARLEN,
    AttentionBackend.FLASH_ATTENTION_2,
    AttentionBackend.SDPA,
)
"""Backends in the order in which `auto` tries them."""


# Backends that cannot compute every run, by name. Their method `why_not` says why they cannot
# compute a given run.
_CHECKED: dict[str, TorchVarlenBackend | FlashBackend] = {
    backend.name: backend
    for backend in (
        *(TORCH_VARLEN, *FLASH_BACKENDS),
        *(TORCH_VARLEN_DETERMINISTIC, *DETERMINISTIC_FLASH_BACKENDS),
    )
}
BACKENDS.update(
    (backend.name, backend)
    for backend in (
        *(SDPA, TORCH_VARLEN, *FLASH_BACKENDS),
        *(SDPA_DETERMINISTIC, TORCH_VARLEN_DETERMINISTIC, *DETERMINISTIC_FLASH_BACKENDS),
        REFERENCE,
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The attention backend of a run, and why it was chosen."""

    backend: AttentionBackend
    reason: str  # why this backend, and why not those that come before it in AUTO_ORDER
    deterministic: bool = False  # whether backward adds up gradients in a fixed order
    # A sentence about a backend that would be better on this GPU but whose package is not
    # installed. Empty if there is none.
    better: str = ""

    @property
    def kernel(self) -> str:
        """Name of the kernel in `BACKENDS`."""
        return kernel_name(self.backend, deterministic=self.deterministic)

    @property
    def line(self) -> str:
        """Text for the run's log: the kernel, and why it was chosen.

        A second line names a better kernel if one could be installed.
        """
        order = ", deterministic" if self.deterministic else ""
        line = f"attention kernel {self.backend}{order} ({self.reason})"
        return f"{line}\nWARNING: {self.better}" if self.better else line


@dataclass(frozen=True, slots=True, kw_only=True)
class _Computed:
    """The properties of a run that decide which attention kernels can compute it."""

    device: torch.device
    dtype: torch.dtype
    head_size: int
    deterministic: bool
    scores: Scores

    def __str__(self) -> str:
        heads = f"{self.dtype} on {self.device.type} with heads of {self.head_size}"
        return f"{heads} and {self.scores}" if str(self.scores) else heads

    @property
    def _arguments(self) -> dict[str, Any]:
        names = ("device", "dtype", "head_size", "scores")
        return {name: getattr(self, name) for name in names}

    def why_not(self, backend: AttentionBackend) -> str | None:
        """Return why a backend cannot compute this run, or None if it can."""
        checked = _CHECKED.get(kernel_name(backend, deterministic=self.deterministic))
        # Only sdpa is not in _CHECKED, because it can compute every run.
        if checked is None:
            return None
        return checked.why_not(**self._arguments)

    def chosen(self, backend: AttentionBackend, reason: str) -> Choice:
        """Make a `Choice`, with a hint if installing a package makes a better backend usable."""
        better = self._better_than(backend)
        return Choice(
            backend=backend, reason=reason, deterministic=self.deterministic, better=better
        )

    def _better_than(self, backend: AttentionBackend) -> str:
        """Return a sentence about a better backend that needs only a package to be installed.

        The backends before `backend` in AUTO_ORDER are better. Returns "" if installing a package
        would not make a better backend usable.
        """
        for other in AUTO_ORDER[: AUTO_ORDER.index(backend)]:
            checked = _CHECKED[kernel_name(other, deterministic=self.deterministic)]
            if isinstance(checked, FlashBackend) and checked.lacks_package_only(**self._arguments):
                return (
                    f"{other} is made for this GPU but cannot be used: "
                    f"{checked.package.problem()}. Install the package with: "
                    f"{checked.package.install}"
                )
        return ""


def select_backend(
    requested: AttentionBackend,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    deterministic: bool = False,
    scores: Scores = PLAIN,
) -> str:
    """Return the name of the kernel in `BACKENDS` that will compute the run.

    Args:
        requested: The value of `kernels.attention`.
        device: Device of the run.
        dtype: Dtype in which the run computes attention.
        head_size: Size of a head.
        deterministic: Whether backward must add up gradients in a fixed order.
        scores: The mask's window and the cap on scores.

    Raises:
        UserError: A backend is requested explicitly and cannot compute the run.
    """
    choice = choose_backend(
        requested,
        device=device,
        dtype=dtype,
        head_size=head_size,
        deterministic=deterministic,
        scores=scores,
    )
    return choice.kernel


def choose_backend(
    requested: AttentionBackend,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    deterministic: bool = False,
    scores: Scores = PLAIN,
) -> Choice:
    """Choose the attention backend of a run, and say why; arguments as in `select_backend`."""
    run = _Computed(
        device=device, dtype=dtype, head_size=head_size, deterministic=deterministic, scores=scores
    )
    if requested != AttentionBackend.AUTO:
        if why := run.why_not(requested):
            raise UserError(
                f"kernels.attention = {requested} cannot be used for this run ({run}): "
                f"{why}. Set kernels.attention = auto or sdpa{_remedy(requested, run)}"
            )
        return run.chosen(requested, f"kernels.attention = {requested}; {run}")
    reason = f"auto; {run}"
    passed_over: dict[str, list[str]] = {}
    for backend in AUTO_ORDER:
        why = run.why_not(backend)
        if why is None:
            for why_not, names in passed_over.items():
                reason += f"; not {', '.join(names)}: {why_not}"
            return run.chosen(backend, reason)
        passed_over.setdefault(why, []).append(backend)
    raise AssertionError("sdpa computes everything")


def _remedy(backend: AttentionBackend, run: _Computed) -> str:
    if wrong_tensors(run.device, run.dtype):
        return ", or set training.dtype = bfloat16 and train on a GPU"
    for flash in FLASH_BACKENDS:
        if flash.name == backend and flash.package.problem():
            return f", or install {flash.package.supported} ({flash.package.install})"
    return ""

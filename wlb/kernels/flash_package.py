"""Base of the three FlashAttention backends: checks and calls that the packages have in common.

We call private functions of the packages, because the public functions run backward only through
autograd. Parameters of private functions may change between versions, which `wlb.kernels.package`
detects.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wlb.kernels.op import Gradients, SavedTensors, kernel_name
from wlb.kernels.package import KernelPackage, Kernels
from wlb.kernels.segments import PLAIN, Scores, Segments
from wlb.spec import AttentionBackend

DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes that FlashAttention computes."""
HEAD_SIZE_STEP = 8
"""Head sizes must be a multiple of this."""
_CAUSAL = ("causal", "is_causal")
"""Names that the packages use for the argument that makes the mask causal."""
# Names of the arguments that all functions of all three packages take.
_EVERY_CALL = (
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    "softmax_scale",
)


class FlashFunction(NamedTuple):
    """A function of a package that we call, and its arguments.

    The fields leave out the arguments that all functions take (`_EVERY_CALL`).
    """

    name: str  # name of the function in the package's module
    by_name: tuple[str, ...]  # names of further arguments whose values are known only at the call
    # Values of the other arguments, by name: those for causal attention without a window and a cap.
    # A call with another mask or with a cap on scores replaces them.
    constants: Mapping[str, Any]

    @property
    def passed(self) -> tuple[str, ...]:
        """Names of all arguments that we pass to the function."""
        return (*_EVERY_CALL, *self.constants, *self.by_name)


class FlashBackend:
    """Base class of the backends for the three FlashAttention packages.

    Args:
        deterministic: Whether backward adds up gradients in a fixed order, which takes more
            time and memory.
    """

    backend: AttentionBackend  # the backend's value of `kernels.attention`
    package: KernelPackage[FlashFunction]  # the package, with its forward and backward function
    # Whether the kernel looks up keys in a larger buffer of rows. Otherwise the caller copies the
    # keys of each segment out of the buffer.
    takes_key_rows: bool = False
    least_max_q: int = 0  # smallest max_q that is passed to the package

    def __init__(self, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic
        self.name = kernel_name(self.backend, deterministic=deterministic)

    def why_not(
        self, *, device: torch.device, dtype: torch.dtype, head_size: int, scores: Scores = PLAIN
    ) -> str | None:
        """Return why this backend cannot compute a run, or None if it can.

        Cheap checks come first; the last one imports the package.

        Args:
            device: Device of the run.
            dtype: Dtype in which the run computes attention.
            head_size: Size of a head.
            scores: The mask's window and the cap on scores.
        """
        if reason := wrong_tensors(device, dtype) or self.package.missing():
            return reason
        capability = compute_capability(device)
        if capability is None:
            return "torch sees no GPU on this machine, so the GPU's compute capability is unknown"
        if wrong := self.wrong_device(*capability, head_size):
            return wrong
        return self.wrong_scores(capability[0], head_size, scores) or self.package.problem()

    def lacks_package_only(
        self, *, device: torch.device, dtype: torch.dtype, head_size: int, scores: Scores = PLAIN
    ) -> bool:
        """Return whether this backend could compute a run if only its package were installed.

        The arguments are those of `why_not`.
        """
        capability = None if wrong_tensors(device, dtype) else compute_capability(device)
        if capability is None or self.wrong_device(*capability, head_size):
            return False
        if self.wrong_scores(capability[0], head_size, scores):
            return False
        return (self.package.missing() or self.package.problem()) is not None

    def wrong_device(self, major: int, minor: int, head_size: int) -> str | None:
        """Return why the package does not support this GPU or head size, or None if it does.

        Args:
            major: Major compute capability.
            minor: Minor compute capability.
            head_size: Size of a head.
        """
        raise NotImplementedError

    def wrong_scores(self, major: int, head_size: int, scores: Scores) -> str | None:
        """Return why the package does not support this window or cap on this GPU; None if it does.

        Args:
            major: Major compute capability.
            head_size: Size of a head.
            scores: The mask's window and the cap on scores.
        """
        return None

    def compiled_calls(
        self, queries_per_key: int, *, is_causal: bool
    ) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return a small example of each kind of call that the package compiles separately.

        A call is given as the (queries, keys) of each of its segments. The result is empty for
        packages that compile nothing during a run.

        Args:
            queries_per_key: Query heads per key head.
            is_causal: Whether the mask is causal.
        """
        return ()

    @cached_property
    def kernels(self) -> Kernels:
        """The package's functions by name. The first use imports them, or raises UserError."""
        return self.package.load()

    def forward(
        self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """Return attention's output [T, H, D] and log-sum-exp [H, T]."""
        function, _ = self.package.functions
        out_THD, lse_HT, *_ = self._call(function, (q_THD, k_SGD, v_SGD), segments, {})
        return out_THD, lse_HT

    def backward(self, grad_THD: Tensor, saved: SavedTensors, segments: Segments) -> Gradients:
        """Return the gradients of q, k and v."""
        q_THD, k_SGD, v_SGD, out_THD, lse_HT = saved
        _, function = self.package.functions
        values: dict[str, Any] = {"dout": grad_THD, "out": out_THD, "softmax_lse": lse_HT}
        values |= {"lse": lse_HT, "deterministic": self.deterministic}
        if "dq" not in function.by_name:
            return self._call(function, (q_THD, k_SGD, v_SGD), segments, values)
        # The function writes into tensors that we pass. They need not be zeroed, because the
        # kernels write all rows, even those of segments without queries.
        dq_THD, dk_SGD, dv_SGD = (x.new_empty(x.shape) for x in (q_THD, k_SGD, v_SGD))
        values |= {"dq": dq_THD, "dk": dk_SGD, "dv": dv_SGD}
        self._call(function, (q_THD, k_SGD, v_SGD), segments, values)
        return dq_THD, dk_SGD, dv_SGD

    def _call(
        self,
        function: FlashFunction,
        qkv: tuple[Tensor, Tensor, Tensor],
        segments: Segments,
        values: dict[str, Any],
    ) -> Any:
        cu_q, cu_k, max_q, max_k = segments.lengths
        scale = qkv[0].shape[-1] ** -0.5
        every_call = (*qkv, cu_q, cu_k, max(self.least_max_q, max_q), max_k, scale)
        mask: dict[str, Any] = {
            name: segments.is_causal for name in _CAUSAL if name in function.constants
        }
        if sliding := segments.scores.sliding:
            mask |= {"window_size_left": sliding - 1, "window_size_right": 0}
        if segments.scores.softcap:
            mask["softcap"] = segments.scores.softcap
        return self.kernels[function.name](
            **dict(zip(_EVERY_CALL, every_call, strict=True)),
            **{name: values[name] for name in function.by_name},
            **{**function.constants, **mask},
        )


def wrong_tensors(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why FlashAttention cannot compute tensors of this device and dtype; None if it can."""
    if device.type == "cuda" and dtype in DTYPES:
        return None
    return "only bfloat16 and float16 on CUDA are supported"


def wrong_head_size(head_size: int, largest: int) -> str | None:
    """Return why a kernel does not support this head size, or None if it does.

    `largest` is the largest head size of the kernel.
    """
    if head_size <= largest and head_size % HEAD_SIZE_STEP == 0:
        return None
    return (
        f"only head sizes up to {largest} that are multiples of {HEAD_SIZE_STEP} are supported, "
        f"not {head_size}"
    )


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return a GPU's compute capability as (major, minor); None if torch sees no GPU here."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None


def before_ampere(major: int, minor: int) -> str | None:
    """Return why a GPU of this compute capability is too old, or None from Ampere (8.0) on."""
    return (
        f"only compute capability 8.0 or newer is supported, not {major}.{minor}"
        if major < 8
        else None
    )

"""Shared by the three optional FlashAttention packages: what their functions take, and where.

We call the functions below the public ones, because only those separate forward from backward. They
are private and may change, which `wlb.kernels.package` finds out.
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
HEAD_SIZE_STEP = 8
_CAUSAL = ("causal", "is_causal")
"""What the packages call the argument that masks later keys."""
_EVERY_CALL = (
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    "softmax_scale",
)


class FlashFunction(NamedTuple):
    """A function of a package, and the arguments besides `_EVERY_CALL`, by name or constant."""

    name: str
    by_name: tuple[str, ...]
    constants: Mapping[str, Any]

    @property
    def passed(self) -> tuple[str, ...]:
        return (*_EVERY_CALL, *self.constants, *self.by_name)


class FlashBackend:
    """Base of the three backends. deterministic: backward adds in a fixed order, which takes
    time and memory.
    """

    backend: AttentionBackend
    package: KernelPackage[FlashFunction]
    takes_key_rows: bool = False
    least_max_q: int = 0

    def __init__(self, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic
        self.name = kernel_name(self.backend, deterministic=deterministic)

    def why_not(
        self, *, device: torch.device, dtype: torch.dtype, head_size: int, scores: Scores = PLAIN
    ) -> str | None:
        """Why this backend cannot compute, in words; None if it can. Cheap checks come first."""
        if reason := wrong_tensors(device, dtype) or self.package.missing():
            return reason
        capability = compute_capability(device)
        if capability is None:
            return "torch sees no GPU here to ask for its compute capability"
        if wrong := self.wrong_device(*capability, head_size):
            return wrong
        return self.wrong_scores(capability[0], head_size, scores) or self.package.problem()

    def lacks_package_only(
        self, *, device: torch.device, dtype: torch.dtype, head_size: int, scores: Scores = PLAIN
    ) -> bool:
        """Whether this backend could compute here if its package were installed as it should be."""
        capability = None if wrong_tensors(device, dtype) else compute_capability(device)
        if capability is None or self.wrong_device(*capability, head_size):
            return False
        if self.wrong_scores(capability[0], head_size, scores):
            return False
        return (self.package.missing() or self.package.problem()) is not None

    def wrong_device(self, major: int, minor: int, head_size: int) -> str | None:
        raise NotImplementedError

    def wrong_scores(self, major: int, head_size: int, scores: Scores) -> str | None:
        """Why the package cannot compute these scores on GPUs of this compute capability."""
        return None

    def compiled_calls(
        self, queries_per_key: int, *, is_causal: bool
    ) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For a package that compiles kinds of calls when they come: a small call of each kind, as
        (queries, keys) of its segments. queries_per_key: query heads of a key head.
        """
        return ()

    @cached_property
    def kernels(self) -> Kernels:
        """The package's functions, loaded and checked once; UserError describes a problem."""
        return self.package.load()

    def forward(
        self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        function, _ = self.package.functions
        out_THD, lse_HT, *_ = self._call(function, (q_THD, k_SGD, v_SGD), segments, {})
        return out_THD, lse_HT

    def backward(self, grad_THD: Tensor, saved: SavedTensors, segments: Segments) -> Gradients:
        q_THD, k_SGD, v_SGD, out_THD, lse_HT = saved
        _, function = self.package.functions
        values: dict[str, Any] = {"dout": grad_THD, "out": out_THD, "softmax_lse": lse_HT}
        values |= {"lse": lse_HT, "deterministic": self.deterministic}
        if "dq" not in function.by_name:
            return self._call(function, (q_THD, k_SGD, v_SGD), segments, values)
        # The function writes into given tensors, which need not be zeroed, because kernels also
        # write the rows of a segment without queries.
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
    if device.type == "cuda" and dtype in DTYPES:
        return None
    return "bfloat16 and float16 on CUDA only"


def wrong_head_size(head_size: int, largest: int) -> str | None:
    if head_size <= largest and head_size % HEAD_SIZE_STEP == 0:
        return None
    return f"heads up to {largest} in steps of {HEAD_SIZE_STEP} only, not {head_size}"


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """(major, minor) of this GPU; None if torch sees none, as on a login node."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None


def before_ampere(major: int, minor: int) -> str | None:
    return f"compute capability 8.0 or newer only, not {major}.{minor}" if major < 8 else None

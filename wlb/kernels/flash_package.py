"""Shared by optional packages of kernels, and by the three FlashAttention packages: finding,
checking and late import.

A package is imported at first use, so that wlb runs without any. We call the functions below the
public ones, because only those separate forward from backward. As they are private and may change,
their parameters are compared with what we pass, and a package that differs is refused by version.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata, util
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from wlb.kernels.op import Gradients, SavedTensors, kernel_name
from wlb.kernels.segments import PLAIN, Scores, Segments
from wlb.plan import UserError
from wlb.spec import AttentionBackend

Kernels = dict[str, Callable[..., Any]]

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


class CalledFunction(Protocol):
    """A function of a package, with the names of the arguments that it is called with."""

    @property
    def name(self) -> str: ...
    @property
    def passed(self) -> tuple[str, ...]: ...


Called = TypeVar("Called", bound=CalledFunction)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPackage(Generic[Called]):
    """A package with the functions that we call, as read in the version `supported`."""

    distribution: str
    module: str
    supported: str
    install: str
    functions: tuple[Called, ...]

    @property
    def installed(self) -> str:
        try:
            return f"{self.distribution} {metadata.version(self.distribution)}"
        except metadata.PackageNotFoundError:
            return f"{self.module} (of no known version)"

    def missing(self) -> str | None:
        """Why the package cannot be here, found without importing it (which takes seconds)."""
        root = self.module.partition(".")[0]
        if root in sys.modules or util.find_spec(root) is not None:
            return None
        return self._not_installed()

    def problem(self) -> str | None:
        """Why its functions cannot be called, in words; None if they can."""
        try:
            self.load()
        except UserError as error:
            return str(error)
        return None

    def load(self) -> Kernels:
        """The functions by name; UserError if the package is missing, broken or different."""
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            # Another package may provide the parent module, but this one is still missing.
            if error.name and (self.module + ".").startswith(error.name + "."):
                raise UserError(self._not_installed()) from error
            raise UserError(self._broken(error)) from error
        except (ImportError, OSError, AttributeError, RuntimeError, TypeError) as error:
            raise UserError(self._broken(error)) from error
        kernels: Kernels = {}
        for called in self.functions:
            function = getattr(module, called.name, None)
            problem = "is missing" if function is None else _difference(function, called.passed)
            if function is None or problem:
                raise UserError(
                    f"{self.installed} is not supported: {self.module}.{called.name} {problem}; "
                    f"supported is {self.supported}"
                )
            kernels[called.name] = function
        return kernels

    def _not_installed(self) -> str:
        return f"package {self.distribution} is not installed"

    def _broken(self, error: Exception) -> str:
        words = " ".join(str(error).split())
        return f"{self.installed} can't be imported: {type(error).__name__}: {words}"


class FlashBackend:
    """Base of the three backends. deterministic: backward adds in a fixed order, which takes
    time and memory."""

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
        (queries, keys) of its segments. queries_per_key: query heads of a key head."""
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


def _difference(function: Callable[..., Any], passed: Collection[str]) -> str:
    """How the function's parameters differ from what we pass; empty if they do not."""
    required = _parameters(function)
    unknown = [name for name in passed if name not in required]
    lacking = [name for name, is_required in required.items() if is_required and name not in passed]
    words = ["does not take " + ", ".join(unknown)] if unknown else []
    words += ["asks for " + ", ".join(lacking)] if lacking else []
    return " and ".join(words)


def _parameters(function: Callable[..., Any]) -> dict[str, bool]:
    """Whether each parameter is required, by name."""
    # A torch custom op's Python signature is (*args, **kwargs); its schema has the names.
    op = getattr(function, "_opoverload", None)
    if op is not None:
        return {a.name: not a.has_default_value() for a in op._schema.arguments}
    return {
        p.name: p.default is p.empty
        for p in inspect.signature(function).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }

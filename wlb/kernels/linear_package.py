"""The gated delta rule by the Triton kernels of the optional package flash-linear-attention.

The package is imported at first use. The package is refused if its function does not take the
arguments that we pass (`KernelPackage`): some older versions have no initial states or no sequences
of different lengths.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wlb.kernels.package import KernelPackage
from wlb.plan import UserError
from wlb.spec import LinearBackend

LARGEST_HEAD = 256
"""Largest head size of keys that the kernels support, because they keep a whole head on chip."""


class _Function(NamedTuple):
    name: str
    passed: tuple[str, ...]


_FUNCTION = _Function(
    "chunk_gated_delta_rule",
    (
        *("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state"),
        *("cu_seqlens", "cu_seqlens_cpu"),
    ),
)
PACKAGE = KernelPackage(
    distribution="fla-core",
    module="fla.ops.gated_delta_rule",
    supported="fla-core 0.6.0",
    install="pip install flash-linear-attention==0.6.0",
    functions=(_FUNCTION,),
)


def choose_linear(
    requested: LinearBackend,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    deterministic: bool = False,
    compiled: bool = False,
) -> tuple[LinearBackend, str]:
    """Choose the implementation of linear attention's recurrence, and say why.

    Args:
        requested: The value of `kernels.linear`.
        device: Device of the run.
        dtype: Dtype in which the run computes.
        head_size: Number of channels of a key head.
        deterministic: Whether a repeated step must give the same bits.
        compiled: Whether layers are compiled by torch.compile.

    Returns:
        The implementation (never `auto`), and a line for the run's log that says why.

    Raises:
        UserError: The package is requested and cannot compute the run.
    """
    package, torch_backend = LinearBackend.FLASH_LINEAR_ATTENTION, LinearBackend.TORCH
    if requested == torch_backend:
        return torch_backend, _line(torch_backend, f"kernels.linear = {requested}")
    why = _why_not(device, dtype, head_size, deterministic=deterministic, compiled=compiled)
    if requested == LinearBackend.AUTO:
        if why is None:
            return package, _line(package, "auto")
        return torch_backend, _line(torch_backend, f"auto; not {package}: {why}")
    if why is not None:
        remedy = f", or install the package: {PACKAGE.install}" if PACKAGE.problem() else ""
        raise UserError(
            f"kernels.linear = {package} cannot be used for this run: {why}. Set "
            f"kernels.linear = auto or torch{remedy}"
        )
    return package, _line(package, f"kernels.linear = {requested}")


def _line(backend: LinearBackend, reason: str) -> str:
    return f"linear-attention kernel {backend} ({reason})"


def _why_not(
    device: torch.device, dtype: torch.dtype, head_size: int, *, deterministic: bool, compiled: bool
) -> str | None:
    """Return why the package cannot compute a run, or None if it can. Cheap checks come first."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return f"only bfloat16 and float16 on CUDA are supported, not {dtype} on {device.type}"
    if head_size > LARGEST_HEAD:
        return f"heads of {head_size} channels are too large; at most {LARGEST_HEAD} are supported"
    if deterministic:
        return (
            "each process may tune the kernels differently, so results can vary, which "
            "kernels.deterministic = true forbids"
        )
    if compiled:
        return "torch.compile (training.compile = true) cannot trace the package's function"
    return PACKAGE.missing() or PACKAGE.problem()


def gated_delta_rule(
    rows: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor,
    state_SHKV: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule over packed spans with the package.

    Args:
        rows: Queries and keys [T, G, K], values [T, H, V], logarithms of decays [T, H], and
            fractions beta [T, H] by which stored values are replaced. The caller has normalised
            queries and keys, and scaled the queries. G divides H.
        cu_seqlens: First row of each span, then T; int64 on the device, shape [S + 1].
        cu_seqlens_cpu: The same values on the host, so that nothing waits for the device.
        state_SHKV: The state before each span. None means zeros.

    Returns:
        Outputs [T, H, V], and the states after the spans [S, H, K, V] in float32.
    """
    q, k, v, g, beta = (x[None] for x in rows)
    function: Any = PACKAGE.load()[_FUNCTION.name]
    out, state = function(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        scale=1.0,
        initial_state=state_SHKV,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )
    return out[0], state

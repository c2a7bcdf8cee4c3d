"""torch.compile of decoder layers: one graph serves all lengths and all layers of a kind.

A layer's forward is compiled without graph breaks, because attention, tensor-parallel products and
fused kernels are custom ops. Two kinds of layers are compiled in part. Of a layer with experts only
attention's half is, because the host reads how many rows each rank gets. Of a linear-attention
layer only the MLP is, because its recurrence has as many steps as the longest document has chunks.

Lengths are the only symbolic sizes. A run compiles one graph for training and one for evaluation of
each kind of layer. It compiles one more if a rank can have a single row (torch specialises on size
1), and one more if FSDP's hooks pass views between layers. CUDA graphs are not used, because they
are recorded per length. Zero-bubble schedules are not supported: their weight queue outlives the
memory of compiled code.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.comptime import comptime
from torch._dynamo.decorators import mark_static, mark_unbacked, maybe_mark_dynamic
from torch._dynamo.utils import counters

from wlb.model import Llama, Rows
from wlb.model.expert_layer import MixtureMlp
from wlb.plan import UserError

_OPTIONS: dict[str, dict[str, Any]] = {"inductor": {"reorder_for_peak_memory": False}}
"""Options of compiler backends.

Without this one, inductor may move the start of a gather next to its wait, because that takes less
memory, and may reorder collectives.
"""


def compile_layers(stage: Llama, backend: str) -> None:
    """Make torch.compile compile each layer of `stage`, in place, at its first call."""
    for layer in stage.model.layers.values():
        has_experts = isinstance(layer.mlp, MixtureMlp)
        if layer.linear_attn is not None:
            if not has_experts:
                _compile_mlp(layer, backend)
        elif has_experts:
            _compile_attention(layer, backend)
        else:
            _compile_whole(layer, backend)


def _compile_whole(layer: Any, backend: str) -> None:
    forward = layer.forward

    # Define a new function for each layer, because torch limits the graphs of one function.
    def whole(x_TC: Tensor, rows: Rows) -> Tensor:
        # Keep head_size static; otherwise RoPE divides once per element to compute its index.
        comptime.force_static(layer.self_attn.head_size)
        return forward(x_TC, rows)

    layer.forward = _compiled(layer, whole, backend)


def _compile_attention(layer: Any, backend: str) -> None:
    """Compile the first half of a layer with experts.

    Backward then starts to gather K and V at the end of this half instead of the end of the layer.
    The gathered rows reach attention as gradients while they are still in transfer, and torch may
    copy gradients that cross the end of a graph.
    """
    first_half = layer.first_half

    def ended(x_TC: Tensor, rows: Rows) -> Tensor:
        comptime.force_static(layer.self_attn.head_size)
        return first_half(x_TC, rows, ends=True)[0]

    run = _compiled(layer, ended, backend)
    layer.first_half = lambda x_TC, rows: (run(x_TC, rows), None)


def _compile_mlp(layer: Any, backend: str) -> None:
    second_half = layer.second_half

    # Define a new function for each layer, as in `_compile_whole`.
    def mlp(x_TC: Tensor) -> Tensor:
        return second_half(x_TC)

    compiled = _traced(mlp, backend)

    def call(x_TC: Tensor, experts: None = None) -> Tensor:
        _mark_residual(x_TC)
        return compiled(x_TC)

    layer.second_half = call


def _traced(function: Any, backend: str) -> Any:
    return torch.compile(
        function, backend=backend, dynamic=True, fullgraph=True, options=_OPTIONS.get(backend)
    )


def _mark_residual(x_TC: Tensor) -> None:
    """Mark the number of rows as dynamic and the width as static.

    Otherwise torch specialises on a number of rows that happens to equal the model's width.
    """
    base = x_TC._base  # not None if FSDP's hooks pass a view of the residual stream
    for residual in [x_TC] if base is None else [x_TC, base]:
        maybe_mark_dynamic(residual, 0)
        mark_static(residual, 1)


def _compiled(
    layer: Any, traced: Callable[[Tensor, Rows], Tensor], backend: str
) -> Callable[[Tensor, Rows], Tensor]:
    """Compile `traced`, a function that starts with the beginning of `layer`."""
    compiled = _traced(traced, backend)

    def call(x_TC: Tensor, rows: Rows) -> Tensor:
        _mark_residual(x_TC)
        # Mark the tables here and not in the thread that makes them, because mark_static has
        # another meaning while this thread compiles.
        cos, sin, _ = rows.of(slides=layer.slides)
        for table in (cos, sin):
            mark_static(table, [1, 2])
        return compiled(x_TC, rows)

    return call


def mark_lengths(tables: Iterable[Tensor], indices: Iterable[Tensor]) -> None:
    """Mark lengths as independent symbolic sizes.

    Args:
        tables: Tables of RoPE.
        indices: Tensors that only custom ops read.
    """
    for tensor in indices:
        for dim in range(tensor.dim()):
            mark_unbacked(tensor, dim)
    for table in tables:
        maybe_mark_dynamic(table, 0)


def num_graphs() -> int:
    """Return how many graphs this process has compiled.

    On a CPU each takes as long as tens of steps.
    """
    return counters["stats"]["unique_graphs"]


def refuse_uncompilable(backend: str, device: torch.device) -> None:
    """Compile a tiny function for `device`, which takes a second.

    Raises:
        UserError: The backend is unknown or cannot compile for the device.
    """
    known = torch.compiler.list_backends(exclude_tags=None)
    if backend not in known:
        raise UserError(
            f"training.compile_backend = {backend!r} is not one of torch {torch.__version__}'s "
            f"backends: {', '.join(known)}"
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        # This is a dry run on a machine without GPUs, so nothing can be compiled for them.
        return

    def probe(x: Tensor) -> Tensor:
        return x.sin() + x

    try:
        torch.compile(probe, backend=backend, fullgraph=True)(torch.ones(8, device=device))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"training.compile = true, but torch's backend {backend!r} cannot compile for "
            f"{device.type} here: {reason}; install its requirements (for training.compile_backend "
            f"= "
            f"inductor: on CPU a C++ compiler and Python's headers, Debian's g++ and python3-dev; "
            f"on CUDA Triton) or set training.compile = false"
        ) from error

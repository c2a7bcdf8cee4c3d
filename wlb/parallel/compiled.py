"""torch.compile of decoder layers: one graph serves all lengths and all layers of a kind.

A layer's forward is compiled without graph breaks, because attention, tensor-parallel products and
fused kernels are custom ops. Two kinds of layers are compiled only in part. In a layer with experts
only the attention half is compiled, because in the other half the host must read how many rows each
rank gets. In a linear-attention layer only the MLP is compiled, because the number of steps of the
recurrence depends on the longest document. A linear-attention layer with experts is not compiled.

Lengths are the only symbolic sizes. A run compiles one graph for training and one for evaluation of
each kind of layer. It compiles another one if a rank can have a single row (torch specialises on
size 1), and another one if FSDP's hooks pass views between layers. CUDA graphs are not used,
because each length would need its own. Zero-bubble schedules are not supported: their queue of
weight gradients keeps tensors whose memory compiled code has already freed or reused.
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
"""Options of compiler backends, by backend.

If reorder_for_peak_memory were on, inductor might move the start of a gather right before the wait
for the gather, because that takes less memory. Communication would then not overlap with
computation. Inductor might also change the order of collectives, which must be equal on all ranks.
"""


def compile_layers(stage: Llama, backend: str) -> None:
    """Change `stage` in place so that torch.compile compiles each layer when it is first called.

    Layers with experts and linear-attention layers are compiled only in part, and layers with both
    are not compiled.

    Args:
        stage: The stage.
        backend: Name of torch.compile's backend, such as "inductor".
    """
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

    # Define a new function for each layer, because torch limits the number of graphs per function.
    def whole(x_TC: Tensor, rows: Rows) -> Tensor:
        # Make head_size a constant. If it were symbolic, RoPE's compiled code would need an integer
        # division per element to compute indices.
        comptime.force_static(layer.self_attn.head_size)
        return forward(x_TC, rows)

    layer.forward = _compiled(layer, whole, backend)


def _compile_attention(layer: Any, backend: str) -> None:
    """Compile the first half of a layer with experts: its norm and attention.

    Backward then starts the gather of K and V inside the compiled graph, when it reaches the output
    of this half. (Otherwise it starts the gather at the output of the layer.) It must not start
    outside of the graph: autograd would then pass the buffer of gathered rows into the graph in the
    place of a gradient, and torch may copy such a tensor before the transfer has filled it.
    """
    first_half = layer.first_half

    def ended(x_TC: Tensor, rows: Rows) -> Tensor:
        comptime.force_static(layer.self_attn.head_size)
        return first_half(x_TC, rows, ends=True)[0]

    run = _compiled(layer, ended, backend)
    layer.first_half = lambda x_TC, rows: (run(x_TC, rows), None)


def _compile_mlp(layer: Any, backend: str) -> None:
    second_half = layer.second_half

    # Define a new function for each layer, because torch limits the number of graphs per function.
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
    """Mark a layer's input: its number of rows is dynamic, and its width is static.

    Without the marks torch would compile a special graph when the number of rows happens to equal
    the width.
    """
    base = x_TC._base  # not None if FSDP's hooks pass a view of the residual stream
    for residual in [x_TC] if base is None else [x_TC, base]:
        maybe_mark_dynamic(residual, 0)
        mark_static(residual, 1)


def _compiled(
    layer: Any, traced: Callable[[Tensor, Rows], Tensor], backend: str
) -> Callable[[Tensor, Rows], Tensor]:
    """Compile `traced`; returns a function that marks lengths as dynamic and calls the result.

    Args:
        layer: The layer.
        traced: The function to compile: the layer's forward, or its first half.
        backend: Name of torch.compile's backend.
    """
    compiled = _traced(traced, backend)

    def call(x_TC: Tensor, rows: Rows) -> Tensor:
        _mark_residual(x_TC)
        # Mark the tables here instead of in the thread that makes them. While this thread compiles,
        # mark_static in any thread acts as if it were called inside the compiled function.
        cos, sin, _ = rows.of(slides=layer.slides)
        for table in (cos, sin):
            mark_static(table, [1, 2])
        return compiled(x_TC, rows)

    return call


def mark_lengths(tables: Iterable[Tensor], indices: Iterable[Tensor]) -> None:
    """Tell torch.compile that the lengths of a micro-batch's tensors are symbolic and independent.

    Args:
        tables: Tables of RoPE, whose first axis is the number of rows.
        indices: Index tensors, which only custom ops read; all their sizes are symbolic.
    """
    for tensor in indices:
        for dim in range(tensor.dim()):
            mark_unbacked(tensor, dim)
    for table in tables:
        maybe_mark_dynamic(table, 0)


def num_graphs() -> int:
    """Return how many graphs torch.compile has compiled in this process so far.

    Compiling a graph takes long: on a CPU, as long as tens of training steps of a small model.
    """
    return counters["stats"]["unique_graphs"]


def refuse_uncompilable(backend: str, device: torch.device) -> None:
    """Check that torch.compile works here, by compiling a tiny function, which takes a second.

    Args:
        backend: Name of torch.compile's backend.
        device: Device of the run.

    Raises:
        UserError: The backend is unknown or cannot compile for the device.
    """
    known = torch.compiler.list_backends(exclude_tags=None)
    if backend not in known:
        raise UserError(
            f"training.compile_backend = {backend!r} must be one of the backends of "
            f"torch {torch.__version__}: {', '.join(known)}"
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
            f"training.compile = true, but torch's backend {backend!r} cannot compile "
            f"for {device.type} on this machine: {reason}. Install what the backend needs (for "
            "training.compile_backend = inductor: on CPU a C++ compiler and Python's "
            "headers, such as Debian's g++ and python3-dev; on CUDA Triton), or set "
            "training.compile = false"
        ) from error

"""torch.compile of decoder layers: one graph serves all layers of a kind and micro-batch lengths.

Each layer's forward is compiled without graph breaks: attention, tensor-parallel products and fused
kernels are custom ops. Of a layer with experts attention's half is compiled, because the host reads
how many rows each rank gets; of a linear layer the MLP, because the steps of its recurrence are as
many as the longest document has chunks. Lengths are the only symbolic sizes. A run has a graph for
training, one for evaluation, of each kind of layer (with experts, with an MLP, linear); one more if
a rank can hold a single row (torch specialises on size 1), and if FSDP's hooks pass views between
layers. No CUDA graphs, recorded per length. Not for zero-bubble: its weight queue outlives compiled
code's memory.
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
"""Otherwise inductor may move the start of a gather to its wait, as that takes less memory, and
collectives past each other."""


def compile_layers(stage: Llama, backend: str) -> None:
    """Have torch.compile compile each layer of `stage`, in place, at its first call."""
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

    # Each kind of layer has a function of its own, because torch limits the graphs of a function.
    def whole(x_TC: Tensor, rows: Rows) -> Tensor:
        # Keep head_size static; otherwise RoPE divides once per element to find its index.
        comptime.force_static(layer.self_attn.head_size)
        return forward(x_TC, rows)

    layer.forward = _compiled(layer, whole, backend)


def _compile_attention(layer: Any, backend: str) -> None:
    """Compile the first half of a layer with experts. Backward starts to exchange K and V again at
    the end of this half, not of the layer: torch may copy gradients that cross the end of a graph,
    and the gathered K and V, which come as gradients, would still be travelling.
    """
    first_half = layer.first_half

    def ended(x_TC: Tensor, rows: Rows) -> Tensor:
        comptime.force_static(layer.self_attn.head_size)
        return first_half(x_TC, rows, ends=True)[0]

    run = _compiled(layer, ended, backend)
    layer.first_half = lambda x_TC, rows: (run(x_TC, rows), None)


def _compile_mlp(layer: Any, backend: str) -> None:
    second_half = layer.second_half

    # As in `_compile_whole`, each layer that differs has a function of its own.
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
    """Otherwise torch specialises on a number of rows that happens to equal the model's width."""
    base = x_TC._base  # FSDP's hooks pass views of the residual stream.
    for residual in [x_TC] if base is None else [x_TC, base]:
        maybe_mark_dynamic(residual, 0)
        mark_static(residual, 1)


def _compiled(
    layer: Any, traced: Callable[[Tensor, Rows], Tensor], backend: str
) -> Callable[[Tensor, Rows], Tensor]:
    """`traced`, a part of `layer` that begins with it, compiled."""
    compiled = _traced(traced, backend)

    def call(x_TC: Tensor, rows: Rows) -> Tensor:
        _mark_residual(x_TC)
        # The tables are marked here rather than by the thread that makes them, because mark_static
        # has another meaning while this thread compiles.
        cos, sin, _ = rows.of(slides=layer.slides)
        for table in (cos, sin):
            mark_static(table, [1, 2])
        return compiled(x_TC, rows)

    return call


def mark_lengths(tables: Iterable[Tensor], indices: Iterable[Tensor]) -> None:
    """Mark lengths as independent symbolic sizes. tables: of RoPE. indices: tensors that only
    custom ops read.
    """
    for tensor in indices:
        for dim in range(tensor.dim()):
            mark_unbacked(tensor, dim)
    for table in tables:
        maybe_mark_dynamic(table, 0)


def num_graphs() -> int:
    """Graphs that this process has compiled (each takes as long as tens of steps on a CPU)."""
    return counters["stats"]["unique_graphs"]


def refuse_uncompilable(backend: str, device: torch.device) -> None:
    """UserError if torch.compile cannot compile a tiny function for `device` (takes a second)."""
    known = torch.compiler.list_backends(exclude_tags=None)
    if backend not in known:
        raise UserError(
            f"training.compile_backend = {backend!r} is not one of torch {torch.__version__}'s "
            f"backends: {', '.join(known)}"
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        # This is a dry run on a machine without the GPUs.
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

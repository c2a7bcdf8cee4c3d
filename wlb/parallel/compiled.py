"""torch.compile of decoder layers: one graph of a layer serves all layers and micro-batch lengths.

A layer's forward is compiled by itself, from the residual stream to the residual stream, with no
graph break: attention and the products of tensor parallelism are custom ops with their collectives
inside (`wlb.kernels.op`, `context_op`, `tensor_op`), so what the compiler fuses is norms, rotation,
SiLU, residual sums and, in one process, what surrounds matrix products. Parts that backward runs
again are traced with it: the last product of a layer is still not run again, since nothing in
backward needs it. Compiled code is inside of FSDP's and the clock's hooks, which are on the module;
the clock's marks around attention are made inside the custom ops.

Lengths are symbols, and nothing else is. Graphs of a run are one for training and one for
evaluation; one more of each if a rank can have a single row (not with a data.row_multiple of 128,
as on GPUs), since torch takes a size of 1 for a constant; and one more for training where FSDP's
hooks hand a view from layer to layer but not to the first. A graph takes as long as tens of steps
to compile on a CPU, so a run counts them (`num_graphs`). More than torch's own limit (8) for a
layer stop it.

No CUDA graphs (torch's mode "reduce-overhead"): they would be recorded anew for every length.

Not with schedules that split the backward pass: weights' gradients wait in a Python queue that
holds what backward passes saved, whose memory compiled code takes to be free after the pass.
"""

from typing import Any

import torch
from torch import Tensor
from torch._dynamo.comptime import comptime
from torch._dynamo.decorators import mark_static, mark_unbacked, maybe_mark_dynamic
from torch._dynamo.utils import counters

from wlb.model import Llama, Rows

_REMEDY = (
    "install what it needs (for training.compile_backend = inductor: on CPU a C++ compiler and "
    "Python's headers, Debian's g++ and python3-dev; on CUDA Triton) or set training.compile = "
    "false"
)


def compile_layers(stage: Llama, backend: str) -> None:
    """Compile the layers of `stage` in place, at their first calls. backend: torch.compile's."""
    for layer in stage.model.layers.values():
        _compile(layer, backend)


def _compile(layer: Any, backend: str) -> None:
    forward = layer.forward

    def traced(x_TC: Tensor, rows: Rows) -> Tensor:
        # Else a head's size is a symbol too, and each element of a rotation is found by divisions.
        comptime.force_static(layer.self_attn.head_size)
        return forward(x_TC, rows)

    compiled = torch.compile(traced, backend=backend, dynamic=True, fullgraph=True)

    def call(x_TC: Tensor, rows: Rows) -> Tensor:
        # Else a number of rows that is, say, the model's width at first is taken to be the width.
        base = x_TC._base  # FSDP's hooks hand on views
        for residual in [x_TC] if base is None else [x_TC, base]:
            maybe_mark_dynamic(residual, 0)
            mark_static(residual, 1)
        # Here, not where they are made: that thread may run while this one compiles, and the call
        # means something else then.
        for table in (rows.cos, rows.sin):
            mark_static(table, [1, 2])
        return compiled(x_TC, rows)

    layer.forward = call


def mark_lengths(rows: Rows, indices: list[Tensor]) -> None:
    """Have the sizes of a micro-batch's tensors be symbols of their own, whatever they are now.

    indices: what only custom ops read.
    """
    for tensor in indices:
        for dim in range(tensor.dim()):
            mark_unbacked(tensor, dim)
    for table in (rows.cos, rows.sin):
        maybe_mark_dynamic(table, 0)


def num_graphs() -> int:
    """Graphs that this process has compiled."""
    return counters["stats"]["unique_graphs"]


def refuse_uncompilable(backend: str, device: torch.device) -> None:
    """ValueError with the remedy if torch.compile cannot compile for `device` here.

    Compiles a sum with it, which takes a second or so for inductor on CPU and leaves it in the
    compiler's cache.
    """
    known = torch.compiler.list_backends(exclude_tags=None)
    if backend not in known:
        raise ValueError(
            f"training.compile_backend = {backend!r} is not one of torch {torch.__version__}'s "
            f"backends: {', '.join(known)}"
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        return  # a dry run for GPUs elsewhere

    def twice(x: Tensor) -> Tensor:
        return x.sin() + x

    try:
        torch.compile(twice, backend=backend, fullgraph=True)(torch.ones(8, device=device))
    except Exception as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"training.compile = true, but torch's backend {backend!r} cannot compile for "
            f"{device.type} here: {words[0]}; {_REMEDY}"
        ) from error

"""torch.compile in a rehearsal: layers become the graphs that inductor would be given, and run
operator by operator.

Traced, decomposed and cut into forward and backward by torch's own code with inductor's settings,
so what is kept for backward, the order of collectives, and when lengths need another graph are a
run's. What inductor then fuses is not known: element-wise kernels count one by one.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.decorators import maybe_mark_dynamic
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental import _config as shapes  # pyright: ignore[reportPrivateUsage]
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
    _get_current_dispatch_mode_stack,
)

from wlb.parallel import compiled
from wlb.plan import UserError

BACKEND = "inductor"
_compile = torch.compile


def refuse_other_backends(backend: str, device: torch.device) -> None:
    """Stands for `wlb.parallel.compiled.refuse_uncompilable`, which would use the GPU."""
    if backend != BACKEND:
        raise UserError(
            f"training.compile_backend = {backend!r} cannot be rehearsed, because only the graphs "
            f"of {BACKEND!r} are known; set training.compile_backend = {BACKEND}, or "
            f"training.compile = false"
        )


def compiling(recorder: Any) -> Callable[..., Callable[..., Any]]:
    """A function to put in torch.compile's place. recorder: the mode that graphs run under.

    Lengths become symbols by a milder mark than a run's, which torch overlooks on fake tensors:
    more lengths than in a run (0 and 1) have a graph of their own.
    """
    setattr(compiled, "mark_unbacked", maybe_mark_dynamic)  # noqa: B010
    setattr(shapes, "use_duck_shape", False)  # noqa: B010  # else lengths that are equal by chance stay equal

    def as_graph(graph: GraphModule, _: list[Tensor]) -> Callable[[list[Any]], Any]:
        def run(arguments: list[Any]) -> Any:
            # Backward comes from autograd, under the mode; forward from the compiler, under none.
            is_seen = recorder in _get_current_dispatch_mode_stack()
            with nullcontext() if is_seen else recorder:
                return Interpreter(graph).boxed_run(arguments)

        setattr(run, "_boxed_call", True)  # noqa: B010  # the arguments' list is emptied
        return run

    backend: Any = aot_autograd(
        fw_compiler=as_graph,
        bw_compiler=as_graph,
        inference_compiler=as_graph,
        decompositions=select_decomp_table(),
        partition_fn=partial(min_cut_rematerialization_partition, compiler=BACKEND),
    )

    def compile(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        kept = {
            name: value for name, value in options.items() if name not in ("backend", "options")
        }
        made = _compile(function, backend=backend, **kept)

        def call(*args: Any) -> Any:
            with _disable_current_modes():  # under a mode of ours torch would not compile
                return made(*args)

        return call

    return compile

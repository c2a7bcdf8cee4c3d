"""torch.compile in a rehearsal: run the graphs that inductor would get, operator by operator.

torch's own code traces layers, decomposes operators and splits forward from backward, with
inductor's settings. So the activations that are saved for backward, the order of collectives and
the recompilations are the same as in a real run. Inductor itself does not run, so its fusion of
element-wise operators is not known, and each of them counts as a kernel.
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
    """Refuse compile backends whose graphs a rehearsal cannot reproduce.

    This function replaces `wlb.parallel.compiled.refuse_uncompilable`, which would use the GPU.

    Args:
        backend: Value of training.compile_backend.
        device: Device of the rank; unused.

    Raises:
        UserError: If the backend is not inductor.
    """
    if backend != BACKEND:
        raise UserError(
            f"training.compile_backend = {backend!r} cannot be rehearsed, because a rehearsal can "
            f"reproduce only the graphs of {BACKEND!r}; set training.compile_backend = {BACKEND}, "
            f"or training.compile = false"
        )


def compiling(recorder: Any) -> Callable[..., Callable[..., Any]]:
    """Return a function to use instead of torch.compile, so that `recorder` sees every operator.

    It traces a function into graphs as torch.compile does, but runs a graph operator by operator.
    torch ignores `mark_unbacked` on fake tensors, so lengths are marked with `maybe_mark_dynamic`
    instead. Unlike in a real run, lengths 0 and 1 therefore get separate graphs.

    Args:
        recorder: The dispatch mode that records the operators of graphs.
    """
    # Switch duck shapes off. With them, torch would assume that lengths which are equal in the
    # first step stay equal, and would compile again when they differ.
    setattr(compiled, "mark_unbacked", maybe_mark_dynamic)  # noqa: B010
    setattr(shapes, "use_duck_shape", False)  # noqa: B010

    def as_graph(graph: GraphModule, _: list[Tensor]) -> Callable[[list[Any]], Any]:
        def run(arguments: list[Any]) -> Any:
            # In backward, autograd runs graphs with the recorder active. In forward, `call` below
            # switches off all modes, so activate the recorder here.
            is_seen = recorder in _get_current_dispatch_mode_stack()
            with nullcontext() if is_seen else recorder:
                return Interpreter(graph).boxed_run(arguments)

        setattr(run, "_boxed_call", True)  # noqa: B010  # boxed_run empties the list of arguments
        return run

    backend: Any = aot_autograd(
        fw_compiler=as_graph,
        bw_compiler=as_graph,
        inference_compiler=as_graph,
        decompositions=select_decomp_table(),
        partition_fn=partial(min_cut_rematerialization_partition, compiler=BACKEND),
    )

    def compile(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        others = {
            name: value for name, value in options.items() if name not in ("backend", "options")
        }
        made = _compile(function, backend=backend, **others)

        def call(*args: Any) -> Any:
            with _disable_current_modes():  # torch does not compile while dispatch modes are active
                return made(*args)

        return call

    return compile

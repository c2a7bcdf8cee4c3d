"""Runs `wlb.rehearse.worker` with a planted fault; `run.name` is the name of the fault's function.

The fault is planted in the forked ranks, so that rehearsals with different faults share one import
of torch.
"""

import sys
from typing import Any

from wlb.rehearse import worker


def index_on_the_cpu() -> None:
    from wlb.parallel.context import op

    right = op.gradients_by_row
    op.gradients_by_row = lambda dk, dv, inverse, **_: right(dk, dv, inverse.cpu())


def host_wait_in_every_norm() -> None:
    from wlb.parallel.tensor import TensorParallelOps

    right = TensorParallelOps.norm

    def norm(self: Any, *args: Any) -> Any:
        out = right(self, *args)
        assert out.sum().item() == 0, "what the host reads is zero"
        return out

    TensorParallelOps.norm = norm


def wrong_dtype() -> None:
    from wlb.model import llama

    right = llama.rotate
    llama.rotate = lambda *args, **options: right(*args, **options).float()


def no_event_of_the_input_stream() -> None:
    from wlb.train.prefetch import InputPrefetcher

    right = InputPrefetcher._load
    InputPrefetcher._load = lambda self, *args: (right(self, *args)[0], None)


def no_record_stream() -> None:
    import torch

    torch.Tensor.record_stream = lambda *_: None


def one_rank_drops_a_collective() -> None:
    import torch.distributed as dist

    from wlb.parallel import data
    from wlb.train import loop

    right = data.gradient_square

    def square(parameters: Any, mesh: Any) -> Any:
        if mesh.rank != 3:
            dist.all_reduce(next(iter(parameters.values())).new_zeros(()).to_local())
        return right(parameters, mesh)

    loop.gradient_square = square


def one_rank_swaps_two_transfers() -> None:
    """Rank 0 sends the activations of its second micro-batch before those of its first."""
    from wlb.parallel.pipeline import VarLenStage

    right = VarLenStage.get_fwd_send_ops
    late: list[Any] = []

    def sends(self: Any, chunk: int) -> Any:
        ops = right(self, chunk)
        if self.stage_index == 0:  # only the first pipeline rank has this stage
            if chunk == 0:
                late[:] = ops
                return []
            if chunk == 1:
                return [*ops, *late]
        return ops

    VarLenStage.get_fwd_send_ops = sends


def nothing() -> None:
    """Plants no fault."""


def one_communicator_for_the_pipeline() -> None:
    """All transfers of the pipeline use one communicator, as in torch."""
    from wlb.parallel import pipeline

    pipeline._over = lambda link, ops: ops


def memory_that_was_not_planned() -> None:
    import torch

    from wlb.train import loop

    right = loop.gradient_square

    def square(parameters: Any, mesh: Any) -> Any:
        torch.empty(200 << 30, dtype=torch.uint8, device=mesh.device)
        return right(parameters, mesh)

    loop.gradient_square = square


def no_event_of_the_checkpoint() -> None:
    from wlb.train.checkpoint import saver

    saver._event = lambda _: None


def _plant_in_ranks() -> None:
    right = worker._child

    def child(rank: int, rehearsal: object, request: worker.Request) -> None:
        globals()[request.spec.run.name]()
        right(rank, rehearsal, request)

    worker._child = child


if __name__ == "__main__":
    _plant_in_ranks()
    sys.exit(worker.main(sys.argv[1:]))

"""Pipeline parallelism by torch's schedules, with a different length for every micro-batch.

torch allocates all receive buffers with the shape of micro-batch 0 and does not support other
shapes (https://github.com/pytorch/pytorch/issues/159942). `VarLenStage` allocates a buffer when its
receive is posted and drops it after the backward pass. Every rank knows the lengths from the plan,
so no shapes are sent. Each link between two pipeline ranks has its own communicator
(`wlb.parallel.mesh`).

All overridden methods are private to torch. tests/parity checks on each supported version of torch
that they still fit.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    RESHARD,
    UNSHARD,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    _Action,  # pyright: ignore[reportPrivateUsage]
)

from wlb.parallel.data import widen_gradients
from wlb.parallel.deferred import WeightQueue
from wlb.parallel.mesh import Mesh
from wlb.parallel.observe import Part, Pass, Watchers
from wlb.spec import Schedule


class VarLenStage(PipelineStage):
    """A pipeline stage that sends and receives activations [rows[i], width] for micro-batch i.

    Args:
        module: The stage's part of the model, called with tokens or rows, and the micro-batch's
            `Rows`.
        index: Index of the stage in the pipeline.
        num_stages: Number of stages of the pipeline.
        mesh: The ranks.
        width: Channels of a row.
        dtype: Dtype of activations and their gradients.
        queue: Where the stage's layers put the computation of weight gradients. None unless the
            schedule computes them in separate passes (zero bubble).
        watchers: Observers of the stage's passes.
    """

    # number of rows that stages exchange for each micro-batch; set before each step
    rows: list[int]

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        *,
        mesh: Mesh,
        width: int,
        dtype: torch.dtype,
        queue: WeightQueue | None,
        watchers: Watchers | None = None,
    ) -> None:
        self.width, self.dtype = width, dtype
        self._queue, self._watchers = queue, watchers or Watchers()
        self._before, self._after = mesh.link_before, mesh.link_after
        self._rows_record: dict[str, Any] = {}
        # Give torch example tensors, so that torch need not run the model to infer shapes. torch
        # uses only their number of axes and their dtype.
        activation = torch.empty(1, self.width, dtype=dtype, device="meta", requires_grad=True)
        tokens = torch.empty(1, dtype=torch.long, device="meta")
        super().__init__(
            module,
            index,
            num_stages,
            mesh.device,
            input_args=tokens if index == 0 else activation,
            output_args=activation,
            group=mesh.group("pp"),
            dw_builder=None if queue is None else self._take_weights,
        )

    def _allocate(self, infos: Any, rows: int, *, requires_grad: bool) -> None:
        for info in infos:
            info.buffer = torch.empty(
                rows, self.width, dtype=self.dtype, device=self.device, requires_grad=requires_grad
            )

    def _drop(self, infos: Any) -> None:
        for info in infos:
            info.buffer = torch.empty(0, device=self.device)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operation that receives a micro-batch's activation in a new buffer."""
        if not self.is_first:
            infos = self.args_recv_info[fwd_chunk_id]
            self._allocate(infos, self.rows[fwd_chunk_id], requires_grad=self.has_backward)
        return _over(self._before, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the send of a micro-batch's activation to the next stage; [] for none."""
        return _over(self._after, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receive of a micro-batch's output gradient, in a new buffer; [] for none."""
        if self.has_backward and not self.is_last:
            infos = self.grad_recv_info[bwd_chunk_id]
            self._allocate(infos, self.rows[bwd_chunk_id], requires_grad=False)
        return _over(self._after, super().get_bwd_recv_ops(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the send of a micro-batch's input gradient to the previous stage; [] for none."""
        return _over(self._before, super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: dict[str, Any] | None = None, **options: Any
    ) -> Any:
        """Run the forward pass of a micro-batch."""
        # Do not pass `Rows` to torch's code, because the zero-bubble code of torch 2.11 fails on
        # keyword arguments that are not tensors. `forward_maybe_with_nosync` adds `Rows` to the
        # call.
        self._rows_record = kwargs or {}
        first = Part.EMBEDDING if self.is_first else Part.LAYERS
        with self._chunk(Pass.FORWARD, fwd_chunk_id, first):
            out = super().forward_one_chunk(fwd_chunk_id, args, {}, **options)
        if not self.has_backward and not self.is_first:
            self._drop(self.args_recv_info[fwd_chunk_id])
        return out

    def forward_maybe_with_nosync(self, *args: Any, **_: Any) -> Any:
        """Call the stage's module with its input and the `Rows` stored by `forward_one_chunk`."""
        return super().forward_maybe_with_nosync(*args, **self._rows_record)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
        """Run a micro-batch's backward pass, and drop the received activation and gradient."""
        with self._chunk(Pass.BACKWARD, bwd_chunk_id, Part.HEAD if self.is_last else Part.LAYERS):
            super().backward_one_chunk(bwd_chunk_id, *args, **options)
        if not self.has_backward:
            # In an evaluation, torch would keep this output until the next step.
            self.fwd_cache.pop(bwd_chunk_id, None)
        if not self.is_first:
            self._drop(self.args_recv_info[bwd_chunk_id])
        if self.has_backward and not self.is_last:
            self._drop(self.grad_recv_info[bwd_chunk_id])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
        """Compute the weight gradients of a micro-batch (zero-bubble schedules)."""
        with self._chunk(Pass.WEIGHT, bwd_chunk_id, Part.LAYERS):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **options)
            widen_gradients(self.submod)

    def _chunk(self, kind: Pass, micro_batch: int, first: Part) -> AbstractContextManager[None]:
        return self._watchers.chunk(kind, self.stage_index, micro_batch, first)

    def _take_weights(self) -> Callable[[], None]:
        assert self._queue is not None
        if self._watchers.timer is not None:
            # On the first stage the backward pass ended with the embedding, so the timer still
            # counts time as embedding. The weight gradients belong to the layers.
            self._watchers.timer.switch(Part.LAYERS)
        return self._queue.take()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return no operations, because `wlb.parallel.connect` has already connected the ranks.

        torch 2.11 would connect the group of the axis pp, over which we send nothing.
        """
        return []

    def _validate_fwd_input(self, *_: Any) -> None:
        """Check nothing: torch 2.11 would compare inputs with one shape, but ours vary."""

    _validate_fwd_outputs = _validate_fwd_input


def _over(link: dist.ProcessGroup, ops: list[dist.P2POp]) -> list[dist.P2POp]:
    """Return the same send and receive operations over the communicator `link`.

    All operations must be between the two ranks of the link.
    """
    assert link.size() == 2, "with more ranks, transfers could block each other"
    return [dist.P2POp(op.op, op.tensor, op.peer, link) for op in ops]


class LateWeights(ScheduleInterleavedZeroBubble):
    """An interleaved zero-bubble schedule that runs weight-gradient passes later than torch's.

    Pipeline rank r begins weight-gradient passes after `r * weight_delay` input-gradient passes;
    from then on it alternates between both kinds of passes. torch's schedule is `weight_delay = 1`.
    If attention dominates the backward pass, weight-gradient passes are short, and a rank must save
    up more of them to fill its idle time at the end of a step.
    """

    def __init__(self, *args: Any, weight_delay: int, **options: Any) -> None:
        self.weight_delay = weight_delay
        super().__init__(*args, **options)

    def _calculate_single_rank_operations(self, rank: int) -> list[_Action | None]:
        actions = [a for a in super()._calculate_single_rank_operations(rank) if a is not None]
        # Keep the order of all other actions. When enough input-gradient passes have run, insert
        # one weight-gradient pass after each further input-gradient pass.
        weights = [a for a in actions if a.computation_type == BACKWARD_WEIGHT]
        out: list[_Action | None] = []
        num_inputs = num_weights = 0
        for action in actions:
            if action.computation_type == BACKWARD_WEIGHT:
                continue
            out.append(action)
            if action.computation_type == BACKWARD_INPUT:
                if num_inputs >= rank * self.weight_delay:
                    out.append(weights[num_weights])
                    num_weights += 1
                num_inputs += 1
        return out + weights[num_weights:]


def gathered_once(actions: Sequence[_Action]) -> list[_Action]:
    """Return the actions, changed so that FSDP gathers each stage's parameters once per step.

    The first action that gathers a stage's parameters stays, and so does the last one that drops
    them. All other gathers and drops of the stage are removed. torch's schedules keep the
    parameters of at most three of a rank's stages at a time, and gather the others before each of
    their passes.

    Args:
        actions: The actions of one rank in a schedule, in order.
    """
    gathers: dict[int, int] = {}
    drops: dict[int, int] = {}
    for i, action in enumerate(actions):
        if action.computation_type == UNSHARD:
            gathers.setdefault(action.stage_index, i)
        elif action.computation_type == RESHARD:
            drops[action.stage_index] = i
    kept = {*gathers.values(), *drops.values()}
    return [
        action
        for i, action in enumerate(actions)
        if action.computation_type not in (UNSHARD, RESHARD) or i in kept
    ]


@dataclass(slots=True, kw_only=True)
class Pipeline:
    """Runs this rank's pipeline stages, with a torch schedule for each number of micro-batches."""

    stages: list[VarLenStage]
    schedule: Schedule
    # With zero-bubble, pipeline rank r runs weight-gradient passes r * weight_delay passes late
    # (`LateWeights`). 1 is torch's order.
    weight_delay: int = 1
    # torch's schedules, by number of micro-batches
    _schedules: dict[int, Any] = field(default_factory=dict)

    def run(
        self, tokens: list[Tensor] | None, rows: Sequence[Any], num_rows: list[int], *, train: bool
    ) -> list[Tensor]:
        """Run the forward passes of all micro-batches, and with `train` also the backward passes.

        Args:
            tokens: On the first pipeline rank the tokens of each micro-batch, [T_local], where
                T_local is the number of a CP rank's rows with padding. None on other ranks.
            rows: The `Rows` of each micro-batch.
            num_rows: Number of rows that stages exchange for each micro-batch, T_local / tp.
            train: Whether to run backward passes.

        Returns:
            The loss of each micro-batch on the last stage's rank, else an empty list.
        """
        if len(rows) not in self._schedules:
            self._schedules[len(rows)] = self._new_schedule(len(rows))
        schedule = self._schedules[len(rows)]
        # Set the field that schedule.eval() would set, because that method also calls step().
        schedule._has_backward = train
        for stage in self.stages:
            stage.has_backward = train
            stage.rows = num_rows
            # Reset the stage, because schedules for other numbers of micro-batches use it, too.
            stage.chunks = len(rows)
            stage.clear_runtime_states()
        losses: list[Tensor] = []
        args = [(t,) for t in tokens] if tokens is not None else [()] * len(rows)
        schedule._step_microbatches(
            args, [{"rows": r} for r in rows], [None] * len(rows), losses, return_outputs=False
        )
        return losses

    def _new_schedule(self, n: int) -> Any:
        # The output of the last stage is the loss itself, so the loss function returns it
        # unchanged.
        options: dict[str, Any] = {"loss_fn": lambda output, _: output, "scale_grads": False}
        stages: Any = self.stages
        match self.schedule:
            case Schedule.ONE_F_ONE_B:
                made = Schedule1F1B(stages[0], n, **options)
            case Schedule.INTERLEAVED_1F1B:
                made = ScheduleInterleaved1F1B(stages, n, **options)
            case Schedule.INTERLEAVED_ZERO_BUBBLE:
                made = LateWeights(stages, n, weight_delay=self.weight_delay, **options)
        if not isinstance(made, Schedule1F1B):
            for rank, actions in made.pipeline_order_with_comms.items():
                made.pipeline_order_with_comms[rank] = gathered_once(actions)
        if hasattr(made, "_warmup_p2p"):
            setattr(made, "_warmup_p2p", _skip_vote)  # noqa: B010  # private to torch
        return made


def _skip_vote(stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
    """Set all stages to static shapes, in place of torch's `_warmup_p2p` (torch 2.12 and later).

    In torch's function the ranks vote on whether torch must infer shapes. In wlb torch never has
    to, because the plan gives all shapes. The vote sends messages through all stages and reads the
    result on the host, before a schedule's first step and whenever a run changes between training
    and evaluation
    (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/pipelining/schedules.py). The
    vote also connects neighbouring ranks, which `wlb.parallel.connect` has already done.
    """
    from torch.distributed.pipelining._utils import InferenceMode  # new in torch 2.12

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC

"""Replay a simulated step with real processes and messages, where each pass only sleeps.

One process per rank runs training's pipeline (`wlb.parallel.pipeline`) over Gloo. The order of
passes, the messages and the delayed weight gradients are real. A pass sleeps for a given time, and
messages are small. So a replay verifies in which order the simulator runs passes and which ranks
wait for each other, but not the times of passes and messages.

A step takes longer than its sleeps alone: each pass on the critical path adds 1 ms, or 2 ms with CP
(measured with 8 to 32 processes on two cores). Multiply all times by a factor that makes this
overhead negligible.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from wlb.launch.local import run_local
from wlb.parallel.deferred import WeightQueue
from wlb.parallel.mesh import Mesh, build_mesh
from wlb.parallel.pipeline import Pipeline, VarLenStage
from wlb.parallel.world import World
from wlb.plan import FloatArray, IntArray, check_at_least
from wlb.simulate import PassKind, pipeline_order
from wlb.spec import ParallelSpec, PipelineSection, RunSpec, Schedule

MIN_WAIT_S = 0.005
"""Shortest time in seconds that a pass may sleep.

Shorter times would be dominated by the replay's overhead (messages, collectives, waking up)."""

TOO_SHORT = (
    f"a sleeping time below {MIN_WAIT_S} s is dominated by overhead; multiply all sleeping times "
    f"by the same factor (20 ms and more are good)"
)
_START_S = 0.02
"""Seconds until a replay starts after its ranks agreed on when, without `_START_PER_RANK_S`."""
_START_PER_RANK_S = 0.001
_LAUNCH_S = 60.0
"""Seconds of the time limit that are allowed for starting the processes."""
_WIDTH = 16
"""Number of float32 values in a row of a message between stages."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepWaits:
    """How long each CP rank sleeps in each pass of one step, in seconds.

    The arrays of seconds have shape [dp, n, num_stages, cp], with n micro-batches per pipeline. 0
    means that the pass does not sleep.
    """

    forward: FloatArray  # seconds of each forward pass
    backward: FloatArray  # seconds of each backward pass, without the weight gradients
    # Seconds of each micro-batch's weight gradients. In zero-bubble schedules, they are passes of
    # their own; in other schedules, the backward pass takes these seconds in addition.
    weight: FloatArray
    rows: IntArray  # rows of each micro-batch's messages between stages, shape [dp, n]

    def __post_init__(self) -> None:
        shape = self.forward.shape
        if len(shape) != 4 or 0 in shape:
            raise ValueError(
                f"forward has shape {shape}, but must have shape [dp, n, num_stages, cp] with no "
                "axis of size 0"
            )
        for name in ("forward", "backward", "weight"):
            _check_waits(name, getattr(self, name), shape)
        if self.rows.shape != shape[:2]:
            raise ValueError(
                f"rows has shape {self.rows.shape}, but must have shape [dp, n] = {shape[:2]}, "
                "the first two axes of forward"
            )
        if self.rows.dtype.kind not in "iu" or self.rows.min() < 1:
            raise ValueError(
                f"the smallest value of rows is {self.rows.min()} ({self.rows.dtype}), but all "
                "must be whole numbers of at least 1"
            )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return (dp, micro-batches of a pipeline, num_stages, cp), the shape of `forward`."""
        return self.forward.shape  # pyright: ignore[reportReturnType]

    @property
    def by_kind(self) -> dict[PassKind, FloatArray]:
        """For each kind of pass, the seconds that each rank sleeps instead of computing it.

        Every array has the shape `shape`.
        """
        return {
            PassKind.FORWARD: self.forward,
            PassKind.BACKWARD: self.backward + self.weight,
            PassKind.BACKWARD_INPUT: self.backward,
            PassKind.BACKWARD_WEIGHT: self.weight,
        }

    @property
    def bound_s(self) -> float:
        """Return an upper bound of the step time in seconds.

        It is the time of the slowest pipeline if its passes ran one after the other.
        """
        total = (self.forward + self.backward + self.weight).max(axis=3)
        return float(total.sum(axis=(1, 2)).max())


def _check_waits(name: str, waits: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    """Raise ValueError if sleeping times have a wrong shape, or one is invalid.

    A time is invalid if it is negative, not finite, or above 0 but below `MIN_WAIT_S`.

    Args:
        name: Name of the sleeping times in error messages.
        waits: The sleeping times in seconds.
        shape: The shape that they must have.
    """
    if waits.shape != shape:
        raise ValueError(
            f"{name} has shape {waits.shape}, but must have the shape of forward, {shape}"
        )
    for wrong, remedy in (
        (
            ~(np.isfinite(waits) & (waits >= 0)),
            ("a sleeping time must be a finite number of seconds, at least 0"),
        ),
        ((waits > 0) & (waits < MIN_WAIT_S), TOO_SHORT),
    ):
        if wrong.any():
            at = [int(i) for i in np.argwhere(wrong)[0]]
            raise ValueError(f"{name}{at} = {waits[tuple(at)]}: {remedy}")


class TimedWait(NamedTuple):
    """When a pass of the replay ran on a rank, in seconds since the step began.

    The rank sleeps in the pass instead of computing, and waits for the other CP ranks.
    """

    stage: int
    kind: PassKind
    micro_batch: int
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Measured times of one replay of a step."""

    step_s: float  # from the common start to the end of the slowest rank's last all-reduce
    spans: dict[tuple[int, int, int], list[TimedWait]]  # passes of each (dp, pp, cp) rank, in order


def replay(
    steps: Sequence[StepWaits], pipeline: PipelineSection, *, pp: int, repeats: int = 3
) -> list[list[Replayed]]:
    """Replay every step several times on dp * pp * cp processes, without tensor parallelism.

    Each step first runs once without sleeping, so that the connections between ranks are open. With
    pp = 1, a rank runs the forward and the backward pass of one micro-batch after the other.

    Args:
        steps: The sleeping times of each step. All steps must have the same dp and cp.
        pipeline: Schedule and virtual stages.
        pp: Pipeline ranks.
        repeats: How often each step is replayed.

    Returns:
        For each step, the times of each replay.
    """
    check_at_least("repeats", repeats, 1)
    if not steps:
        return []
    for index, step in enumerate(steps):
        _check_layout(step, steps[0], pipeline, pp)
        try:
            pipeline_order(pipeline, pp=pp, num_micro_batches=step.shape[1])
        except ValueError as error:
            raise ValueError(f"step {index}: {error}") from None
    dp, _, _, cp = steps[0].shape
    spec = RunSpec(parallel=ParallelSpec(tp=1, cp=cp, pp=pp, dp=dp), pp=pipeline)
    job = _ReplaySettings(spec=spec, repeats=repeats)
    ranks: list[list[list[_RankTimes]]] = run_local(
        _run_rank,
        dp * pp * cp,
        job,
        list(steps),
        timeout_s=_LAUNCH_S + sum(step.bound_s + 2.0 for step in steps) * (repeats + 1),
        start_group=True,
        preload=[__name__],
    )
    return [
        [
            Replayed(
                step_s=max(rank[index][repeat].stop_s for rank in ranks),
                spans={rank[index][repeat].at: rank[index][repeat].spans for rank in ranks},
            )
            for repeat in range(repeats)
        ]
        for index in range(len(steps))
    ]


def _check_layout(step: StepWaits, first: StepWaits, pipeline: PipelineSection, pp: int) -> None:
    """Raise ValueError for a step that does not fit the pipeline or the other steps of the replay.

    It must have as many stages as the pipeline, and the same dp and cp as the first step.
    """
    schedule, virtual_stages = pipeline.schedule, pipeline.virtual_stages
    if pp < 1 or virtual_stages < 1:
        raise ValueError(f"pp = {pp} and virtual_stages = {virtual_stages} must be at least 1")
    dp, _, num_stages, cp = step.shape
    if num_stages != pp * virtual_stages:
        raise ValueError(
            f"sleeping times of {num_stages} stages do not fit pp x virtual_stages = {pp} x "
            f"{virtual_stages}; give sleeping times of {pp * virtual_stages} stages"
        )
    if (dp, cp) != (first.shape[0], first.shape[3]):
        raise ValueError(
            f"steps with dp = {dp}, cp = {cp} and with dp = {first.shape[0]}, cp = "
            f"{first.shape[3]} cannot be replayed together; replay them in separate calls"
        )
    if virtual_stages > 1 and (pp == 1 or schedule == Schedule.ONE_F_ONE_B):
        raise ValueError(
            f"virtual_stages = {virtual_stages} needs pp > 1 and an interleaved schedule, but pp "
            f"= {pp} and schedule = {schedule}; set virtual_stages = 1"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReplaySettings:
    """Settings that are the same on all ranks of a replay."""

    spec: RunSpec  # only the sizes of parallel groups and the pipeline's settings are used
    repeats: int  # how often each step is replayed


class _RankTimes(NamedTuple):
    """Measured times of one replay of a step on one rank."""

    at: tuple[int, int, int]  # the rank as (dp, pp, cp)
    stop_s: float  # seconds from the common start of all ranks to the end of the last all-reduce
    spans: list[TimedWait]  # when each pass ran, in the order of execution


@dataclass(frozen=True, slots=True)
class _WaitingMicroBatch:
    """How long this rank sleeps in each pass of one micro-batch.

    The pipeline hands this object to its stages in place of the `Rows` that real stages get.
    """

    index: int  # number of the micro-batch within its pipeline
    seconds: dict[PassKind, FloatArray]  # sleep in each stage, shape [num_stages], by kind of pass


@dataclass(slots=True)
class _Timer:
    """Sleeps in each pass of a rank, and records when the pass ran."""

    group: dist.ProcessGroup | None  # the CP group; None for cp = 1
    origin_s: float = 0.0  # instant at which all ranks start the step
    spans: list[TimedWait] = field(default_factory=list)  # when the step's passes so far ran

    def restart(self, origin_s: float) -> None:
        """Forget the recorded passes, and count time from `origin_s`, the start of a step."""
        self.origin_s, self.spans = origin_s, []

    def compute(self, kind: PassKind, stage: int, micro_batch: _WaitingMicroBatch) -> None:
        """Run a pass: sleep for its time and then, with CP, wait for the other CP ranks.

        Passes of weight gradients do not wait, because they exchange no keys and values.
        """
        start_s = time.perf_counter()
        group = None if kind == PassKind.BACKWARD_WEIGHT else self.group
        # Count the sleep from when the last CP rank starts the pass. The predicted time of the pass
        # contains its collectives, so the time of this all-reduce is part of the sleep.
        ready_s = start_s if group is None else _latest(start_s, group)
        _sleep_until(ready_s + float(micro_batch.seconds[kind][stage]))
        if group is not None:
            _latest(start_s, group)
        times_s = (start_s - self.origin_s, time.perf_counter() - self.origin_s)
        self.spans.append(TimedWait(stage, kind, micro_batch.index, *times_s))


def _latest(instant_s: float, group: dist.ProcessGroup | None = None) -> float:
    """Return the latest `instant_s` of the ranks of a group, which all must call this function.

    None means the group of all ranks. Instants of different ranks can be compared, because all
    processes of a machine have the same clock (`time.perf_counter`).
    """
    latest = torch.tensor([instant_s], dtype=torch.float64)
    dist.all_reduce(latest, dist.ReduceOp.MAX, group=group)
    return latest.item()


def _sleep_until(instant_s: float) -> None:
    while (left := instant_s - time.perf_counter()) > 0:
        time.sleep(left)


class _WaitingStage(nn.Module):
    """A pipeline stage whose passes sleep (`_WaitingPass`) instead of computing layers."""

    def __init__(
        self, index: int, job: _ReplaySettings, *, timer: _Timer, queue: WeightQueue | None = None
    ) -> None:
        super().__init__()
        self.index, self.timer, self.queue = index, timer, queue
        self.is_first, self.is_last = index == 0, index == job.spec.num_stages - 1
        self.scale = nn.Parameter(torch.ones(_WIDTH))

    def forward(self, x: Tensor, rows: _WaitingMicroBatch) -> Tensor:
        out: Any = _WaitingPass.apply(x, self.scale, self, rows)
        return out


class _WaitingPass(torch.autograd.Function):
    """Autograd function that sleeps in the forward and backward pass of a stage.

    The output is the input times a weight, so that autograd runs backward of every stage. The last
    stage returns a sum as the loss.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale_C: Tensor, stage: _WaitingStage, micro_batch: _WaitingMicroBatch
    ) -> Tensor:
        ctx.stage, ctx.micro_batch = stage, micro_batch
        ctx.save_for_backward(scale_C)
        ctx.num_rows = x.shape[0]
        stage.timer.compute(PassKind.FORWARD, stage.index, micro_batch)
        out_TC = (x.unsqueeze(1) if stage.is_first else x) * scale_C
        return out_TC.sum() if stage.is_last else out_TC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (scale_C,) = ctx.saved_tensors
        stage: _WaitingStage = ctx.stage
        timer, queue, micro_batch = stage.timer, stage.queue, ctx.micro_batch
        no_grad_C = torch.zeros_like(scale_C)
        kind = PassKind.BACKWARD if queue is None else PassKind.BACKWARD_INPUT
        timer.compute(kind, stage.index, micro_batch)
        if queue is not None:

            def later(_: Tensor | None) -> list[Tensor]:
                timer.compute(PassKind.BACKWARD_WEIGHT, stage.index, micro_batch)
                return [no_grad_C]

            queue.push([stage.scale], later)
        grad_TC = (grads[0] * scale_C).expand(ctx.num_rows, -1)
        own_C = no_grad_C if queue is None else None
        return None if stage.is_first else grad_TC.contiguous(), own_C, None, None


@dataclass(slots=True, kw_only=True)
class _Rank:
    """One rank of a replay, with its stages and pipeline."""

    job: _ReplaySettings
    mesh: Mesh
    timer: _Timer
    stages: list[_WaitingStage]
    pipeline: Pipeline | None  # None for pp = 1, where the rank has one stage

    def run(self, step: StepWaits, *, factor: float) -> _RankTimes:
        """Replay a step once on this rank; return when its passes ran.

        Args:
            step: The sleeping times of all ranks.
            factor: Multiplies the sleeping times; 0 replays the step without sleeping.
        """
        mesh = self.mesh
        num_rows = [int(r) for r in step.rows[mesh.at.dp]]
        tokens = [torch.ones(r, dtype=torch.long) for r in num_rows] if mesh.at.pp == 0 else None
        micro_batches = self._micro_batches(step, factor)
        # Agree on an instant in the near future at which all ranks start. A barrier would not do,
        # because ranks leave it at different times.
        ahead_s = _START_S + _START_PER_RANK_S * mesh.world_size
        start_s = _latest(time.perf_counter()) + ahead_s
        _sleep_until(start_s)
        self.timer.restart(start_s)
        if self.pipeline is None:
            assert tokens is not None
            for tokens_T, micro_batch in zip(tokens, micro_batches, strict=True):
                self.stages[0](tokens_T, rows=micro_batch).backward()
        else:
            self.pipeline.run(tokens, micro_batches, num_rows, train=True)
        dist.all_reduce(torch.ones(1), group=mesh.group("fsdp"))
        stop_s = time.perf_counter() - self.timer.origin_s
        at = (mesh.at.dp, mesh.at.pp, mesh.at.cp)
        return _RankTimes(at, stop_s, self.timer.spans)

    def _micro_batches(self, step: StepWaits, factor: float) -> list[_WaitingMicroBatch]:
        """Return this rank's sleeping times for each micro-batch, multiplied by `factor`."""
        dp, cp = self.mesh.at.dp, self.mesh.at.cp
        kinds = step.by_kind.items()
        return [
            _WaitingMicroBatch(i, {kind: s[dp, i, :, cp] * factor for kind, s in kinds})
            for i in range(step.shape[1])
        ]


def _run_rank(world: World, job: _ReplaySettings, steps: list[StepWaits]) -> list[list[_RankTimes]]:
    """Replay all steps on this rank; return its times for each step and repeat."""
    # `world` is not needed, because build_mesh reads ranks from the process group.
    del world
    rank = _build_rank(job)
    # With torch loaded, a full garbage collection takes 140 ms, so collect only between steps.
    gc.freeze()
    gc.disable()
    seen: list[list[_RankTimes]] = []
    for step in steps:
        rank.run(step, factor=0.0)
        seen.append([rank.run(step, factor=1.0) for _ in range(job.repeats)])
        gc.collect()
    return seen


def _build_rank(job: _ReplaySettings) -> _Rank:
    """Build this rank's mesh, stages and pipeline."""
    device = torch.device("cpu")
    mesh = build_mesh(job.spec.parallel, device)
    timer = _Timer(mesh.group("cp") if mesh.parallel.cp > 1 else None)
    stages = [
        _WaitingStage(
            i, job, timer=timer, queue=WeightQueue() if job.spec.splits_backward else None
        )
        for i in job.spec.stages_of(mesh.at.pp)
    ]
    pipeline = None
    if mesh.parallel.pp > 1:
        pipeline = Pipeline(
            stages=[
                VarLenStage(
                    stage,
                    stage.index,
                    job.spec.num_stages,
                    mesh=mesh,
                    width=_WIDTH,
                    dtype=torch.float32,
                    queue=stage.queue,
                )
                for stage in stages
            ],
            schedule=job.spec.pp.schedule,
            weight_delay=job.spec.pp.weight_delay,
        )
    return _Rank(job=job, mesh=mesh, timer=timer, stages=stages, pipeline=pipeline)

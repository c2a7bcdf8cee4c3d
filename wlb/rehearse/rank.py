"""Rehearse one rank: run the real trainer on fake CUDA tensors.

Most code is that of a real run: the trainer, the mesh, the model, the optimiser, and copying the
state of checkpoints to the host. Fakes replace the feed of plans, threads, the values of weights
and the writing of checkpoints. A process rehearses a single rank.
"""

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from wlb.cost import load_profile, workload_for
from wlb.memory import gpu_budget
from wlb.parallel import build, host, world
from wlb.parallel.compiled import num_graphs
from wlb.parallel.mesh import KV_COPY, Mesh, build_mesh, coordinates
from wlb.plan import PipelinePlan, PlannerState, StepPlan, exchange_of
from wlb.rehearse import cuda, equal_experts
from wlb.rehearse.allocator import reserved
from wlb.rehearse.fake_memory import FOOTPRINT
from wlb.rehearse.gpu import GPU, Communicator
from wlb.rehearse.kernel_times import Prices
from wlb.rehearse.record import Recorder, check_copied
from wlb.rehearse.results import Fault, RankResult, StepResult
from wlb.simulate.peak_memory import peak_of_step
from wlb.spec import RunSpec
from wlb.train import loop
from wlb.train.checkpoint import saver
from wlb.train.job import Job
from wlb.train.prefetch import InputPrefetcher
from wlb.train.refuse import with_backend
from wlb.train.telemetry import ranks as rank_records

Item = tuple[StepPlan, PipelinePlan]
"""The plan of a step, and the part of it that this rank's pipeline executes."""


class PlannedFeed:
    """Replaces `PlanFeed`: yields steps that were planned before the rank's process was forked."""

    def __init__(self, items: list[Item]) -> None:
        self._items, self._at = items, -1
        self.waited_ns = 0

    def next(self) -> Item | None:
        """Return the next step, or None after the last."""
        self._at += 1
        return self._items[self._at] if self._at < len(self._items) else None

    def peek(self, steps_ahead: int) -> list[Item]:
        """Return [the step that comes `steps_ahead` steps later], or [] if there is none."""
        at = self._at + steps_ahead
        return self._items[at : at + 1]

    def close(self) -> None:
        """Do nothing, because this feed has no planner process to end."""


class _InlinePool:
    """Replaces a thread pool: runs each function at once, in the thread that submits it.

    A torch dispatch mode is active only in one thread, so operators in other threads would not be
    recorded.
    """

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args))
        return future

    def shutdown(self, **_: Any) -> None:
        """Do nothing, because this pool has no threads."""


class UnwrittenSaver(saver.CheckpointSaver):
    """Copies the state to the host as a run does, but writes no checkpoint.

    It also checks that the copies from the GPU have ended at the point where a real run's writing
    thread would read the copied values.
    """

    copied: ClassVar[dict[int, int]] = {}
    """Bytes copied to the host for each checkpoint, by the number of steps executed before it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._pool: Any = _InlinePool()

    def _write(self, task: Any) -> saver.Saved:
        num_bytes = 0
        for tensor in task.tensors.values():
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            check_copied(local, task.copied)
            num_bytes += local.numel() * local.element_size()
        self.copied[task.step] = num_bytes
        return saver.Saved(step=task.step, stall_s=0.0, write_s=0.0, num_bytes=num_bytes)


class RehearsedTrainer(loop.Trainer):
    """A run's trainer that takes planned steps from a list, and records a result for each step."""

    items: list[Item]  # the planned steps
    results: list[StepResult]  # results of the steps so far

    def _open_feed(self, state: PlannerState | None) -> tuple[Any, InputPrefetcher]:
        inputs = InputPrefetcher(self.executor, self.reader)
        setattr(inputs, "_pool", _InlinePool())  # noqa: B010
        return PlannedFeed(self.items), inputs

    def _step(self, plan: StepPlan, pipeline: PipelinePlan) -> None:
        # Reset the counters, run the step, and read the counters.
        GPU.step = plan.step
        GPU.parts.clear()
        GPU.exposed_ns.clear()
        before, begin_ns = len(GPU.waits), GPU.streams[0].time_ns
        before_peak, graphs = FOOTPRINT.restart_peak(), num_graphs()
        super()._step(plan, pipeline)
        batches = [batch.num_tokens for batch in pipeline.micro_batches]
        parallel = self.spec.parallel
        longest = equal_experts.most_local_tokens(plan, parallel, self.mesh.at)
        self.results.append(
            StepResult(
                step=plan.step,
                num_tokens=sum(batches),
                longest=max(batches, default=0),
                peak_bytes=FOOTPRINT.peak,
                estimate_bytes=peak_of_step(
                    self.spec,
                    pp_rank=self.mesh.at.pp,
                    tokens=[rows * parallel.cp for rows in longest],
                ),
                parts={name: asdict(part) for name, part in GPU.parts.items()},
                exposed_ns=dict(GPU.exposed_ns),
                time_ns=GPU.streams[0].time_ns - begin_ns,
                host_waits=tuple(GPU.waits[before:]),
                graphs=num_graphs() - graphs,
                exchange=self._exchange(pipeline),
            )
        )
        FOOTPRINT.keep_peak(*before_peak)

    def _exchange(self, pipeline: PipelinePlan) -> str:
        """Return a text that says how CP ranks exchange the keys of the longest micro-batch.

        The text is "" without CP, or if the pipeline has no token in this step.
        """
        tokens = [batch.num_tokens for batch in pipeline.micro_batches]
        if self.spec.parallel.cp == 1 or not sum(tokens):
            return ""
        i = tokens.index(max(tokens))
        cp = self.spec.cp
        return str(
            exchange_of(
                pipeline.shardings[i],
                local_tokens=pipeline.local_tokens[i],
                own_first=cp.overlap,
                stages=cp.stages,
            )
        )


def rehearse_rank(
    rank: int, job: Job, items: Callable[[int], list[Item]], *, traces: bool
) -> RankResult:
    """Run the steps of a job as one of its ranks.

    Args:
        rank: The rank to rehearse.
        job: Job of the run.
        items: Function that returns the steps of a pipeline, given the pipeline's number.
        traces: Whether to record begin and duration of all kernels and transfers.

    Returns:
        What was recorded. If the rank raises an error, `RankResult.faults` has the error.
    """
    began = time.perf_counter()
    if job.calibrate is not None:  # ranks write to the same folder, so their file names must differ
        job = replace(job, calibrate=job.calibrate.with_stem(f"calibrated-{rank}"))
    spec = job.spec
    GPU.traces = traces
    RehearsedTrainer.results = []
    with contextlib.ExitStack() as stack:
        errors: list[Fault] = []
        try:
            _trainer(rank, job, items, stack).run()
        except Exception as error:
            errors = [_fault(rank, error)]
        freed = [Fault(rank=rank, trace="", **found._asdict()) for found in GPU.faults]
        limit = gpu_budget(spec).reservable_bytes
        return RankResult(
            rank=rank,
            coordinates=coordinates(rank, spec.parallel),
            steps=tuple(RehearsedTrainer.results),
            messages=GPU.messages,
            spans=GPU.spans,
            streams=tuple(stream.name for stream in GPU.streams),
            host_waits=tuple(GPU.waits),
            peak_bytes=FOOTPRINT.peak,
            at_peak=FOOTPRINT.at_peak,
            reserved={
                kind: reserved(FOOTPRINT.requests, limit=limit, expandable=kind == "expandable")
                for kind in ("expandable", "segments")
            },
            copied=dict(UnwrittenSaver.copied),
            calibration=_calibration(job),
            faults=(*freed, *errors),
            wall_s=time.perf_counter() - began,
        )


def _trainer(
    rank: int, job: Job, items: Callable[[int], list[Item]], stack: contextlib.ExitStack
) -> RehearsedTrainer:
    """Put fakes in place of what the trainer of a rank uses, and return the trainer.

    Args:
        rank: The rank to rehearse.
        job: Job of the run.
        items: Function that returns the steps of a pipeline, given the pipeline's number.
        stack: Keeps open the context managers that the running trainer needs.
    """
    spec = job.spec
    equal_experts.load_equally(spec)
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    priced = with_backend(spec, "cuda")
    recorder = Recorder(Prices(workload_for(priced, "cuda"), priced.kernels), fakes)
    cuda.use(recorder)
    world_size = spec.parallel.world_size
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    host.new_host_group(spec.training.timeout_s)  # `world.init` does this in a run
    mesh = build_mesh(spec.parallel, cuda.DEVICE, shard_size=spec.fsdp.shard_size, model=spec.model)
    recorder.axes.update(_axes(mesh))
    FOOTPRINT.parameter_shapes = _weight_shapes(spec)
    stack.enter_context(recorder)
    stack.enter_context(_weights_without_values(fakes))
    setattr(loop, "CheckpointSaver", UnwrittenSaver)  # noqa: B010
    # Switch timelines off, because they are built from messages between hosts, which have no
    # content in a rehearsal.
    setattr(rank_records, "TIMELINE_INTERVAL", 0)  # noqa: B010
    RehearsedTrainer.items = items(mesh.at.dp)
    place = world.World(rank=rank, world_size=world_size, master_address="rehearsed", master_port=1)
    return RehearsedTrainer(job, place, mesh)


def _axes(mesh: Mesh) -> dict[str, Communicator]:
    """Return a map from the name of each process group of the mesh to its communicator.

    If several axes share a process group, its communicator is named after the first of these axes.
    """
    named = [(axis, mesh.group(axis)) for axis in ("tp", "cp", "pp", "dp", "fsdp")]
    named += mesh.links.items()
    if mesh.sharding is not mesh.fsdp:
        kinds = mesh.sharding.mesh_dim_names or ()
        named += [(f"fsdp {kind}", mesh.sharding.get_group(kind)) for kind in kinds]
    if mesh.kv_heads is not None:
        named.append((KV_COPY, mesh.kv_heads.get_group(KV_COPY)))
    if mesh.experts is not None:
        named += [(axis, mesh.experts.get_group(axis)) for axis in mesh.expert_axes]
    out: dict[str, Communicator] = {}
    for axis, group in named:
        ranks = tuple(dist.get_process_group_ranks(group))
        out.setdefault(group.group_name, Communicator(axis, ranks))
    return out


def _weight_shapes(spec: RunSpec) -> set[tuple[int, ...]]:
    """Return the shapes of a TP rank's weights before FSDP shards them.

    In backward, a new tensor with such a shape counts as a gradient.
    """
    model, tp = spec.model, spec.parallel.tp
    with_copies = model.with_kv_copies(tp)
    q, kv, ffn = model.q_dim // tp, with_copies.kv_dim // tp, model.ffn_hidden_size // tp
    hidden, vocab = model.hidden_size, model.padded_vocab_size // tp
    dense = {(q, hidden), (kv, hidden), (hidden, q), (ffn, hidden), (hidden, ffn), (vocab, hidden)}
    return dense | equal_experts.weight_shapes(spec) if model.experts.num else dense


@contextlib.contextmanager
def _weights_without_values(fakes: FakeTensorMode) -> Iterator[None]:
    """Within the block, create all weights as fake tensors, so that no random values are drawn."""
    before = build.initial_weight

    def initial_weight(name: str, shape: Any, *_: Any, **__: Any) -> torch.Tensor:
        with fakes:
            return torch.empty(tuple(shape))

    setattr(build, "initial_weight", initial_weight)  # noqa: B010
    try:
        yield
    finally:
        setattr(build, "initial_weight", before)  # noqa: B010


def _calibration(job: Job) -> str:
    """Return a text that says how the calibrated profile was fitted; "" if none was written."""
    if job.calibrate is None or not job.calibrate.exists():
        return ""
    return load_profile(str(job.calibrate)).provenance.source


def _fault(rank: int, error: Exception) -> Fault:
    """Return the record of an error, with the innermost line of wlb in the error's traceback."""
    op, where = GPU.failing or ("", "")
    cause: BaseException = error  # torch's pipeline wraps the original error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    frames = traceback.extract_tb(cause.__traceback__)
    in_wlb = [f for f in frames if "/wlb/" in f.filename and "/rehearse/" not in f.filename]
    if in_wlb:
        where = f"wlb/{in_wlb[-1].filename.rpartition('/wlb/')[2]}:{in_wlb[-1].lineno}"
    text = f"{type(cause).__name__}: {cause}"
    trace = "".join(traceback.format_exception(error))
    return Fault(rank=rank, step=GPU.step, error=text, op=op, where=where, trace=trace)

"""From a spec to running ranks: stores, device, layout, folder, and which processes are the ranks.

Under torchrun or Slurm the ranks are those given; otherwise as many local processes are started as
the layout asks for (a single rank runs in this one). What cannot work is refused before a rank
computes.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from rich.console import Console

from wlb.launch.local import run_local
from wlb.packing import with_s_max
from wlb.parallel import world as worlds
from wlb.parallel.mesh import limit_collectives
from wlb.parallel.world import DeviceChoice, World
from wlb.plan import UserError
from wlb.spec import Recompute, RunSpec, apply, resolve_dp
from wlb.train import checkpoint
from wlb.train.faults.lock import RunLock
from wlb.train.faults.stop import Signals, StoppedEarly, StopRequest
from wlb.train.folder import claim_directory, claiming, refuse_inputs_in
from wlb.train.job import Job, directory_of
from wlb.train.memory import budget_of, hold_against, within
from wlb.train.optimizer import peak_missed, rate_change
from wlb.train.rank import run_rank
from wlb.train.refuse import (
    begins_with,
    computed_by,
    model_change,
    priced_by,
    profile_of,
    refuse_early,
)
from wlb.train.stores import Stores, open_stores, ready
from wlb.train.telemetry.calibrate import profile_path

PREPARE_TIMEOUT_S = 24 * 3600.0
"""How long ranks of torchrun or Slurm wait for rank 0 to make the token store."""
_STOPPED = "stopped by a signal before training began: there is nothing to save"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What a run was started with besides its spec; resume and calibrate as `train` takes them."""

    resume: str | None
    calibrate: str | None
    console: Console
    started_s: float
    signals: Signals


def train(
    spec: RunSpec,
    *,
    resume: str | None,
    console: Console,
    calibrate: str | None = None,
    signals: Signals | None = None,
) -> None:
    """Train a spec to its end.

    resume: what `--resume` was given (`checkpoint.resolve_resume`), None without it.
    calibrate: name or path of a kernel profile to fit and write (empty: a name made from the one
    that priced the run); None to write none. signals: caught already; None to catch them here.
    """
    if calibrate is not None:
        _refuse_calibration(spec)
    with Signals() if signals is None else nullcontext(signals) as caught:
        asked = _Request(
            resume=resume,
            calibrate=calibrate,
            console=console,
            started_s=time.time(),
            signals=caught,
        )
        world = worlds.discover()
        try:
            if world is not None:
                _given_ranks(spec, world, asked)
            else:
                _own_ranks(spec, asked)
        except StoppedEarly:
            console.print(_STOPPED)


def _own_ranks(spec: RunSpec, asked: _Request) -> None:
    """Train in this process, or in as many local ones as the layout has ranks."""
    world_size = spec.parallel.world_size
    choice = worlds.choose_device(spec.run.device, local_ranks=world_size)
    checked = resolve_dp(spec, world_size)
    asked.console.print(_why(checked, choice, None))
    with closing(RunLock(directory_of(checked), asked.console)) as lock:
        job = _claimed_job(checked, world_size, choice, asked, lock)
        if world_size == 1:
            request = StopRequest(checked.run.stop_file, rank=0, signals=asked.signals)
            _started_rank(World(), job, choice.kind, request)
            return
        with tempfile.TemporaryDirectory(prefix="wlb-stop-") as folder:
            told = Path(folder) / "told"
            asked.signals.pass_on(told)
            run_local(
                local_rank,
                world_size,
                job,
                choice.kind,
                told,
                device=choice.kind,
                awaits_report=bool(checked.training.heartbeat_s),
            )


def _given_ranks(spec: RunSpec, world: World, asked: _Request) -> None:
    """Train on the ranks of torchrun or Slurm: rank 0 makes the stores, the others wait for it."""
    choice = worlds.choose_device(
        spec.run.device, local_ranks=world.local_world_size, one_gpu_each=world.one_gpu_each
    )
    checked = resolve_dp(spec, world.world_size)
    device = worlds.rank_device(world, choice.kind)
    # The timeout bounds the rendezvous too, where ranks wait for one that failed before it.
    worlds.init(world, device, timeout_s=spec.training.timeout_s)
    try:
        # Rank 0 may tokenise a corpus for hours while the others wait for its answer.
        limit_collectives(max(PREPARE_TIMEOUT_S, spec.training.timeout_s))
        with closing(RunLock(directory_of(checked), asked.console)) as lock:
            answer: list[Job | str | None] = [None]
            if world.rank == 0:
                asked.console.print(_why(checked, choice, world))
                try:
                    answer = [_claimed_job(checked, world.world_size, choice, asked, lock)]
                # Of any kind: the other ranks wait for this answer.
                except (UserError, OSError) as error:
                    answer = [str(error)]
                except StoppedEarly:
                    asked.console.print(_STOPPED)
            dist.broadcast_object_list(answer, src=0)
            job = answer[0]
            if isinstance(job, str):
                raise UserError(job)
            if job is not None:
                limit_collectives(spec.training.timeout_s)
                request = StopRequest(spec.run.stop_file, rank=world.rank, signals=asked.signals)
                run_rank(world, job, device, request)
    finally:
        worlds.shutdown()


def local_rank(world: World, job: Job, device_kind: str, told: Path | None = None) -> None:
    """Life of a local rank. told: the file its launcher makes when it is asked to stop."""
    with Signals() as signals:
        request = StopRequest(job.spec.run.stop_file, rank=world.rank, signals=signals, told=told)
        _started_rank(world, job, device_kind, request)


def _started_rank(world: World, job: Job, device_kind: str, request: StopRequest) -> None:
    device = worlds.rank_device(world, device_kind)
    worlds.init(world, device, timeout_s=job.spec.training.timeout_s)
    try:
        run_rank(world, job, device, request)
    finally:
        worlds.shutdown()


def _claimed_job(
    spec: RunSpec, world_size: int, choice: DeviceChoice, asked: _Request, lock: RunLock
) -> Job:
    """The job, with its stores made and its folder claimed. StoppedEarly if a signal came."""
    stores = open_stores(spec, asked.console, asked.signals)
    asked.console.print(f"corpus: {stores.note}")
    if lock.directory.exists():
        # Lock first: another process might still write checkpoints, which are read next.
        with claiming(spec):
            lock.take()
    job = _job(spec, stores, world_size, choice, asked)
    asked.signals.check()
    claim_directory(job, asked.console, lock)
    return job


def _job(
    spec: RunSpec,
    stores: Stores,
    world_size: int,
    choice: DeviceChoice,
    asked: _Request,
) -> Job:
    console, calibrate = asked.console, asked.calibrate
    filled = ready(spec, stores, world_size)
    budget = budget_of(filled, choice.kind)
    filled = with_s_max(filled, memory_gib=budget.gib if budget else None)
    filled, lowered = within(filled, budget)
    memory = lowered + hold_against(filled, budget)
    directory = directory_of(spec)
    p = filled.parallel
    title = (
        f"{spec.run.name}: {filled.model.num_parameters / 1e6:.1f}M parameters, TP {p.tp} x "
        f"CP {p.cp} x PP {p.pp} x DP {p.dp} on {choice.kind}, {filled.num_micro_batches} "
        f"micro-batches of about {filled.data.context_window} tokens"
    )
    saved = checkpoint.resolve_resume(directory / "checkpoints", asked.resume)
    init_from = None
    if saved is None:
        init_from = begins_with(spec)
        refuse_inputs_in(directory, spec)
    planner = refuse_early(
        filled,
        train=stores.train,
        heldout=stores.heldout,
        device=choice.kind,
        resume=saved,
        init_from=init_from,
    )
    for line in memory:
        console.print(line)
    console.print(computed_by(filled, choice.kind))
    console.print(priced_by(planner))
    if init_from is not None:
        console.print(f"weights of {init_from}")
    begun = saved or init_from
    if begun is not None and (change := model_change(filled.model, begun)):
        console.print(change)
    for line in _rates(filled, saved):
        console.print(line)
    target: Path | None = None
    if calibrate is not None:
        target = profile_path(
            calibrate, priced_by=profile_of(planner).name, folder=Path(spec.run.output_dir)
        )
    return Job(
        spec=filled,
        train_store=stores.train,
        heldout_store=stores.heldout,
        resume=saved,
        title=title,
        started_s=asked.started_s,
        calibrate=target,
        init_from=init_from,
    )


def _rates(spec: RunSpec, saved: Path | None) -> Iterator[str]:
    """Lines for the log about surprises in the learning rate."""
    if missed := peak_missed(spec):
        yield missed
    if saved is None:
        return
    run = checkpoint.read_run(saved)
    before = apply(
        RunSpec(), {"training": run["spec"]["training"]}, source=str(saved), is_stored=True
    ).training
    if change := rate_change(spec, before, run["step"]):
        yield change


def _refuse_calibration(spec: RunSpec) -> None:
    telemetry, steps, recompute = spec.telemetry, spec.training.steps, spec.training.recompute
    if not telemetry.enabled:
        raise UserError("--calibrate needs measured times; set telemetry.enabled = true")
    if steps <= telemetry.warmup_steps:
        raise UserError(
            f"--calibrate: training.steps = {steps} are all warm-up (telemetry.warmup_steps = "
            f"{telemetry.warmup_steps}); train more steps"
        )
    if recompute != Recompute.NONE:
        raise UserError(
            f"--calibrate fits forward and backward apart, but with training.recompute = "
            f"{recompute} backward holds forward work; set training.recompute = none (with a "
            f"shorter data.context_window if that does not fit)"
        )


def _why(spec: RunSpec, choice: DeviceChoice, world: World | None) -> str:
    p = spec.parallel
    layout = f"TP {p.tp} x CP {p.cp} x PP {p.pp} x DP {max(1, p.dp)}"
    if world is not None:
        ranks = f"{world.world_size} ranks given by {world.origin}"
    elif p.world_size == 1:
        ranks = "1 rank in this process (not started by torchrun or Slurm)"
    else:
        ranks = f"{p.world_size} local ranks (not started by torchrun or Slurm)"
    backend = "NCCL" if choice.kind == "cuda" else "Gloo"
    return f"{ranks} for {layout}; {choice.kind} with {backend}: {choice.reason}"

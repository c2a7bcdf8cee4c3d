"""From a spec to running ranks: stores, device, layout, folder, and which processes are the ranks.

Under torchrun or Slurm the ranks are those given; otherwise as many local processes are started as
the layout needs (a single rank runs in this one). A run that cannot work is refused before a rank
computes.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console

from wlb.data.folder import refuse_nowhere
from wlb.data.leftovers import temporary_folder
from wlb.launch.failure import new_records, records_of
from wlb.launch.local import run_local
from wlb.launch.report import FLIGHT_RECORDS, LOGS, compose_report, keep_report
from wlb.packing import with_s_max
from wlb.parallel import world as worlds
from wlb.parallel.host import host_group
from wlb.parallel.mesh import build_mesh, limit_collectives
from wlb.parallel.wait_signals import ended_by_signals
from wlb.parallel.world import DeviceChoice, World
from wlb.plan import UserError
from wlb.plan.tally import Tally
from wlb.planner import Planner
from wlb.spec import Device, Recompute, RunSpec, apply, resolve_dp
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.checkpoint.room import hold_room, strays_remark
from wlb.train.checkpoint.saves import unsaved_remark
from wlb.train.checkpoint.shared_folder import refuse_unshared
from wlb.train.faults.lock import RunLock
from wlb.train.faults.recorded_rank import recorded
from wlb.train.faults.stop import Signals, StoppedEarly, StopRequest
from wlb.train.folder import claim_directory, claiming, refuse_inputs_in
from wlb.train.job import Job, directory_of
from wlb.train.loop import Trainer
from wlb.train.memory_check import budget_of, given_beyond, hold_against, measured_budget, within
from wlb.train.optimizer import peak_missed, rate_change
from wlb.train.refuse import (
    Probe,
    computed_by,
    model_change,
    priced_by,
    priced_workload,
    probe_here,
    refuse_early,
)
from wlb.train.refuse_inputs import begins_with
from wlb.train.stores import Stores, open_stores, ready
from wlb.train.telemetry.calibrate import profile_path

PREPARE_TIMEOUT_S = 24 * 3600.0
"""How long ranks of torchrun or Slurm wait for rank 0 to make the token store."""
_STOPPED = "stopped by a signal before training began: there is nothing to save"


class _Request(NamedTuple):
    """Arguments of a run besides its spec; resume and calibrate as `train` takes them."""

    resume: str | None
    calibrate: str | None
    console: Console
    started_s: float
    signals: Signals
    verbose: bool = False


def train(
    spec: RunSpec,
    *,
    resume: str | None,
    console: Console,
    calibrate: str | None = None,
    signals: Signals | None = None,
    started_s: float | None = None,
    verbose: bool = False,
) -> bool:
    """Train a spec to its end.

    Args:
        spec: The run.
        resume: Value of this option; None without it.
        console: What is printed on.
        calibrate: Value of this option; None without it.
        signals: Those that are caught already; None: none are.
        started_s: Unix time at which the command began; None: now.
        verbose: Whether all columns of steps, and all rows of the summary, are shown.

    Returns:
        Whether the run was asked to end before its last step. Always false on ranks of torchrun or
        Slurm.
    """
    started_s = time.time() if started_s is None else started_s
    if calibrate is not None:
        _refuse_calibration(spec)
        refuse_nowhere(Path(calibrate).parent)
    with Signals(answers=True) if signals is None else nullcontext(signals) as caught:
        asked = _Request(resume, calibrate, console, started_s, caught, verbose)
        world = worlds.discover()
        try:
            if world is None:
                return _own_ranks(spec, asked)
            _given_ranks(spec, world, asked)
        except StoppedEarly:
            console.print(_STOPPED)
            return world is None
    return False


def _own_ranks(spec: RunSpec, asked: _Request) -> bool:
    """Train in this process, or in as many local ones as the layout has ranks; whether the run was
    asked to end early.
    """
    world_size = spec.parallel.world_size
    choice = worlds.choose_device(spec.run.device, local_ranks=world_size)
    checked = resolve_dp(spec, world_size)
    asked.console.print(_why(checked, choice, None))
    directory = directory_of(checked)
    with asked.signals.early(), closing(RunLock(directory, asked.console)) as lock:
        apart = world_size > 1 and choice.kind == "cuda"
        probe = _in_own_process if apart else probe_here
        job = _claimed_job(checked, world_size, choice, asked, lock, probe)
        if world_size == 1:
            request = StopRequest(checked.run, rank=0, signals=asked.signals)
            return _started_rank(World(), job, choice.kind, request)
        with temporary_folder("stop") as folder:
            told = folder / "told"
            asked.signals.pass_on(told)
            stopped = run_local(
                local_rank,
                world_size,
                job,
                choice.kind,
                told,
                device=choice.kind,
                preload=[__name__],
                records=records_of(directory, job.started_s),
            )
        return any(stopped)


def _given_ranks(spec: RunSpec, world: World, asked: _Request) -> None:
    """Train on the ranks of torchrun or Slurm: rank 0 makes the stores, the others wait for it."""
    choice = worlds.choose_device(
        spec.run.device, local_ranks=world.local_world_size, one_gpu_each=world.one_gpu_each
    )
    checked = resolve_dp(spec, world.world_size)
    device = worlds.rank_device(world, choice.kind)
    _keep_flight_records(directory_of(checked), choice.kind)
    with ExitStack() as waiting:
        waiting.enter_context(ended_by_signals(was_asked=asked.signals.came))
        # The timeout bounds the rendezvous too, where ranks wait for one that failed before it.
        with (
            worlds.in_group(world, device, timeout_s=spec.training.timeout_s),
            closing(RunLock(directory_of(checked), asked.console)) as lock,
        ):
            # Rank 0 may tokenise a corpus for hours while the others wait for its answer.
            limit_collectives(max(PREPARE_TIMEOUT_S, spec.training.timeout_s))
            answer: list[Job | str | None] = [None]
            if world.rank == 0:
                waiting.close()
                asked.console.print(_why(checked, choice, world))
                answer = [_answer(checked, world, choice, asked, lock)]
            dist.broadcast_object_list(answer, src=0, group=host_group())
            waiting.close()
            job = answer[0]
            if isinstance(job, Job):
                limit_collectives(spec.training.timeout_s)
                request = StopRequest(spec.run, rank=world.rank, signals=asked.signals)
                run_rank(world, job, device, request)
    if isinstance(job, str):
        raise UserError(job)


def _answer(
    spec: RunSpec, world: World, choice: DeviceChoice, asked: _Request, lock: RunLock
) -> Job | str | None:
    """What rank 0 tells the others, which wait for it: the job, a refusal, or None for a signal."""
    try:
        with asked.signals.early():
            return _claimed_job(spec, world.world_size, choice, asked, lock, probe_here)
    except (UserError, OSError) as error:
        return str(error)
    except StoppedEarly:
        asked.console.print(_STOPPED)
        return None


def local_rank(world: World, job: Job, device_kind: str, told: Path | None = None) -> bool:
    """Life of a local rank; whether the run was asked to end early. told: the file its launcher
    makes when it is asked to stop.
    """
    _keep_flight_records(job.directory, device_kind)
    with Signals() as signals:
        request = StopRequest(job.spec.run, rank=world.rank, signals=signals, told=told)
        return _started_rank(world, job, device_kind, request)


def _started_rank(world: World, job: Job, device_kind: str, request: StopRequest) -> bool:
    device = worlds.rank_device(world, device_kind)
    with worlds.in_group(world, device, timeout_s=job.spec.training.timeout_s):
        return bool(run_rank(world, job, device, request).stopped)


def _keep_flight_records(directory: Path, device_kind: str) -> None:
    """Have NCCL write its last operations to the run's logs when a collective times out."""
    if device_kind == "cuda":
        worlds.set_flight_records(str(directory / LOGS / FLIGHT_RECORDS))


def _in_own_process(fn: Callable[..., Any], *args: Any) -> Any:
    """The result of `fn` from a process that ends, and with it its context on a GPU (0.5 GiB): a
    launcher that made one would hold it, beside those of its ranks, until the run ends.
    """
    (result,) = run_local(_told, 1, fn, args, device="cuda", preload=[__name__])
    if isinstance(result, UserError):
        raise result
    return result


def _told(_: World, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return fn(*args)
    except UserError as error:
        return error


def _claimed_job(
    spec: RunSpec,
    world_size: int,
    choice: DeviceChoice,
    asked: _Request,
    lock: RunLock,
    probe: Probe,
) -> Job:
    """The job, with its stores made and its folder claimed."""
    # A corpus may take hours to tokenise, for nothing where the run's folder cannot be.
    refuse_nowhere(lock.directory)
    stores = open_stores(spec, asked.console)
    asked.console.print(f"corpus: {stores.note}")
    if lock.directory.exists():
        # The folder is locked first, because another process might still write the checkpoints that
        # are read next.
        with claiming(spec):
            lock.take()
        _tell_failure(lock.directory, asked.console)
    job = _job(spec, stores, world_size, choice, asked, probe)
    claim_directory(job, asked.console, lock)
    new_records(job.directory, job.started_s)
    return job


def _tell_failure(directory: Path, console: Console) -> None:
    """Say what ended the run's last start, if it failed; the lock says that it is over."""
    try:
        report = compose_report(directory)
    # Whatever is wrong with old records must not keep a run from going on.
    except Exception as error:
        line = f"what ended the last start of this run cannot be read: {error!r}"
        console.print(line, markup=False)
        return
    if report is not None:
        keep_report(directory, report)
        text = f"the last start of this run failed: {report.text}"
        console.print(text, markup=False, soft_wrap=True)


def _job(
    spec: RunSpec,
    stores: Stores,
    world_size: int,
    choice: DeviceChoice,
    asked: _Request,
    probe: Probe,
) -> Job:
    console = asked.console
    filled = ready(spec, stores, world_size)
    budget = budget_of(filled, choice.kind)
    measured = measured_budget(filled) if choice.kind == "cuda" else None
    # Plans count on what is there, whatever the run may take before it is refused.
    least = min((b for b in (budget, measured) if b), key=lambda b: b.gib, default=None)
    filled = with_s_max(filled, planned_gib=least.planned_gib if least else None)
    filled, lowered = within(filled, least)
    memory = given_beyond(filled, measured) + lowered + hold_against(filled, budget)
    directory = directory_of(spec)
    saved, passed_over, falls_back = _resumed(spec, asked)
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
        probe=probe,
    )
    begun = saved or init_from
    room = hold_room(directory / "checkpoints", filled, saved)
    for line in (
        *(f"WARNING: {why}" for why in passed_over),
        *room,
        strays_remark(saved) if saved else "",
        *memory,
        computed_by(filled, choice.kind, probe),
        priced_by(planner),
        f"weights of {init_from}" if init_from else "",
        model_change(filled.model, begun) if begun else "",
        unsaved_remark(filled, saved),
        peak_missed(filled),
        _rate_change(filled, saved) if saved else "",
    ):
        if line:
            console.print(line)
    return Job(
        spec=filled,
        train_store=stores.train,
        heldout_store=stores.heldout,
        resume=saved,
        title=_title(filled, choice.kind),
        started_s=asked.started_s,
        ready_s=time.time(),
        calibrate=_profile_to_write(spec, asked, planner),
        init_from=init_from,
        falls_back=falls_back,
        verbose=asked.verbose,
    )


def _profile_to_write(spec: RunSpec, asked: _Request, planner: Planner) -> Path | None:
    if asked.calibrate is None:
        return None
    return profile_path(
        asked.calibrate,
        priced_by=priced_workload(planner).profile.name,
        folder=Path(spec.run.output_dir),
    )


def _title(spec: RunSpec, device: str) -> str:
    p = spec.parallel
    return (
        f"{spec.run.name}: {spec.model.num_parameters / 1e6:.1f}M parameters, TP {p.tp} x "
        f"CP {p.cp} x PP {p.pp} x DP {p.dp} on {device}, {spec.num_micro_batches} "
        f"micro-batches of about {spec.data.context_window} tokens"
    )


def _resumed(spec: RunSpec, asked: _Request) -> checkpoint.ToResume:
    folder = directory_of(spec) / "checkpoints"
    return checkpoint.resolve_resume(folder, asked.resume)


def _rate_change(spec: RunSpec, saved_in: Path) -> str:
    run = checkpoint.read_run(saved_in)
    saved = {"training": run["spec"]["training"]}
    before = apply(RunSpec(), saved, source=str(saved_in), is_stored=True)
    return rate_change(spec, before.training, run["step"])


def _refuse_calibration(spec: RunSpec) -> None:
    telemetry, steps, recompute = spec.telemetry, spec.training.steps, spec.training.recompute
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
    why = f"{ranks} for {layout}; {choice.kind} with {backend}: {choice.reason}"
    is_meant_for_gpus = spec.run.device == Device.AUTO and spec.cost.profile not in ("auto", "cpu")
    if choice.kind == "cpu" and is_meant_for_gpus:
        return (
            f"This machine does not have the GPUs that {spec.run.name} is meant for, so it will be "
            f"slow here; --dry-run predicts it for them. {why}"
        )
    return why


def run_rank(world: World, job: Job, device: torch.device, request: StopRequest) -> Tally:
    """Train `job` on this rank; all ranks call it together."""
    if job.calibrate is not None and device.type == "cpu":
        # Profiles are measured with one thread, whose CPU time is the work done.
        torch.set_num_threads(1)
    spec = job.spec
    if world.world_size > 1:
        refuse_unshared(
            job.directory,
            world,
            within_s=min(checkpoint.SEEN_WITHIN_S, spec.training.timeout_s / 2),
        )
    mesh = build_mesh(spec.parallel, device, shard_size=spec.fsdp.shard_size, model=spec.model)
    limit_collectives(spec.training.timeout_s)
    limit_collectives(spec.training.timeout_s, mesh)
    records = records_of(job.directory, job.started_s)
    with recorded(job.directory, records, world=world, mesh=mesh) as position:
        return Trainer(job, world, mesh, position, request).run()

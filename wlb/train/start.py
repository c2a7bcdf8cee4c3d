"""Starts a training run: makes its token stores, claims its folder, and starts or joins its ranks.

Under torchrun or Slurm, the processes that the launcher started are the ranks. Otherwise this
process starts as many local ranks as the layout needs, or is itself the only rank. A run that
cannot work is refused before any rank computes.
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
from wlb.train.checkpoint.room import check_disk_space, strays_remark
from wlb.train.checkpoint.saves import unsaved_remark
from wlb.train.checkpoint.shared_folder import refuse_unshared
from wlb.train.faults.lock import RunLock
from wlb.train.faults.recorded_rank import recorded
from wlb.train.faults.stop import Signals, StoppedEarly, StopRequest
from wlb.train.folder import claim_directory, claiming, refuse_inputs_in
from wlb.train.job import Job, directory_of
from wlb.train.loop import Trainer
from wlb.train.memory_check import budget_of, check_budget, given_beyond, measured_budget, within
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
"""Seconds that ranks of torchrun or Slurm wait for rank 0 to make the token store.

The limit is a day, because rank 0 may have to tokenise a large corpus."""
_STOPPED = "stopped by a signal before training began, so there is nothing to save"


class _Request(NamedTuple):
    """The arguments of `wlb train` besides the spec."""

    resume: str | None  # value of --resume; None if the option was not given
    calibrate: str | None  # value of --calibrate; None if the option was not given
    console: Console  # where messages are printed
    started_s: float  # Unix time at which the command began
    signals: Signals  # handles signals from the beginning of the command
    # Whether all columns of the table of steps and all rows of the summary are shown.
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
    """Run the training that `spec` describes, until it ends or is stopped.

    Args:
        spec: The run.
        resume: Value of the option --resume; None if it was not given.
        console: Where messages are printed.
        calibrate: Value of the option --calibrate; None if it was not given.
        signals: The handler of signals, if the caller has installed one; None installs one here.
        started_s: Unix time at which the command began; None means now.
        verbose: Whether all columns of the table of steps and all rows of the summary are shown.

    Returns:
        Whether a signal or a stop file ended the run before its last step. The caller turns True
            into an exit status other than 0. Under torchrun and Slurm the result is always False,
            because these launchers would report such a status as a failure.
    """
    started_s = time.time() if started_s is None else started_s
    if calibrate is not None:
        _refuse_calibration(spec)
        refuse_nowhere(Path(calibrate).parent)
    with Signals(answers=True) if signals is None else nullcontext(signals) as caught:
        request = _Request(resume, calibrate, console, started_s, caught, verbose)
        world = worlds.discover()
        try:
            if world is None:
                return _start_ranks(spec, request)
            _join_ranks(spec, world, request)
        except StoppedEarly:
            console.print(_STOPPED)
            return world is None
    return False


def _start_ranks(spec: RunSpec, request: _Request) -> bool:
    """Train in this process if the layout has one rank, else in one local process for each rank.

    Returns:
        Whether a signal or a stop file ended the run early.
    """
    world_size = spec.parallel.world_size
    choice = worlds.choose_device(spec.run.device, local_ranks=world_size)
    checked = resolve_dp(spec, world_size)
    request.console.print(_describe_ranks(checked, choice, None))
    directory = directory_of(checked)
    with request.signals.early(), closing(RunLock(directory, request.console)) as lock:
        # A process that starts local ranks must not create a CUDA context, because the context
        # would take GPU memory until the run ends. So checks that use a GPU are made in a child
        # process.
        starts_gpu_ranks = world_size > 1 and choice.kind == "cuda"
        probe = _in_new_process if starts_gpu_ranks else probe_here
        job = _claimed_job(checked, world_size, choice, request, lock, probe)
        if world_size == 1:
            stop_request = StopRequest(checked.run, rank=0, signals=request.signals)
            return _started_rank(World(), job, choice.kind, stop_request)
        with temporary_folder("stop") as folder:
            signal_file = folder / "signal"
            request.signals.pass_on(signal_file)
            stopped = run_local(
                local_rank,
                world_size,
                job,
                choice.kind,
                signal_file,
                device=choice.kind,
                preload=[__name__],
                records=records_of(directory, job.started_s),
            )
        return any(stopped)


def _join_ranks(spec: RunSpec, world: World, request: _Request) -> None:
    """Train on this rank, which torchrun or Slurm has started.

    Rank 0 makes the token stores and claims the run's folder, while the other ranks wait.
    """
    choice = worlds.choose_device(
        spec.run.device, local_ranks=world.local_world_size, one_gpu_each=world.one_gpu_each
    )
    checked = resolve_dp(spec, world.world_size)
    device = worlds.rank_device(world, choice.kind)
    _keep_flight_records(directory_of(checked), choice.kind)
    with ExitStack() as waiting:
        waiting.enter_context(ended_by_signals(was_asked=request.signals.came))
        # This timeout also limits the rendezvous. Without a limit, ranks would wait there forever
        # for a rank that has failed.
        with (
            worlds.in_group(world, device, timeout_s=spec.training.timeout_s),
            closing(RunLock(directory_of(checked), request.console)) as lock,
        ):
            # Raise the timeout, because rank 0 may tokenise a corpus for hours before the
            # broadcast.
            limit_collectives(max(PREPARE_TIMEOUT_S, spec.training.timeout_s))
            answer: list[Job | str | None] = [None]
            if world.rank == 0:
                waiting.close()
                request.console.print(_describe_ranks(checked, choice, world))
                answer = [_answer(checked, world, choice, request, lock)]
            dist.broadcast_object_list(answer, src=0, group=host_group())
            waiting.close()
            job = answer[0]
            if isinstance(job, Job):
                limit_collectives(spec.training.timeout_s)
                stop_request = StopRequest(spec.run, rank=world.rank, signals=request.signals)
                run_rank(world, job, device, stop_request)
    if isinstance(job, str):
        raise UserError(job)


def _answer(
    spec: RunSpec, world: World, choice: DeviceChoice, request: _Request, lock: RunLock
) -> Job | str | None:
    """Prepare the run on rank 0, and return the answer that rank 0 broadcasts to the other ranks.

    Returns:
        The job; or the text of an error, if the run cannot start; or None, if a signal has arrived.
    """
    try:
        with request.signals.early():
            return _claimed_job(spec, world.world_size, choice, request, lock, probe_here)
    except (UserError, OSError) as error:
        return str(error)
    except StoppedEarly:
        request.console.print(_STOPPED)
        return None


def local_rank(world: World, job: Job, device_kind: str, signal_file: Path | None = None) -> bool:
    """Run the training on one local rank, in a process that `_start_ranks` launched.

    Args:
        world: This rank's place among the local ranks.
        job: The arguments that every rank of the run gets.
        device_kind: "cpu" or "cuda".
        signal_file: The file that the launching process creates when it gets a signal. None if
            there is no such file.

    Returns:
        Whether a signal or a stop file ended the run early.
    """
    _keep_flight_records(job.directory, device_kind)
    with Signals() as signals:
        stop_request = StopRequest(
            job.spec.run, rank=world.rank, signals=signals, signal_file=signal_file
        )
        return _started_rank(world, job, device_kind, stop_request)


def _started_rank(world: World, job: Job, device_kind: str, stop_request: StopRequest) -> bool:
    device = worlds.rank_device(world, device_kind)
    with worlds.in_group(world, device, timeout_s=job.spec.training.timeout_s):
        return bool(run_rank(world, job, device, stop_request).stopped)


def _keep_flight_records(directory: Path, device_kind: str) -> None:
    """Let torch write the last NCCL operations to the run's logs when a collective times out.

    Does nothing unless `device_kind` is "cuda".
    """
    if device_kind == "cuda":
        worlds.set_flight_records(str(directory / LOGS / FLIGHT_RECORDS))


def _in_new_process(fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn(*args)` in a new process, and return the result. The process then ends.

    This frees the CUDA context (0.5 GiB) that `fn` creates. If this process called `fn` itself, its
    context would exist until the run ends, in addition to the contexts of the ranks.
    """
    (result,) = run_local(_result_or_error, 1, fn, args, device="cuda", preload=[__name__])
    if isinstance(result, UserError):
        raise result
    return result


def _result_or_error(_: World, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return the result of `fn(*args)`, or the UserError that the call raises.

    As a result, a UserError reaches the launching process unchanged. Any other error is raised, and
    the launching process reports it as the failure of a rank.
    """
    try:
        return fn(*args)
    except UserError as error:
        return error


def _claimed_job(
    spec: RunSpec,
    world_size: int,
    choice: DeviceChoice,
    request: _Request,
    lock: RunLock,
    probe: Probe,
) -> Job:
    """Make the token stores, claim the run's folder, and return the job.

    Args:
        spec: The run.
        world_size: Number of ranks.
        choice: The kind of device of the ranks.
        request: The other arguments of `wlb train`.
        lock: Lock of the run's folder.
        probe: Calls the checks that use a GPU, in this process or in a child process.
    """
    # Check the folder first, because making the stores may take hours.
    refuse_nowhere(lock.directory)
    stores = open_stores(spec, request.console)
    request.console.print(f"corpus: {stores.note}")
    if lock.directory.exists():
        # Lock the folder before its checkpoints are read, because another process may be writing
        # them.
        with claiming(spec):
            lock.take()
        _report_last_failure(lock.directory, request.console)
    job = _job(spec, stores, world_size, choice, request, probe)
    claim_directory(job, request.console, lock)
    new_records(job.directory, job.started_s)
    return job


def _report_last_failure(directory: Path, console: Console) -> None:
    """Print why the most recent start of this run failed, if it failed.

    The caller must have locked the run's folder, so that no process of that start still runs.
    """
    try:
        report = compose_report(directory)
    # Damaged records of an earlier start must not keep a run from resuming.
    except Exception as error:
        line = (
            "the records of the last start of this run cannot be read, so this start does not say "
            f"why that one failed: {error!r}"
        )
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
    request: _Request,
    probe: Probe,
) -> Job:
    """Check that the run can work, print what the checks have found, and return the job.

    The function fills in derived values, compares the estimated memory with the memory of the
    device, and finds the checkpoint with which the run begins. Then it refuses a run that cannot
    work, checks the disk space, and prints one line for each finding. `probe` calls the checks that
    use a GPU, in this process or in a child process.
    """
    console = request.console
    # Fill in the vocabulary size, the data-parallel size and the limits that depend on memory.
    filled = ready(spec, stores, world_size)
    budget = budget_of(filled, choice.kind)
    measured = measured_budget(filled) if choice.kind == "cuda" else None
    # `budget` may come from cluster.memory_gib, and `measured` from the GPU. Plans use the smaller
    # one, so they never use more memory than the GPU has.
    least = min((b for b in (budget, measured) if b), key=lambda b: b.gib, default=None)
    filled = with_s_max(filled, planned_gib=least.planned_gib if least else None)
    filled, lowered = within(filled, least)
    memory = given_beyond(filled, measured) + lowered + check_budget(filled, budget)
    directory = directory_of(spec)
    # Find the checkpoint from which the run resumes, or whose weights it begins with.
    saved, passed_over, falls_back = _resumed(spec, request)
    init_from = None
    if saved is None:
        # checkpoint.init_from is for new runs only. A resumed run continues with the weights of its
        # own checkpoint.
        init_from = begins_with(spec)
        refuse_inputs_in(directory, spec)
    # Refuse a run that cannot work now, before any rank starts.
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
    disk_space = check_disk_space(directory / "checkpoints", filled, saved)
    # Print the findings in the order of their importance to a reader.
    for line in (
        *(f"WARNING: {why}" for why in passed_over),
        *disk_space,
        strays_remark(saved) if saved else "",
        *memory,
        computed_by(filled, choice.kind, probe),
        priced_by(planner),
        f"the run begins with the weights of {init_from}" if init_from else "",
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
        started_s=request.started_s,
        ready_s=time.time(),
        calibrate=_profile_to_write(spec, request, planner),
        init_from=init_from,
        falls_back=falls_back,
        verbose=request.verbose,
    )


def _profile_to_write(spec: RunSpec, request: _Request, planner: Planner) -> Path | None:
    """Return the path of the kernel profile that --calibrate writes; None without --calibrate."""
    if request.calibrate is None:
        return None
    return profile_path(
        request.calibrate,
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


def _resumed(spec: RunSpec, request: _Request) -> checkpoint.ToResume:
    """Return the checkpoint that --resume selects, and which damaged ones were skipped.

    If the run has no checkpoint, --resume auto begins a new run, and other values are refused.
    """
    folder = directory_of(spec) / "checkpoints"
    return checkpoint.resolve_resume(folder, request.resume)


def _rate_change(spec: RunSpec, saved_in: Path) -> str:
    """Return a warning if the learning rate jumps when the run resumes from `saved_in`, or ""."""
    run = checkpoint.read_run(saved_in)
    saved = {"training": run["spec"]["training"]}
    before = apply(RunSpec(), saved, source=str(saved_in), is_stored=True)
    return rate_change(spec, before.training, run["step"])


def _refuse_calibration(spec: RunSpec) -> None:
    """Raise UserError if --calibrate could not fit a kernel profile to the times of this run."""
    telemetry, steps, recompute = spec.telemetry, spec.training.steps, spec.training.recompute
    if steps <= telemetry.warmup_steps:
        raise UserError(
            f"--calibrate needs measured steps, but all of training.steps = {steps} "
            "belong to the warm-up (telemetry.warmup_steps = "
            f"{telemetry.warmup_steps}); set training.steps to more than "
            "telemetry.warmup_steps"
        )
    if recompute != Recompute.NONE:
        raise UserError(
            "--calibrate needs training.recompute = none, because with "
            f"training.recompute = {recompute} the backward pass includes forward "
            "work; set training.recompute = none, with a shorter data.context_window "
            "if memory does not suffice"
        )


def _describe_ranks(spec: RunSpec, choice: DeviceChoice, world: World | None) -> str:
    """Return text for the log: the ranks, the kind of device, and why it was chosen.

    `world` is this rank's place among the ranks that a launcher such as torchrun started; None if
    wlb starts the ranks itself.
    """
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
            f"This machine does not have the GPUs for which {spec.run.name} is "
            "configured, so the run will be slow. To predict its time on those GPUs, use "
            f"--dry-run. {why}"
        )
    return why


def run_rank(world: World, job: Job, device: torch.device, stop_request: StopRequest) -> Tally:
    """Train a job on this rank. All ranks call this function together.

    Args:
        world: This rank's place among the processes of the launcher.
        job: The arguments that every rank of the run gets.
        device: This rank's device.
        stop_request: Notices signals and stop files that ask the run to end.

    Returns:
        Sums over the trained steps, from which the summary is made.
    """
    if job.calibrate is not None and device.type == "cpu":
        # Profiles of CPUs are measured with one thread, so the times to which a profile is fitted
        # must come from one thread too.
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
    # If this rank fails in the block, `recorded` writes a record that says what it was doing.
    with recorded(job.directory, records, world=world, mesh=mesh) as position:
        return Trainer(job, world, mesh, position, stop_request).run()

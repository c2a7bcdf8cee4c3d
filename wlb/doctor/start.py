"""Examines the machines of a run with many checks, and shows the findings in one table.

The checks run on the ranks that torchrun or Slurm started, on local ranks, or in this process
alone. Each check is a small function that returns a `Finding`. First each rank examines its node.
Then all ranks examine the connections between them. Rank 0 gathers and shows all findings.
"""

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from wlb.cost import KernelProfile, workload_for
from wlb.doctor import attention, folder, gpu, host, load, network, times
from wlb.doctor.facts import Facts, Patient, facts_of
from wlb.doctor.finding import Finding, Verdict, failed, is_failed, merged, ranges, skipped
from wlb.doctor.limit import GRACE_S, StageLimit
from wlb.launch.local import run_local
from wlb.parallel import world as worlds
from wlb.parallel.build import fused_of, kernel_of
from wlb.parallel.host import host_group
from wlb.parallel.mesh import build_mesh, limit_collectives
from wlb.parallel.world import World
from wlb.plan import UserError
from wlb.spec import RunSpec, check, resolve_dp
from wlb.train.refuse import with_backend

MOST_LOCAL_RANKS = 16
"""Most local ranks that are started on a CPU.

If the layout has more ranks, this process examines the machine alone. The value is chosen so that
a login node, which is not meant for computing, can bear so many processes."""
# What the user can do if ranks do not answer.
LOOK = "see the logs of these ranks' nodes (srun's output, dmesg), or leave the nodes out"
# Names of the first two stages of an examination.
START = "start"
FIRST_COLLECTIVE = "first collective"
HOST = socket.gethostname()
# What the user can do if a check raised an error.
CRASHED = "report this line as a bug of wlb: the check itself failed"
Show = Callable[[Sequence[Finding]], None]

# Checks that each rank makes on its node without other ranks, in the order in which the printed
# table lists them.
NODE_CHECKS: tuple[Callable[[Patient], Finding], ...] = (
    gpu.driver,
    gpu.nvlink,
    host.numa,
    host.descriptors,
    host.memory,
    host.shared_memory,
    host.disk,
    folder.token_stores,
    gpu.memory_errors,
)


class Options(NamedTuple):
    """What an examination measures, and how it shows its findings."""

    is_quick: bool  # whether to make fewer and smaller measurements, in about ten seconds
    # Seconds that each stage of the examination may take, such as making the communicators.
    limit_s: float
    # Function that prints findings. It must be picklable, because it is sent to local ranks.
    show: Show


@dataclass(slots=True, kw_only=True)
class RankReport:
    """Findings and measurements of one rank."""

    # Results of the checks that this rank made.
    findings: list[Finding] = field(default_factory=list[Finding])
    # Measurements of this rank's communicators, one each.
    timings: list[network.GroupTiming] = field(default_factory=list[network.GroupTiming])
    tflops: float = 0.0  # TFLOP/s in matrix products; 0 if not measured
    # Seconds from this rank's start until the last rank had started (`wait_for_all`).
    wait_s: float = 0.0


def examine(spec: RunSpec, options: Options) -> bool:
    """Examine the machines for a run, and show the findings.

    Under torchrun or Slurm, the processes that the launcher started are the ranks. Otherwise local
    ranks are started, if this machine has enough devices for the layout. If it has too few, this
    process alone examines the machine and skips the checks between ranks.

    Args:
        spec: The run.
        options: What to measure, and how to show the findings.

    Returns:
        False if a check failed on any rank. All ranks return the same value.

    Raises:
        UserError: If the layout does not fit the number of ranks that the launcher started.
    """
    world = worlds.discover()
    if world is not None:
        return examine_rank(world, _filled(spec, world.world_size), options)
    spec = _filled(spec, spec.parallel.world_size)
    num_ranks = spec.parallel.world_size
    kind, _ = _device_kind(spec, World(local_world_size=1))
    most = torch.cuda.device_count() if kind == "cuda" else MOST_LOCAL_RANKS
    if 1 < num_ranks <= most:
        return all(run_local(examine_rank, num_ranks, spec, options, device=kind))
    return examine_rank(World(), spec, options)


def _filled(spec: RunSpec, world_size: int) -> RunSpec:
    """Fill in the run's data-parallel size, and a vocabulary size for the estimates of memory.

    The vocabulary size comes from `model.vocab_size`, else from the run's token store, else from
    `data.bpe_vocab_size`.
    """
    spec = resolve_dp(spec, world_size)
    size = spec.model.vocab_size
    size = size or folder.vocabulary_of(spec.data.store, spec.data.bpe_vocab_size)
    return check(replace(spec, model=replace(spec.model, vocab_size=size)))


def _device_kind(spec: RunSpec, world: World) -> tuple[str, str]:
    """Choose the kind of device that this rank computes on.

    Returns:
        "cpu" or "cuda", and why it is not the device that the run asks for ("" if it is).
    """
    local, own = world.local_world_size, world.one_gpu_each
    try:
        choice = worlds.choose_device(spec.run.device, local_ranks=local, one_gpu_each=own)
    except UserError as error:
        return "cpu", str(error)
    return choice.kind, ""


def examine_rank(world: World, spec: RunSpec, options: Options) -> bool:
    """Examine the machines on one rank. All ranks call this function together.

    Args:
        world: This rank's place among the processes of the launcher.
        spec: The run, with the data-parallel size and vocabulary size filled in.
        options: What to measure, and how to show the findings.

    Returns:
        False if a check failed on any rank.
    """
    kind, problem = _device_kind(spec, world)
    device = worlds.rank_device(world, kind)
    report = RankReport()

    def show_late(stage: str, late: Sequence[int]) -> None:
        found = (
            f"{_who(late, world)} did not finish the stage {stage!r} within {options.limit_s:g} s"
        )
        options.show([*report.findings, failed("hanging ranks", found, LOOK)])

    limit = StageLimit(world.rank, options.limit_s, show_late)
    arrived = time.perf_counter()
    # Ranks on different kinds of devices cannot form a process group.
    if problem and world.world_size > 1:
        options.show([gpu.equal_gpus([_tried_facts(world, device, problem)])])
        return False
    if world.world_size > 1:
        try:
            worlds.init(world, device, timeout_s=options.limit_s)
        # The limit on open files is too low, or the port is taken.
        except UserError as error:
            options.show([failed("rendezvous", f"{HOST}: {error}", LOOK)])
            return False
        # If ranks cannot connect, torch raises DistError, which is a RuntimeError, and Gloo raises
        # a plain RuntimeError.
        except RuntimeError as error:
            if world.rank == 0:
                options.show([_failed_rendezvous(error, world)])
            return False
        # Let collectives time out later than stages, because only the error of a stage names the
        # late ranks.
        limit_collectives(options.limit_s + 2 * GRACE_S)
        limit.join()
        # This empty stage shows which ranks have joined the process group.
        with limit.stage(START):
            pass
    try:
        if world.world_size > 1:
            # Gloo connects two ranks only when they first communicate, so this may take long.
            with limit.stage(FIRST_COLLECTIVE):
                report.wait_s = times.wait_for_all(arrived)
        return _examined(world, spec, device, problem, options, limit, report)
    # torch raises RuntimeError in a collective if the process of another rank has ended.
    except RuntimeError as error:
        if world.rank:
            raise
        stage, late = limit.missing()
        found = f"{_who(late, world)} did not finish the stage {stage!r}: {_line(error)}"
        options.show([*report.findings, failed("communication", found, LOOK)])
        return False
    finally:
        worlds.shutdown()


def _who(late: Sequence[int], world: World) -> str:
    """Return the late ranks in words, for a sentence such as "rank 3 did not finish it"."""
    if len(late) == world.world_size > 1:
        return f"all {world.world_size} ranks, some of which wait for the others,"
    return f"rank {ranges(late)}"


def _line(error: Exception) -> str:
    """Return a line with the class of an error and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


def _failed_rendezvous(error: RuntimeError, world: World) -> Finding:
    """Return a finding, with the verdict fail, that the ranks could not connect to each other."""
    remedy = "check that all ranks started and can reach the first node (GLOO_SOCKET_IFNAME)"
    found = f"{world.world_size} ranks did not connect: {_line(error)}"
    return failed("rendezvous", found, remedy)


def _examined(
    world: World,
    spec: RunSpec,
    device: torch.device,
    problem: str,
    options: Options,
    limit: StageLimit,
    report: RankReport,
) -> bool:
    """Make all checks, in stages. Rank 0 shows the findings at the end.

    The stages gather the facts of all ranks, build the mesh, check each node, check the connections
    between ranks, check kernels, and gather the ranks' reports.

    Args:
        world: This rank's place among the processes of the launcher.
        spec: The run.
        device: This rank's device.
        problem: Why `device` is not the device that the run asks for; "" if it is.
        options: What to measure, and how to show the findings.
        limit: Limits the time of each stage.
        report: The record to which this rank's findings and measurements are added.

    Returns:
        False if a check failed on any rank. All ranks return the same value.
    """
    with limit.stage("facts of all ranks"):
        mine = replace(_tried_facts(world, device, problem), kernels=_kernels_of(spec, device))
        everyone = [mine]
        if world.world_size > 1:
            everyone = [mine] * world.world_size
            dist.all_gather_object(everyone, mine, group=host_group())
    patient = Patient(
        spec=spec, world=world, device=device, is_quick=options.is_quick, everyone=tuple(everyone)
    )
    # Every rank compares the facts of all ranks, so all ranks agree on whether to build a mesh.
    unequal = [gpu.equal_software(everyone), gpu.equal_gpus(everyone)]
    if world.world_size > 1 and not is_failed(unequal[1:]):
        with limit.stage("making the communicators"):
            mesh = build_mesh(
                spec.parallel, device, shard_size=spec.fsdp.shard_size, model=spec.model
            )
            limit_collectives(options.limit_s + 2 * GRACE_S, mesh)
        patient = replace(patient, mesh=mesh)
    with limit.stage("checks of each node"):
        for one in NODE_CHECKS:
            report.findings += _tried(one, patient)
    if world.world_size > 1:
        _between_ranks(patient, limit, report)
    else:
        with limit.stage("output folder"):
            report.findings += [folder.shared_folder(patient), *_not_started(spec)]
    with limit.stage("kernels and matrix products"):
        report.findings += _tried(attention.kernels, patient)
        report.findings += _tried(
            lambda p: _clocks_under_load(p, report), patient, name="matrix products"
        )
    with limit.stage("gathering"):
        reports = _gathered(report, world)
        is_well = False
        if world.rank == 0:
            findings = _joined(reports, patient, unequal)
            options.show(findings)
            is_well = not is_failed(findings)
        # Only rank 0 has all findings, so it shares the verdict.
        verdict = [is_well]
        if world.world_size > 1:
            dist.broadcast_object_list(verdict, src=0, group=host_group())
    return verdict[0]


def _kernels_of(spec: RunSpec, device: torch.device) -> str:
    """Return the names of the kernels that would compute the run on this rank, as text.

    If no kernel can compute the run, the text says why. The texts of all ranks are compared,
    because all ranks should use the same kernels.
    """
    try:
        fused = ", fused" if fused_of(spec, device).fused else ""
        return f"{kernel_of(spec, device).kernel}{fused}"
    except UserError as error:
        return str(error)


def _tried_facts(world: World, device: torch.device, problem: str) -> Facts:
    """Collect the facts of this rank. If its GPU cannot be opened, `Facts.problem` says so.

    `problem` says why `device` is not the device that the run asks for; "" if it is.
    """
    try:
        return facts_of(world, device, problem)
    # torch raises RuntimeError if it cannot open the GPU.
    except RuntimeError as error:
        return facts_of(world, torch.device("cpu"), f"{device}: {error}")


def _between_ranks(patient: Patient, limit: StageLimit, report: RankReport) -> None:
    """Make the checks in which ranks communicate, and add the results to `report`.

    Every rank must make all of these checks. The others would wait for a rank that left one out.
    """
    with limit.stage("clock skew"):
        report.findings += times.clock_skew(patient)
    with limit.stage("shared folder"):
        report.findings.append(folder.shared_folder(patient))
    with limit.stage("communicators"):
        report.timings = network.measure_groups(patient)


def _not_started(spec: RunSpec) -> list[Finding]:
    """Return a finding that the checks between ranks were skipped, because one process ran alone.

    The list is empty if the layout has only one rank.
    """
    num_ranks = spec.parallel.world_size
    if num_ranks == 1:
        return []
    found = (
        f"only one process ran for a layout of {num_ranks} ranks, so nothing between ranks was "
        "checked"
    )
    return [
        skipped(
            "ranks",
            found,
            "start `wlb doctor` with srun or torchrun, or run sbatch slurm/doctor.sh",
        )
    ]


def _clocks_under_load(patient: Patient, report: RankReport) -> Finding:
    """Check the GPU's clocks while it multiplies matrices.

    The speed of the matrix products is measured too, also on a CPU, and stored in `report`.
    """

    def under_load(meanwhile: Callable[[], None]) -> None:
        report.tflops = load.matrix_tflops(
            patient.device, is_quick=patient.is_quick, meanwhile=meanwhile
        )

    finding = gpu.clocks(patient, under_load)
    if not report.tflops:
        # The clocks could not be checked, so `under_load` was not called. Measure the speed now.
        under_load(lambda: None)
    return finding


def _tried(
    one: Callable[[Patient], Finding | list[Finding]], patient: Patient, name: str = ""
) -> list[Finding]:
    """Make the check `one` and return its findings. If it raises an error, return it as a finding.

    So an error in one check does not prevent the other checks. `name` is the name of the check in
    the finding about an error; with "" it is the name of the function.
    """
    try:
        found = one(patient)
    except Exception as error:
        return [failed(name or one.__name__, _line(error), CRASHED)]
    return found if isinstance(found, list) else [found]


def _gathered(report: RankReport, world: World) -> list[RankReport]:
    """Gather the reports of all ranks on rank 0. The result has no meaning on other ranks."""
    if world.world_size == 1:
        return [report]
    gathered: list[RankReport] = [report] * world.world_size
    dist.gather_object(report, gathered if world.rank == 0 else None, dst=0, group=host_group())
    return gathered


def _joined(
    reports: Sequence[RankReport], patient: Patient, compared: Sequence[Finding]
) -> list[Finding]:
    """Return all findings for the table: those of all ranks, joined, and those that compare ranks.

    Args:
        reports: Reports of all ranks.
        patient: The run, this rank's device and the facts of all ranks.
        compared: Findings of the checks that have already compared the ranks' facts.
    """
    everyone = patient.everyone
    hosts = [facts.host for facts in everyone]
    found = [*compared, *merged([report.findings for report in reports], hosts)]
    if patient.mesh is not None:
        profile, notes = _profile(patient)
        timings = [timing for report in reports for timing in report.timings]
        found += notes + network.link_findings(timings, everyone, profile)
        found.append(times.late_finding([report.wait_s for report in reports], hosts))
    elif patient.world.world_size > 1:
        found.append(skipped("communicators", "not measured, because ranks have different devices"))
    found.append(load.speed_finding([report.tflops for report in reports], everyone))
    return found


def _profile(patient: Patient) -> tuple[KernelProfile | None, list[Finding]]:
    """Return the run's kernel profile and an empty list.

    If the profile cannot be loaded, return None and a list with a finding that says why.
    """
    kind = patient.device.type
    try:
        return workload_for(with_backend(patient.spec, kind), kind).profile, []
    except UserError as error:
        return None, [
            failed(
                "kernel profile",
                str(error),
                "set cost.profile = auto, or measure a profile with `wlb profile`",
            )
        ]


def counts(findings: Sequence[Finding]) -> dict[Verdict, int]:
    """Return the number of findings with each verdict."""
    return {verdict: sum(f.verdict == verdict for f in findings) for verdict in Verdict}

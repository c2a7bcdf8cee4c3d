"""An examination: the ranks of a launcher, local ones, or this process alone; one table of all.

Each check is a small function that returns a `Finding`. Ranks first examine their nodes and then,
together, the connections between them; rank 0 gathers and reports all findings.
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
"""Local ranks on the CPU, which a node that only submits jobs can bear."""
LOOK = "see the logs of these ranks' nodes (srun's output, dmesg), or leave the nodes out"
START = "start"
MEETING = "first collective"
HOST = socket.gethostname()
CRASHED = "a check itself raised an error: report it with this line"
Tell = Callable[[Sequence[Finding]], None]

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
    """is_quick: about ten seconds, fewer and smaller measurements. limit_s: time that a stage may
    take. tell: shows the findings; rank 0 calls it, so for local ranks it must be picklable.
    """

    is_quick: bool
    limit_s: float
    tell: Tell


@dataclass(slots=True, kw_only=True)
class RankReport:
    """Findings and measurements of one rank."""

    findings: list[Finding] = field(default_factory=list[Finding])
    timings: list[network.GroupTiming] = field(default_factory=list[network.GroupTiming])
    tflops: float = 0.0
    wait_s: float = 0.0


def examine(spec: RunSpec, options: Options) -> bool:
    """Examine the machine, or all ranks of a launcher, for a run of `spec`; whether nothing failed,
    the same on all ranks. UserError for a layout that does not fit the launcher's ranks.

    Without a launcher, a layout that is larger than this machine is examined by one process, which
    skips the checks between ranks.
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
    """The spec with dp and a vocabulary size for estimates; the store's if there is one."""
    spec = resolve_dp(spec, world_size)
    size = spec.model.vocab_size
    size = size or folder.vocabulary_of(spec.data.store, spec.data.bpe_vocab_size)
    return check(replace(spec, model=replace(spec.model, vocab_size=size)))


def _device_kind(spec: RunSpec, world: World) -> tuple[str, str]:
    """Kind of device, and why it is not the one that the run asks for."""
    local, own = world.local_world_size, world.one_gpu_each
    try:
        choice = worlds.choose_device(spec.run.device, local_ranks=local, one_gpu_each=own)
    except UserError as error:
        return "cpu", str(error)
    return choice.kind, ""


def examine_rank(world: World, spec: RunSpec, options: Options) -> bool:
    """One rank's part; whether nothing failed on any rank."""
    kind, problem = _device_kind(spec, world)
    device = worlds.rank_device(world, kind)
    report = RankReport()

    def tell_late(stage: str, late: Sequence[int]) -> None:
        found = f"{_who(late, world)} did not end {stage!r} within {options.limit_s:g} s"
        options.tell([*report.findings, failed("hanging ranks", found, LOOK)])

    limit = StageLimit(world.rank, options.limit_s, tell_late)
    arrived = time.perf_counter()
    # Ranks on different kinds of devices cannot form a process group.
    if problem and world.world_size > 1:
        options.tell([gpu.equal_gpus([_tried_facts(world, device, problem)])])
        return False
    if world.world_size > 1:
        try:
            worlds.init(world, device, timeout_s=options.limit_s)
        # The limit on open files is too low, or the port is taken.
        except UserError as error:
            options.tell([failed("rendezvous", f"{HOST}: {error}", LOOK)])
            return False
        # torch raises DistError here, Gloo a plain RuntimeError.
        except RuntimeError as error:
            if world.rank == 0:
                options.tell([_no_meeting(error, world)])
            return False
        # Collectives time out after the stage's limit, because that names the late ranks and a
        # collective does not.
        limit_collectives(options.limit_s + 2 * GRACE_S)
        limit.join()
        # This stage ends at once, so that only ranks that never start lack it.
        with limit.stage(START):
            pass
    try:
        if world.world_size > 1:
            # Gloo connects ranks at their first message.
            with limit.stage(MEETING):
                report.wait_s = times.wait_for_all(arrived)
        return _examined(world, spec, device, problem, options, limit, report)
    # torch raises this in a collective whose peers are gone.
    except RuntimeError as error:
        if world.rank:
            raise
        stage, late = limit.missing()
        found = f"{_who(late, world)} did not end {stage!r}: {_line(error)}"
        options.tell([*report.findings, failed("communication", found, LOOK)])
        return False
    finally:
        worlds.shutdown()


def _who(late: Sequence[int], world: World) -> str:
    if len(late) == world.world_size > 1:
        return f"all {world.world_size} ranks, some of which wait for the others,"
    return f"rank {ranges(late)}"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


def _no_meeting(error: RuntimeError, world: World) -> Finding:
    remedy = "check that all ranks started and reach the first node's address (GLOO_SOCKET_IFNAME)"
    found = f"{world.world_size} ranks did not meet: {_line(error)}"
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
    with limit.stage("facts of all ranks"):
        mine = replace(_tried_facts(world, device, problem), kernels=_kernels_of(spec, device))
        everyone = [mine]
        if world.world_size > 1:
            everyone = [mine] * world.world_size
            dist.all_gather_object(everyone, mine, group=host_group())
    patient = Patient(
        spec=spec, world=world, device=device, is_quick=options.is_quick, everyone=tuple(everyone)
    )
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
        report.findings += _tried(lambda p: _loaded(p, report), patient, name="matrix products")
    with limit.stage("gathering"):
        reports = _gathered(report, world)
        ended = False
        if world.rank == 0:
            told = _joined(reports, patient, unequal)
            options.tell(told)
            ended = not is_failed(told)
        verdict = [ended]
        if world.world_size > 1:
            dist.broadcast_object_list(verdict, src=0, group=host_group())
    return verdict[0]


def _kernels_of(spec: RunSpec, device: torch.device) -> str:
    """Names of the kernels that would compute the run on this rank, which must be the same on
    all.
    """
    try:
        fused = ", fused" if fused_of(spec, device).fused else ""
        return f"{kernel_of(spec, device).kernel}{fused}"
    except UserError as error:
        return str(error)


def _tried_facts(world: World, device: torch.device, problem: str) -> Facts:
    try:
        return facts_of(world, device, problem)
    # torch cannot open the GPU.
    except RuntimeError as error:
        return facts_of(world, torch.device("cpu"), f"{device}: {error}")


def _between_ranks(patient: Patient, limit: StageLimit, report: RankReport) -> None:
    """Run the checks that all ranks make together; none may be skipped by a single rank."""
    with limit.stage("clock skew"):
        report.findings += times.clock_skew(patient)
    with limit.stage("shared folder"):
        report.findings.append(folder.shared_folder(patient))
    with limit.stage("communicators"):
        report.timings = network.measure_groups(patient)


def _not_started(spec: RunSpec) -> list[Finding]:
    num_ranks = spec.parallel.world_size
    if num_ranks == 1:
        return []
    found = f"one process of the layout's {num_ranks} ranks: nothing between ranks was examined"
    return [skipped("ranks", found, "srun or torchrun wlb doctor ..., or sbatch slurm/doctor.sh")]


def _loaded(patient: Patient, report: RankReport) -> Finding:
    """Clocks of the GPU while it multiplies matrices, whose speed goes into the report."""

    def under_load(meanwhile: Callable[[], None]) -> None:
        report.tflops = load.matrix_tflops(
            patient.device, is_quick=patient.is_quick, meanwhile=meanwhile
        )

    finding = gpu.clocks(patient, under_load)
    if not report.tflops:
        under_load(lambda: None)
    return finding


def _tried(
    one: Callable[[Patient], Finding | list[Finding]], patient: Patient, name: str = ""
) -> list[Finding]:
    """The findings of a check; an error that it raises is a finding too, because the other ranks
    and checks go on.
    """
    try:
        found = one(patient)
    except Exception as error:
        return [failed(name or one.__name__, _line(error), CRASHED)]
    return found if isinstance(found, list) else [found]


def _gathered(report: RankReport, world: World) -> list[RankReport]:
    """All reports on rank 0, its own on others."""
    if world.world_size == 1:
        return [report]
    told: list[RankReport] = [report] * world.world_size
    dist.gather_object(report, told if world.rank == 0 else None, dst=0, group=host_group())
    return told


def _joined(
    reports: Sequence[RankReport], patient: Patient, compared: Sequence[Finding]
) -> list[Finding]:
    everyone = patient.everyone
    hosts = [facts.host for facts in everyone]
    found = [*compared, *merged([report.findings for report in reports], hosts)]
    if patient.mesh is not None:
        profile, notes = _profile(patient)
        timings = [timing for report in reports for timing in report.timings]
        found += notes + network.link_findings(timings, everyone, profile)
        found.append(times.late_finding([report.wait_s for report in reports], hosts))
    elif patient.world.world_size > 1:
        found.append(skipped("communicators", "not measured: ranks have different devices"))
    found.append(load.speed_finding([report.tflops for report in reports], everyone))
    return found


def _profile(patient: Patient) -> tuple[KernelProfile | None, list[Finding]]:
    kind = patient.device.type
    try:
        return workload_for(with_backend(patient.spec, kind), kind).profile, []
    except UserError as error:
        return None, [failed("kernel profile", str(error), "cost.profile = auto, or wlb profile")]


def counts(findings: Sequence[Finding]) -> dict[Verdict, int]:
    """How many rows have each verdict."""
    return {verdict: sum(f.verdict == verdict for f in findings) for verdict in Verdict}

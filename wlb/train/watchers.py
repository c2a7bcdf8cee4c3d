"""The hooks of a run, in the order in which every event calls them."""

from wlb.spec import RunSpec
from wlb.train.checkpoint.saves import SaveCheckpoints
from wlb.train.evaluate import EvaluateHeldOut, Evaluator
from wlb.train.faults.folder_removed import KeepFolder
from wlb.train.faults.stop import StopRequest
from wlb.train.faults.verify import VerifyStores
from wlb.train.hooks import Hook, RunContext
from wlb.train.telemetry.calibrate import Calibration, WriteProfile
from wlb.train.telemetry.clock import StepClock
from wlb.train.telemetry.ending import ShowSummary, TellStop
from wlb.train.telemetry.graphs import CountGraphs
from wlb.train.telemetry.ledger import Ledger, RecordLedger
from wlb.train.telemetry.measure import MeasureSteps
from wlb.train.telemetry.ranks import RankMeter, RecordRanks
from wlb.train.telemetry.snapshots import SnapshotMemory
from wlb.train.telemetry.steps import RecordSteps
from wlb.train.telemetry.traces import TRACED_RANK, TraceSteps
from wlb.train.warm_up import CollectGarbage, CompileAttention, ConnectRanks


def hooks_of(
    run: RunContext,
    priced: RunSpec,
    *,
    clock: StepClock,
    evaluator: Evaluator | None,
    saves: SaveCheckpoints,
    stop_request: StopRequest,
) -> tuple[Hook, ...]:
    """The same order on all ranks; rank 0 alone has hooks that do not communicate.
    priced: the spec with the kernel that computes.
    """
    job, spec, mesh, places = run.job, run.spec, run.mesh, run.report.places
    measure = MeasureSteps(priced, mesh, clock)
    calibration = None
    if job.calibrate is not None:
        calibration = WriteProfile(Calibration(priced), job.calibrate, measure.meter)
    traces = spec.telemetry.trace_steps and mesh.rank == TRACED_RANK
    hooks = (
        # This hook is first, because the others record its measurements.
        measure,
        RecordSteps(),
        # Communicators are connected before hooks that communicate when they begin.
        ConnectRanks(),
        CompileAttention(),
        CountGraphs() if spec.training.compile else None,
        RecordRanks(RankMeter(priced, mesh, places), clock),
        # Before checkpoints, so that none is saved of a store that was found wrong.
        VerifyStores(job.train_store, job.heldout_store) if mesh.rank == 0 else None,
        RecordLedger(Ledger(job.directory)) if spec.telemetry.ledger and mesh.rank == 0 else None,
        # Before hooks that take long or save.
        KeepFolder(job.directory) if mesh.rank == 0 else None,
        EvaluateHeldOut(evaluator) if evaluator is not None else None,
        saves,
        TellStop(stop_request),
        ShowSummary(),
        calibration,
        # After the hooks whose work between steps is not to be in a trace.
        TraceSteps(job.directory, mesh.rank) if traces else None,
        SnapshotMemory(job.directory, mesh.rank) if spec.telemetry.snapshot_steps else None,
        # Garbage is collected last, when the other hooks have dropped their objects of the step.
        CollectGarbage(),
    )
    return tuple(hook for hook in hooks if hook is not None)

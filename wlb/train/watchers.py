"""Chooses the hooks of a run, and fixes the order in which they are called at every event."""

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
    """Return the hooks of a run in the order in which every event calls them.

    The order is the same on all ranks. Hooks that only rank 0 has do not communicate.

    Args:
        run: The state that the hooks share with the training loop.
        priced: The run's spec. Its kernels.attention names the kernel that computes, and for which
            plans are priced, instead of `auto`.
        clock: Times the passes of each step.
        evaluator: Computes the held-out loss; None if the run does not evaluate.
        saves: The hook that saves checkpoints.
        stop_request: Says what asked the run to end, for the message at the end.
    """
    job, spec, mesh, places = run.job, run.spec, run.mesh, run.report.places
    measure = MeasureSteps(priced, mesh, clock)
    calibration = None
    if job.calibrate is not None:
        calibration = WriteProfile(Calibration(priced), job.calibrate, measure.meter)
    traces = spec.telemetry.trace_steps and mesh.rank == TRACED_RANK
    hooks = (
        # `MeasureSteps` is first, because the other hooks record its measurements.
        measure,
        RecordSteps(),
        # `ConnectRanks` is before the hooks that communicate in `begin`, because it connects the
        # communicators.
        ConnectRanks(),
        CompileAttention(),
        CountGraphs() if spec.training.compile else None,
        RecordRanks(RankMeter(priced, mesh, places), clock),
        # `VerifyStores` is before `saves`, so that no checkpoint is saved once a token store was
        # found to be damaged.
        VerifyStores(job.train_store, job.heldout_store) if mesh.rank == 0 else None,
        RecordLedger(Ledger(job.directory)) if spec.telemetry.ledger and mesh.rank == 0 else None,
        # `KeepFolder` ends the run if its folder was removed. So it is before the hooks that would
        # write to that folder, or do slow work in vain.
        KeepFolder(job.directory) if mesh.rank == 0 else None,
        EvaluateHeldOut(evaluator) if evaluator is not None else None,
        saves,
        TellStop(stop_request),
        ShowSummary(),
        calibration,
        # `TraceSteps` is behind the hooks that work between two steps, so that this work is not in
        # the trace of the next step.
        TraceSteps(job.directory, mesh.rank) if traces else None,
        SnapshotMemory(job.directory, mesh.rank) if spec.telemetry.snapshot_steps else None,
        # `CollectGarbage` is last, so that the other hooks have dropped their objects of the step.
        CollectGarbage(),
    )
    return tuple(hook for hook in hooks if hook is not None)

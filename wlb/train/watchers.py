"""The hooks of a run, in the order in which every event calls them."""

from wlb.parallel.mesh import Mesh
from wlb.plan import Place
from wlb.spec import RunSpec
from wlb.train.checkpoint.saves import SaveCheckpoints
from wlb.train.evaluate import EvaluateHeldOut, Evaluator
from wlb.train.faults.stop import StopRequest
from wlb.train.hooks import Hook
from wlb.train.job import Job
from wlb.train.telemetry.calibrate import Calibration, WriteProfile
from wlb.train.telemetry.clock import StepClock
from wlb.train.telemetry.ending import ShowSummary, TellStop
from wlb.train.telemetry.graphs import CountGraphs
from wlb.train.telemetry.ledger import Ledger, RecordLedger
from wlb.train.telemetry.measure import MeasureSteps
from wlb.train.telemetry.ranks import RankMeter, RecordRanks
from wlb.train.telemetry.steps import RecordSteps


def hooks_of(
    job: Job,
    priced: RunSpec,
    mesh: Mesh,
    *,
    clock: StepClock | None,
    places: tuple[Place, ...],
    evaluator: Evaluator | None,
    saves: SaveCheckpoints,
    stop_request: StopRequest,
) -> tuple[Hook, ...]:
    """The same order on all ranks; rank 0 alone has a RecordLedger, which does not communicate.

    priced: the spec with the attention kernel that computes. clock: None without telemetry;
    evaluator: None without held-out documents.
    """
    spec, hooks = job.spec, list[Hook]()
    measure = MeasureSteps(priced, mesh, clock) if clock is not None else None
    if measure is not None:
        hooks.append(measure)  # first: the others record what it measured
    hooks.append(RecordSteps())
    if spec.training.compile:
        hooks.append(CountGraphs())
    if clock is not None:
        hooks.append(RecordRanks(RankMeter(priced, mesh, places), clock))
    if spec.telemetry.ledger and mesh.rank == 0:
        hooks.append(RecordLedger(Ledger(job.directory)))
    if evaluator is not None:
        hooks.append(EvaluateHeldOut(evaluator))
    hooks += [saves, TellStop(stop_request), ShowSummary()]
    if job.calibrate is not None:
        assert measure is not None  # --calibrate without telemetry was refused
        hooks.append(WriteProfile(Calibration(priced), job.calibrate, measure.meter))
    return tuple(hooks)

"""Results of rehearsed ranks, as plain records that are pickled between processes."""

from dataclasses import dataclass

from wlb.rehearse.gpu import HostWait, RankMessage, StreamSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An error of a rank: an exception that ended the rank, or memory that was freed too early."""

    rank: int
    step: int  # -1 before the first step
    error: str  # what happened
    op: str  # the operator that failed; "" = no operator
    where: str  # source file and line in wlb; "" = unknown
    trace: str  # traceback; "" = none

    def __str__(self) -> str:
        step = "before step 0" if self.step < 0 else f"step {self.step}"
        op = f", {self.op}" if self.op else ""
        where = f", {self.where}" if self.where else ""
        return f"rank {self.rank}, {step}{op}{where}: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a rehearsed rank did in one step."""

    step: int
    num_tokens: int  # number of tokens that the rank's pipeline trained in the step
    longest: int  # number of tokens of the pipeline's longest micro-batch
    peak_bytes: int  # most bytes that were allocated at a time during the step
    estimate_bytes: int  # wlb.memory's estimate of `peak_bytes` for the micro-batches of the step
    # For each part of the step, such as "GEMM" or "cp": number of calls, bytes, FLOPs and time (the
    # fields of `PartTotals`).
    parts: dict[str, dict[str, float]]
    exposed_ns: dict[str, float]  # time that the compute stream waited for each part's transfers
    time_ns: float  # predicted time of the step on the compute stream
    host_waits: tuple[HostWait, ...]
    graphs: int  # number of graphs that torch.compile made in the step
    exchange: str  # text on how CP ranks exchange keys of the longest micro-batch; "" without CP


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Memory that torch's caching allocator reserves on the device for a rank's requests."""

    peak_bytes: int  # most bytes that were reserved at a time
    allocated_bytes: int  # most bytes of allocated blocks at a time
    retries: int  # how often the allocator returned free segments to the device to make room
    failed_bytes: int  # bytes of the first request that did not fit; 0 = all requests fitted
    failed_at: str  # step, file and line of that request; "" = all requests fitted


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """Everything that was recorded of a rehearsed rank."""

    rank: int
    coordinates: tuple[int, ...]  # place in the mesh, as (tp, cp, pp, dp)
    steps: tuple[StepResult, ...]
    messages: list[RankMessage]  # in the order in which the host issued them
    spans: list[StreamSpan]  # kernels and transfers; empty without traces
    streams: tuple[str, ...]  # name of each stream, by stream id
    host_waits: tuple[HostWait, ...]  # in all steps and outside steps
    peak_bytes: int  # most bytes that were allocated at a time
    at_peak: dict[str, int]  # bytes of each kind of memory when `peak_bytes` were allocated
    # Memory that the allocator reserves, once with expandable segments (key "expandable") and once
    # with torch's default (key "segments").
    reserved: dict[str, Reserved]
    # Number of steps before a checkpoint -> bytes that the checkpoint copied to the host.
    copied: dict[int, int]
    calibration: str  # how the calibrated profile was fitted; "" = no profile was written
    faults: tuple[Fault, ...]  # cases of memory freed too early, then the error that ended the rank
    wall_s: float  # seconds that the rehearsal of this rank took

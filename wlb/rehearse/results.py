"""Results of rehearsed ranks, as plain records that are pickled between processes."""

from dataclasses import dataclass

from wlb.rehearse.gpu import HostWait, RankMessage, StreamSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An error of a rank: one that ended it, or memory that was freed too early."""

    rank: int
    step: int  # -1 before the first step
    error: str  # what happened
    op: str  # the operator that failed; "" = no operator
    where: str  # file and line of wlb; "" = unknown
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
    num_tokens: int  # tokens of the rank's pipeline
    longest: int  # tokens of the pipeline's longest micro-batch
    peak_bytes: int  # most memory allocated during the step
    estimate_bytes: int  # `peak_bytes` as wlb.memory estimates it for the step's lengths
    parts: dict[str, dict[str, float]]  # calls, num_bytes, flops and time_ns of each part
    exposed_ns: dict[str, float]  # time that the compute stream waited for transfers, by part
    time_ns: float  # priced time of the compute stream
    host_waits: tuple[HostWait, ...]
    graphs: int  # graphs that torch.compile made in the step; 0 if layers are not compiled
    exchange: str  # how keys of the longest micro-batch travel, in words; "" without CP


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Memory that torch's caching allocator reserves on the device for a rank's requests."""

    peak_bytes: int  # most memory reserved
    allocated_bytes: int  # most memory allocated in blocks
    retries: int  # times that it returned free segments to the device to make room
    failed_bytes: int  # size of the request that did not fit; 0 = all requests fitted
    failed_at: str  # step, file and line of that request; "" = all requests fitted


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """Everything that was recorded of a rehearsed rank."""

    rank: int
    coordinates: tuple[int, ...]  # tp, cp, pp, dp
    steps: tuple[StepResult, ...]
    messages: list[RankMessage]  # in the order in which the host issued them
    spans: list[StreamSpan]  # kernels and transfers; empty without traces
    streams: tuple[str, ...]  # names by stream id
    host_waits: tuple[HostWait, ...]  # of all steps and between them
    peak_bytes: int  # most memory allocated
    at_peak: dict[str, int]  # bytes allocated at the peak, by kind
    reserved: dict[str, Reserved]  # with "expandable" segments and with the default "segments"
    copied: dict[int, int]  # bytes of each checkpoint, by the number of executed steps
    calibration: str  # how a kernel profile was fitted to the priced times; "" = none was written
    faults: tuple[Fault, ...]  # memory freed too early, then the error that ended the rank
    wall_s: float  # time that the rehearsal took

"""What a rehearsal finds out about a rank; plain records that go between processes."""

from dataclasses import dataclass

from wlb.rehearse.gpu import HostWait, RankMessage, StreamSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why a rank could not go on. op: the operator at fault, "" if none. where: file and line of
    wlb.
    """

    rank: int
    step: int
    error: str
    op: str
    where: str
    trace: str

    def __str__(self) -> str:
        step = "before step 0" if self.step < 0 else f"step {self.step}"
        op = f", {self.op}" if self.op else ""
        where = f", {self.where}" if self.where else ""
        return f"rank {self.rank}, {step}{op}{where}: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A step on a rank. num_tokens, longest: of its pipeline, and of one micro-batch. parts: for
    each part calls, num_bytes, flops, time_ns. estimate_bytes: of
    `wlb.memory`, for the step's lengths. exposed_ns: what the compute stream waited for, by
    part. time_ns: of the compute stream. graphs: that torch.compile made in the step, 0 if layers
    are not compiled. exchange: of the longest micro-batch's keys, in words; "" without CP.
    """

    step: int
    num_tokens: int
    longest: int
    peak_bytes: int
    estimate_bytes: int
    parts: dict[str, dict[str, float]]
    exposed_ns: dict[str, float]
    time_ns: float
    host_waits: tuple[HostWait, ...]
    graphs: int
    exchange: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """What torch's caching allocator takes from the device for a rank's requests, in bytes.
    retries: times it gave free memory back to go on. failed_bytes, failed_at: the request that did
    not fit, its step, file and line; 0 and "" if all did.
    """

    peak_bytes: int
    allocated_bytes: int
    retries: int
    failed_bytes: int
    failed_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """A rehearsed rank. coordinates: tp, cp, pp, dp. at_peak: bytes by kind when most was
    allocated. reserved: with "expandable" segments, and with the default "segments".
    copied: bytes of each checkpoint, by executed steps. calibration: how the kernel profile was
    fitted to the priced times, "" if none was written. faults: all memory that was freed too early,
    and the error that ended the rank.
    """

    rank: int
    coordinates: tuple[int, ...]
    steps: tuple[StepResult, ...]
    messages: list[RankMessage]
    spans: list[StreamSpan]
    streams: tuple[str, ...]
    host_waits: tuple[HostWait, ...]
    peak_bytes: int
    at_peak: dict[str, int]
    reserved: dict[str, Reserved]
    copied: dict[int, int]
    calibration: str
    faults: tuple[Fault, ...]
    wall_s: float

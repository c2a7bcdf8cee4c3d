"""Records of single ranks: a table of all ranks' times, and a timeline of a few ranks' passes.

Times are integers of microseconds. The records are written rarely (`RANKS_INTERVAL`,
`TIMELINE_INTERVAL`) and read by `wlb report`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from wlb.plan.arrays import FloatArray, IntArray
from wlb.plan.errors import UserError
from wlb.plan.plain import PlainRecord
from wlb.plan.schema import COUNT, Schema, schema_of

RANKS_INTERVAL = 10
"""Steps between tables of every rank's times. Fewer steps name a straggler sooner; a table costs a
gather of 35 bytes a rank."""
TIMELINE_INTERVAL = 100
"""Steps between timelines of the passes of up to 64 ranks, to which the last step is added."""
STRAGGLER_THRESHOLD = 0.15
"""A rank is slow if its measured over predicted time exceeds the median rank's by this fraction.
Less than this is usual noise of clocks and prices."""
STRAGGLER_TABLES = 3
"""Tables in a row in which a rank must be slow to be named. One alone may be a disturbance."""


class Place(NamedTuple):
    """Where a rank computes."""

    host: str
    node: int


def places_to_json(places: Sequence[Place]) -> dict[str, Any]:
    """A plain dictionary with each host's name once."""
    hosts = sorted({p.host for p in places})
    numbers = {host: i for i, host in enumerate(hosts)}
    return {
        "hosts": hosts,
        "host": [numbers[p.host] for p in places],
        "node": [p.node for p in places],
    }


def places_from_json(data: dict[str, Any]) -> tuple[Place, ...]:
    hosts = data["hosts"]
    return tuple(Place(hosts[h], n) for h, n in zip(data["host"], data["node"], strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler(PlainRecord):
    """A rank that is slower than others for the same work. over: its ratio of measured to predicted
    time, divided by the median rank's ratio.
    """

    rank: int
    over: float
    host: str
    node: int
    tp: int
    cp: int
    pp: int
    dp: int

    @property
    def text(self) -> str:
        return (
            f"rank {self.rank} on {self.host} (node {self.node}; tp {self.tp}, cp {self.cp}, "
            f"pp {self.pp}, dp {self.dp}) takes {self.over:.2f} times what its work takes on the "
            f"median rank"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankTable(PlainRecord):
    """Times of every rank in `num_steps` steps up to `step`, in us, each int64 [ranks].

    measured, predicted: of terms that hold no wait for other ranks. compute: in all passes. bubble:
    the rest of the steps. loading: waits for inputs. stragglers: as of this table.
    """

    step: int
    steps_done: int
    num_steps: int
    measured_us: IntArray
    predicted_us: IntArray
    compute_us: IntArray
    bubble_us: IntArray
    loading_us: IntArray
    stragglers: tuple[Straggler, ...] = ()

    @property
    def over_median(self) -> FloatArray:
        """Each rank's measured over predicted time, divided by the median rank's; 1 where nothing
        was compared (a rank without a token).
        """
        ratio = np.full(self.measured_us.size, np.nan)
        known = (self.predicted_us > 0) & (self.measured_us > 0)
        np.divide(self.measured_us, self.predicted_us, out=ratio, where=known)
        if not known.any():
            return np.ones_like(ratio)
        return np.where(known, ratio / np.nanmedian(ratio), 1.0)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "RankTable":
        """Read a line of metrics.jsonl; other keys are ignored."""
        values: dict[str, Any] = {n: data[n] for n in ("step", "steps_done", "num_steps")}
        values |= {name: np.array(data[name], np.int64) for name in COLUMNS}
        if len(sizes := {values[name].size for name in COLUMNS}) > 1 or 0 in sizes:
            raise UserError(f"columns of ranks have {sorted(sizes)} entries")
        return cls(**values, stragglers=tuple(Straggler(**s) for s in data["stragglers"]))


COLUMNS = ("measured_us", "predicted_us", "compute_us", "bubble_us", "loading_us")


TABLE: Schema = schema_of(
    RankTable, stragglers=[schema_of(Straggler)], step=COUNT, steps_done=COUNT, num_steps=COUNT
)
PLACES: Schema = {"hosts": [str], "host": [COUNT], "node": [COUNT]}


class TimedPass(NamedTuple):
    """A pass of a rank. micro_batch: its index in the pipeline's plan. begin_us: since the first
    rank began the step.
    """

    kind: str
    stage: int
    micro_batch: int
    begin_us: int
    time_us: int


PASSES = ("forward", "backward", "weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimeline(PlainRecord):
    """When a few ranks ran which pass of a step. wall_us: when each rank had done all its passes,
    since the first rank began; passes: by rank.
    """

    step: int
    steps_done: int
    ranks: tuple[int, ...]
    wall_us: tuple[int, ...]
    passes: tuple[tuple[TimedPass, ...], ...]

    def to_json(self) -> dict[str, Any]:
        kinds = [[[PASSES.index(p[0]), *p[1:]] for p in of_rank] for of_rank in self.passes]
        return PlainRecord.to_json(self) | {"passes": kinds}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "MeasuredTimeline":
        values: dict[str, Any] = {name: data[name] for name in ("step", "steps_done")}
        values |= {name: tuple(data[name]) for name in ("ranks", "wall_us")}
        sizes = {len(data[name]) for name in ("ranks", "wall_us", "passes")}
        if len(sizes) > 1 or 0 in sizes:
            raise UserError(f"a timeline has {sorted(sizes)} ranks, times and lists of passes")
        passes = [[TimedPass(PASSES[p[0]], *p[1:]) for p in ps] for ps in data["passes"]]
        return cls(**values, passes=tuple(map(tuple, passes)))


TIMELINE: Schema = schema_of(MeasuredTimeline, passes=[[[int]]], step=COUNT, steps_done=COUNT)

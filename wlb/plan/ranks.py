"""Records of single ranks: a table of all ranks' times, and a timeline of a few ranks' passes.

Times are whole microseconds. Training writes the records every `RANKS_INTERVAL` and
`TIMELINE_INTERVAL` steps, and `wlb report` reads them.
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
"""Steps between tables of all ranks' times. Shorter intervals find a slow rank sooner; a table
costs a gather of 35 bytes a rank."""
TIMELINE_INTERVAL = 100
"""Steps between timelines of the passes of up to 64 ranks. The last step of a run has one too."""
STRAGGLER_THRESHOLD = 0.15
"""A rank is slow if its ratio of measured to predicted time exceeds the median rank's by this
fraction. Smaller differences are usual noise of clocks and predictions."""
STRAGGLER_TABLES = 3
"""Consecutive tables in which a rank must be slow to be reported. A single one may be a
disturbance."""


class Place(NamedTuple):
    """Host and node on which a rank runs."""

    host: str
    node: int


def places_to_json(places: Sequence[Place]) -> dict[str, Any]:
    """Return the places of all ranks as a dictionary that has each host's name once."""
    hosts = sorted({p.host for p in places})
    numbers = {host: i for i, host in enumerate(hosts)}
    return {
        "hosts": hosts,
        "host": [numbers[p.host] for p in places],
        "node": [p.node for p in places],
    }


def places_from_json(data: dict[str, Any]) -> tuple[Place, ...]:
    """Read what `places_to_json` wrote."""
    hosts = data["hosts"]
    return tuple(Place(hosts[h], n) for h, n in zip(data["host"], data["node"], strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler(PlainRecord):
    """A rank that is slower than others for the same work."""

    rank: int
    over: float  # its ratio of measured to predicted time, divided by the median rank's ratio
    host: str
    node: int
    tp: int
    cp: int
    pp: int
    dp: int

    @property
    def text(self) -> str:
        """The straggler in words: which rank, where, and how slow."""
        return (
            f"rank {self.rank} on {self.host} (node {self.node}; tp {self.tp}, cp {self.cp}, "
            f"pp {self.pp}, dp {self.dp}) takes {self.over:.2f} times what its work takes on the "
            f"median rank"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankTable(PlainRecord):
    """Times of every rank in the `num_steps` steps up to `step`, each of shape [ranks]."""

    step: int  # last step of the table
    steps_done: int  # executed steps of the run by then
    num_steps: int
    measured_us: IntArray  # measured time of work that contains no waiting for other ranks
    predicted_us: IntArray  # predicted time of the same work
    compute_us: IntArray  # time in all passes
    bubble_us: IntArray  # the rest of the steps
    loading_us: IntArray  # waiting for inputs
    stragglers: tuple[Straggler, ...] = ()  # slow ranks as of this table

    @property
    def over_median(self) -> FloatArray:
        """Each rank's ratio of measured to predicted time, divided by the median rank's.

        A rank without a prediction, such as one without a token, has 1.
        """
        ratio = np.full(self.measured_us.size, np.nan)
        # A rank without tokens has nothing to compare.
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
    """One pass that a rank executed."""

    kind: str  # one of `PASSES`
    stage: int  # pipeline stage
    micro_batch: int  # index in the plan of the rank's pipeline
    begin_us: int  # start, counted from when the first rank began the step
    time_us: int  # duration


PASSES = ("forward", "backward", "weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimeline(PlainRecord):
    """When a few ranks executed which passes of a step."""

    step: int  # number of the step
    steps_done: int  # executed steps of the run, this one included
    ranks: tuple[int, ...]  # the recorded ranks
    # when each rank had finished its passes, counted from when the first rank began
    wall_us: tuple[int, ...]
    passes: tuple[tuple[TimedPass, ...], ...]  # passes of each rank

    def to_json(self) -> dict[str, Any]:
        """Return plain values; kinds of passes are written as their index in `PASSES`."""
        kinds = [[[PASSES.index(p[0]), *p[1:]] for p in of_rank] for of_rank in self.passes]
        return PlainRecord.to_json(self) | {"passes": kinds}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "MeasuredTimeline":
        """Read what `to_json` wrote."""
        values: dict[str, Any] = {name: data[name] for name in ("step", "steps_done")}
        values |= {name: tuple(data[name]) for name in ("ranks", "wall_us")}
        sizes = {len(data[name]) for name in ("ranks", "wall_us", "passes")}
        if len(sizes) > 1 or 0 in sizes:
            raise UserError(f"a timeline has {sorted(sizes)} ranks, times and lists of passes")
        passes = [[TimedPass(PASSES[p[0]], *p[1:]) for p in ps] for ps in data["passes"]]
        return cls(**values, passes=tuple(map(tuple, passes)))


TIMELINE: Schema = schema_of(MeasuredTimeline, passes=[[[int]]], step=COUNT, steps_done=COUNT)

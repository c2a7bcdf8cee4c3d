"""Records of ranks: a table of all ranks' times, and a timeline of a few ranks' passes.

Times are whole microseconds. Training writes a table every `RANKS_INTERVAL` steps and a timeline
every `TIMELINE_INTERVAL` steps. `wlb report` reads both.
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
"""Number of steps from one table of all ranks' times to the next. With a shorter interval a slow
rank is found sooner, but for each table 35 bytes are gathered from every rank."""
TIMELINE_INTERVAL = 100
"""Number of steps from one timeline to the next. A timeline records the passes of up to 64 ranks in
one step. The last step of a run is recorded too."""
STRAGGLER_THRESHOLD = 0.15
"""A rank is slow if its ratio of measured to predicted time exceeds the median over ranks by more
than this fraction. Smaller differences are common: clock speeds vary, and predictions are not
exact."""
STRAGGLER_TABLES = 3
"""A rank is reported as a straggler only if it is slow in this many consecutive tables, because a
single slow table may come from a short disturbance."""


class Place(NamedTuple):
    """Where a rank runs."""

    host: str  # name of the machine
    node: int  # number of the node among the nodes of the run


def places_to_json(places: Sequence[Place]) -> dict[str, Any]:
    """Return the places of all ranks as a dictionary for `json.dumps`.

    The dictionary has a list of all host names and, for each rank, an index into this list and the
    number of the node.
    """
    hosts = sorted({p.host for p in places})
    numbers = {host: i for i, host in enumerate(hosts)}
    return {
        "hosts": hosts,
        "host": [numbers[p.host] for p in places],
        "node": [p.node for p in places],
    }


def places_from_json(data: dict[str, Any]) -> tuple[Place, ...]:
    """Return the host and node of each rank from the dictionary that `places_to_json` made."""
    hosts = data["hosts"]
    return tuple(Place(hosts[h], n) for h, n in zip(data["host"], data["node"], strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler(PlainRecord):
    """A rank that is slower than other ranks for the same work."""

    rank: int  # global rank
    over: float  # the rank's ratio of measured to predicted time, divided by the median over ranks
    host: str  # name of the rank's machine
    node: int  # number of the rank's node among the nodes of the run
    # the rank's number along each dimension of the device mesh
    tp: int
    cp: int
    pp: int
    dp: int

    @property
    def text(self) -> str:
        """A sentence that says which rank is slow, where it runs, and how slow it is."""
        return (
            f"rank {self.rank} on {self.host} (node {self.node}; tp {self.tp}, cp {self.cp}, "
            f"pp {self.pp}, dp {self.dp}) takes {self.over:.2f} times as long as the median rank "
            f"for the same work"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankTable(PlainRecord):
    """Times of every rank, summed over the `num_steps` steps up to and including `step`."""

    step: int  # number of the last step of the table
    steps_done: int  # number of steps that the run has executed, this one included
    num_steps: int  # number of steps over which times are summed
    # All arrays have shape [ranks].
    # measured time of each rank's own work, without the time in which it waits for other ranks
    measured_us: IntArray
    predicted_us: IntArray  # predicted time of the same work
    compute_us: IntArray  # time that the rank spends in passes
    bubble_us: IntArray  # time of the steps that the rank does not spend in passes
    loading_us: IntArray  # time that the rank waits for inputs
    # ranks that have been slow in `STRAGGLER_TABLES` consecutive tables, this one included
    stragglers: tuple[Straggler, ...] = ()

    @property
    def over_median(self) -> FloatArray:
        """Each rank's ratio of measured to predicted time, divided by the median over ranks.

        The result is 1 for a rank without a measured or predicted time, such as a rank that had no
        tokens.
        """
        ratio = np.full(self.measured_us.size, np.nan)
        known = (self.predicted_us > 0) & (self.measured_us > 0)
        np.divide(self.measured_us, self.predicted_us, out=ratio, where=known)
        if not known.any():
            return np.ones_like(ratio)
        return np.where(known, ratio / np.nanmedian(ratio), 1.0)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "RankTable":
        """Make the table from an object of metrics.jsonl; keys that are no fields are ignored."""
        values: dict[str, Any] = {n: data[n] for n in ("step", "steps_done", "num_steps")}
        values |= {name: np.array(data[name], np.int64) for name in COLUMNS}
        if len(sizes := {values[name].size for name in COLUMNS}) > 1 or 0 in sizes:
            raise UserError(
                f"a record of kind 'ranks' must have lists of equal length, with one entry for "
                f"each rank, under {', '.join(COLUMNS)}, but their lengths are {sorted(sizes)}; "
                "repair or remove the record"
            )
        return cls(**values, stragglers=tuple(Straggler(**s) for s in data["stragglers"]))


COLUMNS = ("measured_us", "predicted_us", "compute_us", "bubble_us", "loading_us")


TABLE: Schema = schema_of(
    RankTable, stragglers=[schema_of(Straggler)], step=COUNT, steps_done=COUNT, num_steps=COUNT
)
PLACES: Schema = {"hosts": [str], "host": [COUNT], "node": [COUNT]}


class TimedPass(NamedTuple):
    """One pass that a rank executed: one micro-batch in one pipeline stage."""

    kind: str  # one of `PASSES`
    stage: int  # number of the pipeline stage
    micro_batch: int  # number of the micro-batch in the execution order of its pipeline
    begin_us: int  # when the pass began, counted from when the first rank began the step
    time_us: int  # duration of the pass


PASSES = ("forward", "backward", "weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimeline(PlainRecord):
    """A timeline of one step: the passes that a few ranks executed, with their times."""

    step: int  # number of the step
    steps_done: int  # number of steps that the run has executed, this one included
    ranks: tuple[int, ...]  # numbers of the recorded ranks
    # for each of `ranks`: when it finished its last pass, counted from when the first rank began
    # the step
    wall_us: tuple[int, ...]
    passes: tuple[tuple[TimedPass, ...], ...]  # for each of `ranks`: its passes in order

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for `json.dumps`, in which `kind` is an index into `PASSES`."""
        kinds = [[[PASSES.index(p[0]), *p[1:]] for p in of_rank] for of_rank in self.passes]
        return PlainRecord.to_json(self) | {"passes": kinds}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "MeasuredTimeline":
        """Make the timeline from what `to_json` returned."""
        values: dict[str, Any] = {name: data[name] for name in ("step", "steps_done")}
        values |= {name: tuple(data[name]) for name in ("ranks", "wall_us")}
        sizes = {len(data[name]) for name in ("ranks", "wall_us", "passes")}
        if len(sizes) > 1 or 0 in sizes:
            raise UserError(
                f"a timeline has {len(data['ranks'])} entries in `ranks`, {len(data['wall_us'])} "
                f"in `wall_us` and {len(data['passes'])} in `passes`, but each must have one for "
                f"each recorded rank; repair or remove the record"
            )
        passes = [[TimedPass(PASSES[p[0]], *p[1:]) for p in ps] for ps in data["passes"]]
        return cls(**values, passes=tuple(map(tuple, passes)))


TIMELINE: Schema = schema_of(MeasuredTimeline, passes=[[[int]]], step=COUNT, steps_done=COUNT)

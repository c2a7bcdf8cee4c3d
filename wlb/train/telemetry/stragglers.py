"""Which rank is slower than the others for the same work, and where it stands.

A straggler's ratio of measured to predicted time exceeds the median rank's by
telemetry.straggler_threshold in telemetry.straggler_records tables in a row; the first table
without it ends that. Times are of decoder layers on CPU, of attention kernels alone on CUDA, where
the rest of a layer holds the wait for slower ranks of its TP and CP groups. A rank that is late for
another reason (host, link) is not named; its neighbours' bubble shows it.
"""

from collections.abc import Sequence

from wlb.parallel.mesh import coordinates
from wlb.plan import Place, RankTable, Straggler
from wlb.spec import RunSpec

LEAST_SHARE = 0.5
"""Least share of telemetry.ranks_interval that a table needs to change who is a straggler; the last
table of a run may be shorter."""


class StragglerWatch:
    """Takes a run's tables in order and names stragglers."""

    def __init__(self, spec: RunSpec, places: Sequence[Place]) -> None:
        self.spec, self.places = spec, places
        self._streaks: dict[int, int] = {}
        self._named: tuple[Straggler, ...] = ()

    def see(self, table: RankTable) -> tuple[Straggler, ...]:
        """The stragglers as of `table`, slowest first."""
        telemetry = self.spec.telemetry
        if table.num_steps < LEAST_SHARE * telemetry.ranks_interval:
            return self._named
        over = table.over_median
        slow = (over > 1 + telemetry.straggler_threshold).nonzero()[0].tolist()
        self._streaks = {rank: self._streaks.get(rank, 0) + 1 for rank in slow}
        known = [r for r, n in self._streaks.items() if n >= telemetry.straggler_records]
        known.sort(key=lambda rank: (-over[rank], rank))
        self._named = tuple(
            Straggler(
                rank=rank,
                over=float(over[rank]),
                **self.places[rank]._asdict(),
                **coordinates(rank, self.spec.parallel)._asdict(),
            )
            for rank in known
        )
        return self._named

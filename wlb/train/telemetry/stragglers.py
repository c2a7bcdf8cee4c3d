"""Which rank is slower than the others, and where it stands.

A straggler is a rank whose measured over predicted time is over the median rank's by
`telemetry.straggler_threshold` in `telemetry.straggler_records` tables of ranks in a row; it stops
being one with the first table in which it isn't. Dividing by the prediction leaves out that ranks
have different work, the median that all prices may be off alike.

The times are of decoder layers where they hold no waiting (thread CPU time), else of attention
kernels alone: on CUDA the rest of a layer holds the wait for slower ranks of the TP and CP groups,
which would make all of them look slow. A rank that is late for another reason than its passes (its
host, its link) is not named by this; its neighbours' `bubble` shows it.
"""

from collections.abc import Sequence

from wlb.parallel.mesh import coordinates
from wlb.plan import Place, RankTable, Straggler
from wlb.spec import RunSpec

LEAST_SHARE = 0.5
"""Of telemetry.ranks_interval: tables of fewer steps (the last one) neither begin nor end it."""


class StragglerWatch:
    """Sees the tables of a run in order."""

    def __init__(self, spec: RunSpec, places: Sequence[Place]) -> None:
        self.spec, self.places = spec, places
        self._streaks: dict[int, int] = {}
        self._named: tuple[Straggler, ...] = ()

    def see(self, table: RankTable) -> tuple[Straggler, ...]:
        """The stragglers after `table`, the slowest first."""
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

"""Tables of all ranks' times, the ranks that are slower than others, and timelines of a few ranks.

A table gathers five integers from each rank every RANKS_INTERVAL steps (35 bytes a rank
in the file); a timeline is a message from each of at most `MOST_TIMED` ranks, TP rank 0 of the
first pipelines (20 bytes a pass). On CPU a timeline's ranks begin when their hosts' clocks say,
unless those are further apart than the step is long; on CUDA all begin at 0, because a host may be
ahead of its device.
"""

import platform
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from wlb.parallel.host import MOST_TIMED, gather_rows, host_group
from wlb.parallel.mesh import Mesh, coordinates, rank_grid
from wlb.parallel.observe import Pass
from wlb.parallel.world import World
from wlb.plan import MeasuredTimeline, Place, RankTable, Straggler, TimedPass
from wlb.plan.ranks import RANKS_INTERVAL, STRAGGLER_TABLES, STRAGGLER_THRESHOLD, TIMELINE_INTERVAL
from wlb.spec import ParallelSpec, RunSpec
from wlb.train.hooks import ExecutedStep, Hook, RunContext
from wlb.train.telemetry.clock import StepClock, StepSpans
from wlb.train.telemetry.report import RunReport

LEAST_SHARE = 0.5
"""Least share of RANKS_INTERVAL that a table needs to change who is a straggler; the last
table of a run may be shorter."""
_TABLED = ("measured_us", "predicted_us", "compute_us", "bubble_us", "loading_us")
_KINDS = tuple(Pass)
_NONE = -1


class StragglerWatch:
    """Takes a run's tables in order and names the ranks that are slower for the same work.

    A straggler's ratio of measured to predicted time exceeds the median rank's by
    STRAGGLER_THRESHOLD in STRAGGLER_TABLES tables in a row; the first table
    without it ends that. Times are of decoder layers on CPU, of attention kernels alone on CUDA,
    where the rest of a layer holds the wait for slower ranks of its TP and CP groups. A rank that
    is late for another reason (host, link) is not named; its neighbours' bubble shows it.
    """

    def __init__(self, spec: RunSpec, places: Sequence[Place]) -> None:
        self.spec, self.places = spec, places
        self._streaks: dict[int, int] = {}
        self._named: tuple[Straggler, ...] = ()

    def see(self, table: RankTable) -> tuple[Straggler, ...]:
        """The stragglers as of `table`, slowest first."""
        if table.num_steps < LEAST_SHARE * RANKS_INTERVAL:
            return self._named
        over = table.over_median
        slow = (over > 1 + STRAGGLER_THRESHOLD).nonzero()[0].tolist()
        self._streaks = {rank: self._streaks.get(rank, 0) + 1 for rank in slow}
        known = [r for r, n in self._streaks.items() if n >= STRAGGLER_TABLES]
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


class RankMeter:
    """Collects this rank's times; all ranks add the same steps and gather together.

    places: of all ranks, on rank 0 (`gather_places`).
    """

    def __init__(self, spec: RunSpec, mesh: Mesh, places: tuple[Place, ...]) -> None:
        self.spec, self.mesh = spec, mesh
        self._watch = StragglerWatch(spec, places)
        self._drawn = timed_ranks(spec.parallel)
        self._clear()

    def _clear(self) -> None:
        self._own_ns, self._num_steps = np.zeros(5, np.int64), 0

    def add(self, own_ns: np.ndarray, num_steps: int) -> None:
        self._own_ns = self._own_ns + own_ns
        self._num_steps += num_steps

    def is_table_due(self, *, is_last: bool) -> bool:
        return self._num_steps > 0 and (is_last or self._num_steps >= RANKS_INTERVAL)

    def table(self, step: int, steps_done: int) -> RankTable | None:
        """The table of the steps since the last one, on rank 0. A collective call."""
        own = torch.from_numpy(self._own_ns // 1000)
        rows = gather_rows(own)
        num_steps = self._num_steps
        self._clear()
        if rows is None:
            return None
        columns = dict(zip(_TABLED, rows.numpy().T.copy(), strict=True))
        table = RankTable(step=step, steps_done=steps_done, num_steps=num_steps, **columns)
        return replace(table, stragglers=self._watch.see(table))

    def timeline(self, spans: StepSpans, step: int, steps_done: int) -> MeasuredTimeline | None:
        """The passes of the ranks that are drawn, on rank 0. All ranks call it."""
        rank, drawn = self.mesh.rank, self._drawn
        if rank not in drawn:
            return None
        own = self._packed(spans)
        if rank:
            dist.send(own, dst=0, group=host_group())
            return None
        others = {r: torch.empty_like(own) for r in drawn if r}
        for work in [dist.irecv(rows, src=r, group=host_group()) for r, rows in others.items()]:
            assert work is not None
            work.wait()
        return timeline_of(
            {r: others.get(r, own).numpy() for r in drawn},
            step=step,
            steps_done=steps_done,
            has_common_clock=self.mesh.device.type == "cpu",
        )

    def _packed(self, spans: StepSpans) -> torch.Tensor:
        """A header (when it began, ns; wall time, us), then passes; every rank has as many rows."""
        spec = self.spec
        most = len(_KINDS) * spec.pp.virtual_stages * spec.micro_batches_per_pipeline
        packed = np.full((1 + most, 5), _NONE, np.int64)
        packed[0, :2] = spans.began_ns, spans.wall_ns // 1000
        for row, (cell, begin_ns, time_ns) in zip(packed[1:], spans.spans, strict=False):
            row[:3] = _KINDS.index(cell.kind), cell.stage, cell.micro_batch
            row[3:] = begin_ns // 1000, time_ns // 1000
        return torch.from_numpy(packed)


def timed_ranks(parallel: ParallelSpec) -> tuple[int, ...]:
    """TP rank 0 of as many pipelines as fit into MOST_TIMED, of CP rank 0 alone if need be."""
    # The grid has shape [dp, cp, pp].
    grid = rank_grid(parallel)[..., 0].transpose(1, 2, 0)
    if grid[0].size > MOST_TIMED:
        grid = grid[:, :1]
    pipelines = max(1, MOST_TIMED // grid[0].size)
    return tuple(grid[:pipelines].flatten().tolist()[: max(MOST_TIMED, parallel.pp)])


def timeline_of(
    rows: dict[int, np.ndarray], *, step: int, steps_done: int, has_common_clock: bool
) -> MeasuredTimeline:
    """rows: by rank, as `RankMeter` packs them."""
    began_us = np.array([r[0, 0] // 1000 for r in rows.values()])
    walls_us = np.array([r[0, 1] for r in rows.values()])
    offsets_us = began_us - began_us.min()
    if not has_common_clock or offsets_us.max() > walls_us.max():
        offsets_us = np.zeros_like(offsets_us)
    passes: list[tuple[TimedPass, ...]] = []
    for table, offset in zip(rows.values(), offsets_us.tolist(), strict=True):
        found = table[1:][table[1:, 0] != _NONE].tolist()
        passes.append(
            tuple(
                TimedPass(str(_KINDS[kind]), stage, micro_batch, begin + offset, time)
                for kind, stage, micro_batch, begin, time in found
            )
        )
    return MeasuredTimeline(
        step=step,
        steps_done=steps_done,
        ranks=tuple(rows),
        wall_us=tuple((walls_us + offsets_us).tolist()),
        passes=tuple(passes),
    )


class RecordRanks(Hook):
    """Writes tables of ranks and timelines when they are due, and reports new stragglers."""

    def __init__(self, meter: RankMeter, clock: StepClock) -> None:
        self.meter, self.clock = meter, clock
        self._stragglers: dict[int, Straggler] = {}

    def record(self, run: RunContext, step: ExecutedStep) -> None:
        meter, number = self.meter, step.plan.step
        if step.own_ns is not None and step.telemetry is not None:
            meter.add(step.own_ns, step.telemetry.num_steps)
        if not step.plan.num_targets:
            return
        is_last = run.is_last_step
        if meter.is_table_due(is_last=is_last):
            table = meter.table(number, run.steps_done)
            if table is not None:
                run.report.write("ranks", **table.to_json())
                run.tally.stragglers.add(table)
                self._tell(table, run.report)
        if TIMELINE_INTERVAL and (is_last or run.steps_done % TIMELINE_INTERVAL == 0):
            timeline = meter.timeline(self.clock.spans(), number, run.steps_done)
            if timeline is not None:
                run.report.write("timeline", **timeline.to_json())

    def _tell(self, table: RankTable, report: RunReport) -> None:
        known = {s.rank: s for s in table.stragglers}
        for rank, straggler in known.items():
            if rank not in self._stragglers:
                report.say(f"straggler: {straggler.text} (step {table.steps_done})")
        for rank in self._stragglers.keys() - known.keys():
            report.say(f"rank {rank} is no straggler any more (step {table.steps_done})")
        self._stragglers = known


def gather_places(mesh: Mesh, world: World) -> tuple[Place, ...]:
    """Where every rank computes, on rank 0; () elsewhere. A collective call."""
    found: list[Any] = [None] * mesh.world_size
    own = Place(platform.node(), world.node_rank)
    # This gathers along a ring; with gather_object rank 0 would connect to every rank.
    dist.all_gather_object(found, own, group=host_group())
    return tuple(found) if mesh.rank == 0 else ()

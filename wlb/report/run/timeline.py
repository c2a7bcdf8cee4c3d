"""Figure of the measured timeline of a step. It needs matplotlib."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from wlb.plan import MeasuredTimeline, TimedPass
from wlb.report import timeline as bars
from wlb.report.plots import new_figure
from wlb.simulate import PassKind
from wlb.spec import ParallelSpec

MOST_ROWS = 16
"""Most rows of the figure. If there are more ranks, those with higher CP ranks are left out."""
_KINDS = {
    "forward": PassKind.FORWARD,
    "backward": PassKind.BACKWARD,
    "weight": PassKind.BACKWARD_WEIGHT,
}


class TimelineRow(NamedTuple):
    """A row of the figure: the passes of one rank."""

    rank: int  # global rank
    pp: int  # pipeline rank
    cp: int  # CP rank
    wall_us: int  # duration of the step on this rank in microseconds
    passes: tuple[TimedPass, ...]  # passes that the rank executed

    @property
    def idle(self) -> float:
        """Fraction of the step in which the rank executes no pass."""
        return 1 - sum(p.time_us for p in self.passes) / max(1, self.wall_us)


def measured_timeline_figure(
    timeline: MeasuredTimeline, parallel: ParallelSpec, pipeline: int
) -> Any:
    """Return a figure of the measured timeline of one pipeline, with a row for each rank.

    The colour of a pass shows its micro-batch. Forward passes are light and backward passes dark.
    Idle time is blank.

    Args:
        timeline: The measured timeline.
        parallel: The parallel layout.
        pipeline: Number of the pipeline.
    """
    rows = rows_of(timeline, parallel, pipeline)
    end_us = max(row.wall_us for row in rows)
    unit, scale = ("ms", 1e-3) if end_us < 2e6 else ("s", 1e-6)
    inches = bars.row_inches(len(rows))
    figure, (axes,) = new_figure(height=1.5 + inches * len(rows))
    labels = [f"pp {r.pp}, cp {r.cp}" if parallel.cp > 1 else f"pp {r.pp}" for r in rows]
    bars.frame_rows(axes, labels, end=end_us * scale, unit=unit)
    chunks = 1 + max((p.stage // parallel.pp for row in rows for p in row.passes), default=0)
    if chunks > 1:
        title = f"lower bars of a row: later ones of its {chunks} virtual stages"
        axes.set_title(title, fontsize=8, loc="left")
    for (micro_batch, kind), boxes in _boxes(rows, parallel.pp, chunks, scale).items():
        bars.draw_passes(axes, micro_batch, _KINDS[kind], boxes, inches=inches)
    bars.write_idle(axes, (row.idle for row in rows))
    passes = [p for row in rows for p in row.passes]
    splits = any(p.kind == "weight" for p in passes)
    count = 1 + max((p.micro_batch for p in passes), default=0)
    bars.legend_below(figure, bars.shade_handles(splits=splits) + bars.colour_handles(count))
    return figure


def slowest_pipeline(timeline: MeasuredTimeline, parallel: ParallelSpec) -> int:
    """Return the number of the recorded pipeline whose passes ended last."""
    ends: dict[int, int] = {}
    for rank, of_rank in zip(timeline.ranks, timeline.passes, strict=True):
        pipeline = rank // parallel.model_ranks
        end = max((p.begin_us + p.time_us for p in of_rank), default=0)
        ends[pipeline] = max(end, ends.get(pipeline, 0))
    return max(ends, key=lambda pipeline: (ends[pipeline], -pipeline))


def rows_of(timeline: MeasuredTimeline, parallel: ParallelSpec, pipeline: int) -> list[TimelineRow]:
    """Return a row for each rank of a pipeline, sorted by pipeline rank and CP rank.

    If there would be more than `MOST_ROWS` rows, ranks with the highest CP numbers are left out.

    Args:
        timeline: The measured timeline.
        parallel: The parallel layout.
        pipeline: Number of the pipeline.
    """
    rows: list[TimelineRow] = []
    for rank, wall_us, passes in zip(
        timeline.ranks, timeline.wall_us, timeline.passes, strict=True
    ):
        # Global ranks are numbered by rank = ((dp * PP + pp) * CP + cp) * TP + tp.
        of_pipeline, rest = divmod(rank, parallel.model_ranks)
        pp, cp = divmod(rest // parallel.tp, parallel.cp)
        if of_pipeline == pipeline and cp < max(1, MOST_ROWS // parallel.pp):
            rows.append(TimelineRow(rank, pp, cp, wall_us, passes))
    return sorted(rows, key=lambda row: (row.pp, row.cp))


def _boxes(
    rows: Sequence[TimelineRow], pp: int, chunks: int, scale: float
) -> dict[tuple[int, str], list[bars.Box]]:
    """Return the bars of all passes, by micro-batch and kind of pass.

    Args:
        rows: Rows of the figure.
        pp: Number of pipeline ranks.
        chunks: Number of virtual stages of a rank.
        scale: Factor from microseconds to the unit of the time axis.
    """
    boxes: dict[tuple[int, str], list[bars.Box]] = {}
    for i, row in enumerate(rows):
        for timed in row.passes:
            left, right = timed.begin_us * scale, (timed.begin_us + timed.time_us) * scale
            box = bars.row_box(left, right, row=i, chunk=timed.stage // pp, chunks=chunks)
            boxes.setdefault((timed.micro_batch, timed.kind), []).append(box)
    return boxes

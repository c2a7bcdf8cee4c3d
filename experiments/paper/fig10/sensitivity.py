"""Asks what `adaptive` loses if the profile's speed at 128 query rows is wrong.

In Figure 10 the throughput of attention rises from 128 to 256 query rows. Here the throughput of
segments with at most 128 rows is multiplied by a factor. `adaptive` chooses between per-sequence
and per-document sharding, with prices that include the factor and with prices that do not. The
micro-batches are those of Figure 15.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from experiments.harness.pages import Table
from experiments.harness.streams import WINDOW
from experiments.paper.fig15.case import layer_cost, micro_batches
from wlb.cost import AttentionTable, ProfiledWorkload, Surface, attention_latency, limit_growth
from wlb.plan import IntArray
from wlb.sharding import shard

CP, COUNT, SEED = 4, 64, 0
WINDOWS = (WINDOW // 2, WINDOW)
FACTORS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.4, 1.7)
"""Factors of throughput. With 1.7, FlashAttention-3 has as many TFLOP/s at 128 rows as at 256."""
FEW_ROWS = 128
"""Most query rows of segments whose throughput is changed.

From twice as many rows on, throughput is as in the profile.
"""
STATIC = ("per_sequence", "per_document")


def changed(table: AttentionTable, factor: float) -> AttentionTable:
    """Returns the table with the throughput at few rows multiplied by a factor, in both passes."""

    def of(surface: Surface) -> Surface:
        # A table's time must not fall as rows are added. So a small factor also lowers the
        # throughput at the next larger numbers of rows.
        factors = np.where(surface.axis0 <= FEW_ROWS, factor, 1.0)[:, None]
        values = limit_growth(surface.axis0, surface.axis1, surface.values * factors)
        return replace(surface, values=values)

    return replace(table, forward=of(table.forward), backward=of(table.backward))


def changed_cost(cost: ProfiledWorkload, factor: float) -> ProfiledWorkload:
    tables = tuple(changed(table, factor) for table in cost.profile.attention)
    return replace(cost, profile=replace(cost.profile, attention=tables))


def slowest_ms(pieces: Sequence[IntArray], cost: ProfiledWorkload) -> np.ndarray:
    """Returns the slowest rank's attention time under each static strategy.

    Returns:
        Milliseconds of forward plus backward, shape [micro-batches, 2], in the order of STATIC.
    """
    found: list[list[float]] = []
    for lengths in pieces:
        plans = [shard(lengths, cp=CP, strategy=name, cost=cost) for name in STATIC]
        times = [attention_latency(plan, cost) for plan in plans]
        found.append([float(t.forward_ns.max() + t.backward_ns.max()) / 1e6 for t in times])
    return np.array(found)


def rows_of(window: int, *, count: int = COUNT) -> list[list[Any]]:
    """Returns a table row for each factor.

    The columns are:

    - the window and the factor,
    - the number of micro-batches that `adaptive` shards per document with prices that include the
      factor,
    - how many of its choices differ from those by the unchanged profile,
    - the time that is lost if kernels have the factor and prices do not,
    - the time that is lost if prices have the factor and kernels do not.

    Lost time is given as a share of the time of all micro-batches.
    """
    pieces = micro_batches("original", window=window, count=count, seed=SEED)
    cost = layer_cost(window=window, cp=CP)
    plain = slowest_ms(pieces, cost)
    # Like argmin, `adaptive` chooses the first strategy if both take equally long.
    unaware, every = plain.argmin(1), np.arange(len(pieces))
    rows: list[list[Any]] = []
    for factor in FACTORS:
        truth = slowest_ms(pieces, changed_cost(cost, factor))
        aware = truth.argmin(1)
        missed = truth[every, unaware].sum() / truth[every, aware].sum() - 1
        imagined = plain[every, aware].sum() / plain[every, unaware].sum() - 1
        num_changed = int((aware != unaware).sum())
        rows.append([window, factor, int(aware.sum()), num_changed, float(missed), float(imagined)])
    return rows


def first_change(window: int, *, count: int = COUNT) -> int:
    """Returns the smallest loss of throughput, in percent, that changes a choice of `adaptive`.

    Returns 100 if no loss does.
    """
    pieces = micro_batches("original", window=window, count=count, seed=SEED)
    cost = layer_cost(window=window, cp=CP)
    unaware = slowest_ms(pieces, cost).argmin(1)
    for percent in range(1, 100):
        known = slowest_ms(pieces, changed_cost(cost, 1 - percent / 100)).argmin(1)
        if (known != unaware).any():
            return percent
    return 100


def words() -> str:
    """Returns the page's text about the loss at which choices begin to change."""
    first = [f"{first_change(w)}% with windows of {w // 1024}K" for w in WINDOWS]
    return (
        "**Does it matter for sharding?** Hardly. Were kernels slower at 128 rows than measured, "
        f"`adaptive` would first choose otherwise at a loss of {' and of '.join(first)} "
        f"(profile `h100_runs`, FlashAttention-3, CP {CP}, {COUNT} micro-batches of Figure 15 for "
        "each window). The last table has what wrong choices cost, as shares of attention's time "
        "on the slowest rank, both passes. They cost little, because the choice changes only where "
        "both plans take almost equally long."
    )


def sensitivity_table() -> Table:
    columns = (
        "window",
        "throughput at 128 rows, over the measured",
        f"per document, of {COUNT}",
        "choices that differ",
        "lost if kernels are so and the profile is not",
        "lost if the profile is so and kernels are not",
    )
    return Table(
        name="sensitivity",
        title="Other throughput at 128 rows: choices of `adaptive` and what wrong ones cost",
        columns=columns,
        rows=[row for window in WINDOWS for row in rows_of(window)],
        formats={columns[0]: ",d", columns[1]: ".1f", columns[4]: ".2%", columns[5]: ".2%"},
    )

"""Compares shardings of packed documents over context parallelism in models with linear layers.

`python -m experiments.beyond.hybrids [--quick]` shards packed windows with the paper's document
lengths for Qwen3-Next, which has 12 layers with full attention and 36 gated delta nets. For full
attention, all ranks should have equally many query-key pairs. For a gated delta net it matters
where documents are cut: each rank with a later part of a document needs the summary of everything
before it (4.3 MB in float32 per layer).

- **contiguous**: each rank has one contiguous part of the packed window.
- **zigzag**: each rank has two parts, one from each end (`per_sequence`, as in Llama 3).
- **per document**: each document is cut into 2 x CP chunks (`per_document`, the paper's).
- **attention only**: our strategy `balanced` with the price of a model without linear layers.
- **converted**: linear layers are contiguous. Each attention layer moves its rows into the layout
  of "attention only" and back, as Megatron does with another layout.
- **ours**: `balanced` with summaries in its price.

Times are counted in FLOPs of both passes of all layers. A transferred byte costs 900 FLOPs (NVLink)
or 8,000 (a link of 400 Gb/s between nodes), and no transfer is overlapped. Kernels are assumed to
reach the same share of a GPU's peak in all layers, which favours none of the shardings.
"""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness import constants
from experiments.harness.arguments import experiment_parser
from experiments.harness.pages import How, Table, show, write_results
from wlb.cost import FlopsWorkload, kernels_ns
from wlb.cost.config_json import CountedWorkload, counted_of, workload_of_model
from wlb.plan import IntArray, ShardingPlan, summaries_made, summaries_moved
from wlb.sharding import shard
from wlb.sharding.paper import cut_sequence, from_spans

MODEL = counted_of({"model_type": "qwen3_next"}, "Qwen3-Next")
HIDDEN = 2048
"""Values of a row (hidden size). A conversion of the layout moves them at two bytes each."""
LINKS = {"NVLink": 900.0, "between nodes": 8000.0}
"""FLOPs that a GPU computes in the time in which the link transfers one byte."""
WINDOWS = (131_072, 262_144, 524_288)
CPS = (4, 8, 16)
SEED = 0
AREA = FlopsWorkload(quadratic_ns=1.0)
"""Workload that counts query-key pairs only."""


def packed_windows(window: int, count: int) -> list[IntArray]:
    """Draws documents with the paper's lengths and cuts them where windows end.

    Returns:
        Lengths of the pieces of each of `count` windows.
    """
    mean = int(constants.FAMILY.sample(4096, window=window, seed=SEED).mean())
    drawn = constants.FAMILY.sample(2 * count * window // mean, window=window, seed=SEED)
    ends = np.union1d(np.cumsum(drawn), np.arange(0, (count + 1) * window, window))
    pieces = np.diff(ends[ends <= count * window], prepend=0)
    pieces = pieces[pieces > 0]
    first = (np.cumsum(pieces) - pieces) // window
    return [pieces[first == i] for i in range(count)]


def contiguous(pieces: IntArray, cp: int) -> ShardingPlan:
    """Returns the plan in which each rank has one contiguous part of the window."""
    edges = np.arange(cp + 1) * int(pieces.sum()) // cp
    spans = cut_sequence(pieces, edges, np.arange(cp))
    return from_spans(pieces, spans, cp=cp, strategy="per_sequence")


def shardings(
    pieces: IntArray, cp: int, cost: CountedWorkload, blind: CountedWorkload
) -> dict[str, tuple[ShardingPlan, ShardingPlan]]:
    """Returns (plan of attention layers, plan of linear layers) of each sharding, by its name.

    Args:
        pieces: Lengths of the pieces of a window.
        cp: Context-parallel ranks.
        cost: Workload whose price includes summaries.
        blind: Workload in which summaries are free.
    """

    def both(name: str, cost: CountedWorkload) -> tuple[ShardingPlan, ShardingPlan]:
        made = shard(pieces, cp=cp, strategy=name, cost=cost)
        return made, made

    along = contiguous(pieces, cp)
    balanced = both("balanced", blind)
    return {
        "contiguous": (along, along),
        "zigzag": both("per_sequence", blind),
        "per document": both("per_document", blind),
        "attention only": balanced,
        "converted": (balanced[0], along),
        "ours": both("balanced", cost),
    }


def counted_time(
    plans: tuple[ShardingPlan, ShardingPlan], cost: CountedWorkload, flops_per_byte: float
) -> float:
    """Returns the time of the slowest rank in FLOPs: both passes of an average layer, transfers.

    Args:
        plans: Plan of attention layers and plan of linear layers.
        cost: Workload of the model.
        flops_per_byte: FLOPs that a transferred byte costs.
    """
    attention, linear = plans
    layers, cp = MODEL.layers, attention.cp
    forward, backward = kernels_ns([attention], cost, cp=cp)
    # The workload gives both passes of attention together 4 of the 14 FLOPs that they take, and
    # linear layers only the FLOPs of forward, a third of theirs. So scale both up.
    time = 3.5 * float(forward.max() + backward.max())
    time += 3 * float(cost.linear_ns([attention.num_tokens])[0]) / cp
    moved = summaries_moved(linear)
    summaries = max(int(moved.sum(0).max()), int(moved.sum(1).max()))
    moved_bytes = 2 * summaries * MODEL.summary_bytes / layers
    if attention is not linear:
        # Rows move to the layout of attention and back, in forward and in backward.
        rows = (cp - 1) / cp * attention.num_tokens / cp
        moved_bytes += 4 * rows * 2 * HIDDEN * MODEL.kinds["full"] / layers
    return time + moved_bytes * flops_per_byte


def area(plan: ShardingPlan) -> float:
    """Returns the query-key pairs of the busiest rank over the mean of the ranks."""
    made = np.sum(kernels_ns([plan], AREA, cp=plan.cp), axis=0)[0]
    return float(made.max() / made.mean())


def rows_of(window: int, cp: int, count: int) -> list[list[Any]]:
    """Returns a table row for each sharding, with means over `count` windows."""
    pieces = packed_windows(window, count)
    blind = workload_of_model(MODEL, flops_per_byte=0.0)
    found: dict[str, list[list[float]]] = {}
    times: dict[str, dict[str, float]] = {}
    for link, flops in LINKS.items():
        cost = workload_of_model(MODEL, flops_per_byte=flops)
        for one in pieces:
            for name, plans in shardings(one, cp, cost, blind).items():
                of_link = times.setdefault(name, dict.fromkeys(LINKS, 0.0))
                of_link[link] += counted_time(plans, cost, flops)
                if link == "NVLink":
                    attention, linear = plans
                    received = int(summaries_moved(linear).sum(1).max())
                    made = int(summaries_made(linear).max())
                    found.setdefault(name, []).append([area(attention), made, received])
    ours = times["ours"]
    return [
        [window, cp, name, *np.mean(found[name], axis=0).tolist(), *(t[k] / ours[k] for k in LINKS)]
        for name, t in times.items()
    ]


def hybrids_table(windows: tuple[int, ...], count: int) -> Table:
    rows = [row for window in windows for cp in CPS for row in rows_of(window, cp, count)]
    shown = {
        "window": "window",
        "cp": "CP",
        "sharding": "sharding",
        "area": "area of the slowest rank over the mean",
        "made": "summaries that the busiest rank makes",
        "received": "and receives",
        "NVLink": "time over ours, NVLink",
        "between nodes": "time over ours, between nodes",
    }
    formats = {"window": ",d", "area": ".3f", "made": ".1f", "received": ".1f"}
    return Table(
        name="hybrids",
        title="Shardings of packed windows, Qwen3-Next",
        columns=list(shown),
        rows=rows,
        formats={**formats, **dict.fromkeys(LINKS, ".3f")},
        page_columns=shown,
        most_rows=100,
        note=(
            f"Means over {count} windows. Area and summaries of ours are those planned for NVLink. "
            "The rows 'attention only' and 'converted' have our plan for attention too."
        ),
    )


def main() -> None:
    options = experiment_parser(__doc__, quick="one window length, few windows").parse_args()
    windows, count = ((131_072,), 8) if options.quick else (WINDOWS, 40)
    table = hybrids_table(windows, count)
    show(table, width=160)
    if options.quick:
        return
    write_results(
        Path(__file__).parent,
        title="Context parallelism of models with linear layers",
        how=How.COMPUTED,
        profile="FLOPs of Qwen3-Next by its config.json",
        seed=SEED,
        text=__doc__ or "",
        tables=[table],
    )


if __name__ == "__main__":
    main()

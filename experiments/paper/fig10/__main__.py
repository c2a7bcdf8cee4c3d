"""Predicts Figure 10: how fast an attention kernel is with few query rows and many keys.

`python -m experiments.paper.fig10 [--profile NAME ...] [--backend NAME]` reads the attention tables
of kernel profiles. The left plot shows the forward time of a segment with 16 to 256 query rows at
the end of 1K to 64K keys. The right plot shows its TFLOP/s, which count only the query-key pairs
that the mask leaves, not whole tiles.

Both plots are of one layer of LLaMA2-7B with 32 heads. The segment is one of a call that fills the
GPU, and the constant cost of a call is left out.
"""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.arguments import experiment_parser
from experiments.harness.constants import configuration
from experiments.harness.drawing import (
    COLOURS,
    LINES,
    MARKERS,
    new_figure,
    tokens_axis,
    tokens_text,
)
from experiments.harness.pages import Against, How, Picture, Table, priced_with, show, write_results
from experiments.paper.fig10.sensitivity import sensitivity_table, words
from wlb.cost import AttentionTable, KernelProfile, attention_forward_flops, load_profile
from wlb.plan import IntArray

MODEL = configuration("7b_128k").model
FEW_ROWS = np.arange(16, 257, 8)
ROWS = 2 ** np.arange(4, 14)
KEYS = (1024, 4096, 16384, 65536)
PROFILES = ["h100", "h100_runs"]
"""Profiles of FlashAttention-2 (published) and FlashAttention-3 (measured on an H100)."""
MULTICAST = (
    "**What makes 256 rows faster than 128.** The paper draws its figure without numbers in the "
    "text. It explains the higher throughput from 256 rows on by TMA multicast: two blocks of a "
    "cluster load keys and values once. Public kernels cannot do that here. FlashAttention-2 has "
    "no clusters. FlashAttention-3 compiles them only for calls that are neither causal nor of "
    "variable length (`Enable_cluster` in `hopper/flash_fwd_launch_template.h`), and calls on "
    "packed documents are both.\n\n"
    "The rise is there all the same: FlashAttention-3, measured on an H100 (profile `h100_runs`), "
    "reaches {few:.0f} TFLOP/s with 128 rows over 8K keys and {more:.0f} with 256. Memory can "
    "explain it. A tile of 128 rows computes 128 FLOPs for each byte of keys and values in "
    "bfloat16, where each query head has its own. An H100 reads 3.35 TB/s, so one tile a segment "
    "is fed at most "
    "429 TFLOP/s. A second tile of the same segment finds keys and values in the L2 cache. "
    "FlashAttention-2 computes little faster than that bound with any number of rows, and gains "
    "little: {slow_few:.0f} and {slow_more:.0f} TFLOP/s there. This is an inference: no memory "
    "counter was read, and the tables are fits that book the end of a call apart."
)


def forward_us(table: AttentionTable, q: IntArray, kv: IntArray) -> np.ndarray:
    """Returns the forward kernel time of segments in one layer, in microseconds."""
    forward, _ = table.times_ns(
        q.astype(float), kv.astype(float), num_heads=MODEL.num_heads, head_dim=MODEL.head_size
    )
    return forward / 1e3


def tflops(table: AttentionTable, q: IntArray, kv: IntArray) -> np.ndarray:
    """Returns the forward TFLOP/s of segments, counting only pairs that the mask leaves."""
    work = attention_forward_flops(q, kv, num_heads=MODEL.num_heads, head_dim=MODEL.head_size)
    return work / forward_us(table, q, kv) / 1e6


def multicast() -> str:
    """Returns the page's text about the rise of throughput from 128 to 256 rows."""
    at = np.array([128.0, 256.0]), np.array([8192.0, 8192.0])
    (few, more), (slow_few, slow_more) = (
        table_of(load_profile("h100_runs"), backend).forward.at(*at).tolist()
        for backend in ("flash_attention_3", "torch_varlen")
    )
    return MULTICAST.format(few=few, more=more, slow_few=slow_few, slow_more=slow_more)


def table_of(profile: KernelProfile, backend: str | None) -> AttentionTable:
    return profile.table(
        backend=backend,
        head_dim=MODEL.head_size,
        num_heads=MODEL.num_heads,
        num_kv_heads=MODEL.num_kv_heads,
    )


def draw(table: AttentionTable) -> Any:
    """Draws the forward time (left) and the TFLOP/s (right) of a segment by its query rows.

    In the paper, time is constant up to 128 rows, which is a tile, and TFLOP/s rise from 128 to 256
    rows. Here steps at multiples of a tile follow from the profile's tile_rows, but how TFLOP/s
    depend on the number of rows was measured or published.
    """
    figure, (left, right) = new_figure(ncols=2, height=4.0)
    for i, keys in enumerate(KEYS):
        style = {"color": COLOURS[i], "ls": LINES[i], "marker": MARKERS[i], "markersize": 4}
        few, many = np.full(FEW_ROWS.size, keys), ROWS[keys >= ROWS]
        left.plot(FEW_ROWS, forward_us(table, FEW_ROWS, few), lw=1.4, **style)
        achieved = tflops(table, many, np.full(many.size, keys))
        right.plot(many, achieved, lw=1.4, label=f"{tokens_text(keys)} keys", **style)
    left.axvline(table.tile_rows, color="black", linewidth=0.8, linestyle=":")
    left.set(yscale="log", xticks=range(0, 257, 32), xlabel="query rows")
    left.set_ylabel("forward of a segment, one layer (\N{MICRO SIGN}s)")
    right.set(ylim=(0, None), xlabel="query rows", ylabel="achieved TFLOP/s, forward")
    tokens_axis(right)
    figure.legend(loc="outside lower center", ncols=len(KEYS), frameon=False)
    return figure


def rows_table(table: AttentionTable, name: str) -> Table:
    columns = (
        "query rows",
        *(f"us, {tokens_text(k)} keys" for k in KEYS),
        *(f"TFLOP/s, {tokens_text(k)} keys" for k in KEYS),
    )
    rows: list[list[Any]] = []
    for q in np.unique(np.concatenate([FEW_ROWS, ROWS])).tolist():
        known = [(np.array([q]), np.array([keys])) if q <= keys else None for keys in KEYS]
        times = [float(forward_us(table, *at)[0]) if at else None for at in known]
        rates = [float(tflops(table, *at)[0]) if at else None for at in known]
        rows.append([q, *times, *rates])
    return Table(
        name=f"kernel_{name}",
        title=f"All points, {name}",
        columns=columns,
        rows=rows,
        formats={columns[0]: ",d"} | dict.fromkeys(columns[1:5], ".1f") | _whole(columns[5:]),
        most_rows=0,
    )


def _whole(columns: tuple[str, ...]) -> dict[str, str]:
    return dict.fromkeys(columns, ".0f")


def against_of(table: AttentionTable, label: str) -> list[Against]:
    """Compares 16 rows with a tile of 128, and one tile with two, all with 4K keys."""
    q, keys = np.array([16, 128, 256]), np.full(3, 4096)
    time, rate = forward_us(table, q, keys), tflops(table, q, keys)
    return [
        Against(
            what=f"time of 128 rows over that of 16, 4K keys, {label}",
            paper="constant",
            ours=float(time[1] / time[0]),
            note="by construction",
        ),
        Against(
            what=f"time of 256 rows over that of 128, 4K keys, {label}",
            paper="rises significantly",
            ours=float(time[2] / time[1]),
            note="a second tile",
        ),
        Against(
            what=f"TFLOP/s at 256 rows over that at 128, 4K keys, {label}",
            paper="increase significantly",
            ours=float(rate[2] / rate[1]),
        ),
    ]


def worth(table: AttentionTable, label: str) -> str:
    """Returns the page's line about an attention table: its source, tiles and cost of a call."""
    source = table.provenance
    return (
        f"- {label}: {source.kind} ({source.source}). Tiles of {table.tile_rows} rows in forward; "
        f"{table.launch_forward_ns / 1e3:.0f} us a call on top, which the figure leaves out."
    )


def main() -> None:
    parser = experiment_parser(__doc__)
    parser.add_argument("--profile", nargs="+", default=PROFILES, help="names or JSON files")
    parser.add_argument("--backend", help="attention kernel; default: the profile's first")
    options = parser.parse_args()
    profiles = [load_profile(name) for name in options.profile]
    made: list[Table] = []
    figures: list[Picture] = []
    against: list[Against] = []
    sources: list[str] = []
    for profile in profiles:
        table = table_of(profile, options.backend)
        kernel = options.backend or " = ".join(table.backends)
        label = f"{profile.name}, {kernel}"
        made.append(rows_table(table, profile.name))
        against += against_of(table, profile.name)
        sources.append(worth(table, label))
        caption = (
            f"{label}: forward time of a segment of few rows (left), achieved TFLOP/s by query "
            f"rows and keys (right)"
        )
        name = f"kernel_{profile.name}"
        figures.append(Picture(name=name, caption=caption, figure=draw(table)))
    show(against=against, width=160)
    write_results(
        Path(__file__).parent,
        title="Figure 10: attention kernel by query rows and keys",
        how=How.PREDICTED,
        profile=priced_with(*profiles),
        text=(
            "Forward of one layer of LLaMA2-7B (32 heads of 128) for a segment of a call that "
            "fills the GPU; the segment is the end of its document, so that its last row sees all "
            "the keys. TFLOP/s count what the mask leaves: rows that only fill up a tile are lost. "
            "The step at a tile is a rule of the price (FLOPs of whole tiles); what a profile "
            "knows is throughput from a tile on.\n\n" + multicast() + "\n\n" + words() + "\n\n"
            "What the attention tables are:\n" + "\n".join(sources)
        ),
        against=against,
        tables=[*made, sensitivity_table()],
        figures=figures,
    )


if __name__ == "__main__":
    main()

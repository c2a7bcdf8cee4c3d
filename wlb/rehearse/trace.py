"""Write rehearsed ranks as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wlb.rehearse.results import RankResult


def write_trace(path: Path, ranks: Sequence[RankResult]) -> None:
    """Write a trace file, in which a rank is a process and a stream is a thread.

    Times are predicted, not measured.

    Args:
        path: The file.
        ranks: Results of ranks whose rehearsal has recorded kernels and transfers (`GPU.traces`).
    """
    events: list[dict[str, Any]] = []
    for rank in ranks:
        name = {"name": f"rank {rank.rank}"}
        events.append({"ph": "M", "name": "process_name", "pid": rank.rank, "args": name})
        for i, stream in enumerate(rank.streams):
            thread = {"ph": "M", "name": "thread_name", "pid": rank.rank, "tid": i}
            events.append({**thread, "args": {"name": stream}})
        events += [
            {
                "ph": "X",
                "name": span.name,
                "cat": span.part,
                "pid": rank.rank,
                "tid": span.stream,
                "ts": span.begin_ns / 1e3,
                "dur": span.time_ns / 1e3,
                "args": {"where": span.where},
            }
            for span in rank.spans
        ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), "utf-8")

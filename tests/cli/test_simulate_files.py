"""Tests that `wlb simulate` writes what it was asked for: a trace, a timeline."""

import json
from pathlib import Path

from wlb.cli import main


def test_files_of_one_step(tmp_path: Path) -> None:
    trace, timeline = (tmp_path / name for name in ("t.json", "t.png"))
    options = ["--synthetic", "wlb_paper", "--steps", "3", "--step", "1", "--device", "cpu"]
    files = ["--trace", str(trace), "--timeline", str(timeline)]
    assert main(["simulate", "demo", *options, *files]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["name"] for e in events if e["ph"] == "X" and e["cat"] == "step"} == {"step 1"}
    assert timeline.read_bytes().startswith(b"\x89PNG")

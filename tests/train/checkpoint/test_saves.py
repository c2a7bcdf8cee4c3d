"""Tests what a run says about its saves before its first step."""

import json
from pathlib import Path

from tests.words import lacks
from wlb.spec import load
from wlb.train.checkpoint.saves import unsaved_remark


def test_a_run_without_interval_says_what_an_abort_would_lose(tmp_path: Path) -> None:
    spec = load("demo", ["training.steps=5000"])
    said = unsaved_remark(spec, None)
    assert lacks(said, "checkpoint.interval = 0", "Ctrl-C", "second Ctrl-C", "5,000 steps") == []
    (tmp_path / "run.json").write_text(json.dumps({"step": 1200, "spec": {}}), "utf-8")
    assert "3,800 steps after step 1,200" in unsaved_remark(spec, tmp_path)
    assert unsaved_remark(load("demo", ["checkpoint.interval=10"]), None) == ""

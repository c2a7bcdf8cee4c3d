"""What happened to a run besides its steps: saves, steps that were not finite, stops. As words."""

from typing import Any

import numpy as np

KINDS = ("checkpoint", "nonfinite", "stop")
"""Of records in metrics.jsonl."""


def event_lines(events: list[dict[str, Any]]) -> list[str]:
    """Sentences, in order of importance; one that says so where nothing happened."""
    saves = [e for e in events if e["kind"] == "checkpoint"]
    good = [e for e in saves if not e["error"]]
    out: list[str] = []
    if good:
        stalls = np.array([e["stall_s"] for e in good])
        writes = np.array([e["write_s"] for e in good])
        size = good[-1]["num_bytes"] / 2**20
        many = "checkpoints were" if len(good) > 1 else "checkpoint was"
        out.append(
            f"{len(good)} {many} written, the last after step {good[-1]['step']} with {size:,.1f} "
            f"MiB. Training waited {stalls.mean():.3f} s for one on average, {stalls.max():.3f} s "
            f"at most; they were complete after {writes.mean():.2f} s, {writes.max():.2f} s at "
            f"most."
        )
    out += [
        f"The checkpoint after step {e['step']} could not be written: {e['error']}."
        for e in saves
        if e["error"]
    ]
    out += [
        f"The step after step {e.get('steps_done', e['step'])} was not finite ({e['found']}): "
        f"{_DONE[e['action']]}."
        for e in events
        if e["kind"] == "nonfinite"
    ]
    out += [
        f"The run stopped after step {e['steps_done']}, asked by {e['asked_by']}."
        for e in events
        if e["kind"] == "stop"
    ]
    return out or ["No checkpoint was written, no step was refused."]


_DONE = {
    "skip": "its update was skipped",
    "rollback": "training went back to the last checkpoint",
}

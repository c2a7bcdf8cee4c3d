"""Writes the folder of a run as training does, with numbers that tests choose."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.plan.test_telemetry import record
from wlb.plan import (
    TERMS,
    MeasuredStep,
    MeasuredTimeline,
    Moments,
    Place,
    RankTable,
    StepMetrics,
    Straggler,
    places_to_json,
)
from wlb.plan import TimedPass as P
from wlb.spec import RunSpec, apply

SPEC = apply(
    RunSpec(),
    {
        "run": {"name": "made"},
        "model": {"vocab_size": 320},
        "parallel": {"tp": 2, "cp": 2, "pp": 2, "dp": 2},
        "pp": {"virtual_stages": 2},
        "training": {"steps": 20},
        "telemetry": {"warmup_steps": 2},
    },
    source="made",
)
SLOW = Straggler(rank=5, over=1.4, host="gpu07", node=1, tp=1, cp=0, pp=1, dp=0)


def start(steps_done: int = 0, spec: RunSpec = SPEC, **others: Any) -> dict[str, Any]:
    places = [Place(f"gpu{rank // 8:02d}", rank // 8) for rank in range(spec.parallel.world_size)]
    return {
        "kind": "start",
        "resumed_from": f"runs/made/checkpoints/step-{steps_done:08d}" if steps_done else None,
        "steps_done": steps_done,
        "time": "2026-01-01T00:00:00+00:00",
        "version": "0.1.0",
        "device": "cpu",
        "train_store": "no/such/store",
        "places": places_to_json(places),
        "spec": spec.to_dict(),
        **others,
    }


def step(done: int, loss: float | None = None) -> dict[str, Any]:
    terms = tuple((name, Moments.of(1.0, 1.0 + 0.1 * i)) for i, name in enumerate(TERMS))
    common = {
        "step": done - 1,
        "num_documents": 9,
        "num_tokens": 1000 + done,
        "num_targets": 990,
        "mean_delay": 0.5,
        "max_delay": done % 4,
        "num_held_tokens": 10 * done,
    }
    made = {
        "measured": MeasuredStep(
            **common,
            loss=6 - done / 10 if loss is None else loss,
            grad_norm=0.5,
            step_time_s=0.25,
            telemetry=record(terms=terms, num_steps=1),
        ),
        "predicted": StepMetrics(
            **common, imbalance=1.1, max_workload_ns=110, mean_workload_ns=100.0
        ),
        "plain_4d": StepMetrics(
            **common, imbalance=1.4, max_workload_ns=140, mean_workload_ns=100.0
        ),
    }
    lines = {name: metrics.to_json() for name, metrics in made.items()}
    return {"kind": "step", "step": done - 1, "steps_done": done, "learning_rate": 1e-3, **lines}


def ranks(done: int, *stragglers: Straggler, count: int = 16) -> dict[str, Any]:
    times = np.arange(count) * 10 + 100_000
    measured = times.copy()
    for slow in stragglers:
        measured[slow.rank] *= slow.over
    table = RankTable(
        step=done - 1,
        steps_done=done,
        num_steps=4,
        measured_us=measured,
        predicted_us=times,
        compute_us=measured * 2,
        bubble_us=times // 2,
        loading_us=times // 100,
        stragglers=stragglers,
    )
    return {"kind": "ranks", **table.to_json()}


def timeline(done: int) -> dict[str, Any]:
    """Returns the timeline of pipeline 0 of SPEC: two pipeline ranks for each of two CP ranks."""
    chosen = (0, 4, 2, 6)
    passes = tuple(
        (
            P("forward", r // 4, 0, 1000, 2000),
            P("forward", r // 4 + 2, 0, 4000, 2000),
            P("backward", r // 4 + 2, 0, 7000, 3000),
            P("backward", r // 4, 0, 10_000 + r, 3000),
        )
        for r in chosen
    )
    made = MeasuredTimeline(
        step=done - 1, steps_done=done, ranks=chosen, wall_us=(14_000,) * 4, passes=passes
    )
    return {"kind": "timeline", **made.to_json()}


def write(folder: Path, lines: list[dict[str, Any]], *, end: str = "\n") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(json.dumps(line) for line in lines)
    (folder / "metrics.jsonl").write_text(text + end, "utf-8")
    return folder


def whole_run() -> list[dict[str, Any]]:
    """Returns the lines of a run of 20 steps.

    After step 10 it resumes from step 8. From step 16 on it has a straggler.
    """
    lines = [start(), {"kind": "evaluation", "steps_done": 0, "heldout_loss": 6.5}]
    lines += [step(done) for done in range(1, 11)] + [ranks(6), ranks(10), start(8)]
    for done in range(9, 21):
        lines.append(step(done, 3.0))
        if done % 4 == 0:
            lines.append(ranks(done, *([SLOW] if done >= 16 else [])))
    lines += [timeline(12), timeline(20)]
    return [*lines, {"kind": "evaluation", "steps_done": 20, "heldout_loss": 3.25}]

"""Tests telemetry over ranks on known times and in whole runs, and calibration of a slower run."""

import json
import re
from dataclasses import replace
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from tests.cost.test_stages import priced
from tests.plan.test_telemetry import record
from tests.planner.test_compose import planner
from tests.sets import full
from tests.train.case import Run, small_spec, train, write_corpus, write_store
from tests.train.slow import calibrated
from wlb.cost import (
    StageLayers,
    end_times_ns,
    load_profile,
    stage_times,
    without_collectives,
    workload_for,
)
from wlb.launch.local import run_local
from wlb.parallel.mesh import Coordinates, build_mesh
from wlb.parallel.world import World
from wlb.plan import TERMS, MeasuredStep, Moments, PipelinePlan, StepPlan, Telemetry
from wlb.planner import open_planner
from wlb.profile.calibrate import Scales
from wlb.spec import ExpertsSpec, ModelSpec, ParallelSpec, RunSpec, check
from wlb.train import start
from wlb.train.stores import open_stores, ready
from wlb.train.telemetry.calibrate import DRIFT_THRESHOLD, Calibration, profile_path
from wlb.train.telemetry.clock import Cell, Part, Pass, StepTimes
from wlb.train.telemetry.meter import TelemetryMeter

pytestmark = pytest.mark.dist

MODEL = ModelSpec(
    vocab_size=320, hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2, ffn_hidden_size=64
)


def spec_of_ranks(**parallel: int) -> RunSpec:
    """Returns the planner tests' run: 4 micro-batches of 2 pipelines, 2 CP ranks."""
    spec = RunSpec(model=MODEL, parallel=ParallelSpec(**parallel))
    return check(replace(spec, data=replace(spec.data, context_window=64, num_windows=4)))


def first_step(pipeline: int) -> PipelinePlan:
    made = planner()
    plan = made.next(made.start())
    assert plan is not None
    return made.shard(plan, pipeline)


def ms(value: float) -> int:
    return round(value * 1e6)


def measured_of(world: World, times_of_batches: list[list[int]], repeat: int) -> Telemetry:
    """Returns the record of `repeat` steps.

    times_of_batches: forward ms of a rank's two micro-batches, by rank
    """
    spec = spec_of_ranks(cp=2, dp=2)
    mesh = build_mesh(spec.parallel, torch.device("cpu"))
    meter = TelemetryMeter(spec, mesh)
    parts: dict[tuple[Cell, Part], int] = {}
    for i, took in enumerate(times_of_batches[world.rank]):
        forward, backward = Cell(Pass.FORWARD, 0, i), Cell(Pass.BACKWARD, 0, i)
        parts[forward, Part.ATTENTION] = ms(took) // 2
        parts[forward, Part.LAYERS] = ms(took) - ms(took) // 2
        parts[forward, Part.EMBEDDING] = ms(1)
        parts[forward, Part.HEAD] = ms(3)
        parts[backward, Part.ATTENTION] = ms(10)
        parts[backward, Part.LAYERS] = ms(20)
    times = StepTimes(parts, wall_ns=sum(parts.values()) + ms(5 * (world.rank + 1)))
    for _ in range(repeat):
        meter.add(first_step(mesh.at.dp), times)
    assert meter.num_steps == repeat
    record = meter.reduce()
    assert meter.num_steps == 0
    return record


@pytest.mark.parametrize("repeat", [1, *full(3)])
def test_sums_and_maxima_of_four_ranks(repeat: int) -> None:
    """The slower ranks of micro-batches take 20, 40 (pipeline 0), 30, 10: the degree is 40 x 4 /
    100.
    """
    times = [[20, 10], [15, 40], [30, 10], [30, 5]]
    records = run_local(measured_of, 4, times, repeat, start_group=True, timeout_s=600)
    assert records == [records[0]] * 4
    r: Telemetry = records[0]
    assert r.num_steps == repeat
    assert (r.slowest_ns, r.mean_ns) == (ms(40) * repeat, ms(25) * repeat)
    assert r.imbalance == pytest.approx(1.6)
    assert r.whole_imbalance == pytest.approx(44 * 4 / 116)
    assert r.predicted_imbalance >= 1.0
    # A step of a rank: its forward times, and 2 x (1 + 3 + 10 + 20) besides.
    assert r.compute.mean_s == pytest.approx((30 + 55 + 40 + 35) / 4e3 + 0.068)
    assert (r.compute.max_s, r.compute.max_rank) == (pytest.approx(0.055 + 0.068), 1)
    assert r.bubble.mean_s == pytest.approx(12.5e-3)
    assert (r.bubble.max_s, r.bubble.max_rank) == (pytest.approx(20e-3), 3)
    assert (r.embedding_s, r.head_s) == (pytest.approx(2e-3), pytest.approx(6e-3))
    cost = workload_for(spec_of_ranks(cp=2, dp=2), "cpu")
    ends = [end_times_ns(first_step(d), cost) for d in range(2)]
    assert r.predicted_embedding_s == pytest.approx(1e-9 * sum(e[0] for e in ends) / 2)
    assert r.predicted_head_s == pytest.approx(1e-9 * sum(e[1] for e in ends) / 2)
    terms = dict(r.terms)
    # FSDP gathers in the first micro-batch's forward and reduces in the last one's backward: one
    # of two is left, on two CP ranks of two pipelines; one of the four micro-batches is empty.
    assert [s.num_tokens == 0 for d in range(2) for s in first_step(d).shardings].count(True) == 1
    assert terms["attention_backward"].num_cells == 4 * repeat
    assert terms["attention_backward"].measured_s == pytest.approx(0.04 * repeat)
    assert terms["linear_backward"].measured_s == pytest.approx(0.08 * repeat)
    assert terms["linear_forward"].num_cells == 2 * repeat
    assert terms["linear_forward"].predicted_s > 0
    # It took 20 ms everywhere, so there is nothing to correlate with.
    assert terms["linear_backward"].correlation is None


def recomputed(world: World) -> Telemetry:
    spec = spec_of_ranks(cp=2, dp=2)
    mesh = build_mesh(spec.parallel, torch.device("cpu"))
    meter = TelemetryMeter(spec, mesh)
    forward, backward, weight = (Cell(kind, 0, 0) for kind in Pass)
    parts = {
        (forward, Part.ATTENTION): ms(1),
        (backward, Part.ATTENTION): ms(1),
        (backward, Part.LAYERS): ms(4),
        (weight, Part.LAYERS): ms(2),
    }
    if world.rank == 0:
        parts[backward, Part.RECOMPUTE] = ms(7)
    meter.add(first_step(mesh.at.dp), StepTimes(parts, wall_ns=ms(9)))
    return meter.reduce()


@pytest.mark.full
def test_what_runs_again_is_backward_and_cells_without_time_are_not_compared() -> None:
    (terms, *_) = [dict(r.terms) for r in run_local(recomputed, 4, start_group=True, timeout_s=600)]
    counts = {name: m.num_cells for name, m in terms.items()}
    assert counts == {
        "attention_forward": 0,
        "attention_backward": 4,
        "linear_forward": 0,
        "linear_backward": 4,
    }
    assert terms["attention_backward"].measured_s == pytest.approx((4 * 1 + 7) * 1e-3)
    # Weight gradients computed later belong to the backward pass.
    assert terms["linear_backward"].measured_s == pytest.approx(4 * 6e-3)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("telemetry") / "corpus")


def measured(run: Run) -> list[MeasuredStep]:
    return [MeasuredStep.from_json(line["measured"]) for line in run.steps]


def test_every_step_has_a_record(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = small_spec(
        tmp_path,
        corpus,
        training={"steps": 5},
        eval={"steps": 1, "interval": 2},
        telemetry={"warmup_steps": 2},
    )
    run, _ = train(spec)
    steps = measured(run)
    assert len(steps) == 5
    assert all(s["measured"]["max_workload_ns"] > 0 for s in run.steps)
    for step in steps:
        assert step.telemetry is not None
        assert step.telemetry.num_steps == 1
        assert step.imbalance == step.telemetry.imbalance
        # 4 micro-batches on one stage (an empty one has no cell).
        for _, term in step.telemetry.terms:
            assert 0 < term.num_cells <= 4 * step.telemetry.num_steps
            assert term.measured_s > 0
    shown = capsys.readouterr().out
    assert "imbalance, measured" in shown
    assert re.search(r"waiting a step .* \(3 steps\)", shown)  # without those of the warm-up


REFUSED = [
    (
        {},
        {"training": {"steps": 6, "recompute": "full"}},
        "training.recompute = full the backward pass includes",
    ),
    (
        {"warmup_steps": 6},
        {},
        r"training.steps = 6 belong to the warm-up \(telemetry.warmup_steps = 6\)",
    ),
]


@pytest.mark.parametrize(("telemetry", "others", "message"), REFUSED)
def test_calibrations_that_could_measure_nothing_are_refused(
    corpus: Path, tmp_path: Path, telemetry: dict[str, Any], others: dict[str, Any], message: str
) -> None:
    spec = small_spec(tmp_path, corpus, telemetry=telemetry, **others)
    with pytest.raises(ValueError, match=message):
        start.train(spec, resume=None, console=Console(file=StringIO()), calibrate="")
    assert not (tmp_path / "runs" / "small").exists()


def test_where_a_profile_is_written(tmp_path: Path) -> None:
    def path(wanted: str) -> Path:
        return profile_path(wanted, priced_by="cpu", folder=tmp_path)

    assert path("") == tmp_path / "cpu-calibrated.json"
    assert path("mine") == tmp_path / "mine.json"
    assert path("some/where.json") == Path("some/where.json")
    for name in ("cpu-calibrated", "cpu-calibrated-2", "mine"):
        (tmp_path / f"{name}.json").touch()
    assert path("") == tmp_path / "cpu-calibrated-3.json"
    for wanted in ("mine", str(tmp_path / "mine.json")):
        with pytest.raises(ValueError, match=r"mine.json already exists, and --calibrate never"):
            path(wanted)
    for wanted in ("h100", "elsewhere/cpu.json"):
        with pytest.raises(
            ValueError, match=r"is already the name of a profile that comes with wlb"
        ):
            path(wanted)
    with pytest.raises(
        ValueError, match=r"--calibrate a/b must be a name without folders, or the path of a file"
    ):
        path("a/b")


def test_a_run_with_a_profile_of_the_folder_it_would_move_is_refused(
    corpus: Path, tmp_path: Path
) -> None:
    profile = tmp_path / "runs" / "small" / "mine.json"
    profile.parent.mkdir(parents=True)
    profile.write_text(json.dumps({}))
    spec = small_spec(tmp_path, corpus, cost={"profile": str(profile)})
    with pytest.raises(
        ValueError, match="the folder of an older run of the same name, and this folder is renamed"
    ):
        train(spec)
    assert profile.exists()


def heavy_spec(folder: Path, **sections: dict[str, Any]) -> RunSpec:
    """Returns a run of two pipeline ranks whose attention and linear layers take some ms per
    cell.
    """
    draw = np.random.default_rng(1)
    lengths = np.minimum(2048, draw.lognormal(5.5, 1.2, 400).astype(int) + 2).tolist()
    store = str(folder / "store")
    if not Path(f"{store}.bin").exists():
        write_store(folder / "store", lengths)
    return small_spec(
        folder,
        folder / "no-corpus",
        model={"hidden_size": 64, "num_layers": 2, "ffn_hidden_size": 256},
        parallel={"pp": 2},
        data={"store": store, "context_window": 2048},
        packing={"s_max": 1.5},
        planner={"baseline": False},
        training={"steps": 12},
        eval={"steps": 0},
        telemetry={"warmup_steps": 2},
        **sections,
    )


def plans(spec: RunSpec) -> list[StepPlan]:
    """Returns the first 20 steps of a run of `spec`."""
    stores = open_stores(spec, Console(file=StringIO()))
    made = open_planner(ready(spec, stores, spec.parallel.world_size), stores.train, "cpu")
    return list(islice(made.steps(), 20))


def documents(steps: list[StepPlan]) -> list[list[int]]:
    return [s.packing.pieces.document.tolist() + s.packing.offsets.tolist() for s in steps]


def factors(profile: Path) -> dict[str, float]:
    """Returns what the profile's provenance says that times were multiplied by."""
    found = re.findall(
        r"(\w+_(?:for|back)ward) ([\d.]+)", load_profile(str(profile)).provenance.source
    )
    return {name: float(value) for name, value in found}


def drifted(profile: Path, threshold: float) -> tuple[str, ...]:
    """Returns terms that a profile's run found to have drifted."""
    found = factors(profile)
    assert tuple(found) == TERMS
    return Scales(**found, num_records=10, num_steps=10).drifted(threshold)


@pytest.mark.nightly
def test_a_slower_term_is_detected_and_changes_the_next_runs_plans(tmp_path: Path) -> None:
    """The forward kernel burns 1.3 times its CPU time; the profile of the run before notices.

    Whatever else keeps the cores busy slows all terms alike; a run that is not slowed shows that
    nothing is seen where nothing is.
    """
    spec = heavy_spec(tmp_path)
    before = calibrated(spec, name="before")
    next_spec = replace(spec, cost=replace(spec.cost, profile=str(before)))
    threshold = DRIFT_THRESHOLD
    assert drifted(calibrated(next_spec, name="control"), threshold) == ()
    after = calibrated(next_spec, name="after", factor=1.3)
    assert drifted(after, threshold) == ("attention_forward",)
    profile = load_profile(str(after))
    assert (profile.name, profile.provenance.kind) == ("after", "measured")
    assert "profile 'before' with times of sdpa" in profile.provenance.source
    first, again = plans(next_spec), plans(next_spec)
    assert [p.digest() for p in first] == [p.digest() for p in again]
    other = plans(replace(spec, cost=replace(spec.cost, profile=str(after))))
    assert [p.digest() for p in first] != [p.digest() for p in other]
    # Not only prices: some documents are now in other micro-batches.
    assert documents(first) != documents(other)


def test_a_machine_that_is_slower_in_everything_did_not_drift(tmp_path: Path) -> None:
    spec = replace(RunSpec(), telemetry=replace(RunSpec().telemetry, warmup_steps=0))
    calibration = Calibration(spec)
    terms = tuple((name, Moments.of(1.0, 1.3)) for name in TERMS)
    calibration.add(record(terms=terms, num_steps=1))
    said = StringIO()
    calibration.finish(
        tmp_path / "mine.json",
        cost=priced("cpu"),
        run=tmp_path,
        collectives=False,
        console=Console(file=said, width=200),
    )
    assert "drifted" not in said.getvalue()
    assert "everything takes 1.30 times its price" in said.getvalue()


def test_what_drifted_is_said_and_the_profile_says_where_it_comes_from(tmp_path: Path) -> None:
    spec = replace(RunSpec(), telemetry=replace(RunSpec().telemetry, warmup_steps=0))
    cost = priced("cpu")
    ratios = dict(zip(TERMS, (1.3, 1.14, 0.84, 0.86), strict=True))
    terms = tuple((name, Moments.of(1.0, ratio)) for name, ratio in ratios.items())
    calibration = Calibration(spec)
    calibration.add(record(terms=terms, num_steps=1))
    path = tmp_path / "new" / "mine.json"

    def finish(console: Console | None) -> None:
        run = Path("runs/small")
        calibration.finish(path, cost=cost, run=run, collectives=False, console=console)

    finish(None)  # not the rank that writes
    assert not path.exists()
    said = StringIO()
    finish(Console(file=said, width=200))
    head, *rows, last = said.getvalue().splitlines()
    assert "'cpu'" in head
    assert "1 steps" in head
    figures = [
        (name.replace("_", " "), *re.findall(r"\d\.\d+", row))
        for name, row in zip(TERMS, rows, strict=True)
    ]
    assert figures == [
        ("attention forward", "1.300", "1.512", "0.15"),
        ("attention backward", "1.140", "1.326", "0.15"),
        ("linear forward", "0.840", "0.737", "0.15"),
        ("linear backward", "0.860", "0.754", "0.15"),
    ]
    for (name, *_), row in zip(figures, rows, strict=True):
        assert row.strip().startswith(name)
        assert "drifted" in row
    assert str(path) in last
    made = load_profile(str(path))
    assert made.name == "mine"
    source = made.provenance.source
    assert source.startswith("run runs/small: profile 'cpu' with times of sdpa and of linear")
    assert "attention_forward 1.3, attention_backward 1.14" in source
    finish(Console(file=said, width=200))  # again: another run finished meanwhile
    assert load_profile(str(tmp_path / "new" / "mine-calibrated.json")).name == "mine-calibrated"
    assert f"{path} in the meantime" in said.getvalue()
    none = StringIO()
    Calibration(spec).finish(
        path, cost=cost, run=path, collectives=True, console=Console(file=none, width=200)
    )
    assert none.getvalue().startswith("no profile was written: the profile cannot be calibrated")


class RankPlace:
    """A rank's place, without processes."""

    def __init__(self, device: str, cp: int, pp: int = 0) -> None:
        self.at = Coordinates(tp=0, cp=cp, pp=pp, dp=0)
        self.device, self.fsdp_size = torch.device(device), 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_calibrated_profile_has_no_load_of_experts(device: str) -> None:
    """Predicted terms are those of the rows that experts computed, whatever cost.expert_load is."""
    moe = ExpertsSpec(num=4, per_token=2, hidden_size=2**24)
    spec = RunSpec(model=replace(MODEL, experts=moe), parallel=ParallelSpec(cp=2, ep=2))
    spec = replace(spec, data=replace(spec.data, context_window=64, num_windows=4))
    plan = first_step(0)
    mesh: Any = RankPlace(device, 0)
    lengths = np.array([sharding.num_tokens for sharding in plan.shardings])
    cells = [Cell(Pass(end), 0, i) for end in ("forward", "backward") for i in range(lengths.size)]
    times = StepTimes({(cell, Part.LAYERS): ms(1) for cell in cells}, wall_ns=1)
    found: list[dict[str, float]] = []
    for load in (1.0, 1.3, 1.6):
        spec = replace(spec, cost=replace(spec.cost, expert_load=load))
        measured = TelemetryMeter(spec, mesh)
        measured.add(plan, times, experts=1.6 * lengths)
        found.append({name: measured._moments[name].predicted_s for name in TERMS[2:]})
    assert found[0] == pytest.approx(found[2], rel=1e-3)
    assert found[1] == pytest.approx(found[2], rel=1e-3)
    measured = TelemetryMeter(spec, mesh)
    measured.add(plan, times, experts=1.0 * lengths)
    assert measured._moments["linear_forward"].predicted_s < 0.95 * found[2]["linear_forward"]


def test_stages_without_experts_are_priced_as_such() -> None:
    """Stage 0 has MLPs alone and stage 1 experts; a rank of either measures the same ratios."""
    true = dict(zip(TERMS, (3.0, 2.5, 1.0, 1.2), strict=True))
    moe = ExpertsSpec(num=4, per_token=1, hidden_size=2**14, dense_layers=(0, 1))
    spec = RunSpec(model=replace(MODEL, experts=moe), parallel=ParallelSpec(cp=2, pp=2, ep=2))
    spec = replace(spec, data=replace(spec.data, context_window=64, num_windows=4))
    once = without_collectives(workload_for(spec, "cpu"))
    plan = first_step(0)
    lengths = np.array([sharding.num_tokens for sharding in plan.shardings])
    for pp, (kind, load) in enumerate(((spec.model.layer_kinds[1].model, 1.0), (spec.model, 1.5))):
        model = replace(kind, experts=replace(kind.experts, dense_layers=()))
        of_kind = replace(once, model=model, expert_load=load)
        base = stage_times(plan, of_kind, StageLayers(counts=(2,)))
        parts: dict[tuple[Cell, Part], int] = {}
        for i in range(lengths.size):
            for end in ("forward", "backward"):
                cell, factor = Cell(Pass(end), pp, i), true[f"linear_{end}"]
                attention = getattr(base, f"attention_{end}_ns")[i, 0] * true[f"attention_{end}"]
                parts[cell, Part.ATTENTION] = round(attention)
                parts[cell, Part.LAYERS] = round(getattr(base, f"linear_{end}_ns")[i] * factor)
        mesh: Any = RankPlace("cpu", 0, pp)
        measured = TelemetryMeter(spec, mesh)
        measured.add(plan, StepTimes(parts, wall_ns=1), experts=1.5 * lengths)
        found = {name: moments.ratio for name, moments in measured._moments.items()}
        assert found == pytest.approx(true, rel=0.02)

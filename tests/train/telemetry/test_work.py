"""Tests model FLOPs, TFLOP/s and MFU of runs against a count from masks and a model's matrices."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.sets import full
from tests.train.case import Run, relaid, small_spec, train, write_corpus
from wlb.cost import document_flops, known_peak_tflops, rank_peak_tflops, window_flops
from wlb.model import Llama
from wlb.plan import Layout, PackingPlan, Pieces
from wlb.spec import Dtype, ModelSpec, RunSpec, apply
from wlb.train.telemetry.work import WorkMeter

MODEL = ModelSpec(
    vocab_size=512, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_hidden_size=80
)


def count(model: ModelSpec, num_tokens: int, num_pairs: int) -> int:
    """Counts six FLOPs per token and matrix element of a model that is really made.

    Its vocabulary is as it is, not padded. QK^T and PV of every pair count three times.
    """
    with torch.device("meta"):
        made = Llama(model)
    matrices = sum(p.numel() for n, p in made.named_parameters() if "layers" in n and p.dim() == 2)
    matrices += model.vocab_size * model.hidden_size
    width = model.num_heads * model.head_size
    return 6 * matrices * num_tokens + 3 * 2 * 2 * width * model.num_layers * num_pairs


def plan_of(batches: list[list[tuple[int, int, int]]], layout: Layout) -> PackingPlan:
    """Returns a plan of literal batches.

    batches: (document, start, stop) of each piece of each micro-batch
    """
    rows = np.array([piece for batch in batches for piece in batch], np.int64)
    zeros = np.zeros(len(rows), np.int64)
    return PackingPlan(
        step=0,
        policy="test",
        pieces=Pieces(
            document=rows[:, 0],
            start=rows[:, 1],
            stop=rows[:, 2],
            num_targets=rows[:, 2] - rows[:, 1] - 1,
            source=zeros,
            arrival_step=zeros,
        ),
        offsets=np.cumsum([0] + [len(batch) for batch in batches]),
        workload_ns=np.zeros(len(batches), np.int64),
        layout=layout,
    )


def mask_pairs(batch: list[tuple[int, int, int]], layout: Layout) -> int:
    """Counts the ones of the mask of a micro-batch's real tokens."""
    if not batch:
        return 0
    segment = np.repeat(np.arange(len(batch)), [stop - start for _, start, stop in batch])
    if layout == Layout.JOINED:
        segment[:] = 0
    return int(np.tril(segment[:, None] == segment[None, :]).sum())


BATCHES = [
    [(0, 0, 9), (1, 0, 30)],  # document 1 goes on in the third: it does not see its beginning
    [],
    [(1, 30, 41), (2, 0, 1), (3, 0, 17)],
]


@pytest.mark.parametrize("layout", list(Layout))
def test_flops_of_a_step_are_those_of_its_mask(layout: Layout) -> None:
    spec = replace(RunSpec(), model=MODEL)
    spec = apply(
        spec, {"data": {"context_window": 64}, "cluster": {"peak_tflops": 2}}, source="test"
    )
    plan = plan_of(BATCHES, layout)
    mesh: Any = SimpleNamespace(world_size=4, device=torch.device("cpu"))
    meter = WorkMeter(spec, mesh)
    meter.add(plan, 0.5)
    meter.add(plan, 1.0)
    work = meter.take()
    pairs = sum(mask_pairs(batch, layout) for batch in BATCHES)
    assert work.model_flops == 2 * count(MODEL, 68, pairs)
    assert work.rank_s == 6.0
    assert work.tflops == pytest.approx(work.model_flops / 6e12)
    assert work.mfu == pytest.approx(work.tflops / 2)
    # As if 68 tokens were 68 / 64 windows.
    assert work.window_flops == pytest.approx(2 * count(MODEL, 64, 64 * 65 // 2) * 68 / 64)
    assert meter.take().model_flops == 0  # taken
    assert meter.note == ""


def test_short_documents_need_less_than_windows() -> None:
    lengths = np.full(8, 1024)
    own, whole = document_flops(MODEL, lengths).sum(), window_flops(MODEL, 8192, window=8192)
    assert whole == document_flops(MODEL, np.array([8192]))[0]
    assert whole > 3 * own


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", None),
    ],
)
def test_peaks_of_known_gpus(name: str, expected: float | None) -> None:
    assert known_peak_tflops(name) == expected


def test_which_peak_counts() -> None:
    plain = RunSpec()
    bf16 = replace(plain, training=replace(plain.training, dtype=Dtype.BFLOAT16))
    told = replace(bf16, cluster=replace(plain.cluster, peak_tflops=500.0))
    name = "NVIDIA H200"
    assert [rank_peak_tflops(s, name) for s in (plain, bf16, told)] == [0.0, 989.0, 500.0]
    assert rank_peak_tflops(bf16, "a CPU") == 0.0


def test_without_a_peak_the_log_says_how_to_have_mfu() -> None:
    spec = replace(RunSpec(), model=MODEL)
    mesh: Any = SimpleNamespace(world_size=1, device=torch.device("cpu"))
    meter = WorkMeter(spec, mesh)
    assert meter.note.startswith("model TFLOP/s without MFU, because the peak of ")
    assert meter.note.endswith(" in float32 is not known; to get MFU, set cluster.peak_tflops")
    meter.add(plan_of(BATCHES, Layout.SEPARATE), 1.0)
    work = meter.take()
    assert work.tflops > 0
    assert (work.mfu, work.window_mfu, work.peak_flops) == (None, None, 0.0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


def ledger_counts(run: Run, model: ModelSpec) -> list[int]:
    """Returns FLOPs of every step from the pieces that its ledger says were trained."""
    lines = [json.loads(x) for x in (run.folder / "ledger.jsonl").read_text().split("\n") if x]
    counts: list[int] = []
    for line in (x for x in lines if "step" in x):
        tokens = pairs = 0
        for start, stop in zip(line["start"], line["stop"], strict=True):
            tokens += stop - start
            pairs += sum(range(1, stop - start + 1))
        counts.append(count(model, tokens, pairs))
    return counts


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize(("layout", "peak"), [("one", 0.0), *full(("cp2-pp2", 0.25))])
def test_records_of_a_run_have_the_work_of_its_steps(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], layout: str, peak: float
) -> None:
    """There is a record after each step."""
    telemetry, cluster = {"warmup_steps": 3, "ledger": True}, {"peak_tflops": peak}
    spec = relaid(small_spec(tmp_path, corpus, telemetry=telemetry, cluster=cluster), layout)
    run, _ = train(spec)
    model = apply(RunSpec(), run.lines[0]["spec"], source="start").model
    counts = ledger_counts(run, model)
    times = [line["measured"]["step_time_s"] for line in run.steps]
    records = {
        line["steps_done"]: line["measured"]["telemetry"]["work"]
        for line in run.steps
        if line["measured"]["telemetry"]
    }
    ranks = spec.parallel.world_size
    first = 0
    for last, work in records.items():
        assert work["model_flops"] == sum(counts[first:last])
        # Without what the last of them took to write it down, which may be long on a busy machine.
        assert 0 < work["rank_s"] / (ranks * sum(times[first:last])) <= 1
        assert work["tflops"] == pytest.approx(work["model_flops"] / work["rank_s"] / 1e12)
        if peak:
            assert work["mfu"] == pytest.approx(work["tflops"] / peak)
            assert work["window_mfu"] > work["mfu"]  # documents shorter than windows
        else:
            assert work["mfu"] is None
        first = last
    assert list(records) == [1, 2, 3, 4, 5, 6]
    if layout != "one":
        return  # other processes write to where the first test that started ranks was read from
    shown = capfd.readouterr().out
    assert shown.count("model TFLOP/s without MFU") == 1
    (row,) = [line for line in shown.splitlines() if "model FLOP/s" in line]
    warm = [records[step] for step in (4, 5, 6)]
    tflops = sum(w["model_flops"] for w in warm) / sum(w["rank_s"] for w in warm) / 1e12
    assert f" {tflops:.3g} TFLOP/s" in row
    assert "MFU" not in row

"""Tests the memory estimate before a run: refusals, warnings, caps, S_max from the memory."""

import math
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.train.case import small_spec, train, write_corpus
from wlb.memory import Budget, cpu_budget, gpu_budget, memory_estimate, planned_gib
from wlb.memory.estimate import GIB
from wlb.packing import caps_of
from wlb.parallel import world as worlds
from wlb.spec import RunSpec, apply, load, system_choices
from wlb.train import dry_run, start
from wlb.train.memory_check import budget_of, check_budget, given_beyond, measured_budget, within

LAYOUT = {"parallel": {"dp": 1, "pp": 2}, "pp": {"schedule": "1f1b"}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("memory") / "corpus")


def spec_of(folder: Path, corpus: Path, memory_mib: float, **sections: Any) -> RunSpec:
    cluster = {"memory_gib": memory_mib / 1024}
    training = {"loss_chunk": 16}  # else logits are most of it
    return small_spec(folder, corpus, cluster=cluster, training=training, **sections)


def shown(spec: RunSpec) -> str:
    console = Console(file=StringIO(), width=400)
    dry_run.show(spec, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.fixture
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((start, "run_local"), (start, "run_rank"), (worlds, "init")):
        monkeypatch.setattr(owner, name, None)


@pytest.mark.usefixtures("_no_ranks")
@pytest.mark.parametrize("is_dry", [False, True], ids=["run", "dry run"])
def test_too_much_is_refused_before_a_rank_starts(
    corpus: Path, tmp_path: Path, *, is_dry: bool
) -> None:
    """A dry run says it, first and last."""
    spec = spec_of(tmp_path, corpus, 4.0, **LAYOUT)
    if is_dry:
        message = shown(spec)
        answer = (
            r"It does not fit: the fullest rank needs [\d.]+ MiB, and plans may use 3\.8 MiB of"
        )
        assert re.match(answer, message)
        assert re.match(answer, message.splitlines()[-1])
    else:
        with pytest.raises(ValueError) as refused:  # noqa: PT011
            start.train(spec, console=Console(quiet=True), resume=None)
        message = str(refused.value)
    for word in ("3.76 MiB", "4 MiB", "cluster.memory_gib"):
        assert word in message
    for word in ("pipeline rank ", "gradients ", "optimizer "):
        assert word in message
    for key in ("training.recompute", "packing.s_max"):
        assert key in message
    assert not (tmp_path / "runs" / "small").exists()


def test_the_rank_and_bytes_are_those_of_the_estimate(corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, corpus, 4.0, **LAYOUT)
    spec = replace(spec, model=replace(spec.model, vocab_size=320))
    estimate = memory_estimate(spec)
    needs = f"pipeline rank {estimate.pp_rank} needs about {estimate.total_bytes:,} bytes"
    with pytest.raises(ValueError, match=needs):
        check_budget(spec, budget_of(spec, "cpu"))
    exactly = Budget(gib=estimate.total_bytes / GIB, source="here")
    (line,) = check_budget(spec, exactly)
    assert line.startswith(f"memory: pipeline rank {estimate.pp_rank} needs most, about ")
    with pytest.raises(ValueError, match="that plans may use of"):
        check_budget(spec, replace(exactly, gib=exactly.gib * 0.99))


def test_caps_on_a_step_count(corpus: Path, tmp_path: Path) -> None:
    """Micro-batches in flight cannot all be as long as S_max where T is less."""
    spec = spec_of(tmp_path, corpus, 4.0, packing={"s_max": 4.0}, **LAYOUT)
    spec = replace(spec, model=replace(spec.model, vocab_size=320))
    capped = replace(spec, packing=replace(spec.packing, step_tokens=1.1))
    needs = [memory_estimate(s, step_tokens=s.packing.step_tokens_of(512)) for s in (spec, capped)]
    assert needs[1].activations_bytes < needs[0].activations_bytes
    between = Budget(gib=sum(n.total_bytes for n in needs) / 2 / GIB, source="here")
    assert len(check_budget(capped, between)) == 1
    with pytest.raises(ValueError, match="that plans may use of"):
        check_budget(spec, between)


def test_where_nothing_is_known_nothing_is_said(corpus: Path, tmp_path: Path) -> None:
    spec = small_spec(tmp_path, corpus)
    assert budget_of(spec, "cpu") is None
    assert check_budget(spec, None) == []


def test_a_gpu_has_its_own_memory(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [80 << 30, 40 << 30]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=sizes[i])
    )
    spec = small_spec(tmp_path, corpus)
    assert budget_of(spec, "cuda") == gpu_budget(spec, gib=40.0, source="the smallest GPU here")
    asked = replace(spec, cluster=replace(spec.cluster, memory_gib=20.0))
    assert budget_of(asked, "cuda") == gpu_budget(asked)
    assert budget_of(asked, "cpu") == cpu_budget(spec, gib=20.0, source="cluster.memory_gib")


def test_plans_never_count_on_more_than_a_gpu_has(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cluster.memory_gib may be of another cluster, or may start a run above its estimate."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = SimpleNamespace(total_memory=79 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: found)
    spec = small_spec(tmp_path, corpus)
    large = replace(spec, cluster=replace(spec.cluster, memory_gib=141.0))
    measured = measured_budget(large)
    assert measured == gpu_budget(large, gib=79.0, source="the smallest GPU here")
    (line,) = given_beyond(large, measured)
    assert "cluster.memory_gib = 141 is more than the 79.0 GiB of the smallest GPU here" in line
    assert given_beyond(spec, measured) == []
    planned = replace(large, packing=replace(large.packing, memory_gib=120.0))
    lowered, (said,) = within(planned, measured)
    assert lowered.packing.memory_gib == measured.planned_gib
    assert "packing.memory_gib = 120 was lowered" in said


@pytest.mark.usefixtures("_no_ranks")
@pytest.mark.parametrize("preset", ["7b_128k", "30b_128k", "70b_128k"])
def test_packing_plans_with_what_the_device_has(preset: str) -> None:
    """A system's packing plans with 80 GiB, and an H100 shows 79.2 GiB."""
    keys = ["model.vocab_size=32000", "parallel.dp=1"]
    (system,) = system_choices("wlb:1", planned_gib=planned_gib(load(preset, keys)))
    spec = load(preset, [*system, *keys])
    budget = gpu_budget(spec, gib=79.19, source="the smallest GPU here")
    planned, lines = within(spec, budget)
    # 5 communicators: the world, tp, cp, pp, dp x cp.
    left = 0.94 * (79.19 - 1.0 - 5 * 0.5625)
    assert planned.packing.memory_gib == math.floor(left * 1000) / 1000
    (line,) = lines
    assert "packing.memory_gib = 71.616" in line
    for figure in (f"{planned.packing.memory_gib:g}", "70.9 GiB", "79.2 GiB", "the smallest GPU"):
        assert figure in line
    for aside in (" 1 GiB", "2.81 GiB", "4.52 GiB"):
        assert aside in line
    assert len(check_budget(planned, budget)) == 1
    assert within(planned, budget) == (planned, [])
    assert within(spec, None) == (spec, [])


@pytest.mark.usefixtures("_no_ranks")
def test_a_dry_run_shows_caps(corpus: Path, tmp_path: Path) -> None:
    text = shown(small_spec(tmp_path, corpus))
    assert "│ 80.000 GiB" in text
    assert "│ 74.260 GiB" in text  # 0.94 * (80 - 1)
    assert "allocator's gaps 4.74 GiB) fit micro-batches of 1,024 tokens" in text
    text = shown(spec_of(tmp_path, corpus, 2.0, packing={"s_max": 0}, **LAYOUT))
    assert re.match(r"It fits: the fullest rank needs 1\.[78] MiB of the 1\.9 MiB", text)
    assert ") fit micro-batches of 147 tokens (S_max 1.15" in text
    assert "│ 0.002 GiB" in text


@pytest.mark.full
@pytest.mark.dist
def test_s_max_from_memory_trains(corpus: Path, tmp_path: Path) -> None:
    packing = {"policy": "bounded", "s_max": 0, "queue_thresholds": [0.5, 0.9]}
    run, said = train(spec_of(tmp_path, corpus, 2.0, packing=packing, **LAYOUT))
    assert " MiB of the 1.88 MiB that plans may use of 2 MiB (cluster.memory_gib;" in said
    spec = run.lines[0]["spec"]
    assert spec["packing"]["s_max"] == 147 / 128
    assert spec["packing"]["memory_gib"] == pytest.approx(0.94 * 2 / 1024)
    assert len(run.losses) == 6
    assert caps_of(apply(RunSpec(), spec, source="metrics"))[0] == 147
    small = small_spec(tmp_path, corpus, packing=packing, **LAYOUT)
    with pytest.raises(ValueError, match=r"set packing\.s_max .* set cluster\.memory_gib"):
        train(small)

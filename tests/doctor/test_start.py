"""Tests whole examinations: one process, local ranks on Gloo, and ranks with planted faults."""

import functools
import json
import os
import resource
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.test_attention import Planted
from wlb.doctor import Finding, Options, examine, folder, start, times
from wlb.doctor.limit import GRACE_S
from wlb.kernels import BACKENDS
from wlb.launch.local import RankFailure, run_local
from wlb.parallel import world as worlds
from wlb.parallel.host import open_files_needed
from wlb.parallel.world import World
from wlb.plan import UserError
from wlb.spec import RunSpec, load

LATE_S = 5.0
RANKS = 4
HOST = socket.gethostname()
FEW = open_files_needed(0, RANKS, "cpu") - 1
LAYOUT = ("parallel.tp=2", "parallel.cp=1", "parallel.pp=2", "pp.virtual_stages=1")


def keep(path: Path, findings: Sequence[Finding]) -> None:
    path.write_text(json.dumps([finding.to_json() for finding in findings]), "utf-8")


def options(path: Path, *, limit_s: float = 300.0) -> Options:
    return Options(is_quick=True, limit_s=limit_s, show=functools.partial(keep, path))


def rows(path: Path) -> dict[str, dict]:
    return {row["check"]: row for row in json.loads(path.read_text("utf-8"))}


def spec_of(runs: Path, *more: str) -> RunSpec:
    return load("demo", ["run.device=cpu", f"run.output_dir={runs}", *LAYOUT, *more])


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "discover", lambda: None)


def test_one_process_is_examined(tmp_path: Path) -> None:
    spec = load("demo_single", ["run.device=cpu", f"run.output_dir={tmp_path}/runs"])
    assert examine(spec, options(tmp_path / "found"))
    found = rows(tmp_path / "found")
    assert {row["verdict"] for row in found.values()} == {"pass", "skip"}
    examined = ("versions", "file descriptors", "disk for checkpoints", "shared folder")
    for check in (*examined, "attention kernel", "attention sdpa", "matrix products"):
        assert found[check]["verdict"] == "pass", found[check]
    for check in ("GPUs", "driver", "NVLink", "NUMA binding", "ECC", "clocks"):
        assert found[check]["found"] == "ranks are on the CPU"


def test_one_process_says_what_it_leaves_out_of_a_larger_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start.attention, "kernels", lambda _: [])
    spec = load("7b_128k", ["run.device=cpu", f"run.output_dir={tmp_path}"])
    examine(spec, options(tmp_path / "found"))
    found = rows(tmp_path / "found")
    assert found["ranks"]["verdict"] == "skip"
    assert found["ranks"]["found"].startswith("only one process ran for a layout of 64 ranks")
    assert "rank 0 of 64 ranks needs about" in found["file descriptors"]["found"]


def test_gpus_that_the_run_asks_for_and_are_not_there_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worlds.torch.cuda, "is_available", lambda: False)
    spec = load("demo_single", ["run.device=cuda", f"run.output_dir={tmp_path}"])
    assert not examine(spec, options(tmp_path / "found"))
    found = rows(tmp_path / "found")["GPUs"]
    assert found["verdict"] == "fail"
    assert "there are 0 GPUs for 1 ranks" in found["found"]


def test_a_check_that_raises_is_a_finding_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> Finding:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(start, "NODE_CHECKS", (broken, *start.NODE_CHECKS))
    spec = load("demo_single", ["run.device=cpu", f"run.output_dir={tmp_path}"])
    assert not examine(spec, options(tmp_path / "found"))
    found = rows(tmp_path / "found")
    assert found["broken"]["found"] == "ZeroDivisionError: planted"
    assert found["matrix products"]["verdict"] == "pass"


def test_a_layout_that_does_not_fit_the_launcher_s_ranks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(rank=1, world_size=3, local_world_size=3, rendezvous_file="f")
    monkeypatch.setattr(worlds, "discover", lambda: world)
    with pytest.raises(UserError, match="needs 4 ranks per pipeline, but there are 3"):
        examine(spec_of(tmp_path), options(tmp_path / "found"))


@pytest.mark.dist
def test_local_ranks_are_examined_together(tmp_path: Path) -> None:
    assert examine(spec_of(tmp_path / "runs"), options(tmp_path / "found"))
    found = rows(tmp_path / "found")
    assert {row["verdict"] for row in found.values()} <= {"pass", "skip", "warn"}
    assert found["shared folder"]["found"].endswith("every rank sees it")
    for axis, groups in (
        ("world", "1 group of 4"),
        ("tp", "2 groups of 2"),
        ("pp_even", "2 groups of 2"),
    ):
        assert found[f"communicator {axis}"]["found"].startswith(f"{groups} ranks, ")
    assert "p2p" in found["communicator pp_even"]["found"]
    assert "; profile cpu assumes " in found["communicator tp"]["found"]
    assert found["clock skew"]["found"] == "all ranks are on one node"


def sick(world: World, spec: RunSpec, wanted: Options, place: Path) -> bool:
    """Plants faults on each rank but rank 0, as if each were a node.

    1: few file descriptors, a clock ahead; 2: another disk, wrong numbers; 3: a wrong kernel, late.
    """
    world = replace(world, local_rank=0, local_world_size=1, node_rank=world.rank)
    skew, measure = times.clock_skew, start.network.measure_group
    folder.QUICK_WITHIN_S, times.LATE_S = LATE_S, LATE_S / 10
    if world.rank == 1:
        begin = worlds.init

        def begin_with_few(*arguments: Any, **named: Any) -> None:  # it would refuse so few
            begin(*arguments, **named)
            resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, FEW))

        worlds.init = begin_with_few
        times.clock_skew = functools.partial(skew, now=lambda: time.time() + 1000)
    if world.rank == 2:
        (place / "other").mkdir()
        os.chdir(place / "other")
        start.network.measure_group = lambda axis, *rest: replace(
            measure(axis, *rest), is_right=axis != "tp"
        )
    if world.rank == 3:
        BACKENDS["sdpa"] = Planted("a gradient of grouped heads")
        time.sleep(LATE_S)
    return start.examine_rank(world, start._filled(spec, RANKS), wanted)


@pytest.mark.full
@pytest.mark.dist
def test_planted_faults_of_ranks_are_found_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = spec_of(Path("runs"))
    ended = run_local(
        sick, RANKS, spec, options(tmp_path / "found"), tmp_path, timeout_s=600, device="cpu"
    )
    assert ended == [False] * RANKS
    found = rows(tmp_path / "found")
    for check, ranks, verdict, said in (
        (
            "file descriptors",
            [1],
            "fail",
            f"rank 1 on {HOST}: limits on open files: soft {FEW}, hard {FEW}; rank 0 of 4 ranks",
        ),
        ("clock skew", [], "fail", "rank 1 ("),
        ("shared folder", [], "fail", "rank 2: node 2 ("),
        ("communicator tp", [], "fail", "WRONG results from ranks 2-3"),
        ("attention sdpa", [3], "fail", f"rank 3 on {HOST}: WRONG: "),
        ("late ranks", [], "warn", "rank 3 ("),
    ):
        row = found[check]
        assert row["verdict"] == verdict, row
        assert said in row["found"]
        assert row["remedy"]
        if ranks:
            assert row["ranks"] == ranks
    sound = ("versions", "disk for checkpoints", "communicator world", "communicator pp_odd")
    assert {found[check]["verdict"] for check in sound} == {"pass"}


def hanging(world: World, spec: RunSpec, wanted: Options) -> bool:
    """Lets rank 1 never end its own checks, as one does whose driver hangs."""
    if world.rank == 1:
        start.NODE_CHECKS = (lambda _: time.sleep(3600),)  # type: ignore
    return start.examine_rank(world, start._filled(spec, RANKS), wanted)


@pytest.mark.full
@pytest.mark.dist
def test_a_rank_that_hangs_is_named_and_the_examination_ends(tmp_path: Path) -> None:
    wanted = options(tmp_path / "found", limit_s=GRACE_S)
    with pytest.raises(RankFailure, match="rank 0"):
        run_local(hanging, RANKS, spec_of(tmp_path / "runs"), wanted, timeout_s=600)
    found = rows(tmp_path / "found")
    assert found["hanging ranks"]["verdict"] == "fail"
    said = found["hanging ranks"]["found"]
    assert said.startswith("rank 1 did not finish the stage 'checks of each node' within 20 s"), (
        said
    )
    assert found["file descriptors"]["verdict"] == "pass"  # what rank 0 found until then


def absent(world: World, spec: RunSpec, wanted: Options) -> bool:
    if world.rank == 1:
        return False
    return start.examine_rank(world, start._filled(spec, RANKS), wanted)


@pytest.mark.nightly
@pytest.mark.dist
def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    wanted = options(tmp_path / "found", limit_s=GRACE_S)
    with pytest.raises(RankFailure):
        run_local(absent, RANKS, spec_of(tmp_path / "runs"), wanted, timeout_s=600)
    said = rows(tmp_path / "found")["hanging ranks"]["found"]
    assert said.startswith("rank 1 did not finish the stage 'start' within"), said


@pytest.mark.parametrize(
    ("error", "check"),
    [
        (RuntimeError("Timed out waiting for clients. 3/4 clients joined."), "rendezvous"),
        (UserError("rank 0 of 4 needs up to 300 open files"), "rendezvous"),
    ],
)
def test_a_start_that_fails_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, check: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(worlds, "init", refuse)
    world = World(world_size=4, local_world_size=4, rendezvous_file="unused")
    assert not start.examine_rank(world, spec_of(tmp_path), options(tmp_path / "found"))
    (row,) = rows(tmp_path / "found").values()
    assert (row["check"], row["verdict"]) == (check, "fail")
    assert str(error).split(".")[0] in row["found"]


def test_a_rank_without_the_gpu_that_the_run_asks_for_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would wait for it in NCCL."""
    monkeypatch.setattr(worlds, "init", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setattr(worlds.torch.cuda, "is_available", lambda: False)
    world = World(rank=2, world_size=4, local_world_size=4, rendezvous_file="unused")
    spec = spec_of(tmp_path, "run.device=cuda")
    assert not start.examine_rank(world, spec, options(tmp_path / "found"))
    found = rows(tmp_path / "found")["GPUs"]["found"]
    assert "there are 0 GPUs for 4 ranks on this machine" in found

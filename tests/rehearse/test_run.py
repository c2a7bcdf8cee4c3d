"""Tests that a rehearsal runs the whole trainer, proves all ranks, and finds planted faults."""

import json
import re
from pathlib import Path

import pytest

from tests.rehearse.case import rehearsed, rehearsed_each, small_job
from tests.sets import full, nightly
from wlb.cli.main import main
from wlb.plan import UserError
from wlb.rehearse import run
from wlb.rehearse.results import StepResult
from wlb.rehearse.run import Rehearsed, chosen_ranks, rehearse_each
from wlb.rehearse.show import verdict
from wlb.spec.write import to_toml

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def whole() -> Rehearsed:
    """All eight ranks of three steps, with evaluation and a checkpoint."""
    options = ("eval.steps=1", "eval.interval=1", "checkpoint.interval=2")
    return rehearsed(*options, "telemetry.warmup_steps=1", steps=3)


@pytest.mark.full
def test_all_ranks_match_and_cannot_deadlock(whole: Rehearsed) -> None:
    assert whole.passed, verdict(whole)
    assert whole.proof.is_complete
    assert whole.proof.num_communicators == whole.proof.num_seen > 10
    assert whole.proof.num_collectives > 500
    axes = {m.communicator.axis for m in whole.ranks[0].messages if m.communicator}
    assert {"world", "hosts", "tp", "cp", "pp_even", "pp_odd", "fsdp"} <= axes
    assert "pp" not in axes  # the axis's own group carries nothing
    assert whole.proof.num_transfers > 50
    assert [len(result.steps) for result in whole.ranks] == [3] * 8


@pytest.mark.full
def test_what_is_counted_is_what_a_step_does(whole: Rehearsed) -> None:
    spec = small_job()
    (first, *_), plan = whole.ranks, spec.model
    parts = first.steps[-1].parts
    # Each TP rank has half of the heads and columns; 3 matrix products of 2 FLOPs a weight.
    per_token = 6 * sum(
        layers * weights
        for layers, weights in [
            (plan.num_layers, 2 * plan.hidden_size * (plan.q_dim + plan.kv_dim)),
            (plan.num_layers, 3 * plan.hidden_size * plan.ffn_hidden_size),
        ]
    )
    assert parts["GEMM"]["flops"] == pytest.approx(
        first.steps[-1].num_tokens * per_token / 8, rel=0.02
    )
    assert {"attention", "GEMM", "element-wise", "tp", "cp", "pp", "fsdp"} <= set(parts)
    for result in whole.ranks:
        for step in result.steps:
            for part, exposed in step.exposed_ns.items():
                if part in step.parts:
                    assert exposed <= step.parts[part]["time_ns"] * 1.0001 or part == "pp"


@pytest.mark.full
def test_memory_is_counted_by_kind_and_reserved_by_the_allocator(whole: Rehearsed) -> None:
    for result in whole.ranks:
        assert sum(result.at_peak.values()) == result.peak_bytes
        assert {"weights", "activations"} <= set(result.at_peak)
        for taken in result.reserved.values():
            assert taken.peak_bytes >= taken.allocated_bytes >= result.peak_bytes


@pytest.mark.full
def test_a_step_waits_for_the_device_once(whole: Rehearsed) -> None:
    """An evaluation after it waits once more, the last one after all steps; a checkpoint never."""
    reduces, evaluates = ("tolist()", "wlb/train/reduce.py"), ("item()", "wlb/train/evaluate.py")
    for result in whole.ranks:
        found = [
            [(wait.what, wait.where.split(":")[0]) for wait in step.host_waits]
            for step in result.steps
        ]
        assert found == [[reduces, evaluates], [reduces, evaluates], [reduces]]


@pytest.mark.full
def test_a_run_evaluates_saves_and_calibrates(whole: Rehearsed) -> None:
    """Evaluations are seen by their waits (above) and sums, checkpoints by their copies."""
    for result in whole.ranks:
        sums = [m.step for m in result.messages if m.where.startswith("wlb/train/evaluate.py")]
        assert sums == [-1, 0, 1, 2]
        # Weights and both moments, float32, after two steps and at the end.
        assert set(result.copied) == {2, 3}
        assert all(copied > 12 * result.at_peak["weights"] / 4 for copied in result.copied.values())
    # Kernels took what the profile says, so fitting it to their times changes nothing.
    (factor,) = re.findall(r"attention_forward ([\d.]+),", whole.ranks[0].calibration)
    assert float(factor) == pytest.approx(1, abs=0.05)
    assert not any(result.calibration for result in whole.ranks[1:])


ONE_COMMUNICATOR = "one_communicator_for_the_pipeline"
FOUR_STAGES = ("parallel.pp=4", "model.num_layers=8")
"""Of a pipeline of two ranks, all transfers are with the same peer."""
PLANTED = {
    "index_on_the_cpu": ("context/op.py", "0"),
    "wrong_dtype": ("UserError: k has shape", "0"),
    "no_event_of_the_input_stream": ("without waiting for", "0"),
    "no_record_stream": ("call record_stream", "0"),
    "no_event_of_the_checkpoint": ("before the copy", "0"),
    "memory_that_was_not_planned": ("runs out of", "0"),
    "one_rank_drops_a_collective": ("the ranks disagree on collective", "0,1,2,3"),
    "one_rank_swaps_two_transfers": (
        "from rank 0 to rank 4 in pp_even (0, 4) does not match",
        "0,4",
    ),
    ONE_COMMUNICATOR: ("may have to wait for an earlier transfer", "0,4,8,12"),
}
"""What is said of each fault, and the ranks that it takes."""
HOST_WAIT = "host_wait_in_every_norm"
NOTHING = "nothing"


@pytest.fixture(scope="module")
def planted() -> dict[str, Rehearsed]:
    ranks = {name: ranks for name, (_, ranks) in PLANTED.items()} | {HOST_WAIT: "0"}
    ranks[NOTHING] = ranks[ONE_COMMUNICATOR]
    specs = []
    for name in ranks:
        more = FOUR_STAGES if name in (ONE_COMMUNICATOR, NOTHING) else ()
        specs.append(small_job("checkpoint.interval=1", f"run.name={name}", *more))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "WORKER", ("tests.rehearse.planted",))
        found = rehearsed_each(specs, ranks=list(ranks.values()))
    return dict(zip(ranks, found, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str, planted: dict[str, Rehearsed]) -> None:
    """Each is told with the step, and with the file and line that it concerns."""
    said, _ = PLANTED[fault]
    found = planted[fault]
    assert not found.passed
    lines = [line for line in verdict(found) if line.startswith("FAULT") and said in line]
    assert lines, verdict(found)
    assert all(re.search(r"step \d", line) and re.search(r"\w+\.py:\d", line) for line in lines)


@pytest.mark.full
def test_with_links_no_transfer_is_held_up(planted: dict[str, Rehearsed]) -> None:
    """The ranks of the planted fault, without it."""
    found = planted[NOTHING]
    assert found.passed, verdict(found)
    assert found.proof.num_transfers == planted[ONE_COMMUNICATOR].proof.num_transfers > 100


@pytest.mark.full
def test_a_planted_host_wait_is_named(planted: dict[str, Rehearsed]) -> None:
    (result,) = planted[HOST_WAIT].ranks
    assert sum(wait.what == "item()" for wait in result.steps[1].host_waits) >= 4


@pytest.mark.nightly  # test_run_layouts.py has layouts like these, and one step of them, in `full`
@pytest.mark.parametrize(
    "overrides",
    [
        ("pp.schedule=1f1b", "pp.virtual_stages=1"),
        ("pp.schedule=interleaved_zero_bubble", "pp.weight_delay=3"),
        ("sharding.exchange=needed", "parallel.cp=4", "parallel.pp=1", "pp.virtual_stages=1"),
        ("sharding.exchange=needed", "cp.overlap_stages=1", "kernels.deterministic=true"),
    ],
)
def test_all_ranks_of_a_layout_match(overrides: tuple[str, ...]) -> None:
    found = rehearsed(*overrides)
    assert found.passed, verdict(found)
    assert found.proof.is_complete


OPTIONS = [
    ("fsdp.reshard_after_forward=true", "training.recompute=full"),
    ("training.recompute=selective",),
    ("sharding.exchange=needed", "training.recompute=full"),
    ("sharding.exchange=needed", "kernels.fused=off"),
    ("sharding.exchange=auto",),
    ("cp.overlap_stages=1", "kernels.fused=off"),
    ("cp.overlap_stages=1", "sharding.exchange=needed", "training.recompute=full"),
    ("cp.overlap_stages=3", "sharding.exchange=needed"),
    ("cp.overlap_stages=3", "sharding.exchange=auto"),
    ("cp.overlap_stages=2",),
    ("kernels.deterministic=true", "kernels.fused=off"),
    ("packing.policy=var_len", "sharding.strategy=per_document"),
]


@pytest.mark.parametrize(
    "options", [*full(OPTIONS[::4]), *nightly(OPTIONS[1::4], OPTIONS[2::4], OPTIONS[3::4])]
)
def test_options_run_and_wait_once_a_step(options: list[tuple[str, ...]]) -> None:
    specs = [small_job(*overrides) for overrides in options]
    for overrides, found in zip(options, rehearsed_each(specs, ranks="0,7"), strict=True):
        assert found.passed, (overrides, verdict(found))
        waits = [len(result.steps[1].host_waits) for result in found.ranks]
        assert waits == [1, 1], overrides


@pytest.mark.nightly
@pytest.mark.parametrize("recompute", ["none", *nightly("selective")])
def test_compiled_layers_run_as_the_compilers_graphs(recompute: str) -> None:
    """They multiply, attend and communicate as plain layers do, and wait once a step."""
    options = (f"training.recompute={recompute}", "eval.steps=1", "eval.interval=1")
    specs = [small_job(f"training.compile={on}", *options) for on in ("false", "true")]
    plain, compiled = rehearsed_each(specs, ranks="0,7", steps=3)
    assert compiled.passed, verdict(compiled)
    for one, other in zip(plain.ranks, compiled.ranks, strict=True):
        # A rehearsal makes one more graph when the first axis of an index tensor, which was 1, is 2
        # for the first time (see `compiling`). Rank 0 meets that in its second step.
        made = [step.graphs for step in other.steps]
        assert made[0] > 0
        assert made[1] <= 1
        assert made[2] == 0
        assert not any(step.graphs for step in one.steps)
        for a, b in zip(one.steps, other.steps, strict=True):
            expect_the_same_work(a, b)


def expect_the_same_work(plain: StepResult, compiled: StepResult) -> None:
    assert len(plain.host_waits) == len(compiled.host_waits)
    # The estimate is no upper bound here, because it assumes longer documents (`ROWS_OF_SEGMENT`).
    assert compiled.peak_bytes <= 1.02 * plain.peak_bytes
    for part in ("attention", "GEMM", "tp", "cp", "pp", "fsdp"):
        mine, theirs = compiled.parts[part], plain.parts[part]
        assert mine["flops"] == theirs["flops"]
        assert mine["num_bytes"] == pytest.approx(theirs["num_bytes"])


@pytest.mark.full
def test_what_the_cluster_refuses_is_refused_with_a_remedy() -> None:
    compiler = small_job("training.compile=true", "training.compile_backend=aot_eager")
    package = small_job("kernels.linear=flash_linear_attention")
    specs = [compiler, small_job("cluster.memory_gib=0.001"), package]
    told = ["only the graphs of 'inductor';", "needs about", "set kernels.linear = torch"]
    for error, said in zip(rehearse_each(specs, ranks="0", steps=2), told, strict=True):
        assert isinstance(error, UserError)
        assert said in str(error)


def test_ranks_are_chosen() -> None:
    parallel = small_job().parallel
    assert chosen_ranks("all", parallel) == tuple(range(8))
    assert chosen_ranks("one-per-stage", parallel) == (0, 4)
    assert chosen_ranks("7,0", parallel) == (0, 7)
    for wrong in ("8", "x", ""):
        with pytest.raises(UserError, match="--ranks"):
            chosen_ranks(wrong, parallel)


@pytest.mark.full
def test_the_command_prints_tables_and_writes_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(to_toml(small_job()))
    trace, data = tmp_path / "trace.json", tmp_path / "figures.json"
    words = ["rehearse", str(config), "--steps", "1", "--ranks", "0,4"]
    assert main([*words, "--trace", str(trace), "--json", str(data)]) == 0
    out = capsys.readouterr().out
    assert "reserved" in out
    assert "2 of 8 ranks" in out
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 4}
    assert any(event.get("cat") == "attention" for event in events)
    assert json.loads(data.read_text())["passed"] is True

"""Tests that traces hold every event once, at its time, where a viewer looks for it."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from tests.simulate.by_hand import simulation_of
from wlb.simulate import NodeKind, write_trace
from wlb.simulate.trace import MESSAGES, PASSES


@pytest.fixture
def written(tmp_path):
    """A function that writes a simulation's first step and returns what viewers read."""

    def write(simulation):
        write_trace(tmp_path / "trace.json", simulation, steps=[0])
        return json.loads((tmp_path / "trace.json").read_text())

    return write


def complete(trace, *, pid=None, tid=None):
    return [
        e
        for e in trace["traceEvents"]
        if e["ph"] == "X" and pid in (None, e["pid"]) and tid in (None, e["tid"])
    ]


def test_two_micro_batches_on_two_ranks(written):
    trace = written(simulation_of([[[1, 2]]], pp=2))
    passes = {
        rank: [(e["name"], e["ts"], e["dur"]) for e in complete(trace, pid=1 + rank, tid=PASSES)]
        for rank in (0, 1)
    }
    assert passes == {
        0: [("0F0", 0, 1000), ("0F1", 1000, 2000), ("0B0", 4000, 2000), ("0B1", 10000, 4000)],
        1: [("1F0", 1000, 1000), ("1B0", 2000, 2000), ("1F1", 4000, 2000), ("1B1", 6000, 4000)],
    }


def test_the_critical_path_is_a_track_without_gaps_and_marked_on_the_ranks(written):
    trace = written(simulation_of([[[1, 2]]], pp=2))
    track = complete(trace, pid=0, tid=PASSES)
    assert [e["name"] for e in track] == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]
    assert all(a["ts"] + a["dur"] == b["ts"] for a, b in pairwise(track))
    marked = {e["name"] for e in complete(trace, tid=PASSES) if e.get("cname") and e["pid"]}
    assert marked == {e["name"] for e in track}
    assert all("critical" in e["cat"] for e in track)


def test_what_a_pass_says_of_itself(written):
    (event,) = (e for e in complete(written(simulation_of([[[1, 2]]], pp=2)), pid=2)
                if e["name"] == "1B1")  # fmt: skip
    assert event["args"] == {
        "step": "step 0",
        "micro_batch": 1,
        "stage": 1,
        "kind": "backward",
        "tokens": 1,
        "slowest_cp_rank": 0,
        "terms_ms": {"attention": 4.0},
    }


def test_names_say_pipeline_rank_and_thread(written):
    trace = written(simulation_of([[[1, 2], [1, 1]]], pp=2, other_ms=1))
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["critical path", *(f"pipeline {d}, rank {r}" for d in (0, 1) for r in (0, 1))]
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name"
    }
    used = {(e["pid"], e["tid"]) for e in complete(trace)}
    assert used <= set(threads)
    assert threads[1, PASSES] == "passes"


def test_arrows_lead_from_the_sender_to_the_receiver(written):
    trace = written(simulation_of([[[1, 2]]], pp=2, message_ms=3))
    slices = complete(trace, tid=PASSES)
    arrows = defaultdict(dict)
    for e in trace["traceEvents"]:
        if e["ph"] in "sf":
            # A viewer takes the slice that begins at or before the point and is not over.
            (at,) = (
                s["name"]
                for s in slices
                if s["pid"] == e["pid"] and s["ts"] <= e["ts"] < s["ts"] + s["dur"]
            )
            arrows[e["id"]][e["ph"]] = at
    pairs = {(a["s"], a["f"]) for a in arrows.values()}
    assert pairs == {("0F0", "1F0"), ("0F1", "1F1"), ("1B0", "0B0"), ("1B1", "0B1")}
    assert {e["name"] for e in complete(trace, tid=MESSAGES)} == {
        f"output of {a}" for a, _ in pairs
    }


@pytest.mark.parametrize(("pp", "v", "n"), [(1, 1, 3), (2, 1, 4), (2, 2, 4), (4, 2, 8), (4, 1, 4)])
def test_times_of_whole_steps(pp, v, n, written):
    durations = [[[1 + (i * 7 + d) % 5 for i in range(n)] for d in (0, 1)] for _ in (0, 1)]
    simulation = simulation_of(durations, pp=pp, v=v, message_ms=2, other_ms=3)
    trace = written(simulation)
    events = complete(trace)
    assert all(e["ts"] >= 0 and e["dur"] > 0 for e in events)
    last = max(e["ts"] + e["dur"] for e in events)
    assert last * 1e-6 == pytest.approx(float(simulation.step_time_s[0]), abs=1e-9)
    threads = defaultdict(list)
    for e in events:
        threads[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for slices in threads.values():
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(slices)))
    passes = simulation.simulator.graph.indices(NodeKind.PASS)
    assert len([e for e in events if e["tid"] == PASSES and e["pid"]]) == 2 * len(passes)


def test_steps_are_written_one_after_the_other(tmp_path):
    simulation = simulation_of([[[1, 2]], [[2, 2]], [[1, 1]]], pp=2, other_ms=1)
    path = tmp_path / "trace.json"
    num = write_trace(path, simulation, steps=[0, 2], first_step=7)
    trace = json.loads(path.read_text())
    assert len(trace["traceEvents"]) == num
    steps = complete(trace, pid=0, tid=0)
    assert [(e["name"], e["ts"]) for e in steps] == [("step 7", 0), ("step 9", steps[0]["dur"])]
    ends = [e["ts"] + e["dur"] for e in complete(trace)]
    total = simulation.step_time_s[[0, 2]].sum()
    assert max(ends) * 1e-6 == pytest.approx(total, abs=1e-9)
    assert sum(trace["otherData"]["step_time_s"]) == pytest.approx(total)
    ids = [e["id"] for e in trace["traceEvents"] if e["ph"] == "s"]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(("steps", "words"), [([1], "step 1 was not simulated"), ([], "no step")])
def test_a_step_that_is_not_there_writes_nothing(tmp_path, steps, words):
    with pytest.raises(ValueError, match=words):
        write_trace(tmp_path / "trace.json", simulation_of([[[1, 2]]], pp=2), steps=steps)
    assert not (tmp_path / "trace.json").exists()

"""Tests that shipped profiles are found, refused, and true to the figures they were fitted to."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wlb.cost import (
    Collective,
    ProvenanceKind,
    Scope,
    causal_pairs,
    default_profile_name,
    load_profile,
    profile_from_json,
    profile_names,
    profile_to_json,
    save_profile,
)
from wlb.plan import UserError


@pytest.fixture(scope="module")
def h100():
    return load_profile("h100")


def call_ns(profile, *, length, num_docs, tp=1, cp=1):
    """Prices a varlen call like the published table's: 64 / tp heads, documents of equal length."""
    table = profile.table(head_dim=128, num_heads=64 // tp)
    q = np.array([length / cp])
    kv = np.array([length * (0.5 + 0.5 / cp)])
    forward, _ = table.times_ns(q, kv, num_heads=64 // tp, head_dim=128)
    return table.launch_forward_ns + num_docs * float(forward[0])


def test_shipped_profiles_are_found():
    assert {"cpu", "h100"} <= set(profile_names())
    assert load_profile(default_profile_name("cpu")).provenance.kind == ProvenanceKind.MEASURED
    assert load_profile(default_profile_name("cuda")).provenance.kind == ProvenanceKind.PUBLISHED


def test_unknown_profiles_and_devices_are_refused():
    with pytest.raises(ValueError, match=r"no kernel profile 'b200'; choose one of cpu, h100"):
        load_profile("b200")
    with pytest.raises(ValueError, match=r"no kernel profile 'missing\.json'"):
        load_profile("missing.json")
    with pytest.raises(ValueError, match="'tpu'; use one of cpu, cuda"):
        default_profile_name("tpu")


def test_a_profile_is_read_from_a_path(h100, tmp_path):
    path = tmp_path / "mine.json"
    save_profile(path, h100)
    assert profile_to_json(load_profile(str(path))) == profile_to_json(h100)


def test_a_profile_that_no_one_could_read_is_not_written(h100, tmp_path):
    flat = replace(h100, layer=replace(h100.layer, forward_factor=7.3e-19))
    with pytest.raises(
        UserError, match=r"mine\.json was not written, .*: layer\.forward_factor = 7.3e-19"
    ):
        save_profile(tmp_path / "mine.json", flat)
    assert not list(tmp_path.iterdir())


def test_wrong_schema_version_is_refused(h100, tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps(profile_to_json(h100) | {"schema_version": 1}), "utf-8")
    with pytest.raises(ValueError, match=r"schema_version = 1 must be 2"):
        load_profile(str(path))


def test_a_missing_block_is_named(h100, tmp_path):
    data = profile_to_json(h100)
    del data["gemm"]
    path = tmp_path / "part.json"
    path.write_text(json.dumps(data), "utf-8")
    with pytest.raises(ValueError, match="lacks the key 'gemm'"):
        load_profile(str(path))


def test_missing_collectives_and_kinds_are_refused(h100):
    data = profile_to_json(h100)
    data["collectives"] = data["collectives"][1:]
    with pytest.raises(
        ValueError, match="no measurements of these collectives: all_gather intra_node"
    ):
        profile_from_json(data)
    data = profile_to_json(h100)
    data["provenance"]["kind"] = "guessed"
    with pytest.raises(ValueError, match="guessed"):
        profile_from_json(data)


def test_unknown_kernel_is_refused(h100):
    with pytest.raises(ValueError, match=r"attention kernel 'cudnn', only of flash_attention_2"):
        h100.table(backend="cudnn", head_dim=128, num_heads=8)


# TFLOP/s by document length at tp = 1, cp = 1, of calls of 32K and 128K tokens, as published.
DIGEST = [
    (32, 12, 12),
    (64, 40, 40),
    (128, 85, 102),
    (256, 140, 149),
    (512, 203, 203),
    (1024, 267, 284),
    (2048, 313, 322),
    (4096, 337, 348),
    (8192, 345, 361),
    (32768, 345, 370),
]


@pytest.mark.parametrize(("length", "low", "high"), DIGEST)
@pytest.mark.parametrize("total", [32768, 131072])
def test_h100_reproduces_the_published_digest(h100, length, low, high, total):
    num_docs = total // length
    pairs = float(causal_pairs(np.array([length]), np.array([length]))[0])
    flops = 4 * 128 * 64 * num_docs * pairs
    tflops = flops / call_ns(h100, length=length, num_docs=num_docs) * 1e-3
    assert 0.87 * low <= tflops <= 1.13 * high


# (total tokens, document length, tp, cp) -> ms, rows of the published table.
ROWS = [
    (32768, 128, 1, 4, 0.58979),
    (32768, 128, 1, 8, 0.58045),
    (32768, 1024, 8, 8, 0.07707),
    (32768, 4096, 1, 4, 1.6187),
    (32768, 32768, 8, 4, 1.80511),
    (131072, 131072, 2, 2, 199.88185),
    (131072, 256, 4, 2, 0.51169),
    (131072, 65536, 1, 1, 395.64636),
]


@pytest.mark.parametrize(("total", "length", "tp", "cp", "latency_ms"), ROWS)
def test_h100_reproduces_published_calls(h100, total, length, tp, cp, latency_ms):
    predicted = call_ns(h100, length=length, num_docs=total // length, tp=tp, cp=cp)
    assert predicted == pytest.approx(latency_ms * 1e6, rel=0.14)


def test_held_out_error_of_the_fit_is_in_the_file(h100):
    residuals = dict(h100.provenance.residuals)
    assert residuals["held_out_rows_mape"] < 0.05
    assert residuals["held_out_shapes_mape"] < 0.06
    assert residuals["held_out_shapes_max"] < 0.2


def test_plateau_below_one_tile(h100):
    """By Section 5.2 and Figure 10, 16 query rows cost what 128 do, and 256 cost more."""
    table = h100.table(head_dim=128, num_heads=8)
    q = np.array([1.0, 16.0, 64.0, 128.0, 256.0])
    forward, backward = table.times_ns(q, np.full(5, 8192.0), num_heads=8, head_dim=128)
    for time in (forward, backward):
        assert len(set(time[:4].tolist())) == 1
        assert time[4] > 1.5 * time[3]


def test_extrapolation_is_told(h100):
    table = h100.table(head_dim=128, num_heads=8)
    q, kv = np.array([16.0, 64.0, 128.0, 1 << 20]), np.array([16.0, 8.0, 1 << 18, 1 << 20])
    assert table.extrapolated(q, kv).tolist() == [False, True, True, True]


def test_backward_is_slower_than_forward(h100):
    table = h100.table(head_dim=128, num_heads=64)
    forward, backward = table.times_ns(
        np.array([8192.0]), np.array([8192.0]), num_heads=64, head_dim=128
    )
    assert 2.5 < backward[0] / forward[0] < 4.5


def test_fa3_is_faster_than_fa2(h100):
    length = np.array([32768.0])
    fa2, fa3 = (
        h100.table(backend=name, head_dim=128, num_heads=64).times_ns(
            length, length, num_heads=64, head_dim=128
        )
        for name in ("flash_attention_2", "flash_attention_3")
    )
    assert fa2[0][0] / fa3[0][0] == pytest.approx(584 / 344, rel=0.02)


def test_nearest_head_layout():
    cpu = load_profile("cpu")
    assert cpu.table(head_dim=16, num_heads=2).num_heads == 2
    assert cpu.table(head_dim=16, num_heads=4).num_heads == 4
    assert cpu.table(head_dim=128, num_heads=1).head_dim == 64


def test_collectives_reproduce_the_published_points(h100):
    gather = h100.collective(Collective.ALL_GATHER, span_ranks=8)
    assert gather.scope == Scope.INTRA_NODE
    assert gather.provenance.kind == ProvenanceKind.PUBLISHED
    for mib, published_us in [(8, 76), (32, 124), (64, 207), (256, 676), (1024, 2590)]:
        predicted_us = gather.time_ns(mib * 2**20, num_ranks=8) * 1e-3
        assert predicted_us == pytest.approx(published_us, rel=0.07)
    assert gather.time_ns(1 << 20, num_ranks=1) == 0


def test_groups_beyond_a_node_use_the_network(h100):
    network = h100.collective(Collective.ALL_GATHER, span_ranks=16)
    assert network.scope == Scope.INTER_NODE
    assert network.provenance.kind == ProvenanceKind.ASSUMED


def test_ranks_of_a_node_have_a_link_each(h100):
    """1 of 8 ranks per node has one link, 4 have four, and 8 more than NVLink moves, so
    NVLink's.
    """

    def bandwidth(op, ranks, span):
        return h100.collective(op, span_ranks=span, num_ranks=ranks).bytes_per_s

    gather, p2p = Collective.ALL_GATHER, Collective.P2P
    link = 40e9
    assert [bandwidth(gather, ranks, 16) for ranks in (2, 4, 8)] == [link, 2 * link, 4 * link]
    assert bandwidth(gather, 16, 16) == 8 * link
    assert bandwidth(gather, 64, 64) == 8 * link < bandwidth(gather, 8, 8)
    assert bandwidth(p2p, 16, 16) == link


def test_wire_bytes_follow_bus_bandwidth(h100):
    by_op = {c.op: c for c in h100.collectives if c.scope == Scope.INTER_NODE}  # 40 GB/s
    wire = {op: c.wire_ns(40e9, num_ranks=4) * 1e-9 for op, c in by_op.items()}
    assert wire[Collective.ALL_GATHER] == pytest.approx(0.75)
    assert wire[Collective.ALL_REDUCE] == pytest.approx(1.5)
    assert wire[Collective.P2P] == pytest.approx(1.0)


@pytest.mark.process
def test_importing_cost_leaves_torch_out():
    code = "import sys, wlb.cost; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: [data], "a JSON object"),
        (lambda data: {**data, "dtype": "float16"}, "dtype = 'float16'"),
        (lambda data: {**data, "ranks_per_node": "x"}, "ranks_per_node = 'x'"),
        (
            lambda data: first_table(data, heads=[], heads_efficiency=[]),
            "must have at least one entry",
        ),
        (
            lambda data: first_table(data, heads=[4.0], heads_efficiency=[0.0]),
            "must be finite and above 0",
        ),
        (lambda data: first_table(data, heads=[4.0], heads_efficiency=[float("nan")]), "above 0"),
    ],
)
def test_a_profile_with_wrong_content_is_refused_by_name(tmp_path, change, message):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(change(profile_to_json(load_profile("cpu")))))
    with pytest.raises(ValueError, match=rf"mine\.json.*{message}"):
        load_profile(str(path))


def first_table(data, **values):
    first, *others = data["attention"]
    return {**data, "attention": [{**first, **values}, *others]}


@pytest.mark.parametrize("place", ["", "gemm", "attention.0"])
def test_a_key_that_no_profile_has_is_refused(place: str, tmp_path: Path) -> None:
    data = profile_to_json(load_profile("h100"))
    inner: Any = data
    for part in filter(None, place.split(".")):
        inner = inner[int(part) if part.isdecimal() else part]
    inner["speed"] = 1.0
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"has the unknown key '(\w+(\[0\])?\.)?speed'"):
        load_profile(str(path))

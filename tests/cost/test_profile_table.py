"""Tests AttentionTable of kernels that compute similar segments together: padding, groups."""

from dataclasses import replace

import numpy as np
import pytest

from wlb.cost import (
    AttentionTable,
    Curve,
    ProfiledWorkload,
    Provenance,
    ProvenanceKind,
    Surface,
    attention_latency,
    load_profile,
)
from wlb.sharding.paper import per_document
from wlb.spec import ModelSpec, ParallelSpec

AXIS = np.array([1.0, 8192.0])
FLAT = Surface(axis0=AXIS, axis1=AXIS, values=np.full((2, 2), 0.01))
TABLE = AttentionTable(
    backends=("sdpa",),
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    tile_rows=1,
    padded_lengths=(8, 16, 32),
    launch_forward_ns=1000,
    launch_backward_ns=2000,
    group_forward_ns=100,
    group_backward_ns=300,
    forward=FLAT,
    backward=FLAT,
    square_forward=Curve(axis=AXIS, values=np.full(2, 0.02)),
    square_backward=Curve(axis=AXIS, values=np.full(2, 0.04)),
    heads=np.array([2.0]),
    heads_efficiency=np.ones(1),
    provenance=Provenance(kind=ProvenanceKind.ASSUMED, source="made up"),
)


def times(q, kv, table=TABLE):
    q, kv = np.array(q, float), np.array(kv, float)
    return table.times_ns(q, kv, num_heads=2, head_dim=16)


def test_lengths_are_rounded_up_to_those_the_kernel_computes():
    lengths = np.array([0.0, 1, 8, 8.5, 9, 31, 32, 33, 500])
    assert TABLE.padded(lengths).tolist() == [0, 8, 8, 16, 16, 32, 32, 33, 500]
    forward, _ = times([1, 5, 8, 9], [30, 25, 32, 32])
    assert forward[0] == forward[1] == forward[2] < forward[3]


def test_segments_without_a_prefix_have_their_own_throughput():
    """16 rows over 16 keys are 136 pairs: 4 and 10 FLOPs per pair, 2 heads of 16, at 0.02
    TFLOP/s...
    """
    forward, backward = times([16, 16], [16, 17])
    assert forward[0] == pytest.approx(136 * 4 * 32 / 0.02 * 1e-3)
    assert backward[0] == pytest.approx(136 * 10 * 32 / 0.04 * 1e-3)
    pairs = 16 * 32 - 120  # over 17 keys, computed as 32
    assert forward[1] == pytest.approx(pairs * 4 * 32 / 0.01 * 1e-3)


def test_a_document_never_costs_more_than_one_with_a_prefix():
    """This holds even if noise made it measure slower."""
    slow = Curve(axis=AXIS, values=np.full(2, 0.001))
    table = replace(TABLE, square_forward=slow, square_backward=slow)
    for with_square, with_prefix in zip(
        *(times([25], [kv], table) for kv in (25, 26)), strict=True
    ):
        assert with_square == with_prefix
    lengths = np.arange(1.0, 600)
    cpu = load_profile("cpu")
    for kernel in cpu.attention:
        square, prefix = (
            kernel.times_ns(lengths, kv, num_heads=kernel.num_heads, head_dim=kernel.head_dim)
            for kv in (lengths, lengths + 1)
        )
        assert all((a <= b * (1 + 1e-9)).all() for a, b in zip(square, prefix, strict=True))


def test_groups_are_kinds_of_segments_in_a_call():
    q = np.array([3.0, 8, 0, 8, 8, 40, 40, 3])
    kv = np.array([3.0, 8, 5, 9, 16, 40, 41, 3])
    offsets = np.array([0, 3, 7, 7, 8])
    # (8, 8) square twice and nothing; (8, 16) twice, 40 square, (40, 41); nothing; (8, 8).
    assert TABLE.groups(q, kv, offsets).tolist() == [1, 3, 0, 1]
    free = replace(TABLE, group_forward_ns=0, group_backward_ns=0)
    assert free.groups(q, kv, offsets).tolist() == [0] * 4


def test_groups_are_part_of_a_ranks_latency():
    model = ModelSpec(
        hidden_size=32, num_layers=3, num_heads=2, num_kv_heads=2, ffn_hidden_size=64, head_dim=16
    )
    profile = replace(load_profile("cpu"), attention=(TABLE,))
    cost = ProfiledWorkload(model=model, parallel=ParallelSpec(cp=2), profile=profile)
    plan = per_document([64, 64, 20], cp=2)
    latency = attention_latency(plan, cost)
    for rank in range(2):
        spans = plan.for_rank(rank)
        q, kv = (spans.stop - spans.start).astype(float), spans.stop.astype(float)
        forward, backward = TABLE.times_ns(q, kv, num_heads=2, head_dim=16)
        padded = (TABLE.padded(x).tolist() for x in (q, kv))
        kinds = set(zip((q == kv).tolist(), *padded, strict=True))
        assert latency.forward_ns[rank] == pytest.approx(
            3 * (forward.sum() + 1000 + 100 * len(kinds)), abs=10
        )
        assert latency.backward_ns[rank] == pytest.approx(
            3 * (backward.sum() + 2000 + 300 * len(kinds)), abs=10
        )


def test_what_is_outside_is_told_by_the_curve_for_whole_documents():
    curve = Curve(axis=np.array([8.0, 64.0]), values=np.ones(2))
    table = replace(TABLE, square_forward=curve, square_backward=curve)
    q, kv = np.array([64.0, 65, 65]), np.array([64.0, 65, 70])
    assert table.extrapolated(q, kv).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"padded_lengths": (8, 8)}, "must be above 0 and increase"),
        ({"padded_lengths": (0, 8)}, "must be above 0 and increase"),
        ({"group_forward_ns": -1}, "group_backward_ns are .* both must be finite and at least 0"),
        (
            {"launch_backward_ns": -5},
            "launch_backward_ns are .* both must be finite and at least 0",
        ),
        (
            {"launch_forward_ns": float("nan")},
            "launch_backward_ns are .* both must be finite and at least 0",
        ),
        ({"square_forward": None}, "only one of square_forward and square_backward"),
        ({"head_dim": 0}, "head_dim = 0 must be a whole number of at least 1"),
        ({"num_kv_heads": 0}, "num_kv_heads = 0 must be a whole number"),
        ({"num_heads": 3}, "num_heads = 3 must be a multiple of attention.num_kv_heads = 2"),
        ({"backends": "sdpa"}, "backends = 'sdpa' must be a list of kernel names"),
        ({"backends": ()}, "backends is empty"),
        ({"reach": np.ones(5)}, "one for each number of query rows"),
    ],
)
def test_wrong_tables_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TABLE, **change)


def test_keys_that_were_not_measured_with_some_rows_are_told():
    reach = np.array([8192.0, 512.0])
    plain = {"square_forward": None, "square_backward": None, "padded_lengths": ()}
    table = replace(TABLE, **plain, reach=reach)
    q, kv = np.array([1.0, 64, 64]), np.array([8192.0, 512, 513])
    assert table.extrapolated(q, kv).tolist() == [False, False, True]


def test_the_table_of_the_models_ratio_of_heads_is_taken():
    profile = load_profile("cpu")
    tables = [
        replace(TABLE, num_heads=heads, num_kv_heads=kv_heads)
        for heads, kv_heads in ((8, 8), (8, 1), (2, 2))
    ]
    profile = replace(profile, attention=tuple(tables))
    assert profile.table(head_dim=16, num_heads=8) is tables[0]
    assert profile.table(head_dim=16, num_heads=8, num_kv_heads=1) is tables[1]
    assert profile.table(head_dim=16, num_heads=4, num_kv_heads=1) is tables[1]
    assert profile.table(head_dim=16, num_heads=1, num_kv_heads=1) is tables[2]


def test_a_curve_may_not_grow_faster_than_its_axis():
    with pytest.raises(ValueError, match="more work would take less time"):
        Curve(axis=np.array([1.0, 2.0]), values=np.array([1.0, 3.0]))
    with pytest.raises(ValueError, match="sizes along the axes"):
        Curve(axis=np.array([1.0, 2.0]), values=np.ones(3))
    assert Curve(axis=AXIS, values=np.array([1.0, 5.0])).at(np.array([0.5, 1e6])).tolist() == [1, 5]

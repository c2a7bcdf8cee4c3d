"""Tests what a varlen call takes beyond its segments: its grid of blocks and its tail."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.cost import (
    AttentionTable,
    BlockCost,
    ProfiledWorkload,
    Provenance,
    ProvenanceKind,
    Surface,
    attention_latency,
    ideal_kernels_ns,
    load_profile,
)
from wlb.cost.profile_file import profile_from_json, profile_to_json, save_profile
from wlb.plan import UserError
from wlb.profile.calibrate import scaled_profile
from wlb.sharding.paper import per_document
from wlb.spec import ModelSpec, ParallelSpec

BLOCKS = BlockCost(forward_ns=1.0, backward_ns=5.5, tail_forward_ns=27.5, tail_backward_ns=23.0)
AXIS = np.array([128.0, 131072.0])
FLAT = Surface(axis0=AXIS, axis1=AXIS, values=np.full((2, 2), 400.0))
LONG = replace(FLAT, axis0=np.array([1.0, 131072.0]), axis1=np.array([1.0, 131072.0]))
PLAIN = AttentionTable(
    backends=("torch_varlen",),
    num_heads=4,
    num_kv_heads=4,
    head_dim=128,
    tile_rows=128,
    launch_forward_ns=1000,
    launch_backward_ns=2000,
    forward=FLAT,
    backward=FLAT,
    heads=np.array([4.0]),
    heads_efficiency=np.ones(1),
    provenance=Provenance(kind=ProvenanceKind.ASSUMED, source="made up"),
)
TABLE = replace(PLAIN, blocks=BLOCKS)
PASSES = {"forward": 2.0, "backward": 3.0}


def calls(
    q: list[int], kv: list[int], offsets: list[int] | None = None, **options: int
) -> list[list[float]]:
    """Forward and backward ns of calls on TABLE with 4 heads; offsets: None for one call."""
    bounds = np.array(offsets or [0, len(q)])
    rows, keys = np.array(q, np.float64), np.array(kv, np.float64)
    return [x.tolist() for x in TABLE.calls_ns(rows, keys, bounds, num_heads=4, **options)]


def workload(table: AttentionTable, *, cp: int = 1, **model: int) -> ProfiledWorkload:
    spec = ModelSpec(hidden_size=512, num_layers=3, num_heads=4, num_kv_heads=4, **model)
    profile = replace(load_profile("h100"), attention=(table,))
    return ProfiledWorkload(model=spec, parallel=ParallelSpec(cp=cp), profile=profile)


def test_a_call_pays_for_its_longest_segments_tiles_in_every_segment() -> None:
    """Rows of 300 and keys of 1000 are 3 and 8 tiles, each in 3 segments and 4 heads; a segment
    without rows launches nothing.
    """
    assert calls([300, 1, 100, 0], [300, 1000, 100, 9999]) == [
        [1000 + 4 * 3 * 3 * 1.0 + 1000 * 27.5],
        [2000 + 4 * 3 * 8 * 5.5 + 300 * 23.0],
    ]


def test_calls_are_priced_each_by_its_own_segments() -> None:
    q, kv = [128, 256, 640], [128, 512, 640]
    together = calls(q, kv, [0, 1, 1, 3])
    apart = [calls(q[:1], kv[:1]), calls([], []), calls(q[1:], kv[1:])]
    assert together == [[call[i][0] for call in apart] for i in range(2)]
    assert calls([], []) == [[1000.0], [2000.0]]


def test_a_sliding_window_shortens_the_tail_and_not_the_grid() -> None:
    """Blocks of 128 rows see at most 512 + 128 keys, of 128 keys at most as many rows."""
    assert calls([4096], [4096], sliding=512) == [
        [1000 + 4 * 32 * 1.0 + 640 * 27.5],
        [2000 + 4 * 32 * 5.5 + 640 * 23.0],
    ]


SEGMENT = st.tuples(st.integers(1, 9000), st.integers(0, 9000))


@given(st.lists(SEGMENT, min_size=1, max_size=12), st.data())
def test_calls_never_get_cheaper_as_segments_grow_or_are_added(
    segments: list[tuple[int, int]], data: st.DataObject
) -> None:
    def of(pairs: list[tuple[int, int]]) -> list[float]:
        forward, backward = calls([q for q, _ in pairs], [q + prefix for q, prefix in pairs])
        return [*forward, *backward]

    who = data.draw(st.integers(0, len(segments) - 1))
    rows, prefix = data.draw(SEGMENT)
    q, before = segments[who]
    grown = [*segments[:who], (q + rows, before + prefix), *segments[who + 1 :]]
    for longer in (grown, [*segments, (rows, prefix)]):
        assert all(a <= b for a, b in zip(of(segments), of(longer), strict=True))


def test_ranks_wait_for_their_calls_grids_in_all_layers() -> None:
    """Documents of 1024 and 100 tokens in 4 chunks: rank 0 has the first and the last of each, rank
    1 the two between, which are one segment of 512 rows over 768 keys and one of 50.
    """
    plan = per_document([1024, 100], cp=2)
    with_grid, without = (
        attention_latency(plan, workload(table, cp=2)) for table in (TABLE, PLAIN)
    )
    extra = [
        (getattr(with_grid, f"{name}_ns") - getattr(without, f"{name}_ns")).tolist()
        for name in PASSES
    ]
    # Heads x segments x tiles of most rows or keys, and the tails.
    assert extra == [
        [3 * (4 * 4 * 2 + 1024 * 27.5), 3 * (4 * 2 * 4 + 768 * 27.5)],
        [3 * (4 * 4 * 8 * 5.5 + 256 * 23), 3 * (4 * 2 * 6 * 5.5 + 512 * 23)],
    ]


def test_sliding_layers_have_grids_of_their_own() -> None:
    model = {"sliding_window": 512, "full_every": 3}
    cost, plain = (workload(table, **model) for table in (TABLE, PLAIN))
    one = np.array([0, 1])
    with_grid, without = (w.attention_call_ns([4096], [4096], one)[0][0] for w in (cost, plain))
    assert without == 3 * 1000
    assert with_grid - without == 3 * 4 * 32 + (4096 + 2 * 640) * 27.5


def test_pieces_have_the_price_of_their_segments_alone() -> None:
    """Eq. 2 adds prices of pieces, which a grid has no part in."""
    lengths = np.array([1, 128, 5000])
    of_both = [workload(table).workload_ns(lengths).tolist() for table in (TABLE, PLAIN)]
    assert of_both[0] == of_both[1]


def test_ideal_kernels_hold_a_ranks_share_of_the_documents() -> None:
    """Of 3 documents on 2 ranks one holds the longest and the shortest."""
    lengths = [256, 1024, 512]
    with_grid, without = (
        ideal_kernels_ns(lengths, workload(table), cp=2) for table in (TABLE, PLAIN)
    )
    forward = 4 * 2 * 8 * 1.0 + 1024 * 27.5
    backward = 4 * 2 * 8 * 5.5 + 1024 * 23.0
    assert with_grid - without == 3 * (forward + backward)


def test_profiles_keep_their_blocks(tmp_path: Path) -> None:
    plain = load_profile("h100")
    assert all(table.blocks is None for table in plain.attention)
    assert all("blocks" not in table for table in profile_to_json(plain)["attention"])
    path = tmp_path / "mine.json"
    save_profile(path, replace(plain, attention=(TABLE, PLAIN)))
    found = load_profile(str(path))
    assert [table.blocks for table in found.attention] == [BLOCKS, None]
    assert json.loads(path.read_text())["attention"][0]["blocks"] == asdict(BLOCKS)


@pytest.mark.parametrize(
    "blocks", [{}, [1.0], asdict(BLOCKS) | {"backward_ns": -1.0}, asdict(BLOCKS) | {"speed": 1.0}]
)
def test_a_profile_with_wrong_blocks_is_refused_by_name(blocks: object, tmp_path: Path) -> None:
    data = profile_to_json(load_profile("h100"))
    data["attention"][0]["blocks"] = blocks
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"mine\.json"):
        load_profile(str(path))


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_wrong_costs_are_refused(wrong: float) -> None:
    with pytest.raises(UserError, match="must be finite and at least 0"):
        replace(BLOCKS, tail_forward_ns=wrong)


def test_a_scaled_profile_scales_blocks_too() -> None:
    scaled = scaled_profile(
        replace(load_profile("h100"), attention=(TABLE,)),
        **{f"attention_{name}": factor for name, factor in PASSES.items()},
        linear_forward=1.0,
        linear_backward=1.0,
        name="x",
        provenance=PLAIN.provenance,
    )
    assert scaled.attention[0].blocks == BlockCost(
        forward_ns=2.0, backward_ns=16.5, tail_forward_ns=55.0, tail_backward_ns=69.0
    )


def test_backward_has_its_own_tiles() -> None:
    """One row computes 128 rows over 1000 keys in forward, 64 in backward, at 4 and 10 FLOPs."""
    table = replace(PLAIN, backward_tile_rows=64, forward=LONG, backward=LONG)
    q, kv = np.array([1.0, 65.0]), np.array([1000.0, 1000.0])
    forward, backward = table.times_ns(q, kv, num_heads=4, head_dim=128)
    unit = 4 * 128 / 400.0 * 1e-3
    assert forward.tolist() == pytest.approx([128 * 1000 * 4 * unit] * 2)
    # Of 65 rows the first 64 see all keys but the last one's, to a tile's end: 935 + 64.
    two_tiles = 64 * (999 + 1000)
    assert backward.tolist() == pytest.approx([64 * 1000 * 10 * unit, two_tiles * 10 * unit])


def test_backward_counts_blocks_of_its_own_keys() -> None:
    table = replace(TABLE, backward_tile_rows=64, backward_tile_keys=96)
    rows, keys = np.array([300.0]), np.array([1000.0])
    forward, backward = table.calls_ns(rows, keys, np.array([0, 1]), num_heads=4)
    assert forward.tolist() == [1000 + 4 * 3 * 1.0 + 1000 * 27.5]
    assert backward.tolist() == [2000 + 4 * 11 * 5.5 + 300 * 23.0]


def test_files_without_backwards_tiles_have_forwards() -> None:
    """Old files have one number; new ones state backward's where it is another."""
    profile = replace(load_profile("h100"), attention=(TABLE,))
    old = profile_to_json(profile)
    assert not {"backward_tile_rows", "backward_tile_keys"} & old["attention"][0].keys()
    read = profile_from_json(old).attention[0]
    assert (read.backward_tile_rows, read.backward_tile_keys) == (128, 128)
    other = replace(TABLE, backward_tile_rows=64)
    new = json.loads(json.dumps(profile_to_json(replace(profile, attention=(other,)))))
    read = profile_from_json(new).attention[0]
    assert (read.tile_rows, read.backward_tile_rows, read.backward_tile_keys) == (128, 64, 128)
    new["attention"][0]["backward_tile_rows"] = -1
    with pytest.raises(UserError, match="backward_tile_rows = -1 must be a whole number"):
        profile_from_json(new)

"""Tests bin packing against packers that look at one document and one bin at a time."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.property.test_conservation import Ledger, batches
from wlb.cost import FlopsWorkload
from wlb.packing import PackerOptions
from wlb.packing.bins import BinMethod, pack_bins
from wlb.packing.capacity import CapacityPacker
from wlb.plan import Carry, Pieces

FFD, BFD = BinMethod.FIRST_FIT_DECREASING, BinMethod.BEST_FIT_DECREASING
NEXT_FIT, BEST_FIT = BinMethod.NEXT_FIT, BinMethod.BEST_FIT
NFD = BinMethod.NEXT_FIT_DECREASING


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int]:
    """Draws lengths and a capacity: many equal lengths, and long ones that take two sorting
    passes.
    """
    capacity = draw(st.one_of(st.integers(1, 40), st.integers(60_000, 140_000)))
    few = draw(st.lists(st.integers(1, capacity), min_size=1, max_size=6))
    length = st.one_of(st.sampled_from(few), st.integers(1, capacity), st.integers(1, 3))
    lengths = draw(st.lists(length.map(lambda n: min(n, capacity)), max_size=60))
    return lengths, capacity


def one_by_one(
    lengths: list[int], capacity: int, method: BinMethod, *, window: int = 1, num_first: int = 0
) -> list[list[int]]:
    """Returns the rows of each bin as the method's definition says, in O(documents x bins)."""
    rows = list(range(len(lengths)))
    if method in (FFD, BFD, NFD):
        rows.sort(key=lambda row: (row >= num_first, -lengths[row], row))
    bins: list[list[int]] = []
    room: list[int] = []
    is_open: list[int] = []
    for row in rows:
        fits = [b for b in is_open if room[b] >= lengths[row]]
        if not fits:
            if method in (NEXT_FIT, NFD):
                is_open.clear()
            elif method == BEST_FIT and len(is_open) == window:
                is_open.remove(min(is_open, key=lambda b: (room[b], b)))
            fits = [len(bins)]
            is_open.append(len(bins))
            bins.append([])
            room.append(capacity)
        least_room = method in (BFD, BEST_FIT)
        b = min(fits, key=lambda b: (room[b] if least_room else 0, b))
        bins[b].append(row)
        room[b] -= lengths[row]
    return bins


@given(problems(), st.sampled_from(list(BinMethod)), st.data())
def test_bins_are_those_of_placing_documents_one_by_one(
    problem: tuple[list[int], int], method: BinMethod, data: st.DataObject
) -> None:
    lengths, capacity = problem
    options = {
        "window": data.draw(st.integers(1, 8)),
        "num_first": data.draw(st.sampled_from([0, len(lengths) // 2, len(lengths)])),
    }
    bins = pack_bins(lengths, capacity, method=method, **options)
    rows = [bins.rows(b).tolist() for b in range(bins.num_bins)]
    assert rows == one_by_one(lengths, capacity, method, **options)
    # Every document once, no bin too full.
    assert sorted(bins.order.tolist()) == list(range(len(lengths)))
    assert bins.tokens.tolist() == [sum(lengths[row] for row in members) for members in rows]
    assert all(0 < n <= capacity for n in bins.tokens.tolist())


@st.composite
def packers(draw: st.DrawFn, window: int, **fixed: object) -> CapacityPacker:
    options = PackerOptions(
        num_micro_batches=draw(st.integers(1, 4)),
        context_window=window,
        cost=FlopsWorkload(quadratic_ns=1, linear_ns_per_token=1),
        seed=draw(st.integers(0, 3)),
    )
    drawn: dict[str, object] = {
        "method": draw(st.sampled_from(list(BinMethod))),
        "capacity": draw(st.one_of(st.none(), st.integers(window, 3 * window))),
        "pack_batches": draw(st.integers(1, 3)),
        "open_bins": draw(st.integers(1, 5)),
    }
    return CapacityPacker(options=options, **(drawn | fixed))  # pyright: ignore[reportArgumentType]


windows = st.integers(1, 16)


@given(st.data())
def test_tokens_and_labels_are_placed_once_or_wait(data: st.DataObject) -> None:
    """Each push may be another packer's: method, N, capacity and pack_batches change."""
    window = data.draw(windows)
    packer = data.draw(packers(window))
    changes = data.draw(st.booleans())
    most = 3 * window if changes else packer.bin_tokens
    ledger = Ledger(packer.start())
    for batch in [*data.draw(batches(window)), None]:
        if changes:
            packer = data.draw(packers(window))
        plans = ledger.push(packer, batch)
        assert all(int(p.tokens.max()) <= min(most, packer.bin_tokens) for p in plans)
        assert all(p.num_micro_batches == packer.num_micro_batches for p in plans)
        # Only a flush leaves micro-batches empty.
        assert batch is None or all(int(p.tokens.min()) > 0 for p in plans)
    assert len(ledger.carry.pieces) == 0
    assert sorted(ledger.placed) == sorted(ledger.arrived)
    assert ledger.push(packer, None) == ()


@given(st.data())
def test_what_is_left_over_leaves_with_the_next_steps(data: st.DataObject) -> None:
    window = data.draw(windows)
    packer = data.draw(packers(window))
    carry = packer.start()
    for batch in data.draw(batches(window)):
        oldest, left_over = _names(carry.pieces.slice(0, 1)), _names(carry.in_slot(0))
        plans, carry = packer.push(batch, carry)
        if not plans:
            continue
        if packer.method.is_streaming:
            assert oldest <= _names(plans[0].pieces)
        if packer.method == NEXT_FIT:
            assert left_over <= _names(plans[0].pieces)
        if packer.method != BEST_FIT:
            assert not left_over & _names(carry.pieces)
            # At most N bins are left over, and packed again they are no more.
            alone = pack_bins(carry.pieces.length, packer.bin_tokens, method=packer.method)
            assert alone.num_bins <= packer.num_micro_batches


def _names(pieces: Pieces) -> set[tuple[int, ...]]:
    columns = (pieces.source, pieces.document, pieces.start)
    return set(zip(*(column.tolist() for column in columns), strict=True))


@given(st.data())
def test_next_fit_does_not_depend_on_where_batches_end(data: st.DataObject) -> None:
    window = data.draw(windows)
    packer = data.draw(packers(window, method=NEXT_FIT))
    carry, tokens, lengths = packer.start(), [], []
    for batch in [*data.draw(batches(window)), None]:
        lengths += packer.options.arrived(batch, 0).length.tolist()
        plans, carry = packer.push(batch, carry)
        tokens += [n for plan in plans for n in plan.tokens.tolist() if n]
    whole = pack_bins(np.array(lengths, np.int64), packer.bin_tokens, method=NEXT_FIT)
    assert tokens == whole.tokens.tolist()


@given(st.data())
def test_a_carry_that_went_through_json_goes_on_identically(data: st.DataObject) -> None:
    window = data.draw(windows)
    packer = data.draw(packers(window))
    stream = [*data.draw(batches(window)), None]
    stop = data.draw(st.integers(0, len(stream) - 1))
    carry = packer.start()
    for batch in stream[:stop]:
        _, carry = packer.push(batch, carry)
    again = Carry.from_json(json.loads(json.dumps(carry.to_json())))
    for batch in stream[stop:]:
        plans, carry = packer.push(batch, carry)
        replayed, again = packer.push(batch, again)
        assert [p.to_json() for p in replayed] == [p.to_json() for p in plans]
        assert again.to_json() == carry.to_json()

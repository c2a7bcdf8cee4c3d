"""Tests conservation: every document token and every label is placed once or waits.

Tokens are counted one by one, as numbers that name source, document and position; nothing here
trusts a sum that the packers made themselves.
"""

import json
from dataclasses import replace
from tempfile import NamedTemporaryFile

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wlb.cost import FlopsWorkload
from wlb.packing import (
    BinMethod,
    BoundedPacker,
    CapacityPacker,
    ExamplesPacker,
    FixedPacker,
    OriginalPacker,
    Packer,
    PackerOptions,
    PriceRange,
    VarLenPacker,
    WindowCut,
)
from wlb.plan import Carry, Documents, GlobalBatch, PackingPlan, Pieces, ranges
from wlb.spec import Policy

MOST = 1000  # documents a source, and tokens a document, are fewer


@st.composite
def batches(draw: st.DrawFn, window: int) -> list[GlobalBatch]:
    """Draws batches of plain documents (0 or more) of two sources, from 1 token to several
    windows.
    """
    length = st.one_of(
        st.integers(1, 3 * window + 1),
        st.integers(max(1, window - 1), window + 1),
        st.integers(1, 3),
    )
    out: list[GlobalBatch] = []
    seen = [0, 0]
    for index in range(draw(st.integers(1, 5))):
        rows = draw(st.lists(st.tuples(st.integers(0, 1), length), max_size=9))
        ids: list[int] = []
        for source, _ in rows:
            ids.append(seen[source])
            seen[source] += 1
        lengths = np.array([n for _, n in rows], np.int64)
        documents = Documents(
            id=ids, length=lengths, num_targets=lengths - 1, source=[source for source, _ in rows]
        )
        out.append(GlobalBatch(index=index, documents=documents))
    return out


POLICIES = tuple(map(str, Policy))
WINDOWED = ("fixed", "capacity")


@st.composite
def packers(draw: st.DrawFn, window: int, policy: str | None = None) -> Packer:
    options = PackerOptions(
        num_micro_batches=draw(st.integers(1, 4)),
        context_window=window,
        cost=FlopsWorkload(quadratic_ns=1, linear_ns_per_token=draw(st.integers(0, 40))),
        seed=draw(st.integers(0, 3)),
    )
    per_step = options.tokens_per_step
    prices = draw(st.sampled_from([PriceRange(), PriceRange(low=0.7, high=1.6)]))
    match chosen := policy or draw(st.sampled_from(POLICIES)):
        case "original":
            return OriginalPacker(options=options, cut=draw(st.sampled_from(list(WindowCut))))
        case "fixed":
            return FixedPacker(options=options, window_batches=draw(st.integers(1, 3)))
        case "capacity":
            return CapacityPacker(
                options=options,
                method=draw(st.sampled_from(list(BinMethod))),
                pack_batches=draw(st.integers(1, 3)),
                open_bins=draw(st.integers(1, 4)),
            )
        case "examples":
            return ExamplesPacker(
                options=options, examples=draw(st.integers(1, 4)), by_length=draw(st.booleans())
            )
        case "bounded":
            return BoundedPacker(
                options=options,
                s_max=draw(st.integers(window + 1, 3 * window + 1)),
                step_tokens=draw(st.none() | st.integers(per_step + 1, 3 * per_step)),
                max_delay=draw(st.integers(1, 8)),
                price_range=prices,
            )
        case "var_len":
            return draw(_var_len(options, prices))
    raise ValueError(f"policy {chosen} has no case here: add one, so that these tests hold it too")


@st.composite
def _var_len(draw: st.DrawFn, options: PackerOptions, prices: PriceRange) -> VarLenPacker:
    window = options.context_window
    thresholds = draw(st.lists(st.integers(1, window + 2), max_size=3, unique=True).map(sorted))
    s_max = draw(st.integers(window, 3 * window))
    return VarLenPacker(
        options=options,
        s_max=s_max,
        queue_thresholds=tuple(thresholds),
        step_tokens=draw(st.none() | st.integers(window, 3 * options.tokens_per_step + s_max)),
        price_range=prices,
    )


windows = st.integers(1, 16)


def keys(source: np.ndarray, document: np.ndarray, start: np.ndarray, stop: np.ndarray) -> list:
    base = (source * MOST + document) * MOST
    return ranges(base + start, base + stop).tolist()


def piece_keys(pieces: Pieces) -> list[int]:
    return keys(pieces.source, pieces.document, pieces.start, pieces.stop)


def document_keys(batch: GlobalBatch) -> list[int]:
    d = batch.documents
    return keys(d.source, d.id, np.zeros_like(d.length), d.length)


class Ledger:
    """Follows a packer through pushes and checks the books after each of them."""

    def __init__(self, carry: Carry) -> None:
        self.carry = carry
        self.arrived: list[int] = []
        self.placed: list[int] = []
        self.targets_arrived = self.targets_placed = 0
        self.length: dict[tuple[int, int], int] = {}
        self.came_at: dict[tuple[int, int], int] = {}
        self.plans: list[PackingPlan] = []

    def push(self, packer: Packer, batch: GlobalBatch | None) -> tuple[PackingPlan, ...]:
        if batch is not None:
            self._arrive(batch)
        before = self.carry.next_step
        plans, self.carry = packer.push(batch, self.carry)
        assert [p.step for p in plans] == list(range(before, before + len(plans)))
        assert self.carry.next_step == before + len(plans)
        for plan in plans:
            self._place(plan)
        waiting = self.carry.pieces
        assert sorted(self.placed + piece_keys(waiting)) == sorted(self.arrived)
        assert self.targets_placed + int(waiting.num_targets.sum()) == self.targets_arrived
        self._check_pieces(waiting)
        return plans

    def _arrive(self, batch: GlobalBatch) -> None:
        self.arrived += document_keys(batch)
        d = batch.documents
        self.targets_arrived += int(d.num_targets.sum())
        for source, document, n in zip(d.source, d.id, d.length, strict=True):
            self.length[int(source), int(document)] = int(n)
            self.came_at[int(source), int(document)] = self.carry.next_step

    def _place(self, plan: PackingPlan) -> None:
        self.plans.append(plan)
        batches = plan.micro_batches
        self.placed += [key for m in batches for key in piece_keys(m.pieces)]
        self.targets_placed += sum(m.num_targets for m in batches)
        self._check_pieces(plan.pieces)
        # At any moment placed + waiting = arrived, between the plans of one push too.
        assert len(self.placed) + plan.num_held_tokens == len(self.arrived)
        assert plan.num_tokens == int(plan.tokens.sum()) > 0
        if plan.policy not in WINDOWED:  # they train some documents before they are due
            assert int((plan.step - plan.pieces.arrival_step).min(initial=0)) >= 0

    def _check_pieces(self, pieces: Pieces) -> None:
        for i in range(len(pieces)):
            piece = pieces[i]
            length = self.length[piece.source, piece.document]
            # Every token is labelled with the document's next one, so all but the last have one.
            assert piece.num_targets == piece.stop - piece.start - (piece.stop == length)
            came_at = self.came_at[piece.source, piece.document]
            assert piece.arrival_step == came_at or (
                self.carry.policy in WINDOWED and piece.arrival_step > came_at
            )


@given(st.data())
def test_tokens_and_labels_are_placed_once_or_wait(data: st.DataObject) -> None:
    window = data.draw(windows)
    packer = data.draw(packers(window))
    ledger = Ledger(packer.start())
    stream = data.draw(batches(window))
    if stream and data.draw(st.booleans()):
        stream[-1] = replace(stream[-1], is_last=True)
    for batch in [*stream, None]:
        ledger.push(packer, batch)
    assert len(ledger.carry.pieces) == 0
    assert sorted(ledger.placed) == sorted(ledger.arrived)
    num = packer.options.num_micro_batches
    assert all(p.num_micro_batches == num and p.policy == packer.policy for p in ledger.plans)
    assert ledger.push(packer, None) == ()


@given(st.data())
def test_nothing_is_lost_when_the_packer_changes_on_the_way(data: st.DataObject) -> None:
    """N, thresholds, S_max and cost change: each push may be another packer's (a restart from its
    carry).
    """
    window, policy = data.draw(windows), data.draw(st.sampled_from(POLICIES))
    ledger = Ledger(data.draw(packers(window, policy)).start())
    for batch in [*data.draw(batches(window)), None]:
        packer = data.draw(packers(window, policy))
        plans = ledger.push(packer, batch)
        assert all(p.num_micro_batches == packer.options.num_micro_batches for p in plans)
    assert len(ledger.carry.pieces) == 0
    assert sorted(ledger.placed) == sorted(ledger.arrived)


@given(st.data())
def test_var_len_stays_below_s_max_and_keeps_back_only_what_it_must(data: st.DataObject) -> None:
    window = data.draw(windows)
    packer = data.draw(packers(window, "var_len"))
    assert isinstance(packer, VarLenPacker)
    ledger, num = Ledger(packer.start()), packer.options.num_micro_batches
    edges = [0, *packer.queue_thresholds, 1 << 60]
    for batch in [*data.draw(batches(window)), None]:
        arrived, before = packer.options.arrived(batch, 0), ledger.carry
        plans = ledger.push(packer, batch)
        assert all(int(p.tokens.max()) <= packer.s_max for p in plans)
        assert all(int(p.pieces.length.max()) <= window for p in plans)
        carry = ledger.carry
        for level in range(1, len(edges) - 1):
            queue = carry.in_slot(level)
            # A queue holds documents of its band only, and never enough for a release.
            assert np.all((edges[level] <= queue.length) & (queue.length < edges[level + 1]))
            assert len(queue) < num
            band = (edges[level] <= arrived.length) & (arrived.length < edges[level + 1])
            released = len(before.in_slot(level)) + int(band.sum()) - len(queue)
            assert batch is None or released % num == 0
        left = carry.in_slot(0)
        if len(left):
            # What is left over fits no micro-batch of the step just made, or not the step.
            shortest, made = int(left.length.min()), plans[-1]
            is_full = shortest + int(made.tokens.min()) > packer.s_max
            cap = packer.step_tokens
            assert is_full or (cap is not None and shortest + made.num_tokens > cap)
        assert len(left) + sum(len(carry.in_slot(i)) for i in range(1, len(edges) - 1)) == len(
            carry.pieces
        )


@given(st.data())
def test_original_fills_windows_exactly_and_keeps_the_order(data: st.DataObject) -> None:
    window = data.draw(windows)
    packer = data.draw(packers(window, "original"))
    assert isinstance(packer, OriginalPacker)
    packer = replace(packer, cut=WindowCut.ANYWHERE)
    ledger, num = Ledger(packer.start()), packer.options.num_micro_batches
    for batch in data.draw(batches(window)):
        for plan in ledger.push(packer, batch):
            assert plan.tokens.tolist() == [window] * num
        assert ledger.carry.num_tokens < window * num
    rest = ledger.carry.num_tokens
    flush = ledger.push(packer, None)
    full, part = divmod(rest, window)
    expected = [window] * full + ([part] if part else [])
    assert [t for p in flush for t in p.tokens.tolist()] == (
        expected + [0] * (num - len(expected)) if rest else []
    )
    assert ledger.placed == ledger.arrived  # the stream itself, not only its tokens


@given(st.data())
def test_packing_to_windows_fills_each_of_them(data: st.DataObject) -> None:
    """fixed, and the loader that keeps long documents whole, give exactly C tokens before the
    flush.
    """
    window = data.draw(windows)
    packer = data.draw(packers(window, data.draw(st.sampled_from(["fixed", "original"]))))
    ledger, num = Ledger(packer.start()), packer.num_micro_batches
    for batch in data.draw(batches(window)):
        for plan in ledger.push(packer, batch):
            assert plan.tokens.tolist() == [window] * num
    for plan in ledger.push(packer, None):
        assert int(plan.tokens.max()) <= window


@given(st.data())
def test_labels_do_not_depend_on_the_policy(data: st.DataObject) -> None:
    window = data.draw(windows)
    stream = data.draw(batches(window))
    expected = sum(int((b.documents.length - 1).sum()) for b in stream)
    for policy in POLICIES:
        packer = data.draw(packers(window, policy))
        ledger = Ledger(packer.start())
        for batch in [*stream, None]:
            ledger.push(packer, batch)
        assert sum(p.num_targets for p in ledger.plans) == expected


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
    with NamedTemporaryFile(suffix=".npz") as file:
        carry.save(file.name)
        assert Carry.load(file.name).to_json() == again.to_json()
    assert (again.pieces, again.next_step) == (carry.pieces, carry.next_step)
    for batch in stream[stop:]:
        plans, carry = packer.push(batch, carry)
        replayed, again = packer.push(batch, again)
        assert [p.digest() for p in replayed] == [p.digest() for p in plans]
        assert [p.num_held_tokens for p in replayed] == [p.num_held_tokens for p in plans]
        assert again.to_json() == carry.to_json()


@given(st.data())
def test_plans_survive_json(data: st.DataObject) -> None:
    window = data.draw(windows)
    packer = data.draw(packers(window))
    carry = packer.start()
    for batch in [*data.draw(batches(window)), None]:
        plans, carry = packer.push(batch, carry)
        for plan in plans:
            back = PackingPlan.from_json(json.loads(json.dumps(plan.to_json())))
            assert back.digest() == plan.digest()
            assert back.to_json() == plan.to_json()


@given(st.data())
def test_labels_of_partly_labelled_documents_are_conserved(data: st.DataObject) -> None:
    """As in fine-tuning, only some tokens have labels, and no document is longer than the
    window.
    """
    window = data.draw(windows)
    rows = st.integers(1, window).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))
    packer = data.draw(packers(window, "var_len"))
    carry, first_id = packer.start(), 0
    arrived: dict[int, int] = {}
    placed: dict[int, int] = {}
    for batch_rows in [*data.draw(st.lists(st.lists(rows, max_size=9), max_size=4)), None]:
        batch = None
        if batch_rows is not None:
            ids = np.arange(first_id, first_id + len(batch_rows))
            first_id += len(batch_rows)
            targets = [t for _, t in batch_rows]
            arrived |= dict(zip(ids.tolist(), targets, strict=True))
            documents = Documents(
                id=ids, length=[n for n, _ in batch_rows], num_targets=targets, source=ids * 0
            )
            batch = GlobalBatch(index=0, documents=documents)
        plans, carry = packer.push(batch, carry)
        for plan in plans:
            for piece in (plan.pieces[i] for i in range(len(plan.pieces))):
                assert piece.document not in placed
                placed[piece.document] = piece.num_targets
    assert placed == arrived

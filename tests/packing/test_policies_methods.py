"""Tests the fine-tuning paper's grouping methods: Table 1 row by row, their packers and names."""

from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.adapters.collate.test_flat import Reader
from wlb.cost import FlopsWorkload
from wlb.data import GlobalBatches, LengthSource
from wlb.memory.estimate import longest_micro_batch
from wlb.packing import CapacityPacker, ExamplesPacker, PackerOptions, packer_for
from wlb.parallel.rows import rank_labels
from wlb.plan import IGNORE, Documents, GlobalBatch, Layout, PackingPlan
from wlb.planner import Planner
from wlb.sharding.paper import per_sequence
from wlb.spec import METHODS, RunSpec, load

COST = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=10)
WINDOW, N = 512, 4

# Table 1: position IDs (no padding), correct cross-example attention, no broken examples, no
# sorting of the data set.
TABLE_1 = {
    "random_padding": (False, True, True, True),
    "group_by_length_padding": (False, True, True, False),
    "mini_batch_posid": (True, True, True, True),
    "fixed_length": (False, False, False, True),
    "fixed_length_posid": (True, True, False, True),
    "multipack_posid": (True, True, True, False),
    "multipack_bfd_posid": (True, True, True, False),
    "sorted_posid": (True, True, True, False),
    "random_posid": (True, True, True, True),
}


def spec_of(method: str, *overrides: str) -> RunSpec:
    return load(
        "demo",
        [
            f"packing.method={method}",
            "model.vocab_size=512",
            "parallel.tp=1",
            "parallel.cp=1",
            "parallel.pp=1",
            "pp.virtual_stages=1",
            "parallel.dp=1",
            f"data.context_window={WINDOW}",
            f"data.num_windows={N}",
            *overrides,
        ],
    )


def lengths_of(num: int = 3000, seed: int = 5) -> np.ndarray:
    draw = np.random.default_rng(seed).lognormal(4.2, 0.9, num)
    return np.clip(draw.astype(np.int64), 2, WINDOW)


def plans_of(spec: RunSpec, lengths: np.ndarray) -> list[PackingPlan]:
    source = GlobalBatches(
        LengthSource(name="examples", lengths=lengths),
        tokens_per_batch=spec.tokens_per_step,
        seed=1,
        epochs=1,
    )
    return [plan.packing for plan in Planner.from_spec(spec, source, COST).steps()]


def test_every_row_of_the_table_has_a_method() -> None:
    assert set(TABLE_1) == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_the_row_of_table_1(method: str) -> None:
    has_position_ids, is_correct, is_unbroken, is_unsorted = TABLE_1[method]
    lengths = lengths_of()
    spec = spec_of(method)
    plans = plans_of(spec, lengths)
    documents = np.concatenate([plan.pieces.document for plan in plans])
    parts = np.bincount(documents, minlength=lengths.size)
    # Every token once, whatever the method.
    assert sum(plan.num_tokens for plan in plans) == lengths.sum()
    assert (parts >= 1).all()
    assert bool((parts == 1).all()) == is_unbroken
    # Position IDs: rows are the examples' own tokens and segments the examples.
    num_rows, num_tokens = (
        sum(int(x.sum()) for x in c)
        for c in zip(*((plan.rows, plan.tokens) for plan in plans), strict=True)
    )
    segments = [batch.lengths.size for plan in plans for batch in plan.micro_batches]
    pieces = [len(batch.pieces) for plan in plans for batch in plan.micro_batches]
    assert (num_rows == num_tokens and segments == pieces) == has_position_ids
    assert (num_rows > num_tokens) == method.endswith("padding")
    # Cross-example attention: a segment holds one example.
    assert (segments == pieces) == is_correct
    # The data set's order is that of its stream.
    stream = GlobalBatches(
        LengthSource(name="examples", lengths=lengths),
        tokens_per_batch=spec.tokens_per_step,
        seed=1,
        epochs=1,
    )
    order = np.concatenate([batch.documents.id for batch, _ in stream.iterate()])
    first_seen = documents[np.sort(np.unique(documents, return_index=True)[1])]
    assert np.array_equal(first_seen, order) == is_unsorted


def push_all(
    packer: ExamplesPacker | CapacityPacker, batches: list[list[int]]
) -> list[PackingPlan]:
    carry, plans, first = packer.start(), list[PackingPlan](), 0
    for index, lengths in enumerate(batches):
        documents = Documents.from_lengths(lengths, first_id=first)
        first += len(lengths)
        made, carry = packer.push(GlobalBatch(index=index, documents=documents), carry)
        plans += made
    made, carry = packer.push(None, carry)
    assert not len(carry.pieces)
    return plans + list(made)


def test_mini_batches_have_so_many_examples() -> None:
    options = PackerOptions(num_micro_batches=2, context_window=100, cost=COST)
    plans = push_all(ExamplesPacker(options=options, examples=3), [[5] * 4, [7] * 11, [9]])
    found = [[batch.pieces.length.tolist() for batch in plan.micro_batches] for plan in plans]
    assert found == [[[5, 5, 5], [5, 7, 7]], [[7, 7, 7], [7, 7, 7]], [[7, 7], [7, 9]]]
    assert [plan.num_held_tokens for plan in plans] == [9 * 7, 4 * 7 - 7, 0]


def test_by_length_sorts_fifty_steps_at_a_time() -> None:
    options = PackerOptions(num_micro_batches=2, context_window=100, cost=COST)
    packer = ExamplesPacker(options=options, examples=2, by_length=True)
    lengths = (np.arange(450) * 37 % 99 + 1).tolist()
    plans = push_all(packer, [lengths])
    assert len(plans) == 113
    trained = np.concatenate([plan.pieces.length for plan in plans])
    for start in (0, 200, 400):
        part = trained[start : start + 200]
        assert (np.diff(part) <= 0).all()
        assert sorted(part.tolist()) == sorted(lengths[start : start + 200])


@given(
    batches=st.lists(st.lists(st.integers(1, 90), max_size=30), max_size=6),
    n=st.integers(1, 4),
    examples=st.integers(1, 5),
    by_length=st.booleans(),
    layout=st.sampled_from(list(Layout)),
)
def test_every_example_is_trained_once(
    batches: list[list[int]], n: int, examples: int, by_length: bool, layout: Layout
) -> None:
    options = PackerOptions(num_micro_batches=n, context_window=64, cost=COST, layout=layout)
    packer = ExamplesPacker(options=options, examples=examples, by_length=by_length)
    plans = push_all(packer, batches)
    assert sum(plan.num_tokens for plan in plans) == sum(map(sum, batches))
    for plan in plans:
        assert plan.num_micro_batches == n
        for batch in plan.micro_batches:
            assert len(batch.pieces) <= examples
            assert batch.workload_ns == int(COST.workload_ns(batch.lengths).sum())
            assert batch.num_rows >= batch.num_tokens


@pytest.mark.parametrize("method", ["examples", "capacity"])
def test_labels_of_joined_pieces_are_the_plans(method: str) -> None:
    """Each token is a label once at most.

    A document's last token takes no label from a piece that does not begin its document, because
    that is the label of another piece.
    """
    lengths = [25, 19, 15, 8, 9, 2, 3, 1]
    options = PackerOptions(num_micro_batches=2, context_window=10, cost=COST, layout=Layout.JOINED)
    packer = ExamplesPacker(options=options, examples=3, by_length=True)
    if method == "capacity":
        packer = CapacityPacker(options=options, capacity=20)
    followed = 0
    for plan in push_all(packer, [lengths]):
        labels: list[int] = []
        for micro_batch in plan.micro_batches:
            pieces = micro_batch.pieces
            followed += sum(
                a.stop == lengths[a.document] and b.start > 0
                for a, b in pairwise(pieces[i] for i in range(len(pieces)))
            )
            sharding = per_sequence(micro_batch.lengths, cp=1)
            made = rank_labels(micro_batch, sharding, 0, pieces.num_tokens, Reader(lengths))
            labels += made[made != IGNORE].tolist()
        assert len(labels) == plan.num_targets
        assert len(set(labels)) == len(labels)
    assert followed  # the case occurs


def test_padding_and_joining_are_priced() -> None:
    """The expected prices are W of 3 x 30 tokens, and of one sequence of 60, with W(d) = d^2 + 10
    d.
    """
    found: dict[Layout, PackingPlan] = {}
    for layout in Layout:
        options = PackerOptions(num_micro_batches=1, context_window=64, cost=COST, layout=layout)
        (found[layout],) = push_all(ExamplesPacker(options=options, examples=3), [[10, 20, 30]])
    work = {layout: int(plan.workload_ns[0]) for layout, plan in found.items()}
    assert work[Layout.SEPARATE] == 100 + 400 + 900 + 600
    assert work[Layout.PADDED] == 3 * (900 + 300)
    assert work[Layout.JOINED] == 3600 + 600
    targets = {layout: plan.num_targets for layout, plan in found.items()}
    assert targets == {Layout.SEPARATE: 57, Layout.PADDED: 57, Layout.JOINED: 59}
    for plan in found.values():
        again = PackingPlan.from_json(plan.to_json())
        assert (again.layout, again.num_targets) == (plan.layout, plan.num_targets)
        assert again.digest() == plan.digest()
    assert len({plan.digest() for plan in found.values()}) == 3


def test_flat_bins_hold_bs_times_msl() -> None:
    spec = spec_of("random_posid", "packing.bin_windows=3")
    packer = packer_for(spec, COST)
    tokens = np.concatenate([p.tokens for p in plans_of(spec, lengths_of(2000))])
    assert packer.num_micro_batches == N
    assert WINDOW < tokens.max() <= 3 * WINDOW
    assert longest_micro_batch(spec) == 3 * WINDOW
    padded = spec_of("random_padding", "packing.examples=6")
    assert longest_micro_batch(padded) == 6 * WINDOW
    assert max(int(p.rows.max()) for p in plans_of(padded, lengths_of(500))) <= 6 * WINDOW


def test_sorted_packing_goes_from_long_to_short() -> None:
    spec = spec_of("sorted_posid", "packing.window_batches=100")
    trained = np.concatenate([p.pieces.length for p in plans_of(spec, lengths_of(600))])
    assert (np.diff(trained) <= 0).all()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["packing.method=multi"],
            "packing.method = 'multi' is unknown; use one of random_padding, gro",
        ),
        (
            ["packing.method=sorted_posid", "packing.policy=bounded"],
            "packing.method = sorted_posid sets packing.policy = capacity, but the run sets "
            "packing.policy = bounded",
        ),
        (
            ["packing.layout=padded"],
            "packing.layout = padded is not supported by packing.policy = var_len",
        ),
        (["packing.examples=0"], "packing.examples = 0 must be at least 1"),
        (["packing.bin_windows=0"], "packing.bin_windows = 0 must be at least 1"),
    ],
)
def test_what_cannot_be(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("demo", overrides)


def test_a_later_method_replaces_an_earlier_one() -> None:
    spec = load("demo", ["packing.method=fixed_length", "packing.method=random_posid"])
    assert (spec.packing.layout, str(spec.packing.policy)) == (Layout.SEPARATE, "capacity")
    assert list(islice(METHODS, 1)) == ["random_padding"]


@pytest.mark.parametrize("method", ["multipack_posid", "multipack_bfd_posid"])
def test_multipack_is_balanced_over_dp_ranks_by_work_as_well_as_tokens(method: str) -> None:
    """Bins of equal tokens differ in attention; ranks that take them as they come would wait."""
    # Several bins a rank, and documents of a third of a bin beside many short ones.
    spec = spec_of(method, "parallel.dp=4", "data.num_windows=32", "packing.window_batches=4")
    source = GlobalBatches(
        LengthSource(name="examples", lengths=lengths_of(6000)),
        tokens_per_batch=spec.tokens_per_step,
        seed=1,
        epochs=1,
    )
    cost = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=1)
    found: dict[str, list[float]] = {"work": [], "tokens": [], "as they come": []}
    steps = [plan for plan in Planner.from_spec(spec, source, cost).steps()][:-1]
    for plan in steps:
        work, tokens = plan.packing.workload_ns, plan.packing.rows
        for name, values, dealt in (
            ("work", work, plan.pipelines),
            ("tokens", tokens, plan.pipelines),
            ("as they come", work, np.arange(32).reshape(4, 8)),
        ):
            sums = values[dealt].sum(1)
            found[name].append(sums.max() / sums.mean())
    assert len(steps) > 20
    assert max(found["work"]) < 1.02
    assert max(found["tokens"]) < 1.01
    assert np.mean(found["as they come"]) > 1.04

"""Tests that the comparison's rows follow from a run's own [packing] section."""

from dataclasses import replace

import pytest

from wlb.cost import FlopsWorkload
from wlb.data import GlobalBatches, lengths_of_family
from wlb.packing.study.compare import compare, solver_packers, variants_of
from wlb.plan import GlobalBatch, Layout
from wlb.spec import PackingSection, Policy, RunSpec, check

C = 2048
COST = FlopsWorkload(quadratic_ns=1670 / C, linear_ns_per_token=1000)


def spec(**packing: object) -> RunSpec:
    base = RunSpec()
    data = replace(base.data, context_window=C, num_windows=4)
    return check(replace(base, data=data, packing=PackingSection(**packing)))


def batches(num: int) -> list[GlobalBatch]:
    source = lengths_of_family("wlb_paper", window=C, num_documents=num * 350, seed=1)
    stream = GlobalBatches(source, tokens_per_batch=4 * C, seed=1)
    return [b for b, _ in zip((b for b, _ in stream.iterate()), range(num), strict=False)]


def test_the_run_comes_first_and_once() -> None:
    rows = variants_of(spec(s_max=2.0, step_tokens=1.5))
    assert [r.is_own for r in rows].count(True) == 1
    assert rows[0].label == "var_len L 0.2 0.63 (run)"
    assert [r.label for r in rows[1:]] == [
        "original",
        "original, long whole",
        "fixed, W = 1",
        "fixed, W = 2",
        "fixed, W = 4",
        "fixed, W = 8",
        "var_len L 0.2",
        "var_len L 0.2 0.415 0.63",
        "bounded T 1.5 D 10",
        "bounded T 1.1 D 10",
        "capacity, BFD",
    ]
    assert len({r.section for r in rows}) == len(rows)
    caps = {(r.section.s_max, r.section.step_tokens) for r in rows if "T 1.1" not in r.label}
    assert caps == {(2.0, 1.5)}  # all policies have the run's own caps


@pytest.mark.parametrize(
    ("packing", "label"),
    [
        ({"policy": Policy.ORIGINAL}, "original (run)"),
        ({"policy": Policy.ORIGINAL, "window_cut": "short"}, "original, long whole (run)"),
        ({"policy": Policy.FIXED, "window_batches": 4}, "fixed, W = 4 (run)"),
        ({"policy": Policy.CAPACITY}, "capacity (run)"),
        ({"queue_thresholds": ()}, "var_len no queue (run)"),
        ({"policy": Policy.BOUNDED, "max_delay": 7}, "bounded S_max 1.5 D 7 (run)"),
    ],
)
def test_the_run_is_named_like_the_other_rows(packing: dict[str, object], label: str) -> None:
    labels = [r.label for r in variants_of(spec(**packing))]
    assert labels[0] == label
    assert label.removesuffix(" (run)") not in labels


def test_rows_that_cannot_be_are_left_out() -> None:
    labels = [r.label for r in variants_of(spec(s_max=1.0))]
    assert not any(label.startswith("bounded") for label in labels)
    labels = [r.label for r in variants_of(spec(queue_thresholds=()))]
    assert sum("var_len" in label for label in labels) == 1


@pytest.mark.parametrize("m", [3, 6])
def test_windows_are_as_many_as_a_global_batch_brings_whatever_the_run_packs(m: int) -> None:
    run = spec(policy=Policy.BOUNDED, num_micro_batches=m)
    made = list(compare(run, batches(12), COST))
    assert len({r.summary.num_tokens for r in made}) == 1
    for each in made:
        if each.summary.policy in ("original", "fixed"):
            assert set(each.tokens.tolist()) == {4 * C}
        if each.summary.policy == "capacity":
            assert each.summary.longest_step <= 4 * C
    numbers = {r.label: r.section.num_micro_batches for r in variants_of(run)}
    assert {label.split()[0] for label, number in numbers.items() if number == m} == {
        "var_len",
        "bounded",
    }
    ((_, solver),) = solver_packers(run, COST, windows=(1,), time_limit_s=2.0)
    assert solver.num_micro_batches == 4


def test_a_number_of_micro_batches_that_says_the_same_is_not_another_row() -> None:
    plain, same = (spec(policy=Policy.ORIGINAL, num_micro_batches=m) for m in (0, 4))
    assert [r.label for r in variants_of(same)] == [r.label for r in variants_of(plain)]


def test_policies_that_balance_keep_documents_apart() -> None:
    rows = variants_of(spec(policy=Policy.EXAMPLES, layout=Layout.PADDED))
    by_policy = {r.section.policy: r.section.layout for r in rows}
    assert by_policy == {
        Policy.EXAMPLES: Layout.PADDED,
        Policy.ORIGINAL: Layout.PADDED,
        Policy.CAPACITY: Layout.PADDED,
        Policy.FIXED: Layout.SEPARATE,
        Policy.VAR_LEN: Layout.SEPARATE,
        Policy.BOUNDED: Layout.SEPARATE,
    }


def test_everyone_packs_the_same_documents() -> None:
    run = spec(policy=Policy.BOUNDED, s_max=2.0, step_tokens=1.5)
    made = [r.summary for r in compare(run, batches(24), COST)]
    assert {(s.num_tokens, s.num_documents) for s in made} == {
        (made[0].num_tokens, made[0].num_documents)
    }
    by_label = {s.label: s for s in made}
    ours, plain = by_label["bounded T 1.5 D 10 (run)"], by_label["original, long whole"]
    assert ours.imbalance < 1.05 < 1.25 < plain.imbalance
    assert by_label["fixed, W = 4"].mean_advance > 0


def test_solver_rows() -> None:
    pairs = solver_packers(spec(), COST, windows=(1,), time_limit_s=2.0)
    assert [label for label, _ in pairs] == ["solver, W = 1"]
    with pytest.raises(ValueError, match="time_limit_s = 0"):
        solver_packers(spec(), COST, time_limit_s=0)

"""Tests that a run's packers make the epochs that experiments/paper/packing_methods counts."""

import numpy as np
import pytest

from experiments.paper.packing_methods.counting import (
    Count,
    Method,
    count,
    first_come,
    fixed_length,
    mini_batch,
    padded,
)
from experiments.paper.packing_methods.lengths import FLAN, STACK, Dataset
from tests.packing.test_policies_methods import COST
from wlb.data import GlobalBatches, LengthSource
from wlb.plan import IntArray, PackingPlan
from wlb.planner import Planner
from wlb.spec import load

pytestmark = pytest.mark.full

MSL, BS, GAS = 4096, 2, 4


def sorted_rows(lengths: IntArray, *, bs: int, msl: int) -> Count:
    return first_come(-np.sort(-lengths), bs=bs, msl=msl)


def first_fit(lengths: IntArray, *, bs: int, msl: int) -> Count:
    return count(Method.FIRST_FIT_DECREASING, lengths, bs=bs, msl=msl, gas=GAS, seed=0)


def best_fit(lengths: IntArray, *, bs: int, msl: int) -> Count:
    return count(Method.BEST_FIT_DECREASING, lengths, bs=bs, msl=msl, gas=GAS, seed=0)


COUNTED = {
    "random_padding": padded,
    "mini_batch_posid": mini_batch,
    "fixed_length": fixed_length,
    "fixed_length_posid": fixed_length,
    "multipack_posid": first_fit,
    "multipack_bfd_posid": best_fit,
    "sorted_posid": sorted_rows,
    "random_posid": first_come,
}


def epoch(method: str, lengths: IntArray) -> list[PackingPlan]:
    """Returns the epoch's plans, in the data set's order, offline where the method packs bins."""
    spec = load(
        "demo",
        [
            f"packing.method={method}",
            f"packing.examples={BS}",
            "packing.window_batches=100000",
            "packing.bin_windows=1",
            "parallel.tp=1",
            "parallel.cp=1",
            "parallel.pp=1",
            "pp.virtual_stages=1",
            "parallel.dp=1",
            "model.vocab_size=512",
            f"data.context_window={MSL}",
            f"data.num_windows={GAS}",
            "planner.baseline=false",
        ],
    )
    source = GlobalBatches(
        LengthSource(name="examples", lengths=lengths),
        tokens_per_batch=spec.tokens_per_step,
        seed=0,
        epochs=1,
        shuffle=False,
    )
    return [plan.packing for plan in Planner.from_spec(spec, source, COST).steps()]


@pytest.mark.parametrize("method", COUNTED)
@pytest.mark.parametrize("dataset", [FLAN, STACK], ids=("flan", "stack"))
def test_counts_are_the_same(method: str, dataset: Dataset) -> None:
    lengths = dataset.shuffled(3)[: 1504 // (BS * GAS) * BS * GAS]
    # Bins of one row each: a micro-batch of ours is a row of theirs.
    bs = BS if method in ("random_padding", "mini_batch_posid") else 1
    expected = COUNTED[method](lengths, bs=bs, msl=MSL)
    plans = epoch(method, lengths)
    filled = [b for plan in plans for b in plan.micro_batches if len(b.pieces)]
    assert len(filled) == expected.micro_batches
    assert sum(b.num_tokens for b in filled) == expected.tokens
    # They fill the last row of the epoch up.
    last = MSL - filled[-1].num_tokens if method.startswith("fixed") else 0
    assert sum(b.num_rows for b in filled) == expected.positions - last
    documents = np.concatenate([b.pieces.document for b in filled])
    assert int((np.bincount(documents) > 1).sum()) == expected.num_broken

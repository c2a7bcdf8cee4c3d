"""Tests that ours stays near perfect balance in whole simulated runs, which need no clock."""

import pytest

from experiments.harness import constants
from experiments.harness.evaluation import EARLIER_GIB, batches_of, outcome, spec_of, system
from tests.sets import nightly

NEAR = 0.98
"""Share of perfect balance that every number of pipelines keeps."""


@pytest.mark.full
@pytest.mark.parametrize("dp", [1, *nightly(2, 8)])
def test_ours_is_within_two_percent_of_perfect_balance(dp: int) -> None:
    """That is so in the whole run, every document of which is trained."""
    # As many micro-batches a pipeline as the preset has with one.
    layout = (f"parallel.dp={dp}", f"data.num_windows={4 * dp}")
    case, *_ = system("wlb", "7b_128k", *layout, gib=EARLIER_GIB)
    found = outcome(case)
    assert NEAR <= found.of_bound <= 1
    batches = batches_of(spec_of(case), family=constants.FAMILY, steps=case.steps, seed=case.seed)
    assert found.tokens == sum(batch.documents.num_tokens for batch in batches)


@pytest.mark.full
def test_few_steps_lose_no_more_where_the_end_of_the_data_is_known() -> None:
    """Ten batches of four pipelines: what was flushed by itself cost several percent."""
    case, *_ = system("wlb", "7b_128k", "parallel.dp=4", gib=EARLIER_GIB, steps=10)
    assert outcome(case).of_bound >= NEAR

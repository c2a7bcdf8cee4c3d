"""Tests the verdict of `wlb tune packing`, and its settings in words."""

import pytest

from wlb.report.packing.choice import in_words, switch_verdict
from wlb.simulate.forecast import SavedShare
from wlb.spec import PackingSection, Policy


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (SavedShare(0.012, 0.002), "The recommended packing would save 1.2% of the GPU hours of"),
        (SavedShare(-0.012, 0.002), "Keep 7b as it is set: the best packing that was tried takes"),
        (SavedShare(0.012, 0.012), "Repeat with --steps 1500 to know."),
        (SavedShare(0.004, 0.003), "Repeat with --steps 240 to know."),
        (SavedShare(0.001, 0.002), "Either will do."),
        (SavedShare(0.012, None), "repeat with more --steps."),
    ],
)
def test_a_switch_is_judged_by_its_standard_error(share: SavedShare, said: str) -> None:
    assert said in switch_verdict("7b", share, steps=160)


def test_settings_in_words() -> None:
    bounded = PackingSection(policy=Policy.BOUNDED, step_tokens=1.1, delay_price=0.01875)
    assert in_words(bounded) == (
        "policy bounded, micro-batches of at most 1.5 context windows, steps of at most 1.1 global "
        "batches, and a delay price of 0.019 (documents wait at most 10 steps)"
    )
    assert in_words(PackingSection()) == (
        "policy var_len, micro-batches of at most 1.5 context windows, and waiting queues for "
        "documents from 0.2 and 0.63 windows on"
    )
    none = PackingSection(queue_thresholds=())
    assert in_words(none).endswith("and no waiting queue")

"""Tests the verdict of `wlb tune packing`, and its settings in words."""

import pytest

from wlb.report.packing.choice import in_words, switch_verdict
from wlb.spec import PackingSection, Policy


@pytest.mark.parametrize(
    ("best", "error", "said"),
    [
        (0.076, 0.002, "The difference is 1.2%, with a standard error of 0.2% over 160"),
        (0.052, 0.002, "Keep the packing of 7b: it saves 6.4% of the usual loader's GPU hours"),
        (0.076, 0.012, "too few to trust the difference, whose standard error is 1.2%; repeat"),
        (0.076, 0.012, "--steps 1500."),
        (0.068, 0.003, "--steps 240."),
        (0.065, 0.002, "within the standard error of their difference, 0.2%; use either."),
        (0.076, None, "repeat the command with more --steps."),
    ],
)
def test_a_switch_is_judged_by_its_standard_error(
    best: float, error: float | None, said: str
) -> None:
    verdict = switch_verdict("7b", best=best, own=0.064, error=error, steps=160)
    assert said in verdict
    assert (f"would save {best:.1%}" in verdict) == (error is not None and best > 0.064)


def test_settings_in_words() -> None:
    bounded = PackingSection(policy=Policy.BOUNDED, step_tokens=1.1, delay_price=0.01875)
    assert in_words(bounded) == (
        "policy bounded, which lets a long document wait until a step with it is balanced, at most "
        "10 steps. A micro-batch has at most the tokens of 1.5 context windows, and a step at most "
        "those of 1.1 global batches"
    )
    assert in_words(PackingSection()) == (
        "policy var_len (the paper's Algorithm 1), in which documents of at least 0.2 and 0.63 "
        "context windows wait in queues until every micro-batch gets one of them. A micro-batch "
        "has at most the tokens of 1.5 context windows"
    )
    none = PackingSection(queue_thresholds=())
    assert "in which no document waits in a queue" in in_words(none)

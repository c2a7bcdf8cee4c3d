"""Tests that the tour reaches the loss of one process, and prints every step on the way."""

import re

import pytest

from wlb import tour


@pytest.mark.dist
def test_the_tour_ends_at_the_loss_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    tour.main()
    shown = capsys.readouterr().out
    assert re.findall(r"^== (\d)\.", shown, re.MULTILINE) == list("1233444556")
    (two, one) = re.findall(r"(?:two ranks|one process): +([\d.]+), ([\d.]+)", shown)
    assert [float(x) for x in two] == pytest.approx([float(x) for x in one], abs=2e-6)
    # The step takes other documents than the windows of Plain-4D, and balances them better.
    ours, plain = re.findall(r"slowest micro-batch over mean: ([\d.]+) \(.*: ([\d.]+)\)", shown)[0]
    assert float(ours) < float(plain)

"""Tests what Figure 15's page says of its times."""

from experiments.paper.fig15.report import conditions_of


def test_conditions_are_said_once_for_windows_that_share_them() -> None:
    assert conditions_of({"65536": {"note": "8 heads."}, "131072": {"note": "8 heads."}}) == (
        "8 heads."
    )
    of_each = conditions_of({"65536": {"note": "8 heads."}, "131072": {"note": "4 heads."}})
    assert of_each == "Window 65536: 8 heads. Window 131072: 4 heads."

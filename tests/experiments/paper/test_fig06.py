"""Tests Figure 6's losses: what it takes from the convergence study, what it says without one."""

import math
from pathlib import Path

import pytest

from experiments.paper.fig06.__main__ import draw_losses, loss_text
from experiments.paper.fig06.loss import Loss, read_losses
from experiments.paper.fig16.arms import arm_of

pytestmark = pytest.mark.full

HEAD = 'arm,seeds,loss,sd,less baseline,"±, end",relative,difference\n'


def results(path: Path, *rows: tuple[str, float, str, str, str]) -> Path:
    lines = [f"\"{arm_of(name).title}\",3,{loss},,,{half},{relative},{verdict}\n"
             for name, loss, half, relative, verdict in rows]  # fmt: skip
    path.write_text(HEAD + "".join(lines), "utf-8")
    return path


def test_without_results_it_says_so(tmp_path: Path) -> None:
    assert read_losses(tmp_path / "quality.csv") == []
    assert "Only the balance half is here" in loss_text([])


def test_losses_are_relative_to_originals(tmp_path: Path) -> None:
    path = results(
        tmp_path / "quality.csv",
        ("original", 2.5, "", "", ""),
        ("fixed-1", 2.5, "0.005", "0.0", "noise"),
        ("fixed-8", 2.54, "0.005", "0.016", "worse"),
        ("even", 2.6, "0.005", "0.04", "worse"),
        ("bounded", 2.6, "", "0.04", "one seed"),
    )
    one, eight, bounded = read_losses(path)
    assert one == Loss("fixed greedy, W = 1", 1, 0.0, 0.002, "noise")
    assert (eight.window, eight.relative, eight.half) == (8, 0.016, 0.002)
    assert bounded.window is None
    assert math.isnan(bounded.half)
    said = loss_text([one, eight])
    assert "fixed greedy, W = 8 +1.60 ± 0.20% (worse)" in said
    assert "bounded, T 1.5 +4.00% (one seed)" in loss_text([bounded])
    assert "The interval here has it" in said
    assert "It is not seen here" in loss_text([one, eight._replace(relative=0.0139)])
    assert loss_text([one]).endswith("for its 550M model.")
    (panel,) = draw_losses([one, eight, bounded]).axes
    (line, _, _) = panel.containers[0]
    assert line.get_xdata().tolist() == [1, 8]
    assert line.get_ydata().tolist() == pytest.approx([0.0, 1.6])


def test_results_without_the_baseline_are_refused(tmp_path: Path) -> None:
    path = results(tmp_path / "quality.csv", ("fixed-1", 2.5, "0.005", "0.0", "noise"))
    with pytest.raises(ValueError, match="has no row"):
        read_losses(path)

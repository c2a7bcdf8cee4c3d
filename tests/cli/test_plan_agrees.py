"""Tests that plan, tune, simulate, training's summary and the report say one thing of a run."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.train.case import write_store
from wlb.cli import main
from wlb.plan.tally import BalanceGain

STEPS = 12
TOML = """
[run]
name = "five"
device = "cpu"
output_dir = "{folder}/runs"
[model]
hidden_size = 32
num_layers = 2
num_heads = 2
num_kv_heads = 2
ffn_hidden_size = 64
[parallel]
dp = 1
[pp]
virtual_stages = 1
[data]
store = "{store}"
context_window = 512
num_windows = 4
[packing]
policy = "bounded"
s_max = 1.5
[cost]
profile = "cpu"
[training]
steps = {steps}
[eval]
steps = 0
"""


def said(text: str) -> tuple[str, ...]:
    """The figures of the sentence on balance."""
    found = re.search(
        r"imbalance (\d\.\d{3}), with the usual loader (\d\.\d{3}): the slowest micro-batches take "
        r"(\d+\.\d)% less",
        " ".join(text.replace("│", " ").split()),
    )
    assert found is not None, text
    return found.groups()


@pytest.mark.process
def test_five_commands_agree_to_the_digit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    drawn = np.random.default_rng(0).normal(4.0, 1.1, 1500)
    lengths = np.minimum(np.exp(drawn).astype(int) + 2, 512).tolist()
    store = write_store(tmp_path / "docs", lengths)
    run = tmp_path / "run.toml"
    run.write_text(TOML.format(folder=tmp_path, store=store, steps=STEPS), "utf-8")

    def printed(*words: str) -> str:
        assert main([*words]) == 0
        return capsys.readouterr().out

    steps = ("--steps", str(STEPS))
    found = {
        "train": said(printed("train", str(run))),
        "plan": said(printed("plan", str(run), *steps)),
        "tune": said(printed("tune", "packing", str(run), *steps, "--all")),
        "simulate": said(printed("simulate", str(run), *steps)),
    }
    page = tmp_path / "report.html"
    printed("report", str(tmp_path / "runs" / "five"), "--out", str(page))
    found["report"] = said(re.sub("<[^>]+>", " ", page.read_text("utf-8")))
    assert len(set(found.values())) == 1, found
    ours, usual, saved = (float(figure) for figure in found["plan"])
    assert 1.0 <= ours < usual - 0.05
    assert saved == pytest.approx(100 * (1 - ours / usual), abs=0.15)
    # And the same without rounding, where there is JSON.
    whole = [
        json.loads(printed(*words, str(run), *steps, "--json"))["balance"]
        for words in (("plan",), ("tune", "packing"), ("simulate",))
    ]
    assert whole[0] == whole[1] == whole[2]
    # The share of GPU hours of whole simulated steps too, of the run as it is set.
    planned = json.loads(printed("plan", str(run), *steps, "--json"))["saving"]["simulated_own"]
    runs = json.loads(printed("simulate", str(run), *steps, "--json"))["runs"]
    assert [one["label"] for one in runs] == ["usual", "run"]
    assert planned == 1 - runs[1]["time_s"] / runs[0]["time_s"]
    gain = BalanceGain(whole[0]["usual"], whole[0]["ours"])
    assert gain.saved == whole[0]["saved"]
    assert said(str(gain)) == found["plan"]


def test_more_imbalance_is_said_as_more() -> None:
    assert str(BalanceGain(1.0, 1.25)).endswith("the slowest micro-batches take 25.0% more time")

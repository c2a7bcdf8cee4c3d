"""Tests that lines of metrics.jsonl are held as a whole, with the number of the line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.report.run import lines
from tests.report.run.test_page import text_of
from wlb.cli import main
from wlb.plan import UserError
from wlb.report.run.page import run_page
from wlb.report.run.records import read_run

Line = dict[str, Any]
WRONG: dict[str, tuple[Callable[[list[Line]], Any], str]] = {
    "a loss in words": (
        lambda found: found[1]["measured"].update(loss="high"),
        "line 2: measured.loss = 'high' must be a number",
    ),
    "a time in words": (
        lambda found: found[1]["measured"].update(step_time_s="long"),
        "line 2: measured.step_time_s = 'long' must be a number",
    ),
    "tokens in words": (
        lambda found: found[2]["predicted"].update(num_tokens="all"),
        "line 3: predicted.num_tokens = 'all' must be a whole number",
    ),
    "telemetry in a list": (
        lambda found: found[1]["measured"].update(telemetry=[1]),
        r"line 2: measured.telemetry = \[1\] must be an object",
    ),
    "a term in words": (
        lambda found: found[1]["measured"]["telemetry"]["compute"].update(mean_s="x"),
        "measured.telemetry.compute.mean_s = 'x' must be a number",
    ),
    "an unknown key of measurements": (
        lambda found: found[1]["measured"].update(speed=1),
        "measured has the unknown key 'speed'",
    ),
    "a held-out loss in words": (
        lambda found: found[3].update(heldout_loss="5.5"),
        "line 4: heldout_loss = '5.5' must be a number",
    ),
    "a configuration in a list": (
        lambda found: found[0].update(spec=[1]),
        r"line 1: spec = \[1\] must be an object",
    ),
    "a section in a list": (
        lambda found: found[0]["spec"].update(model=[1]),
        r"line 1: spec\['model'\] = \[1\] must be an object",
    ),
    "a step to begin at in words": (
        lambda found: found[0].update(steps_done="none"),
        "line 1: steps_done = 'none' must be a whole number in",
    ),
    "times of ranks in words": (
        lambda found: found[4]["measured_us"].__setitem__(0, "long"),
        r"line 5: measured_us\[0\] = 'long' must be a whole number",
    ),
    "times of some ranks": (
        lambda found: found[4]["measured_us"].pop(),
        r"loading_us, but their lengths are \[15, 16\]",
    ),
    "passes of some ranks": (
        lambda found: found[5]["passes"].pop(),
        "has 4 entries in `ranks`, 4 in `wall_us` and 3 in `passes`",
    ),
    "wall times in words": (
        lambda found: found[6]["seconds"].update(steps="3"),
        r"line 7: seconds\['steps'\] = '3' must be a number",
    ),
    "a save's time in words": (
        lambda found: found[7].update(write_s="long"),
        "line 8: write_s = 'long' must be a number",
    ),
    "a save without its error": (
        lambda found: found[7].pop("error"),
        "line 8: it lacks the key 'error'",
    ),
    "a refused step without what was found": (
        lambda found: found[8].pop("found"),
        "line 9: it lacks the key 'found'",
    ),
    "a spike at no step": (
        lambda found: found[9].update(steps_done=None),
        "line 10: steps_done = None must be a whole number",
    ),
    "a stop that a list asked for": (
        lambda found: found[10].update(asked_by=[]),
        r"line 11: asked_by = \[\] must be text",
    ),
}


def whole() -> list[Line]:
    evaluation = {"kind": "evaluation", "steps_done": 2, "heldout_loss": 5.5}
    found = [lines.start(), lines.step(1), lines.step(2), evaluation, lines.ranks(2)]
    found += [lines.timeline(2), {"kind": "wall", "seconds": {"steps": 3.5}}]
    saved = {"step": 2, "stall_s": 0.1, "write_s": 1.5, "num_bytes": 9, "error": ""}
    refused = {"steps_done": 2, "found": "loss nan", "action": "skip"}
    found += [
        {"kind": "checkpoint", **saved},
        {"kind": "nonfinite", "step": 2, **refused},
        {"kind": "spike", **refused},
        {"kind": "stop", "steps_done": 2, "asked_by": "a signal"},
    ]
    return json.loads(json.dumps(found))


@pytest.mark.parametrize("what", WRONG)
def test_a_line_that_no_run_wrote_is_refused_by_its_number(what: str, tmp_path: Path) -> None:
    found = whole()
    assert len(read_run(lines.write(tmp_path, found)).steps) == 2
    change, said = WRONG[what]
    change(found)
    with pytest.raises(UserError, match=said):
        read_run(lines.write(tmp_path, found))


@pytest.mark.parametrize("command", [["report"], ["simulate", "--run"]])
def test_commands_say_it_in_one_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = whole()
    found[1]["measured"]["step_time_s"] = "long"
    assert main([*command, str(lines.write(tmp_path / "run", found))]) == 2
    assert "line 2: measured.step_time_s = 'long' must be a number" in capsys.readouterr().err


def test_a_run_that_had_learned_prices_is_read_and_its_page_says_so(tmp_path: Path) -> None:
    """As versions with `cost.online` wrote it: lines of decisions, and prices of steps."""
    prices = {"attention_forward": 1_500_000, "linear_forward": 1_000_000, "expert_load": 0}
    change = {"step": 9, "prices": prices}
    decision = {"kind": "prices", "step": 3, "steps_done": 4, "base": "h100 sdpa", "votes": 8}
    decision |= {"measured": {"attention_forward": 1.5}, "change": change}
    found = [lines.start(), *map(lines.step, range(1, 5)), decision]
    found += [lines.step(done) for done in range(5, 10)]
    found += [lines.step(done) | {"prices": prices} for done in range(10, 13)]
    records = read_run(lines.write(tmp_path, found))
    assert [step.has_learned_prices for step in records.steps] == [False] * 9 + [True] * 3
    first = records.learned_from
    assert first is not None
    assert first.steps_done == 10
    told = "From step 10 on the run planned and predicted with prices that it had learned"
    assert told in text_of(run_page(records))
    plain = read_run(lines.write(tmp_path / "plain", lines.whole_run()))
    assert plain.learned_from is None
    assert "prices that it had learned" not in text_of(run_page(plain))

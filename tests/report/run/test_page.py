"""Tests a run read back over restarts, and its page: complete, self-contained, true to numbers."""

import json
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.report.run.lines import SLOW, SPEC, ranks, start, step, timeline, whole_run, write
from wlb.cli import main
from wlb.plan import ExpertLoad, MeasuredTimeline
from wlb.report.run.page import run_page
from wlb.report.run.plots import balance_figure
from wlb.report.run.records import read_run
from wlb.report.run.timeline import rows_of, slowest_pipeline
from wlb.spec import apply

SECTIONS = (
    "loss",
    "rate",
    "predicted",
    "balance",
    "ranks",
    "timeline",
    "delays",
    "stragglers",
    "configuration",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write(tmp_path_factory.mktemp("runs") / "made", whole_run())
    return run_page(read_run(folder), command="wlb report runs/made")


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", page)))


def test_later_lines_replace_earlier_ones_and_what_was_left_behind_is_dropped(
    tmp_path: Path,
) -> None:
    records = read_run(write(tmp_path, whole_run()))
    assert [s.steps_done for s in records.steps] == list(range(1, 21))
    assert [s.measured.loss for s in records.steps][6:10] == [5.3, 5.2, 3.0, 3.0]
    assert (records.num_restarts, records.restarts, records.num_replaced) == (1, [8], 2)
    # The table of steps 7 to 10 went with the steps that were trained again.
    assert [t.steps_done for t in records.tables] == [6, 12, 16, 20]
    assert records.evaluations == [(0, 6.5), (20, 3.25)]
    assert records.telemetry[0][0] == 3  # without the warm-up
    assert records.places[15].host == "gpu01"


def test_a_step_that_was_left_behind_for_good_does_not_count(tmp_path: Path) -> None:
    records = read_run(write(tmp_path, [start(), *map(step, range(1, 8)), start(5), step(6)]))
    assert [s.steps_done for s in records.steps] == [1, 2, 3, 4, 5, 6]
    old = [start(), *map(step, range(1, 8)), start(5), step(6)]
    for line in old:
        line.pop("places", None)
        if line["kind"] == "start":  # as written before starts said so
            del line["steps_done"]
    assert len(read_run(write(tmp_path, old)).steps) == 6


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    lines = [start(), step(1), step(2)]
    records = read_run(write(tmp_path, lines, end='\n{"kind": "step", "st'))
    assert (len(records.steps), records.num_unreadable) == (2, 1)
    assert "1 lines of metrics.jsonl are incomplete" in run_page(records)


def test_tables_of_another_layout_are_not_mixed(tmp_path: Path) -> None:
    other = apply(SPEC, {"parallel": {"dp": 1}}, source="test")
    lines = [start(), step(1), ranks(1), start(1, other), step(2), ranks(2, count=8)]
    records = read_run(write(tmp_path, lines))
    assert [t.measured_us.size for t in records.tables] == [8]
    run_page(records)


def test_what_has_nothing_to_show_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metrics\.jsonl does not exist; give the folder of a"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="has no step yet"):
        read_run(write(tmp_path, [start()]))
    bare = [line for line in (start(), step(1)) if line.pop("spec", None) or True]
    with pytest.raises(ValueError, match="the configuration of the run is neither in"):
        read_run(write(tmp_path, bare))
    saved = tmp_path / "checkpoints" / "step-00000001"
    saved.mkdir(parents=True)
    (saved / "run.json").write_text(json.dumps({"step": 1, "spec": SPEC.to_dict()}))
    assert read_run(tmp_path).spec == SPEC


def test_the_page_has_every_section_and_needs_nothing_else(page: str) -> None:
    for name in SECTIONS:
        assert page.count(f'<h2 id="{name}">') == 1
        assert f'href="#{name}"' in page
    assert not re.search(r"<(script|link|img|iframe)\b", page)
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", page)
    assert not re.search(r"@import|https?://(?!www\.w3\.org/)", page)
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) == 8
    ids: list[str] = []
    for drawing in drawings:
        ids += [e.attrib["id"] for e in ElementTree.fromstring(drawing).iter() if "id" in e.attrib]
    assert len(set(ids)) == len(ids)
    assert len(page) < 600_000


def test_loads_of_experts_have_a_section_of_their_own(page: str, tmp_path: Path) -> None:
    assert 'id="experts"' not in page
    lines = [start(), *map(step, range(1, 4))]
    load = ExpertLoad(layers=(0, 1), expert=(1.5, 2.5), rank=(1.125, 1.375), ranks=(0.75, 1.25))
    for line in lines[1:]:
        line["measured"] |= {"experts": load.to_json(), "cp_imbalance": 1.0625}
    made = run_page(read_run(write(tmp_path, lines)))
    assert made.count('<h2 id="experts">') == 1
    assert 'href="#experts"' in made
    text = text_of(made)
    assert "load of EP ranks 1.250 rows of the most loaded EP rank / mean over EP ranks" in text
    assert "slowest CP rank / mean over CP ranks is 1.062" in text
    assert "EP rank 1 has the most rows, 1.250 times the mean over EP ranks" in text


def test_the_page_says_what_the_numbers_are(page: str) -> None:
    text = text_of(page)
    assert "20 of 20 steps ended" in text
    assert "resumed once, 2 steps were trained more than once and count once" in text
    assert "held-out loss 3.250 after 20 steps; first 6.500" in text
    assert "imbalance 1.100 predicted; 1.400 with the usual loader" in text
    assert "imbalance 1.100, with the usual loader 1.400: the slowest micro-batches take" in text
    assert "stragglers 1 of 16 ranks" in text
    assert "counted over full windows, the MFU is 37.5%" in text
    rate = sum(1000 + d for d in range(1, 21)) / (20 * 0.25)
    assert f"tokens/s {rate:,.0f}" in text
    for name, ratio in (("attention forward", "1.000"), ("linear backward", "1.300")):
        assert re.search(rf"{name} \d+ [\d.]+ [\d.]+ {ratio}", text)


def test_the_page_names_the_straggler(page: str) -> None:
    text = text_of(page)
    assert re.search(r"15%[^.]* 3 tables[^.]* 10 steps", text)
    assert "Found: 1." in text
    assert f"5 {SLOW.host} 1 1 0 1 0 1.40x 16 20" in text


def test_far_points_stand_at_their_steps_in_their_colours(tmp_path: Path) -> None:
    """Values are missing between them, as older runs recorded only some steps."""
    lines = [start()]
    for done in range(1, 201):
        line = step(done)
        line["predicted"]["imbalance"] = 1.01 + 0.001 * (done % 7)
        line["plain_4d"] = {**line["predicted"], "imbalance": 9.0 if done == 100 else 1.3}
        if done % 10:
            line["measured"]["telemetry"] = None
        else:
            line["measured"]["telemetry"]["slowest_ns"] = 160 if done == 150 else 21
        lines.append(line)
    axes = balance_figure(read_run(write(tmp_path, lines))).axes[0]
    colours = {line.get_label(): line.get_color() for line in axes.lines}
    far = {line.get_xdata()[0]: line.get_color() for line in axes.lines if line.get_marker() == "^"}
    assert far == {
        100: colours["usual loader on the same documents, predicted"],
        150: colours["this run, measured"],
    }


def test_the_page_says_what_happened_besides(tmp_path: Path) -> None:
    def save(step: int, **others: object) -> dict[str, object]:
        times = {"stall_s": 0.02, "write_s": 1.0, "num_bytes": 3 << 20, "error": ""}
        return {"kind": "checkpoint", "step": step, **times, **others}

    events = [
        save(5),
        save(10, stall_s=0.04, write_s=2.0),
        save(15, error="rank 0: No space left on device"),
        {
            "kind": "nonfinite",
            "step": 12,
            "steps_done": 11,
            "found": "loss nan",
            "action": "rollback",
        },
        {
            "kind": "spike",
            "step": 14,
            "steps_done": 13,
            "found": "loss 2.0, gradient norm 60.0, with a median of 1",
            "action": "skip",
        },
        {"kind": "stop", "steps_done": 20, "asked_by": "the stop file <x>"},
    ]
    shown = " ".join(run_page(read_run(write(tmp_path, [*whole_run(), *events]))).split())
    for text in (
        "2 checkpoints were written, the last after step 10 with 3.0 MiB",
        "waited 0.030 s for a checkpoint on average, 0.040 s at most",
        "complete 1.50 s after training began to wait for it on average, 2.00 s at most",
        "The checkpoint after step 15 could not be written: rank 0: No space left on device.",
        "In the step after step 11, the loss or the gradient was not finite (loss nan): training "
        "went back to the last",
        "update of the step after step 13 was skipped, because its gradient norm was unusually "
        "large (loss 2.0, gradient norm 60.0, with a median of 1).",
        "stopped after step 20 by the stop file &lt;x&gt;.",
    ):
        assert text in shown
    assert "No checkpoint was written" in run_page(read_run(write(tmp_path / "no", whole_run())))


def test_the_page_has_the_configuration(page: str) -> None:
    text = text_of(page)
    assert "[parallel] tp = 2 cp = 2 pp = 2 dp = 2" in text
    assert "started 2026-01-01T00:00:00+00:00, wlb 0.1.0 on cpu" in text
    assert "from runs/made/checkpoints/step-00000008" in text
    assert "gpu00, gpu01" in text


def test_the_timeline_says_that_it_was_measured_and_draws_every_pass(page: str) -> None:
    assert "Measured : step 20, pipeline 0, TP rank 0." in text_of(page)
    assert "Recorded: steps 12, 20" in text_of(page)
    drawing = next(d for d in re.findall(r"<svg.*?</svg>", page, re.DOTALL) if "mb0F" in d)
    root = ElementTree.fromstring(drawing)
    for kind in "FB":
        (group,) = [e for e in root.iter() if e.attrib.get("id") == f"timeline-mb0{kind}"]
        assert sum(e.tag.endswith("path") for e in group.iter()) == 8
    made = MeasuredTimeline.from_json(timeline(20))
    assert slowest_pipeline(made, SPEC.parallel) == 0
    rows = rows_of(made, SPEC.parallel, 0)
    assert [(r.rank, r.pp, r.cp) for r in rows] == [(0, 0, 0), (2, 0, 1), (4, 1, 0), (6, 1, 1)]
    assert rows[0].idle == pytest.approx(4 / 14)


@pytest.mark.full
def test_a_step_without_a_timeline_is_simulated_or_the_page_says_why_not(tmp_path: Path) -> None:
    records = read_run(write(tmp_path, whole_run()))
    chosen = text_of(run_page(records, step=12))
    assert "Measured : step 12" in chosen
    other = text_of(run_page(records, step=7))
    assert "Step 7 has no measured timeline" in other
    assert "cannot be simulated here: " in other
    with pytest.raises(
        ValueError, match=r"--step 30: .* has no such step.*give another step from 1 to 20"
    ):
        run_page(records, step=30)


def test_a_run_that_recorded_little_has_a_page_too(tmp_path: Path) -> None:
    line = step(1)
    line["measured"] |= {"telemetry": None, "imbalance": None, "loss": None, "grad_norm": None}
    line["plain_4d"] = None
    text = text_of(run_page(read_run(write(tmp_path, [start(), line]))))
    assert "1 of 20 steps so far" in text
    assert "The run recorded no times (telemetry.enabled = false, which was removed)." in text
    assert "No table of ranks was recorded" in text


def test_the_page_warns_of_documents_later_than_the_maximum_delay(tmp_path: Path) -> None:
    lines = [step(1), step(2)]
    fine = text_of(run_page(read_run(write(tmp_path / "fine", [start(), *lines]))))
    assert "later than packing.max_delay" not in fine
    lines[1]["predicted"]["num_overdue"] = 5
    lines[1]["measured"]["max_delay"] = 13
    late = text_of(run_page(read_run(write(tmp_path / "late", [start(), *lines]))))
    assert "5 pieces of documents were trained later than packing.max_delay, up to 13" in late


def test_the_page_says_how_keys_were_exchanged(tmp_path: Path) -> None:
    lines = [step(done) for done in (1, 2)]
    text = text_of(run_page(read_run(write(tmp_path / "old", [start(), *lines]))))
    assert "keys exchanged" not in text
    for line in lines:
        line["measured"] |= {
            "sharding_counts": {"balanced": 4},
            "key_rows": {"num_by_need": 3, "received": 250, "gathered": 1000},
        }
    text = text_of(run_page(read_run(write(tmp_path / "new", [start(), *lines]))))
    assert "keys exchanged 25.0%" in text
    assert "6 of 8 micro-batches exchanged only rows that queries attend to" in text
    assert "sharding.exchange = gather, cp.overlap_stages = 0" in text


def test_without_a_peak_the_page_has_the_rate_of_work_alone(tmp_path: Path) -> None:
    line = step(1)
    line["measured"]["telemetry"]["work"]["peak_flops"] = 0.0
    text = text_of(run_page(read_run(write(tmp_path / "unknown", [start(), line]))))
    assert (
        "model TFLOP/s a rank 0.5 counting attention within documents only; 0.75 if attention is "
        "counted over full windows" in text
    )
    assert "MFU" not in text
    del line["measured"]["telemetry"]["work"]  # written before it was counted
    text = text_of(run_page(read_run(write(tmp_path / "old", [start(), line]))))
    assert "imbalance, measured" in text
    assert "TFLOP/s" not in text


@pytest.mark.full
def test_long_runs_make_small_pages(tmp_path: Path) -> None:
    lines = [start()]
    for done in range(1, 6001):
        line = step(done, 3.0)
        line["measured"]["telemetry"] = None
        lines.append(line)
    assert len(run_page(read_run(write(tmp_path, lines)))) < 1_500_000


@pytest.mark.process
def test_the_command_writes_the_page_without_torch(tmp_path: Path) -> None:
    folder = write(tmp_path / "made", whole_run())
    code = (
        "import sys; from wlb.cli import main; status = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "report", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"written: {folder / 'report.html'} (")
    assert "wlb report" in (folder / "report.html").read_text("utf-8")


def test_what_the_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "made", whole_run())
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "does not exist; give the folder of a run" in capsys.readouterr().err
    assert main(["report", str(folder), "--out", str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err

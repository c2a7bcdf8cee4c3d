"""Tests `wlb plan` and `wlb tune packing` from the command line, without torch."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wlb.cli import main
from wlb.data import TokenStoreWriter
from wlb.packing.study.compare import variants_of
from wlb.spec import load

SMALL = ["--set", "data.context_window=2048", "data.num_windows=4"]


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("lengths") / "lengths.npy"
    draw = np.random.default_rng(0)
    np.save(path, np.minimum(draw.lognormal(5, 1.5, 3000).astype(np.int64) + 1, 6000))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_a_table_of_all_policies(
    lengths: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    out = run(capsys, "plan", "--lengths", lengths, "--steps", "20", "--all", *SMALL)
    assert "3,000 documents" in out
    for label in (
        "var_len L 0.2 0.63 (run)",
        "original",
        "fixed, W = 8",
        "bounded",
        "capacity, BFD",
    ):
        assert label in out
    assert "W_a / W_l" in out
    assert "Sharding over 2 CP ranks in the first 8 steps." in out
    for strategy in ("per_sequence", "per_document", "adaptive", "hybrid", "balanced"):
        said = rf"on one rank divided by 2:.* {strategy} \d\.\d{{3}}"
        assert re.search(said, " ".join(out.split()))
    assert "are cut into pieces of at most this length" in " ".join(out.split())
    few = run(capsys, "plan", "--lengths", lengths, "--steps", "3", "--all", *SMALL)
    assert "micro-batches are divided as follows: per_" in " ".join(few.split())


@pytest.mark.full
def test_long_documents_of_little_weight_are_said(
    lengths: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The JSON has the weight; nothing is said where the run weighs labels alike or nearly so."""
    monkeypatch.setenv("COLUMNS", "200")
    words = ["--lengths", lengths, "--steps", "20", *SMALL]
    bounded = ["packing.policy=bounded", "packing.s_max=2", "packing.step_tokens=1.5"]
    remark = "a label of the longest documents (those with a tenth of all labels) has"
    out = run(capsys, "plan", "--all", *words, *bounded)
    assert out.count(remark) == 1
    found = re.search(r"bounded T 1.5 D 10 \(run\): a label .* has (\d\.\d\d) times", out)
    assert found is not None
    assert "training.loss_normalizer=constant to give all labels the same weight" in out
    rows = json.loads(run(capsys, "plan", "--all", *words, *bounded, "--json", "-"))["rows"]
    weight = {row["label"]: row["long_weight"] for row in rows}
    assert f"{weight['bounded T 1.5 D 10 (run)']:.2f}" == found.group(1)
    assert weight["bounded T 1.5 D 10 (run)"] < 0.95 < weight["original"] < 1.05
    assert remark not in run(capsys, "plan", "--all", *words, "packing.policy=original")
    constant = "training.loss_normalizer=constant"
    assert remark not in run(capsys, "plan", "--all", *words, *bounded, constant)
    tune = ["tune", "packing", "--policies", "bounded", "--step-tokens", "1.5", "--s-max", "2"]
    assert remark in run(capsys, *tune, "--all", *words)
    assert remark not in run(capsys, *tune, "--all", *words, constant)


def test_a_source_that_is_short_of_the_steps_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "[odd] name.txt"
    path.write_text("100\n" * 128, "utf-8")
    options = ["plan", "--lengths", str(path), "--steps", "4", *SMALL]
    out = run(capsys, *options)
    assert "[odd] name.txt: 128 documents" in out
    assert "32,800 tokens were packed; the source was read 2.6 times" in out
    assert "in another order" in out
    assert "in the same order" in run(capsys, *options, "--in-order")
    out = run(capsys, *options, "data.epochs=1")
    assert "12,800 tokens were packed; the data ended after 2 of 4 global batches\n" in out


def test_tokens_over_are_dealt_one_by_one_where_that_can_be(
    lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--lengths", lengths, "--steps", "3", "--json", *SMALL]
    merged = json.loads(run(capsys, "plan", *words))["sharding"]["over_ideal"]
    dealt = json.loads(run(capsys, "plan", *words, "sharding.remainder=one_by_one"))
    over = dealt["sharding"]["over_ideal"]
    assert {name for name in over if over[name] != merged[name]} >= {"per_document"}
    assert {name for name in over if over[name] == merged[name]} >= {"per_sequence", "balanced"}


@pytest.mark.full
@pytest.mark.parametrize("method", ["mini_batch_posid", "multipack_bfd_posid", "fixed_length"])
def test_a_page_of_a_run_with_a_grouping_method(
    method: str, lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    words = ["sft_demo", "--lengths", lengths, "--steps", "3", "--html", str(page)]
    run(capsys, "plan", *words, "--set", f"packing.method={method}")
    assert "(run)" in page.read_text("utf-8")


def test_caps_by_memory_count_the_vocabulary(
    lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The vocabulary is the one that training would have, because logits are in the memory."""
    words = ["--lengths", lengths, "--steps", "2", "--json", "--set", "packing.policy=bounded"]
    words += ["packing.s_max=0", "cluster.memory_gib=52", "data.context_window=65536"]

    def s_max(*more: str) -> float:
        found = json.loads(run(capsys, "plan", "7b_64k", *words, *more))["spec"]
        assert found["model"]["vocab_size"] > 0
        return found["packing"]["s_max"]

    assert s_max() == s_max("model.vocab_size=32000") > s_max("model.vocab_size=128000")


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--json"],
        ["plan", "--html"],
        ["simulate", "--json"],
        ["simulate", "--trace"],
        ["tune", "packing", "--json"],
        ["tune", "packing", "--plot"],
        ["tune", "layout", "--gpus", "8", "--json"],
    ],
    ids=lambda words: " ".join(words),
)
def test_settings_are_not_taken_for_an_output(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "my_run.toml"
    mine.write_text("[data]\n", "utf-8")
    for name in ("demo", str(mine)):
        assert main([*words, name, "--synthetic", "wlb_paper"]) == 2
        err = capsys.readouterr().err
        assert f"{name} is a preset or a TOML file with settings, but stands where" in err
    assert mine.read_text("utf-8") == "[data]\n"
    assert not Path("demo").exists()


def test_json_is_all_that_is_printed_and_has_every_number(
    lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data: dict[str, Any] = json.loads(
        run(capsys, "plan", "--lengths", lengths, "--steps", "20", "--json", *SMALL)
    )
    assert data["source"]["num_documents"] == 3000
    assert data["setting"]["steps"] == 20
    assert data["own"] == data["rows"][0]["label"]
    for row in data["rows"]:
        assert row["imbalance"] >= row["lower_bound"] - 1e-9 >= 1 - 1e-9
        assert row["num_tokens"] == data["rows"][0]["num_tokens"]
    again = json.loads(run(capsys, "plan", "--lengths", lengths, "--steps", "20", "--json", *SMALL))
    for row in (*data["rows"], *again["rows"]):
        del row["packing_ms"]
    assert again["rows"] == data["rows"]


def test_files_are_written_and_named(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, rows = tmp_path / "page.html", tmp_path / "rows.json"
    out = run(capsys, "plan", "--lengths", lengths, "--steps", "8", "--html", str(page),
              "--json", str(rows), *SMALL)  # fmt: skip
    assert "written: " in out
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert json.loads(rows.read_text("utf-8"))["command"].startswith("wlb plan --lengths ")


def test_other_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = tmp_path / "store"
    with TokenStoreWriter(prefix, vocab_size=100) as writer:
        for length in (10, 200, 30, 400, 50) * 40:
            writer.add(np.ones(length, np.int64))
    options = ["--steps", "5", "--json", "--set", "data.context_window=512"]
    data = json.loads(run(capsys, "plan", "--corpus", str(prefix), *options))
    assert data["source"]["num_tokens"] == 690 * 40
    data = json.loads(run(capsys, "plan", "--synthetic", "wlb_paper", *options))
    assert data["source"]["longest"] == 512
    once = json.loads(
        run(capsys, "plan", "--corpus", str(prefix), "--in-order", *options, "data.epochs=1")
    )
    assert once["rows"][0]["num_tokens"] <= 690 * 40


@pytest.mark.full
def test_solver_rows_stand_beside_greedy(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    solved = ["--steps", "6", "--ilp", "--ilp-seconds", "1", "--json"]
    data = json.loads(run(capsys, "plan", "--lengths", lengths, *solved, *SMALL))
    rows = {row["label"]: row for row in data["rows"]}
    for w in (1, 2):
        solver, greedy = rows[f"solver, W = {w}, 6 batches"], rows[f"fixed, W = {w}, 6 batches"]
        # Never more attention on the slowest micro-batches; what is cut changes the mean a little.
        assert solver["attention_time_weighted"] <= 1.03 * greedy["attention_time_weighted"]
        assert solver["num_tokens"] == greedy["num_tokens"]


@pytest.mark.full
def test_tuning_recommends_a_setting(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot, own = (tmp_path / name for name in ("front.png", "own.toml"))
    common = ["--lengths", lengths, "--steps", "15", "--s-max", "1.5", "--step-tokens", "0", "1.2",
              "--thresholds", "0.3", "0.7", "--prices", "1", *SMALL]  # fmt: skip
    out = run(capsys, "tune", "packing", *common, "--plot", str(plot), "--out", str(own))
    (command,) = re.findall(r"^- in wlb's trainer: (wlb train 7b_128k .+)$", out, re.MULTILINE)
    words = shlex.split(command)
    assert words.pop(4) == "data.store=PREFIX"
    assert words[4:6] == SMALL[1:]
    # The first line says whether it is worth it, the table compares it with the present packing.
    first, priced, fits, *_ = out.splitlines()
    assert priced.startswith("Simulated for 7b_128k")
    assert first.startswith(
        "15 steps are too few to say whether another packing of 7b_128k would save"
    )
    assert re.fullmatch(
        r"The recommended packing fits in GPU memory: of 64 GPUs, the one that needs most memory "
        r"needs [\d.]+ GiB, and training may use [\d.]+ of its .+",
        fits,
    )
    rows = {row.split("│")[1].strip(): row.split("│")[2:] for row in out.splitlines() if "│" in row}
    assert {"usual loader", "7b_128k, present", "recommended"} <= set(rows)
    assert "Recommended: policy " in out
    assert "How it was chosen: 10 settings were tried." in out
    assert "tok. CV" not in out
    assert "tok. CV" in run(capsys, "tune", "packing", *common, "--all")
    # The loss weighs labels of unequal steps alike where the remark says so.
    assert ("training.loss_normalizer=constant" in words) == (
        "Every label then has the same weight" in " ".join(out.split())
    )
    assert load("7b_128k", words[4:]) == load(str(own))
    assert plot.read_bytes().startswith(b"\x89PNG")
    data = json.loads(run(capsys, "tune", "packing", *common, "--json"))
    assert len(data["points"]) == 2 * (4 + 1)
    assert data["recommended"] in data["front"]
    assert set(data["hours"]) == {"recommended", "own", "switch", "switch_error"}
    hours = f"{1 - data['hours']['recommended']:.1%}"
    assert rows["recommended"][0].strip() == hours
    assert data["recommended"]["mean_delay"] <= data["delay_budget"] == 0.5
    # The recommendation can be used as it is printed.
    again = ["--lengths", lengths, "--steps", "15", "--json", *SMALL, *data["recommended"]["set"]]
    own = json.loads(run(capsys, "plan", *again))["rows"][0]
    assert own["mean_delay"] == pytest.approx(data["recommended"]["mean_delay"], abs=0.02)


def test_tuning_leaves_out_what_does_not_fit(
    lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tune", "packing", "--lengths", lengths, "--steps", "4", "--policies", "bounded"]
    words += ["--s-max", "1.1", "60", "--step-tokens", "0", "--prices", "1"]
    out = " ".join(run(capsys, *words).split())
    said = "--s-max 60 (context windows) was not tried, because micro-batches of this size need"
    assert said in out
    assert "1 settings were tried" in out


def test_a_budget_that_nothing_keeps_is_said(
    lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run(capsys, "tune", "packing", "--lengths", lengths, "--steps", "15", "--policies",
              "bounded", "--s-max", "1.5", "--step-tokens", "0", "--prices", "0.1",
              "--delay-budget", "0", *SMALL)  # fmt: skip
    said = "How it was chosen: 1 settings were tried. None has a mean delay of at most 0 steps"
    assert said in " ".join(out.split())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[5, 0, 3]", "length 1 is 0"),
        ("[5, -2]", "length 1 is -2"),
        ("[5, 2.5]", "length 1 is 2.5, but must be a whole number"),
        ("[5, NaN]", "length 1 is nan"),
        ("[]", "has no lengths"),
        ("{}", "must be a JSON list of lengths"),
        ("[5, 5]", "would repeat its documents 26,843,546 times; lower --steps"),
    ],
)
def test_lengths_that_are_none_are_refused_in_a_line(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content, "utf-8")
    assert main(["plan", "--lengths", str(path)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "nowhere.npy"], "the file of lengths nowhere.npy does not exist"),
        (["--corpus", "nowhere"], "nowhere"),
        (
            ["--synthetic", "lognormal"],
            "'lognormal' is not a distribution of document lengths; use one of",
        ),
        (["--synthetic", "wlb_paper", "--steps", "0"], "--steps = 0 must be at least 1"),
        (["nope", "--synthetic", "wlb_paper"], "neither a preset"),
        (
            ["--synthetic", "wlb_paper", "--set", "packing.policy=bounded", "packing.s_max=1"],
            "no room for a global batch of",
        ),
    ],
)
@pytest.mark.parametrize("command", [["plan"], ["tune", "packing"]])
def test_other_bad_input(
    command: list[str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_at_most_one_source(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--lengths", "a", "--synthetic", "wlb_paper"])
    assert stop.value.code == 2
    assert "--lengths" in capsys.readouterr().err


@pytest.mark.process
def test_no_torch_is_needed() -> None:
    code = """
import sys
sys.modules["torch"] = None  # an import of it fails
from wlb.cli import main
small = ["--steps", "4", "--json", "--set", "data.context_window=512"]
assert main(["plan", "--synthetic", "wlb_paper", *small]) == 0
assert main(["tune", "packing", "--synthetic", "wlb_paper", "--policies", "bounded", *small]) == 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_one_sentence_says_what_is_saved_by_the_table_s_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--synthetic", "wlb_paper", "--steps", "30", "--all"]
    out = run(capsys, *words)
    said = re.search(
        r"with (.+) instead of the usual loader, which cuts documents where a window ends "
        r"\((.+)\), and sharding per sequence you would save (\d+\.\d)% of GPU hours, whole steps "
        r"simulated; the slowest micro-batches of all steps would take (\d+\.\d)% less time "
        r"\(F\+B time-w\. (\d\.\d{3}) against (\d\.\d{3})\); predicted for 7b_128k \(6.74 billion",
        out,
    )
    assert said is not None
    assert "no NAME was given, so 7b_128k was used" in out
    best, usual, simulated, share, ours, theirs = said.groups()
    (head,) = [line for line in out.splitlines() if "┃ policy" in line and "F+B time-w." in line]
    at = [cell.strip() for cell in re.split("[┃│]", head)].index("F+B time-w.")
    column = {
        cells[1].strip(): cells[at].strip()
        for line in out.splitlines()
        if len(cells := line.split("│")) > at
    }
    assert (column[best], column[usual]) == (ours, theirs)
    assert float(share) == pytest.approx(100 * (1 - float(ours) / float(theirs)), abs=0.1)
    assert usual == "original"
    # A pipeline waits less than its slowest micro-batch times their number.
    assert 0 < float(simulated) < float(share)
    own = tmp_path / "own.toml"
    out = run(capsys, *words[:1], "7b_128k", *words[1:], "--delay-budget", "0.5", "--out", str(own))
    assert "no NAME was given" not in out
    assert f"written: {own}" in out
    (label,) = re.findall(r"with (.+?) instead of the usual loader", out)
    spec = load(str(own))
    assert variants_of(spec)[0].label == f"{label.removesuffix(' (run)')} (run)"
    assert replace(
        spec, packing=load("7b_128k").packing, training=load("7b_128k").training
    ) == load("7b_128k")
    saving = json.loads(run(capsys, *words, "--json", "-"))["saving"]
    assert (saving["best"], f"{saving['share']:.1%}") == (best, f"{share}%")
    assert f"{saving['simulated']:.1%}" == f"{simulated}%"
    assert 0 < saving["simulated_own"] < 1


@pytest.mark.parametrize("preset", ["sft_demo", "demo"])
def test_a_run_with_a_grouping_method_or_too_few_steps_is_compared_too(
    preset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its method would contradict the other policies; a flush of few steps outweighs the gain."""
    out = run(capsys, "plan", preset, "--synthetic", "wlb_paper", "--steps", "8", "--all")
    assert (
        re.search(r"you would save (\d+\.\d% of|no) GPU hours.*; the slowest micro-batches of", out)
        is not None
    )


def test_prices_of_a_config_json(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three of four layers of Qwen3-Next are linear, so there is less to balance."""
    shares: dict[str, float] = {}
    for name in ("llama", "qwen3_next"):
        values = {"model_type": name, "vocab_size": 1000}
        (tmp_path / "config.json").write_text(json.dumps(values), "utf-8")
        words = ["plan", "--lengths", lengths, "--steps", "20", "--model", str(tmp_path), *SMALL]
        out = run(capsys, *words)
        assert f"FLOPs of {name}: " in out
        assert "--out" not in out
        said = re.match(
            r"Balanced packing would shorten the computing time of steps by (\d+\.\d)% on these "
            r"documents \(FLOPs of .*; collectives and pipeline bubbles are not included\)",
            " ".join(out.split()),
        )
        assert said is not None
        shares[name] = float(said[1])
        made = json.loads(run(capsys, *words, "--json"))
        assert made["saving"]["simulated"] is None
        assert name in made["setting"]["cost"]
    assert shares["llama"] > 0


def test_settings_of_a_run_are_not_written_for_another_model(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama"}', "utf-8")
    out = ["--out", str(tmp_path / "my.toml")]
    assert main(["plan", "--lengths", lengths, "--model", str(file), *out, *SMALL]) == 2
    assert "remove --out or --model" in capsys.readouterr().err
    assert main(["plan", "--lengths", lengths, "--model", str(tmp_path / "none"), *SMALL]) == 2
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.full
def test_the_first_lines_answer_and_six_columns_fit_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is saved, then what to do; the figure is the JSON's, and the table says the same."""
    monkeypatch.setenv("COLUMNS", "80")
    words = ["plan", "7b_128k", "--synthetic", "wlb_paper", "--steps", "30"]
    out = run(capsys, *words)
    said = re.match(
        r"Balanced packing and sharding would save (\d+\.\d)% of GPU hours on these documents "
        r"\(7b_128k on (\d+) GPUs with kernel times of h100_runs, simulated; predicted step "
        r"times of published runs were wrong by at most 6%"
        r"(?:; the standard error of the saving is .+; simulate more steps with --steps)?\)\. "
        r"The best policy is (.+?); --out my\.toml writes its settings",
        " ".join(out.split()),
    )
    assert said is not None
    saving = json.loads(run(capsys, *words, "--json", "-"))["saving"]
    assert f"{saving['simulated']:.1%}" == f"{said[1]}%"
    assert saving["best"] == said[3]
    assert int(said[2]) == load("7b_128k").parallel.world_size
    rows = [line.split("│") for line in out.splitlines() if line.startswith("│")]
    assert all(len("│".join(row)) <= 80 for row in rows)
    cells = {row[1].strip(): [cell.strip() for cell in row[2:-1]] for row in rows}
    assert all(len(row) == 5 for row in cells.values())
    assert cells["original (usual)"][0] == "1.000"
    assert float(cells[saving["best"]][0]) == pytest.approx(1 - saving["share"], abs=6e-4)
    assert "W_a" not in out
    assert "--all prints every column" in out


def test_nothing_to_gain_is_said_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Documents of one length have nothing to balance."""
    np.save(tmp_path / "equal.npy", np.full(400, 256))
    out = run(capsys, "plan", "--lengths", str(tmp_path / "equal.npy"), "--steps", "8", *SMALL)
    first = " ".join(out.split())
    assert re.match(
        r"(No policy here is faster than the usual loader|"
        r"Balanced packing and sharding would save no GPU hours) on these documents",
        first,
    )

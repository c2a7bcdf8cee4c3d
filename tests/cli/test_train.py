"""Tests `wlb train`: help, bad input, dry run, and every way of starting it."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.train.case import write_corpus, write_store
from tests.words import lacks
from wlb.cli import main
from wlb.cli.train import COMMON
from wlb.parallel import world as worlds
from wlb.parallel.world import DeviceChoice
from wlb.planner.liveness import PlanningError
from wlb.spec import RunSpec, list_keys, load
from wlb.train import start
from wlb.train.checkpoint.saver import CheckpointError

SPEC = """
[run]
name = "tiny"
output_dir = "{folder}/runs"
device = "cpu"

[model]
hidden_size = 32
num_layers = 4
num_heads = 4
num_kv_heads = 2
ffn_hidden_size = 64

[data]
corpus = "{folder}/corpus"
bpe_vocab_size = 320
context_window = 64
num_windows = 2

[training]
steps = 2
warmup_steps = 1
learning_rate = 1e-2

[eval]
steps = 1
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Returns a TOML file whose corpus is 30 small texts."""
    write_corpus(tmp_path / "corpus", num_files=30)
    path = tmp_path / "tiny.toml"
    path.write_text(SPEC.format(folder=tmp_path), "utf-8")
    return path


@pytest.fixture
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the test fail if a rank or a process group is started."""

    def started(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a rank was started")

    for owner, name in ((start, "run_local"), (start, "run_rank"), (worlds, "init")):
        monkeypatch.setattr(owner, name, started)


def test_help_lists_the_common_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert {*COMMON} < {key.name for key in list_keys(RunSpec)}
    with pytest.raises(SystemExit) as exit_:
        main(["train", "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert re.findall(r"^  (\w+\.[\w.]+) = ", text, re.MULTILINE) == [*COMMON]
    assert f"--help-all shows all {len(list_keys(RunSpec))}" in text


def test_help_all_lists_every_key_with_its_default_and_unit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "--help-all"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  data.context_window = 4096 tokens  (int)" in lines
    assert "  training.timeout_s = 600.0 s  (float)" in lines
    assert (
        "  pp.schedule = 'interleaved_1f1b'  (1f1b|interleaved_1f1b|interleaved_zero_bubble)"
        in (lines)
    )
    at = -1
    for key in list_keys(RunSpec):
        (here,) = (i for i, line in enumerate(lines) if line.startswith(f"  {key.name} = "))
        assert here > at  # in the order of the sections
        at = here
        assert lines[here].startswith(f"  {key.name} = {key.default} {key.unit}".rstrip())
        assert lines[here + 1] == f"      {key.doc}"
        assert key.doc


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--system", "plain_4d"], ("original", "per_sequence", "merged", 0.0, "none")),
        (["--system", "fixed_4d"], ("fixed", "per_sequence", "merged", 0.0, "none")),
        (["--system", "fixed_4d:2"], ("fixed", "per_document", "one_by_one", 0.0, "none")),
        (["--system", "paper"], ("var_len", "adaptive", "one_by_one", 0.0, "none")),
        (["--system", "wlb"], ("bounded", "balanced", "merged", 71.616, "none")),
        (["--system", "wlb:2"], ("bounded", "balanced", "merged", 71.616, "selective")),
        (
            ["--system", "wlb", "--set", "cluster.memory_gib=100", "sharding.strategy=hybrid"],
            ("bounded", "hybrid", "merged", 90.416, "none"),
        ),
        (
            ["--system", "wlb", "--set", "cluster.memory_gib=46"],
            ("bounded", "balanced", "merged", 39.656, "selective"),
        ),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_a_system_is_settings_that_set_comes_after(
    monkeypatch: pytest.MonkeyPatch, options: list[str], expected: tuple[Any, ...]
) -> None:
    trained: list[RunSpec] = []
    monkeypatch.setattr(start, "train", lambda spec, **_: trained.append(spec))
    assert main(["train", "7b_128k", *options]) == 0
    (s,) = trained
    packing, sharding = s.packing, s.sharding
    found = (packing.policy, sharding.strategy, sharding.remainder, packing.memory_gib)
    assert (*found, s.training.recompute) == expected
    assert s.data.context_window == 131072


@pytest.mark.usefixtures("_no_ranks")
def test_an_unknown_system_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    known = "use one of usual, plain_4d, fixed_4d, paper, wlb"
    assert known in refused(["demo", "--system", "megatron"], capsys)
    said = refused(["demo", "--system", "paper:2"], capsys)
    assert "paper has only the alternatives paper:1; use" in said


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the one line that `wlb train` ends with for bad input."""
    capsys.readouterr()
    assert main(["train", *arguments]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("wlb train: ")
    assert said.err.count("\n") == 1
    assert said.err.endswith("\n")
    assert "Traceback" not in said.out + said.err
    return said.err.removeprefix("wlb train: ").rstrip("\n")


# --set, the value that the message names, the remedy.
BAD_INPUT = [
    (["training.stesp=3"], "unknown key 'training.stesp'", "did you mean 'training.steps'?"),
    (["training.steps=many"], "training.steps must be int, got 'many'", ""),
    (["training.steps"], "'training.steps'", "write section.key=value"),
    (
        ["parallel.tp=3"],
        "parallel.tp = 3 is above model.num_kv_heads = 2 and not a multiple of it",
        "set parallel.tp to at most 2, or to a multiple of it",
    ),
    (["parallel.pp=3"], "model.num_layers = 4 is not a multiple of pp 3", "stages"),
    (
        ["parallel.dp=2", "data.num_windows=3"],
        "3 micro-batches per step are not a multiple of parallel.dp = 2",
        "set data.num_windows to a multiple of 2",
    ),
    (["data.corpus={folder}/empty"], "no UTF-8 text in {folder}/empty", "give a folder with"),
    (["data.corpus={folder}/none"], '"{folder}/none" is not a folder', "give a folder of"),
    (["data.store={folder}/none"], "no token store at {folder}/none", "wlb prepare"),
    (
        ["data.store={folder}/store", "data.heldout_store={folder}/none"],
        "no token store at {folder}/none",
        "wlb prepare",
    ),
    (
        ["data.store={folder}/store", "model.vocab_size=319"],
        "model.vocab_size = 319 is smaller than the vocabulary of the store {folder}/store",
        "raise model.vocab_size, or set it to 0",
    ),
    (
        ["data.store={folder}/ones"],
        "every document of the store {folder}/ones has only one token",
        "use another",
    ),
    (["cost.profile=h200"], "no kernel profile 'h200'", "choose one of cpu, h100"),
    (
        ["kernels.attention=torch_varlen"],
        "kernels.attention = torch_varlen",
        "Set kernels.attention = auto",
    ),
]


@pytest.mark.usefixtures("_no_ranks")
@pytest.mark.parametrize(
    ("overrides", "value", "remedy"),
    BAD_INPUT,
    ids=[", ".join(row[0]).replace("{folder}/", "") for row in BAD_INPUT],
)
def test_bad_input_is_refused_in_a_line_before_any_rank_starts(
    tiny: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], value: str, remedy: str
) -> None:
    folder = tiny.parent
    (folder / "empty").mkdir()
    write_store(folder / "store", [30, 70, 50])
    write_store(folder / "ones", [1] * 40)
    layout = [] if any(o.startswith("parallel.") for o in overrides) else ["parallel.dp=2"]
    given = [o.format(folder=folder) for o in overrides]
    message = refused([str(tiny), "--set", *layout, *given], capsys)
    assert value.format(folder=folder) in message
    assert remedy in message
    assert not (folder / "runs" / "tiny").exists()


@pytest.mark.usefixtures("_no_ranks")
def test_an_unknown_preset_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(["deom"], capsys)
    assert "'deom' is neither a preset (" in message
    assert "demo" in message


@pytest.mark.usefixtures("_no_ranks")
@pytest.mark.parametrize(
    ("ranks", "overrides", "expected"),
    [
        (
            2,
            ["parallel.tp=2", "parallel.pp=2"],
            "too few ranks: tp 2 x cp 1 x pp 2 needs 4 ranks per pipeline, but there are 2; start",
        ),
        (3, ["parallel.tp=2"], "3 ranks are not a multiple of tp 2 x cp 1 x pp 1 = 2"),
        (
            2,
            ["parallel.dp=1"],
            "parallel.dp = 1 needs 1 ranks, but there are 2; set parallel.dp = 2",
        ),
    ],
)
def test_ranks_of_torchrun_that_do_not_fit_are_refused(
    tiny: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    overrides: list[str],
    expected: str,
) -> None:
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29555",
    }.items():
        monkeypatch.setenv(name, value)
    assert expected in refused([str(tiny), "--set", *overrides], capsys)


@pytest.mark.usefixtures("_no_ranks")
def test_a_dry_run_shows_what_the_run_would_take(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = ["parallel.tp=2", "parallel.pp=2", "pp.virtual_stages=2", "parallel.dp=1"]
    assert main(["train", str(tiny), "--dry-run", "--set", *layout]) == 0
    shown = capsys.readouterr().out
    assert "Layout" in shown
    # Pipeline rank 1 has stages 1 and 3, a layer each, and is ranks 2 and 3.
    row = next(line for line in shown.splitlines() if "1, 3" in line)
    assert " ".join(row.split()) == "│ 1 │ 1, 3 │ 1, 3 │ 2-3 │"
    rows = {w[0].strip(): w[1] for x in shown.splitlines() if len(w := x.split("│")[1:]) == 3}
    spec = replace(load(str(tiny), layout), model=replace(load(str(tiny)).model, vocab_size=320))
    assert re.search(rf"parameters +│ {spec.model.num_parameters:,} ", shown)
    assert rows["ranks"].startswith(" 4 = TP 2 x CP 1 x PP 2 x DP 1")
    assert rows["tokens per step"].startswith(" 128: 2 windows of 64")
    assert lacks(rows["step time"], " s predicted: ", " tokens/s, MFU unknown") == []
    assert lacks(rows["the run"], "2 steps, 256 tokens", " seconds) predicted") == []
    assert f" {12 * spec.model.num_parameters / 2**20:.1f} MiB each" in rows["checkpoint"]
    room = f"needs space for {3 * 12 * spec.model.num_parameters / 2**20:.1f} MiB: 2 kept, and the"
    assert room in rows["checkpoint"]
    assert lacks(rows["documents"], "drawn from wlb_paper", "corpus was not read") == []
    assert lacks(rows["machine"], "4 CPU processes", "kernel profile cpu", "not examined") == []
    assert rows["total"].strip().endswith(" MiB")
    assert "First plan, pipeline 0" in shown
    assert lacks(shown, "Memory of the fullest rank", "activations", "step 0: ", "imbalance") == []
    assert not (tiny.parent / "runs").exists()


def test_a_dry_run_says_first_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """And last, with status 3, if it does not."""
    assert main(["train", "7b_128k", "--dry-run"]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    answer = re.fullmatch(
        r"It fits: the fullest rank needs [\d.]+ GiB of the [\d.]+ GiB that plans may use\. A step "
        r"takes "
        r"[\d.]+ s \(predicted, ±6%\), and all 50,000 take [\d.]+ days\.",
        first,
    )
    assert answer is not None
    assert last.startswith("step 0: ")
    for change in ("cluster.memory_gib=40", "model.hidden_size=16384"):
        words = ["--set", change, "packing.s_max=1.1"]
        assert main(["train", "7b_128k", "--dry-run", *words]) == 3
        first, *_, last = capsys.readouterr().out.splitlines()
        assert first == last
        assert first.startswith("It does not fit: the fullest rank needs ")
        assert "Try a lower packing.s_max first" in first


@pytest.mark.parametrize("key", ["reshard_after_forward=true", "shard_size=1"])
def test_a_dry_run_predicts_both_ways_to_shard(
    tiny: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    words = ["--dry-run", "--set", "parallel.cp=2", "parallel.dp=1", f"fsdp.{key}"]
    assert main(["train", str(tiny), *words]) == 0
    shown = capsys.readouterr().out
    assert "s predicted" in shown
    assert "not predicted" not in shown


@pytest.mark.process
def test_a_dry_run_of_a_cluster_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from wlb.cli import main; main(['train', '7b_128k', '--dry-run']); "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'matplotlib')))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout
    assert out.splitlines()[-1] == "[]"
    assert (
        lacks(
            out, "6,738,415,616", "MFU ", "days predicted", "75.3 GiB each", "64 GPUs like NVIDIA"
        )
        == []
    )
    assert lacks(out, "this machine", "0 GPUs") == ["this machine", "0 GPUs"]
    assert not list(tmp_path.iterdir())


@pytest.mark.dist
def test_a_checkpoint_is_as_large_as_its_dry_run_says(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(tiny), "--dry-run"]) == 0
    said = re.search(r"checkpoint +│ ([0-9.]+) MiB each", capsys.readouterr().out)
    assert said is not None
    assert main(["train", str(tiny)]) == 0
    saved = tiny.parent / "runs" / "tiny" / "checkpoints" / "step-00000002"
    size = sum(path.stat().st_size for path in saved.glob("*.safetensors"))
    # Names, shapes and the state of random numbers are in it besides.
    assert size / 2**20 == pytest.approx(float(said[1]), abs=0.1)


@pytest.mark.usefixtures("_no_ranks")
@pytest.mark.parametrize("given", ["", "2", "auto"])
def test_a_dry_run_does_not_go_on_from_a_checkpoint(
    tiny: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    words = ["--dry-run", "--resume", *([given] if given else [])]
    message = refused([str(tiny), *words], capsys)
    assert lacks(message, "--resume", "--dry-run") == []


def planning(trace: str) -> PlanningError:
    return PlanningError.of(f"Traceback (most recent call last):\n  File ...\n{trace}\n")


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (CheckpointError("the last checkpoint could not be written"), "the last checkpoint could"),
        (
            planning("wlb.plan.errors.UserError: the store broke"),
            "planning failed: the store broke",
        ),
        (PlanningError("the planner process of this node has died"), "the planner process of"),
    ],
)
def test_what_a_run_in_one_process_fails_of_is_one_line(
    tiny: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
    said: str,
) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise failure

    monkeypatch.setattr(start, "train", fail)
    assert main(["train", str(tiny)]) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"wlb train: {said}")
    assert message.count("\n") == 1


def test_a_planner_that_is_wrong_shows_where() -> None:
    assert "Traceback" in str(planning("KeyError: 3"))
    assert planning("wlb.plan.errors.UserError: x").__notes__[0].startswith("Traceback")


@pytest.mark.usefixtures("_no_ranks")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--calibrate", "--dry-run"], "--calibrate has no effect with --dry-run"),
        (["--calibrate", "a/b"], "--calibrate a/b must be a name without folders, or the path of "),
        (["--calibrate"], "training.steps = 2 belong to the warm-up (telemetry.warmup_steps = 3)"),
    ],
)
def test_calibrations_that_cannot_work_are_refused(
    tiny: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    steps = [] if len(arguments) == 1 else ["--set", "telemetry.warmup_steps=0"]
    assert message in refused([str(tiny), *steps, *arguments], capsys)
    assert not (tiny.parent / "runs" / "tiny").exists()


@pytest.mark.full
@pytest.mark.dist
def test_a_calibrated_profile_prices_the_next_run(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["--set", "telemetry.warmup_steps=0", "parallel.dp=1"]
    made = tiny.parent / "runs" / "cpu-calibrated.json"
    assert main(["train", str(tiny), *keys, "--calibrate"]) == 0
    assert f"profile: {made} (the plans of this run used the prices of 'cpu')" in (
        capsys.readouterr().out
    )
    content = made.read_bytes()
    assert main(["train", str(tiny), *keys, f"cost.profile={made}", "--calibrate"]) == 0
    shown = capsys.readouterr().out
    assert "plans priced by kernel profile 'cpu-calibrated' (measured, sdpa with " in shown
    assert "calibration: time measured / predicted by 'cpu-calibrated'" in shown
    assert made.with_name("cpu-calibrated-2.json").exists()
    assert made.read_bytes() == content


@pytest.mark.usefixtures("_no_ranks")
def test_a_dry_run_refuses_what_a_run_refuses(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_store(tiny.parent / "store", [30, 70, 50])
    stores = [f"data.store={tiny.parent}/store", f"data.heldout_store={tiny.parent}/none"]
    assert "no token store" in refused([str(tiny), "--dry-run", "--set", *stores], capsys)


@pytest.mark.dist
def test_resuming_with_another_model_or_seed_is_refused(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"data.store={write_store(tiny.parent / 'store', [30, 70, 50] * 5)}"
    assert main(["train", str(tiny), "--set", store]) == 0
    monkeypatch.setattr(start, "run_rank", None)
    again = [str(tiny), "--resume", "--set", store]
    message = refused([*again, "model.hidden_size=64"], capsys)
    assert (
        "step-00000002 has model.hidden_size = 32, but this run has model.hidden_size = 64"
        in message
    )
    assert "made with seed = 0, but this run has 5" in refused([*again, "run.seed=5"], capsys)
    metrics = (tiny.parent / "runs" / "tiny" / "metrics.jsonl").read_text("utf-8")
    assert metrics.count('"kind": "step"') == 2


@pytest.mark.dist
def test_a_loss_that_is_not_finite_ends_with_one_line(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wild = ["training.learning_rate=1e30", "training.clip_norm=0", "training.steps=9"]
    assert main(["train", str(tiny), "--set", *wild]) == 1
    message = capsys.readouterr().err
    assert message.startswith("wlb train: step ")
    assert message.count("\n") == 1
    assert "Lower training.learning_rate" in message


def called(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, **options
    )


@pytest.mark.process
@pytest.mark.full
def test_both_modules_can_be_run() -> None:
    short, long = called("-m", "wlb.train", "--help"), called("-m", "wlb", "train", "--help")
    assert short.returncode == long.returncode == 0
    assert short.stdout == long.stdout
    assert short.stdout.startswith("usage: wlb train ")
    whole = called("-m", "wlb", "--help")
    assert whole.returncode == 0
    assert "train a preset or a TOML file" in whole.stdout
    bare = called("-m", "wlb")
    assert (bare.returncode, bare.stdout) == (0, whole.stdout)


@pytest.mark.full
@pytest.mark.dist
def test_torchrun_gives_the_ranks(tiny: Path) -> None:
    """As on a cluster, torchrun starts the ranks, rank 0 makes the store, and all of them train."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = called(
        *torchrun,
        *["-m", "wlb", "train", str(tiny), "--set", "parallel.tp=2"],
        env=worlds.environment(OMP_NUM_THREADS="1"),
        timeout=600,
    )
    assert out.returncode == 0, out.stdout + out.stderr
    assert out.stdout.count("2 ranks given by torchrun for TP 2 x CP 1 x PP 1 x DP 1") == 1
    assert out.stdout.count("Summary") == 1
    text = (tiny.parent / "runs" / "tiny" / "metrics.jsonl").read_text("utf-8")
    steps = [json.loads(line) for line in text.splitlines()]
    assert [line["steps_done"] for line in steps if line["kind"] == "step"] == [1, 2]
    assert (tiny.parent / "runs" / "tiny" / "checkpoints" / "step-00000002").is_dir()


@pytest.mark.full
@pytest.mark.dist
def test_bad_input_under_torchrun_stops_every_rank(tiny: Path) -> None:
    """Only rank 0 finds out that the store is too large; no rank waits for the others."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = called(
        *torchrun,
        *["-m", "wlb", "train", str(tiny), "--set", "parallel.tp=2", "model.vocab_size=100"],
        env=worlds.environment(OMP_NUM_THREADS="1"),
        timeout=600,
    )
    assert out.returncode != 0
    assert "wlb train: model.vocab_size = 100 is smaller than the" in out.stderr
    assert not (tiny.parent / "runs" / "tiny").exists()


def test_a_machine_without_gpus_is_said_first() -> None:
    """Where the settings are meant for GPUs, and not where a CPU was asked for."""
    no_gpus = DeviceChoice("cpu", "0 GPUs for 64 ranks on this machine")
    said = start._describe_ranks(load("7b_128k"), no_gpus, None)
    assert said.startswith("This machine does not have the GPUs for which 7b_128k is configured")
    assert "To predict its time on those GPUs, use --dry-run" in said
    for spec in (load("demo"), load("7b_128k", ["run.device=cpu"])):
        assert start._describe_ranks(spec, no_gpus, None).startswith(
            f"{spec.parallel.world_size} local ranks"
        )

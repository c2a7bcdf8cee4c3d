"""Tests what published runs are mapped to, and how bad rows are refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.beyond.published_runs.__main__ import CONSTANTS, RUNS
from experiments.beyond.published_runs.fitting import (
    Sensitivity,
    fit,
    fit_without,
    rank_correlation,
    sensitivity,
)
from experiments.beyond.published_runs.mapping import as_wlb_runs, layers_of_stages, mapped
from experiments.beyond.published_runs.prediction import Constants, kept_bytes, predict
from experiments.beyond.published_runs.rows import read_runs
from kernels_profile.derive import MEASURED
from wlb.cost import load_profile
from wlb.plan import UserError

BY_LINE = {run.line: run for run in read_runs(RUNS)}
HEADER = RUNS.read_text().splitlines()[0]
ROW = "mpt,7b,8,2048,6,1,1,1,1,1,8,none,bf16,10643,,,"


def test_the_file_has_all_rows() -> None:
    assert len(BY_LINE) == 28
    assert BY_LINE[2].tokens_per_s_gpu == 10643.0
    assert BY_LINE[27].vp is None


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("mpt,7b,8,2048,6,1,1,1,1,1,4,none,bf16,1,,,", "line 3: tp 1 x cp 1 x pp 1 x dp 4 = 4"),
        ("mpt,7b,8,2k,6,1,1,1,1,1,8,none,bf16,1,,,", "line 3: seq '2k' must be a whole number"),
        ("mpt,7b,8,2048,6,1,1,1,1,1,8,some,bf16,1,,,", "line 3: recompute 'some' is none of"),
        ("mpt,7b,8,2048,6,1,1,1,1,1,8,none,bf16,-1,,,", "line 3: tokens_per_s_gpu '-1'"),
        ("mpt,7b,8,2048,6,1,1,1,1,1,8,none,bf16,,,,", "line 3: both tokens_per_s_gpu and"),
    ],
)
def test_bad_rows_are_refused_with_their_line(tmp_path: Path, row: str, said: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([HEADER, ROW, row]) + "\n")
    with pytest.raises(UserError, match=said):
        read_runs(path)


def test_a_file_without_a_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("source,model\nmpt,7b\n")
    with pytest.raises(UserError, match="line 1 lacks the columns cp, dp"):
        read_runs(path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"source": "x"}, "line 2: source 'x' is not known; known are mpt"),
        ({"model": "9b"}, "line 2: model '9b' is not known of source mpt; known are 760m"),
    ],
)
def test_unknown_names_are_refused_with_their_line(changed: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        mapped(replace(BY_LINE[2], **changed))


def test_model_sizes_are_those_of_their_names() -> None:
    billions = {
        (run.source, run.model): mapped(run).spec.model.num_parameters / 1e9
        for run in BY_LINE.values()
    }
    assert billions[("mpt", "760m")] == pytest.approx(0.76, abs=0.02)
    assert billions[("mpt", "13b")] == pytest.approx(12.85, abs=0.05)
    assert billions[("mpt", "70b")] == pytest.approx(64.9, abs=0.2)
    assert billions[("titan", "llama3.1-8b")] == pytest.approx(8.03, abs=0.01)
    assert billions[("llama3", "llama3.1-405b")] == pytest.approx(405.9, abs=0.2)


def test_what_rows_are_mapped_to() -> None:
    eager, compiled = (mapped(BY_LINE[line]) for line in (19, 20))
    assert eager.gpu.name == "h100_500w"
    assert set(eager.traffic) == {"norm", "head_norm", "rotary", "swiglu"}
    assert not compiled.traffic
    assert eager.recomputed is not None
    assert list(eager.recomputed.matrices) == [1, 3, 5]
    assert eager.spec.fsdp.reshard_after_forward
    pipeline = mapped(BY_LINE[23]).spec
    # 32 sequences are 32 micro-batches of the pipeline, and one virtual stage has 15 or 16 layers.
    assert (pipeline.micro_batches_per_pipeline, pipeline.data.context_window) == (32, 8192)
    assert pipeline.stage_layers == (15, 16, 16, 16, 16, 16, 16, 15)
    assert not pipeline.fsdp.reshard_after_forward
    llama = mapped(BY_LINE[27]).spec
    assert llama.pp.virtual_stages == 8
    assert llama.stage_layers[0] == llama.stage_layers[-1] == 0
    own = as_wlb_runs(eager)
    assert (own.gpu.name, own.kernel, dict(own.traffic)) == ("h100_sxm", "flash_2", {})


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(8, 4, (2, 2, 2, 2)), (7, 4, (2, 2, 2, 1)), (6, 4, (1, 2, 2, 1)), (5, 4, (1, 2, 1, 1))],
)
def test_missing_layers_are_taken_from_the_ends(layers, stages, expected) -> None:
    assert layers_of_stages(layers, stages) == expected


def test_flops_of_a_token_count_pairs_below_the_diagonal() -> None:
    """405B at 8K: 6 FLOPs for each weight but the embedding's, 12 x 126 x 16,384 x 8,192 / 2."""
    case = mapped(BY_LINE[27])
    assert case.flops_per_token() == pytest.approx(6 * 403.7e9 + 101.5e9, rel=2e-3)
    assert case.measured == pytest.approx(430e12 / case.flops_per_token())


@pytest.fixture(scope="module")
def fits() -> list[Sensitivity]:
    """Rows of each kind that take little time to simulate."""
    profile = load_profile(MEASURED)
    return [sensitivity(mapped(BY_LINE[line]), profile) for line in (2, 5, 14, 19, 20, 21, 29)]


@pytest.mark.parametrize("line", [2, 5, 14, 19, 20, 21, 28, 29])
def test_a_row_of_each_kind_is_within_ten_percent(line: int) -> None:
    found = predict(mapped(BY_LINE[line]), load_profile(MEASURED), CONSTANTS)
    assert abs(found.ratio - 1) < 0.1
    assert 0 < found.attention_share < 1
    assert sum(found.shares.values()) == pytest.approx(1, abs=1e-3)


def test_times_are_linear_in_the_constants(fits: list[Sensitivity]) -> None:
    constants = Constants(product_speed=0.8, fsdp_slowdown=0.3, triton_speed=0.6)
    profile = load_profile(MEASURED)
    for one in fits:
        assert one.ratio(constants) == pytest.approx(
            predict(one.case, profile, constants).ratio, rel=0.01
        )


def test_fits_recover_the_constants_of_made_up_runs(fits: list[Sensitivity]) -> None:
    true = Constants(product_speed=0.9, fsdp_slowdown=0.4, triton_speed=0.55)
    made = []
    for one in fits:
        scale = one.ratio(true)
        names = ("base", "of_products", "of_slowdown", "of_kernel")
        made.append(replace(one, **{name: getattr(one, name) * scale for name in names}))
    assert fit(made) == true
    assert fit_without(made, "mpt") == true
    # Without any source but MPT, nothing is left to fit a kernel's speed to but its own runs.
    assert fit_without(made, "titan") == true


def test_rank_correlation_by_hand() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)


@pytest.mark.parametrize("line", [19, 20, 25, 26])
def test_printed_peaks_without_a_pipeline_are_within_six_percent(line: int) -> None:
    case = mapped(BY_LINE[line])
    found = predict(case, load_profile(MEASURED), CONSTANTS)
    assert case.run.peak_gib is not None
    assert abs(found.peak_gib / case.run.peak_gib - 1) < 0.06


def test_checkpointing_by_operator_keeps_every_second_product() -> None:
    """Of 8B's layer: its input, attention's result, Q and V, gate and down projection's results."""
    case = mapped(BY_LINE[19])
    assert case.recomputed is not None
    values = 4096 + 4096 + 4096 + 1024 + 14336 + 4096
    assert kept_bytes(case.recomputed, case.spec) == 2 * 16384 * values


def test_peaks_count_sharded_gradients() -> None:
    """70B on 64 GPUs: gradients that every pass reduces never are whole, 262 GiB of float32."""
    found = predict(mapped(BY_LINE[29]), load_profile("h100"), Constants())
    assert found.peak_gib < 80

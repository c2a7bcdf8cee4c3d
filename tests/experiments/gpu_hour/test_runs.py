"""Tests the hour's training runs: what they are, and that GPUs of 80 GB can run them."""

from pathlib import Path

import pytest

from experiments.gpu_hour.parts import all_parts, parts_for
from experiments.gpu_hour.runs import balanced, document_window, documents, restarted, trainings
from experiments.gpu_hour.setting import Setting
from wlb.cli import main
from wlb.prepare.synthetic import prepare_synthetic
from wlb.spec import check


def setting_of(folder: Path, gpus: int) -> Setting:
    device = "cuda" if gpus else "cpu"
    return Setting(folder=folder, device=device, gpus=gpus, quick=True)


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_every_run_is_a_configuration_that_is_right(gpus: int, tmp_path: Path) -> None:
    setting = setting_of(tmp_path, gpus)
    runs = (*trainings(setting), balanced(setting), restarted(setting))
    assert len({run.name for run in runs}) == len(runs)
    for run in runs:
        spec = run.spec(setting, folder=tmp_path)
        check(spec)
        assert spec.data.context_window == run.window <= document_window(setting)
        assert spec.parallel.world_size in (1, 2, 8)
        assert spec.run.device == setting.device


def test_parts_for_one_gpu_leave_out_what_needs_eight(tmp_path: Path) -> None:
    names = [part.name for part in all_parts(setting_of(tmp_path, 1))]
    assert "balance" not in names
    assert "balance" in [part.name for part in all_parts(setting_of(tmp_path, 8))]
    assert names.index("doctor") < names.index("kernels") < names.index("profile")
    steps = parts_for(setting_of(tmp_path, 1), ["steps"])
    assert [part.name for part in steps] == [name for name in names if name.startswith("steps_")]
    with pytest.raises(ValueError, match="no part 'balance' here; parts are"):
        parts_for(setting_of(tmp_path, 1), ["balance"])


@pytest.mark.nightly
@pytest.mark.process
@pytest.mark.parametrize("gpus", [1, 8])
def test_every_run_is_rehearsed_and_fits(gpus: int, tmp_path: Path) -> None:
    """All ranks on fake GPUs: no fault, no deadlock, less memory than 80 GB have."""
    setting = setting_of(tmp_path, gpus)
    window = document_window(setting)
    prefix = documents(setting)
    prepare_synthetic(prefix, family="wlb_paper", num_tokens=2_000_000, window=window, seed=0)
    for run in (*trainings(setting), *[balanced(setting)] * (gpus == 8)):
        toml = run.write(setting, folder=tmp_path)
        command = ["rehearse", str(toml), "--steps", "2", "--jobs", "2"]
        assert main([*command, "--ranks", "all"]) == 0, run.name

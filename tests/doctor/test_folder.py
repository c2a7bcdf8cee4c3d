"""Tests folders and stores that a rank cannot see."""

from pathlib import Path

from tests.doctor.patient import patient
from tests.train.case import write_store
from wlb.doctor.finding import Verdict
from wlb.doctor.folder import shared_folder, token_stores, vocabulary_of


def test_stores_that_are_missing_are_named(tmp_path: Path) -> None:
    assert token_stores(patient()).verdict == Verdict.SKIP
    store = write_store(tmp_path / "some", [3, 4])
    found = token_stores(patient(data__store=store))
    assert (found.verdict, found.found) == (Verdict.PASS, f"{store}: 7 tokens")
    lost = token_stores(patient(data__store=store, data__heldout_store=f"{tmp_path}/lost"))
    assert lost.verdict == Verdict.FAIL
    assert f"{tmp_path}/lost" in lost.found
    assert vocabulary_of(store, 512) == 320
    assert vocabulary_of(f"{tmp_path}/lost", 512) == vocabulary_of("", 512) == 512


def test_a_folder_that_cannot_be_made_fails(tmp_path: Path) -> None:
    found = shared_folder(patient(run__output_dir=tmp_path / "runs"))
    assert found.verdict == Verdict.PASS
    assert list((tmp_path / "runs").iterdir()) == []
    (tmp_path / "file").touch()
    refused = shared_folder(patient(run__output_dir=tmp_path / "file" / "runs"))
    assert refused.verdict == Verdict.FAIL
    assert "file is a file, not a folder" in refused.found

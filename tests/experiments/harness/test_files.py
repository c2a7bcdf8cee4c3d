"""Tests that a file of results is the old one or the new one."""

import json
from pathlib import Path

import pytest

from experiments.harness.files import write_json


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "results" / "found.json"
    write_json(path, {"a": [1, 2]}, indent=1)
    assert path.read_text() == '{\n "a": [\n  1,\n  2\n ]\n}\n'
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": [1, 2]}
    assert [found.name for found in path.parent.iterdir()] == ["found.json"]

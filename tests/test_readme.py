"""Tests that README's way from JSONL to transformers works as it is written."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.experiments.test_examples import shell
from wlb.prepare import stdlib_documents
from wlb.prepare.text import Skip

README = Path(__file__).parents[1] / "README.md"


def written() -> str:
    """Returns the lines of README's path."""
    text = README.read_text("utf-8").split("<!-- path -->")[1].split("<!-- end -->")[0]
    (block,) = re.findall(r"```\n(.*?)```", text, re.DOTALL)
    return block


def sources(folder: Path, *, most_bytes: int = 400_000) -> None:
    """Writes two JSONL files of sources of the standard library."""
    folder.mkdir()
    documents, held = stdlib_documents(), 0
    files = [(folder / name).open("w", encoding="utf-8") for name in ("a.jsonl", "b.jsonl")]
    for row in range(0, len(documents.names), 7):
        text = documents.read(row)
        if not isinstance(text, Skip) and held < most_bytes:
            files[row % 2].write(json.dumps({"text": text}) + "\n")
            held += len(text)
    for file in files:
        file.close()


def test_the_path_has_every_step() -> None:
    commands = [line.split()[:2] for line in written().splitlines()]
    assert [name for _, name in commands[:4]] == ["prepare", "train", "train", "export"]
    assert "--resume" in written()
    assert "transformers" in written().splitlines()[-1]


@pytest.mark.nightly
@pytest.mark.process
@pytest.mark.dist
def test_someones_own_jsonl_is_trained_resumed_exported_and_loaded(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sources(tmp_path / "data")
    script = f"set -euo pipefail\n{written()}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=shell(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = (tmp_path / "runs" / "mine" / "metrics.jsonl").read_text("utf-8").splitlines()
    steps = [line for line in map(json.loads, lines) if line["kind"] == "step"]
    assert [line["plan"]["step"] if "plan" in line else line["step"] for line in steps] == list(
        range(40)
    )
    losses = [line["measured"]["loss"] for line in steps]
    assert losses[-1] < losses[29] < losses[0]
    made = done.stdout.splitlines()[-1]
    assert "generated_text" in made
    assert "import " in made

"""Tests shell completion in a real bash, and in zsh where there is one."""

import shutil
import subprocess

import pytest

from wlb.cli import main
from wlb.spec import KNOWN_SYSTEMS, presets

pytestmark = pytest.mark.process


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", "bash"]) == 0
    return capsys.readouterr().out


def completed(script: str, line: str) -> list[str]:
    """Returns what bash offers for the last word of a line."""
    words = " ".join(f"'{word}'" for word in line.split(" "))
    asked = (
        f"{script}\nCOMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n"
        "_wlb; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    out = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    return out.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("wlb tr", ["train"]),
        ("wlb train 7b_1", ["7b_128k"]),
        ("wlb train demo --dry", ["--dry-run"]),
        ("wlb train demo --help", ["--help", "--help-all"]),
        ("wlb train demo --set training.lear", ["training.learning_rate="]),
        ("wlb train demo --set a=1 parallel.t", ["parallel.tp="]),
        ("wlb train demo --set a=1 --res", ["--resume"]),
        ("wlb tune la", ["layout"]),
        ("wlb tune packing --delay", ["--delay-budget"]),
        ("wlb train demo --system ", list(KNOWN_SYSTEMS)),
    ],
)
def test_bash_offers(script: str, line: str, offered: list[str]) -> None:
    assert completed(script, line) == offered


def test_it_offers_every_command_and_preset(script: str) -> None:
    assert {"init", "train", "report", "export"} < set(completed(script, "wlb "))
    assert set(presets()) < set(completed(script, "wlb train "))


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_reads_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    script = f"autoload -Uz compinit && compinit -u\n{capsys.readouterr().out}"
    subprocess.run(["zsh", "-fc", script], capture_output=True, text=True, check=True)

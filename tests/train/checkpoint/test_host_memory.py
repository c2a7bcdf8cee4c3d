"""Tests that freed memory between what is in use goes back to the operating system."""

import subprocess
import sys

import pytest

from wlb.train.checkpoint.host_memory import give_back_freed

PROGRAM = """
import sys
from pathlib import Path
from wlb.train.checkpoint.host_memory import give_back_freed

def resident_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

blocks = [bytes(20_000) for _ in range(10_000)]
full = resident_kib()
blocks = blocks[::100]
kept = resident_kib()
assert give_back_freed()
print(full, kept, resident_kib())
"""


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_gaps_between_blocks_in_use_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    full, kept, after = (int(n) for n in done.stdout.split())
    assert kept > 0.9 * full  # the C library holds on to 99% of 200 MB that are free
    assert full - after > 150_000


def test_a_c_library_without_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert not give_back_freed()

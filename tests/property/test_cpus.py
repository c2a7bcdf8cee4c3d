"""Tests that hosts with other CPUs make the same plans: NumPy, BLAS and libm choose by the CPU."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.full, pytest.mark.process]

umath: Any = importlib.import_module("numpy._core._multiarray_umath")
ROOT = Path(__file__).resolve().parents[2]
OTHER_CPUS = {
    "NPY_DISABLE_CPU_FEATURES": " ".join(umath.__cpu_dispatch__),
    "OPENBLAS_CORETYPE": "Nehalem",
    # glibc's powers and logarithms use fused multiply-adds where there are any.
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4",
}


def digests(**variables: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.property.plans_of_cpu"],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_hosts_with_other_instructions_make_the_same_plans() -> None:
    here = digests()
    assert all(len(set(found)) > 3 for found in here.values())
    for name, value in OTHER_CPUS.items():
        found = digests(**{name: value})
        differ = [kind for kind in here if here[kind] != found[kind]]
        assert differ == [], f"{name}={value}"

"""Dense bfloat16 peaks of GPUs by driver name, for MFU."""

import re

from wlb.spec import Dtype, RunSpec

PEAK_TFLOPS: tuple[tuple[frozenset[str], float], ...] = tuple(
    (frozenset(words.split()), peak)
    for words, peak in (
        ("GB300", 2500.0),
        ("B300", 2250.0),
        ("GB200", 2500.0),
        ("B200", 2250.0),
        ("GH200", 989.0),
        ("H200 NVL", 835.0),
        ("H200", 989.0),
        ("H100 PCIE", 756.0),
        ("H100 NVL", 835.0),
        ("H100", 989.0),
        ("H800 PCIE", 756.0),
        ("H800", 989.0),
        ("H20", 148.0),
        ("A100", 312.0),
        ("A800", 312.0),
        ("L40S", 362.0),
        ("L4", 121.0),
    )
)
"""Words in a name -> TFLOP/s without sparsity (NVIDIA's data sheets mostly give twice that, with
sparsity). The first match counts."""


def known_peak_tflops(device: str) -> float | None:
    """bfloat16 TFLOP/s of a GPU of this name; None for unknown ones and for slices (MIG)."""
    words = set(re.split(r"[^A-Z0-9]+", device.upper()))
    if "MIG" in words:
        return None
    return next((peak for needed, peak in PEAK_TFLOPS if needed <= words), None)


def rank_peak_tflops(spec: RunSpec, device: str) -> float:
    """Peak TFLOP/s of a rank for MFU: telemetry.peak_tflops, else the bfloat16 table's, else 0."""
    if spec.telemetry.peak_tflops or spec.training.dtype != Dtype.BFLOAT16:
        return spec.telemetry.peak_tflops
    return known_peak_tflops(device) or 0.0

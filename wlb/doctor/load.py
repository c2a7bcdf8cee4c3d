"""Measures the speed of matrix products on each rank, and finds slow ranks."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from wlb.cost import known_peak_tflops
from wlb.doctor.facts import Facts
from wlb.doctor.finding import Finding, passed, skipped, warned
from wlb.doctor.network import synchronize

SIZE = {"cpu": 512, "cuda": 8192}  # rows and columns of the square matrices that are multiplied
SECONDS = {"cpu": (0.1, 0.5), "cuda": (0.5, 4.0)}
"""Seconds that the measurement takes, by kind of device: in a quick and in a full examination."""
AT_ONCE = 10  # number of matrix products between two calls of `meanwhile`
LEAST_OF_MEDIAN = 0.9  # a GPU is slow if its speed is below this share of the median GPU's


def matrix_tflops(device: torch.device, *, is_quick: bool, meanwhile: Callable[[], None]) -> float:
    """Measure how many TFLOP/s this rank's device reaches in products of square matrices.

    The matrices are in bfloat16 on CUDA and in float32 on a CPU. This code has not run on a
    GPU yet.

    Args:
        device: This rank's device.
        is_quick: Whether to measure for a shorter time.
        meanwhile: A function that is called repeatedly while the device computes, for example to
            read the GPU's clocks.
    """
    size, seconds = SIZE[device.type], SECONDS[device.type][not is_quick]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    torch.mm(a, b)
    synchronize(device)
    began, count = time.perf_counter(), 0
    while not count or time.perf_counter() - began < seconds:
        for _ in range(AT_ONCE):
            torch.mm(a, b)
        meanwhile()
        synchronize(device)
        count += AT_ONCE
    return 2 * size**3 * count / (time.perf_counter() - began) / 1e12


def speed_finding(tflops: Sequence[float], everyone: Sequence[Facts]) -> Finding:
    """Compare the speeds of all ranks. The verdict is warn if a GPU is slow (`LEAST_OF_MEDIAN`).

    The speeds of CPU ranks are shown but not judged, because ranks of a node share caches and
    memory.

    Args:
        tflops: TFLOP/s of each rank; 0 for a rank that was not measured.
        everyone: Facts of all ranks.
    """
    check = "matrix products"
    measured = [speed for speed in tflops if speed]
    if not measured:
        return skipped(check, "not measured")
    usual = median(measured)
    found = f"{min(measured):.3g} to {max(measured):.3g} TFLOP/s"
    gpu = everyone[0].gpu
    peak = known_peak_tflops(gpu.name) if gpu else None
    if peak:
        found += f", median {usual / peak:.0%} of the peak of {peak:.0f}"
    slow = [
        f"rank {facts.rank} ({facts.host}) {speed:.0f}"
        for speed, facts in zip(tflops, everyone, strict=True)
        if facts.gpu and 0 < speed < LEAST_OF_MEDIAN * usual
    ]
    if slow:
        remedy = (
            "leave these nodes out, because all ranks wait for the slowest one; the row of clocks "
            "may show why they are slow"
        )
        return warned(check, f"{found}; slow: {', '.join(slow)}", remedy)
    return passed(check, found)

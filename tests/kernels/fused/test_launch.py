"""Tests that every launch compiles for Hopper and Blackwell, spills nothing and reads vectors.

Triton compiles without a GPU; its own assembler reports registers. Nothing runs.
"""

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="needs Triton, which is for Linux on x86_64")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from tests.sets import full  # noqa: E402
from wlb.kernels.fused import kernels, launch  # noqa: E402
from wlb.kernels.fused.launch import Launch  # noqa: E402
from wlb.parallel.context.exchange import to_device  # noqa: E402

KERNELS = {name for name, of in vars(kernels).items() if isinstance(of, triton.JITFunction)}
BF16, FP32, ROWS = torch.bfloat16, torch.float32, 4100
CPU = torch.device("cpu")
ASSEMBLERS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = {90: "ptxas", 100: "ptxas-blackwell"}  # compute capability: Triton's assembler for it


class NoGpu:
    """Stands in for the driver of a GPU with this compute capability, and launches nothing."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # compiled kernels are cached by device

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture(params=[90, *full(100)])
def capability(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> int:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", NoGpu(request.param))
    return request.param


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def rotate(heads: int, head_size: int, dtype: torch.dtype = BF16) -> Launch:
    table = empty(ROWS, 1, head_size // 2, dtype=FP32)
    x, out = (empty(ROWS, heads, head_size, dtype=dtype) for _ in range(2))
    return launch.rotate(x, table, table, out, inverse=True)


def gated(width: int, gelu: bool, dtype: torch.dtype = BF16) -> Launch:
    return launch.gated(*(empty(ROWS, width, dtype=dtype) for _ in range(3)), gelu=gelu)


def gated_backward(width: int, gelu: bool, dtype: torch.dtype = BF16) -> Launch:
    return launch.gated_backward(*(empty(ROWS, width, dtype=dtype) for _ in range(5)), gelu=gelu)


def norm(width: int, dtype: torch.dtype = BF16) -> Launch:
    x, weight = empty(ROWS, width, dtype=dtype), empty(width, dtype=dtype)
    return launch.norm(x, weight, x, empty(ROWS, dtype=FP32), 1e-5)


def norm_backward(width: int, dtype: torch.dtype = BF16, *, rows: int = ROWS) -> Launch:
    x, weight = empty(rows, width, dtype=dtype), empty(width, dtype=dtype)
    sums = empty(launch.norm_programs(rows, width), width, dtype=FP32)
    return launch.norm_backward(x, x, weight, empty(rows, dtype=FP32), x, sums)


def sum_uses(heads: int, head_size: int, dtype: torch.dtype = BF16) -> Launch:
    grads = empty(5000, heads, head_size, dtype=dtype)
    inverse = empty(3, ROWS, dtype=torch.int64)
    return launch.sum_uses(grads, grads, inverse, empty(ROWS, 2, heads, head_size, dtype=FP32))


def compiled(of: Launch) -> Any:
    return of.kernel.warmup(*of.arguments, grid=of.grid, **of.options)


def resources(ptx: str, capability: int, folder: Path) -> str:
    """Returns what the assembler reports of registers and spills."""
    assembler = ASSEMBLERS / TARGETS[capability]
    if not assembler.exists():
        assembler = ASSEMBLERS / "ptxas"
    target = re.search(r"\.target (sm_\w+)", ptx)
    assert target is not None
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [assembler, "-v", f"-arch={target[1]}", source, "-o", folder / "kernel.cubin"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stderr


def accesses(ptx: str) -> Counter[str]:
    """Counts the reads and writes of global memory, by width."""
    return Counter(re.findall(r"(?:ld|st)\.global\S*", ptx))


# What a kernel reads or writes once for each row, one number at a time.
SCALARS = {norm: {"st.global.b32"}, norm_backward: {"ld.global.b32"}}
# A narrow weight and its sums, read and written once a program, have less than 16 bytes a thread.
NARROW = {f"{way}.global.{size}" for way in ("ld", "st") for size in ("b16", "b32", "v2.b32")}
# The table of uses: a thread reads the entry of its row.
SCALARS[sum_uses] = {"ld.global.b64"}

PRESETS = [  # each kernel at the sizes of 550M to 405B models, by tp rank
    (rotate, (16, 64)),
    (rotate, (32, 128)),
    (rotate, (1, 128)),
    (gated, (1376, False)),
    (gated, (11008, False)),
    (gated, (10240, True)),
    (gated_backward, (1376, False)),
    (gated_backward, (11008, False)),
    (gated_backward, (2560, True)),
    (norm, (128,)),
    (norm, (256,)),
    (norm, (1024,)),
    (norm, (4096,)),
    (norm, (16384,)),
    (norm_backward, (64,)),
    (norm_backward, (128,)),
    (norm_backward, (256,)),
    (norm_backward, (1024,)),
    (norm_backward, (4096,)),
    (norm_backward, (8192,)),
    (norm_backward, (16384,)),
    (sum_uses, (1, 128)),
    (sum_uses, (32, 128)),
]


@pytest.mark.parametrize("dtype", [BF16, *full(FP32)], ids=str)
@pytest.mark.parametrize(("make", "sizes"), PRESETS)
def test_no_spills_and_vectors_of_16_bytes(
    capability: int, make: Any, sizes: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    kernel = compiled(make(*sizes, dtype))
    assert kernel.asm["cubin"]
    ptx = kernel.asm["ptx"]
    found = accesses(ptx)
    is_narrow = make in (norm, norm_backward) and sizes[0] < 1024
    scalars = NARROW if is_narrow else SCALARS.get(make, set())
    assert {name for name in found if ".v4.b32" not in name} <= scalars, found
    assert any(name.startswith("ld.") for name in found if ".v4." in name)
    assert any(name.startswith("st.") for name in found if ".v4." in name)
    report = resources(ptx, capability, tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in report, report
    if dtype == BF16 and make is not sum_uses:  # rounded to nearest even, as the plain code does
        assert "cvt.rn.bf16" in ptx


def test_numbers_of_rows_compile_nothing_new(capability: int) -> None:
    """Every micro-batch has its own numbers of rows, keys and uses, some multiples of 16, and its
    table of uses begins anywhere in a buffer of index tensors (a pointer of meta tensors is 0).
    """
    made: list[object] = []
    offsets: set[int] = set()
    for rows, uses in ((16, 1), (17, 2), (1, 3), (4096, 16)):
        index = {"kv_index 0": np.zeros(rows, np.int64), "inverse 0": np.zeros((uses, rows), int)}
        x, weight = empty(rows, 64), empty(64)
        table, grads = empty(rows, 1, 8, dtype=FP32), empty(3 * rows, 2, 32)
        of_rows, inverse = empty(rows, dtype=FP32), to_device(index, CPU)["inverse 0"]
        sums = empty(launch.norm_programs(rows, 64), 64, dtype=FP32)
        heads = x.view(rows, 4, 16)
        launches = (
            launch.rotate(heads, table, table, heads, inverse=False),
            launch.gated(x, x, x, gelu=False),
            launch.gated_backward(x, x, x, x, x, gelu=True),
            launch.norm(x, weight, x, of_rows, 1e-5),
            launch.norm_backward(x, x, weight, of_rows, x, sums),
            launch.sum_uses(grads, grads, inverse, empty(rows, 2, 2, 32, dtype=FP32)),
        )
        made.append([compiled(of).hash for of in launches])
        assert {of.kernel.__name__ for of in launches} == KERNELS
        offsets.add(inverse.data_ptr() % 16)
    assert all(hashes == made[0] for hashes in made)
    assert offsets == {0, 8}


def test_every_kernel_is_compiled_at_the_sizes_of_models() -> None:
    assert {make.__name__ + "_kernel" for make, _ in PRESETS} == KERNELS


def test_no_rows_launch_nothing() -> None:
    class Refuses:
        def __getitem__(self, grid: tuple[int, ...]) -> None:
            raise AssertionError(f"launched {grid}")

    Launch(kernel=Refuses(), grid=(0, 3), arguments=(), options={}).run()
    with pytest.raises(AssertionError, match=r"launched \(2, 3\)"):
        Launch(kernel=Refuses(), grid=(2, 3), arguments=(), options={}).run()


@pytest.mark.parametrize(
    ("width", "programs"),
    [(4096, [0, 1, 512, 512, 512]), (1024, [0, 1, 256, 512, 512]), (128, [0, 1, 32, 64, 65])],
)
def test_tiles_of_each_summing_program(width: int, programs: list[int]) -> None:
    """At most 512 programs, whatever the GPU, so that sums have one order."""
    assert [launch.norm_programs(n, width) for n in (0, 1, 512, 1024, 1025)] == programs


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_norms_of_heads_keep_two_megabytes_on_their_way(head_size: int) -> None:
    """An H100 needs as many for its bandwidth; 512 single rows of 128 would be 0.26 MB."""
    of = norm_backward(head_size, rows=32768)
    values = of.grid[0] * of.options["ROWS"] * of.options["BLOCK"]
    assert 2 * values * BF16.itemsize >= 2e6

"""Runs the fused kernels on CPU tensors, in Triton's interpreter.

A test module that imports it is skipped if Triton is missing.
"""

from typing import Any

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton, which is for Linux on x86_64")
if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7):
    pytest.skip(
        "the interpreter of Triton 3.6 fails with NumPy 2.4 in loops to a number known at run time",
        allow_module_level=True,
    )

from triton.runtime import interpreter  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from wlb.kernels.fused import kernels, launch  # noqa: E402


def interpret(patch: pytest.MonkeyPatch, *, summing_programs: int = 3) -> None:
    """Makes the custom ops of fused kernels run in the interpreter, until `patch` is undone.

    Conversions from float32 to bfloat16 are replaced: GPUs round to nearest even, but the
    interpreter truncates. Tiles are small and programs few, so that each program adds several
    tiles.
    """
    for name, kernel in vars(kernels).items():
        if isinstance(kernel, JITFunction):
            patch.setattr(kernels, name, interpreter.InterpretedFunction(kernel.fn))
    patch.setattr(kernels.tl, "sum", interpreter.InterpretedFunction(kernels.tl.sum.fn))
    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (str(source), str(target)) != ("fp32", "bf16"):
            return convert(data, source, target, mode)
        values = torch.from_numpy(np.ascontiguousarray(data, np.float32)).bfloat16()
        return values.view(torch.int16).numpy().view(np.uint16).reshape(data.shape)

    patch.setattr(interpreter, "_convert_float", rounded)
    patch.setattr(launch, "_SUMMING_PROGRAMS", summing_programs)
    patch.setattr(launch, "_NARROW_TILE", 64)

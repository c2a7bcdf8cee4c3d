"""Describes what a device computes in this study: heads, dtype, kernel, lengths, workload model."""

import argparse
from dataclasses import dataclass
from fractions import Fraction

import torch

from experiments.harness.streams import WINDOW
from experiments.paper.fig15.case import MODEL, PROFILE, TP, layer_cost
from experiments.paper.fig15.rank_times import Layout
from wlb.cost import ProfiledWorkload, load_profile
from wlb.kernels import select_backend
from wlb.plan import IntArray
from wlb.spec import AttentionBackend, ModelSpec, ParallelSpec

CPU_SCALE = Fraction(1, 16)
CPU_MODEL = ModelSpec(hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=4)
"""Model on a CPU: it has 4 heads of 16, the shape that the cpu profile was measured with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A window and a device to measure it on."""

    window: int  # context window in tokens, before scaling
    cp: int
    device: torch.device
    scale: Fraction  # factor on the window and on the lengths of documents
    profile: str = PROFILE  # name or file of the kernel profile that strategies use on CUDA

    def lengths(self, pieces: IntArray) -> IntArray:
        """Returns the scaled lengths, each at least one token."""
        top, bottom = self.scale.numerator, self.scale.denominator
        return -(-pieces * top // bottom)

    def cost(self) -> ProfiledWorkload:
        """Returns the workload by which `adaptive`, `hybrid` and `balanced` choose."""
        if self.device.type == "cuda":
            return layer_cost(
                window=self.window, cp=self.cp, profile=self.profile, backend=self.layout().backend
            )
        return ProfiledWorkload(
            model=CPU_MODEL,
            parallel=ParallelSpec(tp=1, cp=self.cp, pp=1, dp=1),
            profile=load_profile("cpu"),
            micro_batch_tokens=max(1, int(self.window * self.scale)),
        )

    def layout(self) -> Layout:
        """Returns the layout of attention: the 7B model in bf16 on CUDA, CPU_MODEL on a CPU."""
        is_cuda = self.device.type == "cuda"
        dtype = torch.bfloat16 if is_cuda else torch.float32
        model = MODEL if is_cuda else CPU_MODEL
        tp = TP.get(self.window, TP[WINDOW]) if is_cuda else 1
        backend = select_backend(
            AttentionBackend.AUTO, device=self.device, dtype=dtype, head_size=model.head_size
        )
        return Layout(
            num_heads=model.num_heads // tp,
            num_kv_heads=model.num_kv_heads // tp,
            head_dim=model.head_size,
            dtype=dtype,
            device=self.device,
            backend=str(backend),
        )


def scale_of(text: str) -> Fraction:
    """Parses the option --scale, such as 1/16 or 0.0625."""
    try:
        scale = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r} is no fraction, such as 1/16") from None
    if not 0 < scale <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and at most 1")
    return scale


def describe(layout: Layout) -> str:
    dtype = str(layout.dtype).removeprefix("torch.")
    return f"{layout.num_heads} heads of {layout.head_dim}, {dtype}, {layout.backend}"

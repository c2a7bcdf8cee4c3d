"""Compares every attention kernel that can compute here with the definition in float64.

The cases: several documents, CP-like tails with fewer queries than keys, the run's heads, grouped
heads, and sliding windows and caps if the kernel supports them. Output and gradients are compared.

A kernel passes if its root mean square error is at most twice, and its largest error at most three
times, the error of the definition computed in the kernel's dtype. wlb's own tests use the same
tolerance. **No kernel was examined on a GPU yet.**
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wlb.doctor.facts import Patient
from wlb.doctor.finding import Finding, failed, passed, skipped, warned
from wlb.kernels import Scores, Segments, attend, select_backend
from wlb.kernels.op import kernel_name
from wlb.kernels.segments import PLAIN
from wlb.parallel.build import compute_dtype, kernel_of
from wlb.plan import UserError
from wlb.spec.run import AttentionBackend

MOST_HEADS = 4  # most query heads that are tested
# How many times the definition's error in the same dtype a kernel's error may be: root mean square
# error, and largest error.
MEAN_TIMES, MAX_TIMES = 2.0, 3.0
FLOOR_EPS = 16  # error that is always allowed, as a multiple of eps (at most float32's)
# Numbers of queries and keys of each document. The LONG ones are left out if quick.
LENGTHS = [(5, 5), (33, 33), (17, 30), (1, 61), (128, 128), (10, 140)]
LONG = [(600, 600), (257, 900)]
WINDOW, CAP = Scores(sliding=40), Scores(softcap=2.0)
"""A window that ends within documents, and a cap in the range of these scores."""
# What a user can do about a wrong kernel.
REMEDY = "kernels.attention = {other} computes the run meanwhile; report the error with versions"


class Heads(NamedTuple):
    """Numbers and size of attention heads."""

    num_heads: int
    num_kv_heads: int
    head_size: int

    @property
    def text(self) -> str:
        """Description for messages."""
        return f"{self.num_heads} heads of {self.head_size}, {self.num_kv_heads} of keys"


class Deviation(NamedTuple):
    """Error of one tensor of a kernel's result."""

    what: str  # the tensor and the case
    times: float  # its error over the allowed error; right if at most 1
    eps: float  # its error over the tensor's root mean square, in multiples of the dtype's eps


def kernels(patient: Patient) -> list[Finding]:
    """Check the kernel that the run would use.

    Unless quick, every other kernel that can compute here is checked too.
    """
    spec, device = patient.spec, patient.device
    try:
        choice = kernel_of(spec, device)
    except UserError as error:
        return [failed("attention kernel", str(error), "kernels.attention = auto")]
    found = [passed("attention kernel", choice.line)]
    names = [choice.backend]
    if not patient.is_quick:
        others = (name for name in AttentionBackend if name != AttentionBackend.AUTO)
        names += [name for name in others if name != choice.backend and _computes(name, patient)]
    for name in names:
        found.append(
            examine_kernel(name, patient, compute_dtype(spec), is_chosen=name == choice.backend)
        )
    return found


def _computes(name: AttentionBackend, patient: Patient) -> bool:
    """Return whether a kernel can compute the run on this device."""
    kernels = replace(patient.spec.kernels, attention=name)
    try:
        kernel_of(replace(patient.spec, kernels=kernels), patient.device)
    except UserError:
        return False
    return True


def examine_kernel(
    name: AttentionBackend, patient: Patient, dtype: torch.dtype, *, is_chosen: bool
) -> Finding:
    """Compare an attention kernel with the definition of attention.

    Args:
        name: The kernel.
        patient: Inputs of the check.
        dtype: Dtype of the run.
        is_chosen: Whether the run uses this kernel. Its error is then a fail, else a warning.
    """
    check = f"attention {name}"
    sdpa = AttentionBackend.SDPA
    other = AttentionBackend.TORCH_VARLEN if name == sdpa else sdpa
    lengths = LENGTHS if patient.is_quick else LENGTHS + LONG
    say, remedy = failed if is_chosen else warned, REMEDY.format(other=other)
    kernel = kernel_name(name, deterministic=patient.spec.kernels.deterministic)
    worst: list[Deviation] = []
    try:
        run, *others = _heads_of(patient)
        how: dict[str, Any] = {"dtype": dtype, "device": patient.device}
        for heads in (run, *others):
            worst += deviations(kernel, heads, lengths, **how)
        for scores in _other_scores(name, patient, dtype):
            worst += deviations(kernel, run, lengths, scores=scores, **how)
    except torch.OutOfMemoryError as error:
        return skipped(check, f"no memory to compare: {str(error).splitlines()[0]}")
    # Kernel packages raise exceptions of many classes.
    except Exception as error:
        return say(check, f"{type(error).__name__}: {str(error).strip()[:300]}", remedy)
    # Negated, so that NaN counts as wrong.
    wrong = [d for d in worst if not d.times <= 1]
    top = max(wrong or worst, key=lambda d: np.nan_to_num(d.times, nan=np.inf))
    found = (
        f"{str(dtype).removeprefix('torch.')} on {patient.device.type}: error of {top.what} is "
        f"{top.times:.2f} of the allowed error ({top.eps:.1f} eps)"
    )
    if wrong:
        return say(check, f"WRONG: {found}", remedy)
    return passed(check, found)


def _other_scores(name: AttentionBackend, patient: Patient, dtype: torch.dtype) -> list[Scores]:
    """Return the sliding window and the cap to test, if the kernel supports them.

    If quick, only what the run's layers use is tested.
    """
    model = patient.spec.model
    is_used_by_layers = {WINDOW: model.num_sliding_layers > 0, CAP: model.attention_softcap > 0}
    found: list[Scores] = []
    for scores, is_used in is_used_by_layers.items():
        if patient.is_quick and not is_used:
            continue
        try:
            select_backend(
                name,
                device=patient.device,
                dtype=dtype,
                head_size=model.head_size,
                deterministic=patient.spec.kernels.deterministic,
                scores=scores,
            )
        except UserError:
            continue
        found.append(scores)
    return found


def _heads_of(patient: Patient) -> list[Heads]:
    """Return the heads to test: a few of the run's heads of a TP rank, and grouped heads."""
    model, tp = patient.spec.model, patient.spec.parallel.tp
    num_kv = model.with_kv_copies(tp).num_kv_heads
    group = max(1, model.num_heads // num_kv)
    kv = min(max(1, num_kv // tp), max(1, MOST_HEADS // group))
    run = Heads(kv * group, kv, model.head_size)
    return list(dict.fromkeys([run, Heads(4, 2, model.head_size)]))


def deviations(
    name: str,
    heads: Heads,
    lengths: Sequence[tuple[int, int]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    scores: Scores = PLAIN,
) -> list[Deviation]:
    """Measure the errors of a kernel's output and of the gradients of q, k and v.

    Args:
        name: The kernel.
        heads: Numbers and size of heads.
        lengths: Queries and keys of each document.
        dtype: Dtype of the tensors.
        device: This rank's device.
        scores: Sliding window and cap.
    """
    queries, keys = zip(*lengths, strict=True)
    segments = Segments.from_offsets(
        _offsets(queries), _offsets(keys), device=device, scores=scores
    )
    given = ", ".join(text for text in (heads.text, str(scores)) if text)
    tensors = _inputs(heads, sum(queries), sum(keys), dtype, device)
    # The same case three times: in float64, by the definition in the kernel's dtype, and by the
    # kernel.
    exact = _results([x.double() for x in tensors], segments, "reference")
    same = _results(tensors, segments, "reference")
    got = _results(tensors, segments, name)
    eps = torch.finfo(dtype).eps
    floor_eps = FLOOR_EPS * min(eps, torch.finfo(torch.float32).eps)
    found: list[Deviation] = []
    for what, x, reference, truth in zip(
        ("output", "dq", "dk", "dv"), got, same, exact, strict=True
    ):
        floor = floor_eps * max(1.0, float(truth.abs().max()))
        error, usual = (x - truth).abs(), (reference - truth).abs()
        times = max(
            _rms(error) / (MEAN_TIMES * _rms(usual) + floor),
            float(error.max()) / (MAX_TIMES * float(usual.max()) + floor),
            key=lambda value: np.nan_to_num(value, nan=np.inf),
        )
        found.append(Deviation(f"{what}, {given},", times, _rms(error) / eps / _rms(truth)))
    return found


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _inputs(
    heads: Heads, queries: int, keys: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Return q, k, v and the gradient of the output, the same on every rank."""
    random = torch.Generator().manual_seed(0)
    q, kv = (queries, heads.num_heads), (keys, heads.num_kv_heads)
    return [
        torch.randn(*shape, heads.head_size, generator=random).to(dtype).to(device)
        for shape in (q, kv, kv, q)
    ]


def _results(tensors: list[Tensor], segments: Segments, backend: str) -> list[Tensor]:
    """Return output, dq, dk and dv of a kernel, in float64."""
    *qkv, grad = tensors
    q, k, v = (x.detach().clone().requires_grad_() for x in qkv)
    out = attend(q, k, v, segments, backend=backend)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    return [x.detach().double() for x in (out, *grads)]


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())

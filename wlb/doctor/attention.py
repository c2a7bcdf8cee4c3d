"""Compares each attention kernel that works on this machine with attention's definition in float64.

The test cases have several documents, segments with fewer queries than keys (as on CP ranks), the
run's heads, grouped heads, and sliding windows and softcaps if the kernel supports them. Output and
gradients are compared.

The definition is also computed in the kernel's dtype, and that error sets the limits: a kernel
passes if its root mean square error is at most twice the definition's, and its largest error at
most three times the definition's. wlb's tests use the same limits. **No kernel has been examined on
a GPU yet.**
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

MOST_HEADS = 4  # number of the run's query heads that are tested at most, to save time
# The allowed root mean square error (MEAN_TIMES) and the allowed largest error (MAX_TIMES) of a
# kernel, as multiples of the error that the definition of attention has in the same dtype.
MEAN_TIMES, MAX_TIMES = 2.0, 3.0
# An error of this many eps is always allowed, because the definition may happen to be exact. Eps is
# the dtype's or float32's, whichever is smaller.
FLOOR_EPS = 16
# Numbers of queries and keys of each tested document. A quick examination leaves out LONG.
LENGTHS = [(5, 5), (33, 33), (17, 30), (1, 61), (128, 128), (10, 140)]
LONG = [(600, 600), (257, 900)]
WINDOW, CAP = Scores(sliding=40), Scores(softcap=2.0)
"""The tested sliding window and softcap.

The window of 40 tokens is shorter than half of the tested documents, and the cap of 2.0 is in the
range of their scores, so that both change the result."""
# Remedy for a wrong kernel: what the user can do.
REMEDY = (
    "set kernels.attention = {other} until this is fixed, and report the error with all versions"
)


class Heads(NamedTuple):
    """Numbers and size of attention heads."""

    num_heads: int  # query heads
    num_kv_heads: int  # heads of keys and values
    head_size: int  # elements of a head

    @property
    def text(self) -> str:
        """Description of the heads, for messages."""
        return f"{self.num_heads} heads of {self.head_size}, {self.num_kv_heads} of keys"


class Deviation(NamedTuple):
    """Error of one tensor that a kernel computed: the output or a gradient."""

    what: str  # names the tensor and the test case, for messages
    times: float  # the error over the allowed error; the tensor is right if this is at most 1
    # Root mean square error over the tensor's root mean square, in multiples of the dtype's eps.
    eps: float


def kernels(patient: Patient) -> list[Finding]:
    """Check the attention kernel that the run would use, and return one finding per kernel.

    A full examination also checks every other attention kernel that can compute the run here.
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
        is_chosen: Whether the run would use this kernel. If so, a wrong result is a fail, else a
            warning.
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
        return skipped(check, f"not enough memory for the comparison: {str(error).splitlines()[0]}")
    # Kernel packages raise exceptions of many classes.
    except Exception as error:
        return say(check, f"{type(error).__name__}: {str(error).strip()[:300]}", remedy)
    # The comparison is negated, so that NaN counts as wrong.
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
    """Return the sliding window and the softcap to test, if the kernel supports them.

    A quick examination only tests what the run's layers use.
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
    """Return two sets of heads to test: a few heads of the run, and four grouped-query heads.

    The heads of the run have the run's head size and group size, and are at most as many as a TP
    rank has.
    """
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
        lengths: Numbers of queries and keys of each document.
        dtype: Dtype of the tensors.
        device: This rank's device.
        scores: Sliding window and softcap of the scores.
    """
    queries, keys = zip(*lengths, strict=True)
    segments = Segments.from_offsets(
        _offsets(queries), _offsets(keys), device=device, scores=scores
    )
    given = ", ".join(text for text in (heads.text, str(scores)) if text)
    tensors = _inputs(heads, sum(queries), sum(keys), dtype, device)
    # Compute the same case three times: by the definition in float64 (`exact`), by the definition
    # in the kernel's dtype (`same`), and by the kernel (`got`).
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
    """Draw q, k, v and the gradient of the output at random, the same on every rank.

    `queries` and `keys` are the numbers of queries and keys of all documents together.
    """
    random = torch.Generator().manual_seed(0)
    q, kv = (queries, heads.num_heads), (keys, heads.num_kv_heads)
    return [
        torch.randn(*shape, heads.head_size, generator=random).to(dtype).to(device)
        for shape in (q, kv, kv, q)
    ]


def _results(tensors: list[Tensor], segments: Segments, backend: str) -> list[Tensor]:
    """Return the output of a kernel and its gradients dq, dk and dv, converted to float64.

    `tensors` are q, k, v and the gradient of the output.
    """
    *qkv, grad = tensors
    q, k, v = (x.detach().clone().requires_grad_() for x in qkv)
    out = attend(q, k, v, segments, backend=backend)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    return [x.detach().double() for x in (out, *grads)]


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())

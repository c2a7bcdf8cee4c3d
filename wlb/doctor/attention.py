"""Compares each attention kernel that works on this machine with attention's definition in float64.

Each test case has several documents. Some have fewer queries than keys, as on CP ranks. The cases
cover heads like the run's, grouped-query heads and, if the kernel supports them, a sliding window
and a softcap. The output and the gradients are compared.

The definition is also computed in the kernel's dtype, which has an error itself. A kernel passes if
its root mean square error is at most twice that of the definition, and its largest error at most
three times that of the definition. wlb's tests use the same limits. **No kernel has been examined
on a GPU yet.**
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

# Most query heads that are tested, to save time. If more query heads share one key-value head, all
# of these are tested.
MOST_HEADS = 4
# The allowed root mean square error (MEAN_TIMES) and the allowed largest error (MAX_TIMES) of a
# kernel, as multiples of the error that the definition of attention has in the same dtype.
MEAN_TIMES, MAX_TIMES = 2.0, 3.0
# An error of this many eps is always allowed. Otherwise no error would be allowed where the
# definition, computed in the kernel's dtype, happens to be exact. Eps is the dtype's or float32's,
# whichever is smaller.
FLOOR_EPS = 16
# Numbers of queries and keys of each tested document. A quick examination leaves out LONG.
LENGTHS = [(5, 5), (33, 33), (17, 30), (1, 61), (128, 128), (10, 140)]
LONG = [(600, 600), (257, 900)]
WINDOW, CAP = Scores(sliding=40), Scores(softcap=2.0)
"""The tested sliding window and softcap.

At least half of the tested documents are longer than the window of 40 tokens, and attention scores
are about as large as the cap of 2.0. So both change the result."""
# What the user can do if a kernel computes wrong results.
REMEDY = (
    "set kernels.attention = {other} until this is fixed, and report this line to wlb, with the "
    "versions of torch, the driver and the kernel's package"
)


class Heads(NamedTuple):
    """Numbers and size of attention heads."""

    num_heads: int  # number of query heads
    num_kv_heads: int  # number of key-value heads
    head_size: int  # number of elements of a head

    @property
    def text(self) -> str:
        """Numbers and size of the heads in words, for messages."""
        return f"{self.num_heads} query and {self.num_kv_heads} key heads of size {self.head_size}"


class Deviation(NamedTuple):
    """Error of one tensor that a kernel computed: the output or a gradient."""

    what: str  # name of the tensor and description of the test case, for messages
    times: float  # the error divided by the allowed error; at most 1 if the tensor is right
    # Root mean square error, divided by the tensor's root mean square and by the dtype's eps.
    eps: float


def kernels(patient: Patient) -> list[Finding]:
    """Check the attention kernel that the run would use on this device.

    Unless `Patient.is_quick` is true, every other attention kernel that can compute the run on this
    device is checked too.

    Returns:
        A finding that names the run's kernel and why it is used, then one finding per checked
            kernel. A single failed finding if no kernel can compute the run.
    """
    spec, device = patient.spec, patient.device
    try:
        choice = kernel_of(spec, device)
    except UserError as error:
        return [failed("attention kernel", str(error), "set kernels.attention = auto")]
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
    """Return whether the attention kernel `name` can compute the run on this rank's device."""
    kernels = replace(patient.spec.kernels, attention=name)
    try:
        kernel_of(replace(patient.spec, kernels=kernels), patient.device)
    except UserError:
        return False
    return True


def examine_kernel(
    name: AttentionBackend, patient: Patient, dtype: torch.dtype, *, is_chosen: bool
) -> Finding:
    """Compare an attention kernel's results with the definition of attention in all test cases.

    Args:
        name: The kernel.
        patient: The run, this rank's device and the facts of all ranks.
        dtype: Dtype in which the run computes attention.
        is_chosen: Whether the run would use this kernel. A wrong result then has the verdict fail,
            otherwise the verdict warn.
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
    # Catch every exception, because kernel packages raise exceptions of many classes.
    except Exception as error:
        return say(check, f"{type(error).__name__}: {str(error).strip()[:300]}", remedy)
    # `not ... <= 1` instead of `> 1` also finds NaN.
    wrong = [d for d in worst if not d.times <= 1]
    top = max(wrong or worst, key=lambda d: np.nan_to_num(d.times, nan=np.inf))
    found = (
        f"{str(dtype).removeprefix('torch.')} on {patient.device.type}: error of {top.what} is "
        f"{top.times:.2f} times the allowed error (root mean square {top.eps:.1f} eps)"
    )
    if wrong:
        return say(check, f"WRONG: {found}", remedy)
    return passed(check, found)


def _other_scores(name: AttentionBackend, patient: Patient, dtype: torch.dtype) -> list[Scores]:
    """Return the changes of attention scores to test: a sliding window and a softcap.

    A change that the kernel does not support is left out. If `Patient.is_quick` is true, a change
    that no layer of the run uses is left out too.
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
    """Return the sets of attention heads to test: one like the run's, and one with grouped queries.

    The first has as many query heads per key-value head as the run, but only a few key-value heads
    (`MOST_HEADS`), and at most as many as a TP rank has. The second has four query heads and two
    key-value heads. Both have the run's head size. If they are equal, one is returned.
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
    """Measure the errors of a kernel's output and of its gradients of q, k and v in one test case.

    Args:
        name: The kernel.
        heads: Numbers and size of heads.
        lengths: For each document of the test case, its numbers of queries and of keys.
        dtype: Dtype of the tensors.
        device: This rank's device.
        scores: Sliding window and softcap of the scores.

    Returns:
        One record for each of: output, dq, dk and dv.
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
    """Draw q, k, v and the gradient of the output at random. All ranks draw the same values.

    `queries` and `keys` are the total numbers of queries and of keys in all documents.
    """
    random = torch.Generator().manual_seed(0)
    q, kv = (queries, heads.num_heads), (keys, heads.num_kv_heads)
    return [
        torch.randn(*shape, heads.head_size, generator=random).to(dtype).to(device)
        for shape in (q, kv, kv, q)
    ]


def _results(tensors: list[Tensor], segments: Segments, backend: str) -> list[Tensor]:
    """Run a kernel forward and backward, and return output, dq, dk and dv in float64.

    `tensors` are q, k, v and the gradient of the output.
    """
    *qkv, grad = tensors
    q, k, v = (x.detach().clone().requires_grad_() for x in qkv)
    out = attend(q, k, v, segments, backend=backend)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    return [x.detach().double() for x in (out, *grads)]


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())

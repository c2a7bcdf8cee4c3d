"""Tests that right kernels pass and that planted wrong ones are found and named."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.doctor.patient import facts, patient
from wlb.doctor import attention
from wlb.doctor.attention import Deviation, examine_kernel, kernels
from wlb.doctor.finding import Verdict
from wlb.kernels import BACKENDS, Scores
from wlb.plan import UserError
from wlb.spec import AttentionBackend

SDPA = AttentionBackend.SDPA


def raising(*_: Any) -> Any:
    raise RuntimeError("no kernel image is available for execution on the device")


class Planted:
    """Is the CPU's kernel with one fault."""

    name, takes_key_rows = "sdpa", False

    def __init__(self, fault: str) -> None:
        self.fault, self.right = fault, BACKENDS["sdpa"]

    def forward(self, q: Any, k: Any, v: Any, segments: Any) -> Any:
        if self.fault == "raises":
            raising()
        out, lse = self.right.forward(q, k, v, segments)
        if self.fault == "a token of a late document":
            out[-1] = out[-2]
        if self.fault == "not a number":
            out[0, 0, 0] = float("nan")
        return out, lse

    def backward(self, grad: Any, saved: Any, segments: Any) -> Any:
        dq, dk, dv = self.right.backward(grad, saved, segments)
        if self.fault == "a gradient of grouped heads":
            dk = dk / 2
        if self.fault == "a slightly wrong scale":
            dq = dq * (1 + 3e-5)
        return dq, dk, dv


FAULTS = {
    "a token of a late document": "WRONG: float32 on cpu: error of output",
    "not a number": "error of output",
    "a gradient of grouped heads": "error of dk",
    "a slightly wrong scale": "error of dq",
    "raises": "RuntimeError: no kernel image is available",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_cpu_s_kernel_passes(dtype: torch.dtype) -> None:
    found = examine_kernel(SDPA, patient(is_quick=False), dtype, is_chosen=True)
    assert found.verdict == Verdict.PASS, found
    assert re.search(r"is \d\.\d\d times the allowed error .* eps\)", found.found)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setitem(BACKENDS, "sdpa", Planted(fault))
    found = examine_kernel(SDPA, patient(), torch.float32, is_chosen=True)
    assert (found.check, found.verdict) == ("attention sdpa", Verdict.FAIL)
    assert FAULTS[fault] in found.found
    assert "kernels.attention = torch_varlen" in found.remedy
    not_taken = examine_kernel(SDPA, patient(), torch.float32, is_chosen=False)
    assert not_taken.verdict == Verdict.WARN


class IgnoresScores(Planted):
    """Computes all scores as plain ones, as a kernel that does not know a window would."""

    def forward(self, q: Any, k: Any, v: Any, segments: Any) -> Any:
        return self.right.forward(q, k, v, replace(segments, scores=Scores()))

    def backward(self, grad: Any, saved: Any, segments: Any) -> Any:
        return self.right.backward(grad, saved, replace(segments, scores=Scores()))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"model__sliding_window": 512}, "a sliding window of 40"),
        ({"model__attention_softcap": 50.0}, "scores capped at 2"),
    ],
)
def test_windows_and_caps_are_compared_quickly_where_the_run_has_them(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], said: str
) -> None:
    of_run = patient(**keys)
    assert examine_kernel(SDPA, of_run, torch.float32, is_chosen=True).verdict == Verdict.PASS
    monkeypatch.setitem(BACKENDS, "sdpa", IgnoresScores(""))
    found = examine_kernel(SDPA, of_run, torch.float32, is_chosen=True)
    assert found.verdict == Verdict.FAIL
    assert said in found.found
    plain = examine_kernel(SDPA, patient(), torch.float32, is_chosen=True)
    assert plain.verdict == Verdict.PASS
    whole = examine_kernel(SDPA, patient(is_quick=False), torch.float32, is_chosen=True)
    assert whole.verdict == Verdict.FAIL


def test_scores_that_a_kernel_cannot_compute_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(name: str, *, scores: Scores, **_: Any) -> str:
        if scores.softcap:
            raise UserError("torch's kernel does not support a cap on scores")
        return name

    monkeypatch.setattr(attention, "select_backend", asked)
    found = attention._other_scores(SDPA, patient(is_quick=False), torch.float32)
    assert found == [attention.WINDOW]


def test_all_kernels_that_can_compute_are_examined_unless_quick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    able = {SDPA, AttentionBackend.TORCH_VARLEN}
    examined: list[tuple[str, bool]] = []

    def noted(name: str, *_: Any, is_chosen: bool) -> Any:
        examined.append((name, is_chosen))
        return attention.passed(name, "")

    monkeypatch.setattr(attention, "_computes", lambda name, _: name in able)
    monkeypatch.setattr(attention, "examine_kernel", noted)
    kernels(patient())
    assert examined == [("sdpa", True)]
    examined.clear()
    found = kernels(patient(is_quick=False))
    assert examined == [("sdpa", True), ("torch_varlen", False)]
    assert found[0].found.startswith("attention kernel sdpa (auto; torch.float32 on cpu")


def test_the_deterministic_kernel_is_examined_where_the_run_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        attention,
        "deviations",
        lambda kernel, *_, **__: asked.append(kernel) or [Deviation("dq", 0.1, 1.0)],
    )
    found = kernels(patient(kernels__deterministic="true"))
    assert "sdpa, deterministic" in found[0].found
    assert set(asked) == {"sdpa_deterministic"}


def test_a_kernel_that_cannot_compute_the_run_fails() -> None:
    (found,) = kernels(patient(kernels__attention="torch_varlen"))
    assert found.verdict == Verdict.FAIL
    assert "cannot be used for this run" in found.found


def test_heads_are_those_of_a_tp_rank() -> None:
    seven = patient(facts(), preset="7b_128k")  # 32 heads of 128 over 8 TP ranks
    assert [heads[:] for heads in attention._heads_of(seven)] == [(4, 4, 128), (4, 2, 128)]
    grouped = patient(facts(), preset="70b_128k")  # 64 heads, 8 of keys, over 16 TP ranks
    run = attention._heads_of(grouped)[0]
    assert run.num_heads == run.num_kv_heads * 8 or run.num_heads == run.num_kv_heads

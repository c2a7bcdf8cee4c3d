"""Tests which backend is chosen on which machine; GPUs and packages are made up."""

import pytest
import torch

from tests.words import lacks
from wlb.kernels.flash import FLASH2, FLASH3, FLASH4
from wlb.kernels.op import BACKENDS
from wlb.kernels.package import KernelPackage
from wlb.kernels.segments import Scores
from wlb.kernels.select import AUTO_ORDER, choose_backend, select_backend
from wlb.plan import UserError
from wlb.spec.run import AttentionBackend

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
AUTO = AttentionBackend.AUTO
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FLASH = {2: FLASH2, 3: FLASH3, 4: FLASH4}
ALL = (2, 3, 4)


def machine(monkeypatch, capability: tuple[int, int] | None, installed: tuple[int, ...]) -> None:
    """Plays a machine with this GPU (None: without) and these FlashAttention packages."""
    distributions = {FLASH[i].package.distribution for i in installed}

    def missing(package: KernelPackage) -> str | None:
        name = package.distribution
        return None if name in distributions else f"package {name} is not installed"

    monkeypatch.setattr(KernelPackage, "missing", missing)
    monkeypatch.setattr(KernelPackage, "problem", missing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


HOPPER, BLACKWELL, AMPERE, TURING = (9, 0), (10, 0), (8, 0), (7, 5)
CHOICES = [
    (HOPPER, ALL, BF16, 128, "flash_attention_3"),
    (HOPPER, ALL, FP16, 128, "flash_attention_3"),
    (HOPPER, (2, 4), BF16, 128, "flash_attention_4"),
    (HOPPER, (2,), BF16, 128, "torch_varlen"),
    (HOPPER, (), BF16, 128, "torch_varlen"),
    (HOPPER, ALL, BF16, 256, "flash_attention_3"),
    (HOPPER, ALL, BF16, 20, "sdpa"),
    (HOPPER, ALL, FP32, 128, "sdpa"),
    (BLACKWELL, ALL, BF16, 128, "flash_attention_4"),
    (BLACKWELL, ALL, BF16, 192, "torch_varlen"),
    (BLACKWELL, (2, 3), BF16, 128, "torch_varlen"),
    (AMPERE, ALL, BF16, 128, "torch_varlen"),
    ((12, 0), ALL, BF16, 128, "torch_varlen"),
    (TURING, ALL, FP16, 128, "sdpa"),
    (None, ALL, BF16, 128, "torch_varlen"),
]


@pytest.mark.parametrize(("capability", "installed", "dtype", "head_size", "expected"), CHOICES)
def test_auto_on_cuda(monkeypatch, capability, installed, dtype, head_size, expected):
    machine(monkeypatch, capability, installed)
    assert select_backend(AUTO, device=CUDA, dtype=dtype, head_size=head_size) == expected


WINDOW, CAP = Scores(sliding=4096), Scores(sliding=4096, softcap=50.0)
SCORED_CHOICES = [
    (HOPPER, ALL, WINDOW, "flash_attention_3"),
    (HOPPER, (2, 4), WINDOW, "flash_attention_4"),
    (BLACKWELL, ALL, WINDOW, "flash_attention_4"),
    (HOPPER, ALL, CAP, "flash_attention_3"),
    (HOPPER, (2, 4), CAP, "flash_attention_4"),
    (BLACKWELL, ALL, CAP, "flash_attention_4"),
    (AMPERE, (2,), CAP, "flash_attention_2"),
    (AMPERE, (), CAP, "sdpa"),
    (None, (), CAP, "sdpa"),
]


@pytest.mark.parametrize(("capability", "installed", "scores", "expected"), SCORED_CHOICES)
def test_auto_takes_a_kernel_with_windows_and_caps(
    monkeypatch, capability, installed, scores, expected
):
    machine(monkeypatch, capability, installed)
    made = select_backend(AUTO, device=CUDA, dtype=BF16, head_size=128, scores=scores)
    assert made == expected


def test_kernels_without_caps_are_refused_by_name(monkeypatch):
    machine(monkeypatch, BLACKWELL, ALL)
    asked = {"device": CUDA, "dtype": BF16, "head_size": 128, "scores": CAP}
    with pytest.raises(
        UserError, match=r"torch_varlen cannot .*torch's kernel does not support a cap"
    ):
        select_backend(AttentionBackend.TORCH_VARLEN, **asked)
    says = "flash_attention_4 cannot .*heads of 256 supports neither"
    for scores in (WINDOW, CAP):
        of_256 = asked | {"head_size": 256, "scores": scores}
        assert select_backend(AUTO, **of_256) == (
            "torch_varlen" if scores is WINDOW else "flash_attention_2"
        )
    with pytest.raises(UserError, match=says):
        select_backend(AttentionBackend.FLASH_ATTENTION_4, **of_256)
    machine(monkeypatch, HOPPER, (4,))
    assert select_backend(AUTO, **of_256) == "flash_attention_4"
    machine(monkeypatch, AMPERE, ())
    better = choose_backend(AUTO, **asked).better
    assert "flash_attention_2 is made for this GPU but cannot be used" in better


DETERMINISTIC_CHOICES = [
    (HOPPER, ALL, BF16, 128, "flash_attention_3"),
    (HOPPER, ALL, BF16, 256, "flash_attention_4"),
    (AMPERE, ALL, BF16, 128, "torch_varlen"),
    (HOPPER, ALL, FP32, 128, "sdpa"),
]


@pytest.mark.parametrize(
    ("capability", "installed", "dtype", "head_size", "expected"), DETERMINISTIC_CHOICES
)
def test_auto_with_a_deterministic_backward(
    monkeypatch, capability, installed, dtype, head_size, expected
):
    machine(monkeypatch, capability, installed)
    choice = choose_backend(AUTO, device=CUDA, dtype=dtype, head_size=head_size, deterministic=True)
    assert (choice.backend, choice.kernel) == (expected, f"{expected}_deterministic")
    assert lacks(choice.line, f"{expected}, deterministic") == []
    assert BACKENDS[choice.kernel].deterministic


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float64])
def test_auto_on_cpu_is_sdpa_and_asks_no_gpu(monkeypatch, dtype):
    machine(monkeypatch, HOPPER, ALL)

    def asked(*_):
        raise AssertionError("a CPU run must not start CUDA or import packages")

    monkeypatch.setattr(torch.cuda, "get_device_capability", asked)
    monkeypatch.setattr(KernelPackage, "problem", asked)
    assert select_backend(AUTO, device=CPU, dtype=dtype, head_size=64) == "sdpa"


@pytest.mark.parametrize("requested", AUTO_ORDER)
def test_an_explicit_choice_is_kept(monkeypatch, requested):
    machine(monkeypatch, HOPPER, ALL)
    assert select_backend(requested, device=CUDA, dtype=BF16, head_size=128) == requested


@pytest.mark.parametrize("requested", AUTO_ORDER[:-1])
@pytest.mark.parametrize(("device", "dtype"), [(CPU, BF16), (CUDA, FP32)])
def test_an_explicit_choice_is_refused_not_replaced(monkeypatch, requested, device, dtype):
    machine(monkeypatch, HOPPER, ALL)
    with pytest.raises(
        ValueError,
        match=rf"kernels\.attention = {requested} cannot be used for this run "
        rf"\({dtype} on {device.type} with heads of 64\): only bfloat16 and float16 on "
        r"CUDA are supported\. Set kernels\.attention = auto or sdpa, or set "
        r"training\.dtype = bfloat16 and train on a GPU$",
    ):
        select_backend(requested, device=device, dtype=dtype, head_size=64)


REFUSALS = [
    ("torch_varlen", HOPPER, ALL, 20, r"multiples of 8 are supported, not 20\..*auto or sdpa$"),
    ("torch_varlen", TURING, ALL, 64, r"8\.0 or newer is supported, not 7\.5\..*auto or sdpa$"),
    (
        "flash_attention_3",
        AMPERE,
        ALL,
        64,
        r"9\.x \(Hopper\) is supported, not 8\.0\..*auto or sdpa$",
    ),
    (
        "flash_attention_4",
        BLACKWELL,
        ALL,
        192,
        r"head sizes up to 128 .*, not 192\..*auto or sdpa$",
    ),
    ("flash_attention_2", None, ALL, 64, r"no GPU on this machine.*auto or sdpa$"),
    (
        "flash_attention_3",
        HOPPER,
        (2, 4),
        64,
        r"flash-attn-3 is not installed.*or install flash-attn-3 3\.0\.0 \(pip install",
    ),
    ("flash_attention_4", HOPPER, (), 64, r"install flash-attn-4 4\.0\.0b36 \(pip install 'wlb"),
    ("flash_attention_2", HOPPER, (), 64, r"install flash-attn 2\.8\.3 \(pip install"),
]


@pytest.mark.parametrize(("name", "capability", "installed", "head_size", "words"), REFUSALS)
def test_refusals_name_reason_and_remedy(
    monkeypatch, name, capability, installed, head_size, words
):
    machine(monkeypatch, capability, installed)
    with pytest.raises(ValueError, match=words):
        select_backend(AttentionBackend(name), device=CUDA, dtype=BF16, head_size=head_size)


def test_the_log_line_on_a_gpu(monkeypatch):
    machine(monkeypatch, BLACKWELL, (3,))
    line = choose_backend(AUTO, device=CUDA, dtype=BF16, head_size=128).line
    assert lacks(line, "torch_varlen", "auto", "torch.bfloat16", "cuda", 128) == []
    assert lacks(line, "flash_attention_3: only compute capability 9.x", "10.0") == []
    assert lacks(line, "flash_attention_4: ", "flash-attn-4 is not installed") == []


BETTER = [
    (HOPPER, (), AUTO, "flash_attention_3", "pip install --no-deps flash-attn-3 --index-url"),
    (HOPPER, (4,), AUTO, "flash_attention_3", "flash-attn-3 is not installed"),
    (BLACKWELL, (3,), AUTO, "flash_attention_4", "wlb-llm[flash]"),
    (
        HOPPER,
        (),
        AttentionBackend.TORCH_VARLEN,
        "flash_attention_3",
        "pip install --no-deps flash-attn-3 --index-url",
    ),
]


@pytest.mark.parametrize(("capability", "installed", "requested", "better", "install"), BETTER)
def test_the_log_names_the_kernel_made_for_a_gpu_and_how_to_install_it(
    monkeypatch, capability, installed, requested, better, install
):
    machine(monkeypatch, capability, installed)
    line = choose_backend(requested, device=CUDA, dtype=BF16, head_size=128).line
    _, warning = line.split("\n")
    assert lacks(warning, "WARNING", f"{better} is made for this GPU", install) == []


@pytest.mark.parametrize(
    ("capability", "installed", "requested"),
    [
        (HOPPER, (3,), AUTO),
        (BLACKWELL, (4,), AUTO),
        (AMPERE, (), AUTO),
        (None, (), AUTO),
        (HOPPER, ALL, AttentionBackend.TORCH_VARLEN),
    ],
)
def test_no_warning_where_no_package_is_missing(monkeypatch, capability, installed, requested):
    machine(monkeypatch, capability, installed)
    assert "\n" not in choose_backend(requested, device=CUDA, dtype=BF16, head_size=128).line


def test_the_log_line_on_cpu_gathers_equal_reasons():
    line = choose_backend(AUTO, device=CPU, dtype=FP32, head_size=64).line
    assert lacks(line, "sdpa", "auto", "torch.float32", "cpu", 64) == []
    why = "flash_attention_3, flash_attention_4, torch_varlen, flash_attention_2: only bfloat16"
    assert lacks(line, why, "CUDA") == []


def test_the_log_line_of_an_explicit_choice():
    choice = choose_backend(AttentionBackend.SDPA, device=CPU, dtype=FP32, head_size=64)
    assert choice.backend == "sdpa"
    assert lacks(choice.reason, "kernels.attention = ", "torch.float32", "cpu", 64) == []


def test_the_order_has_every_backend_once():
    assert sorted(AUTO_ORDER) == sorted(set(AttentionBackend) - {AUTO})


def test_every_backend_of_the_config_is_registered():
    assert set(AttentionBackend) - {AUTO} <= set(BACKENDS)

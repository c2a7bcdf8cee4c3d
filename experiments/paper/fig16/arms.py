"""Defines the arms of the study (packing policies, loss normalisers, forced delays) and its scales.

Every arm trains the same documents once, from the same initial weights, with a cosine schedule that
ends at the arm's last step.

All policies decide by the same prices: attention over a full window takes 1.67 times as long as the
linear layers, as in the 7B model at 128K (`experiments/harness/streams.py`). So documents of the
small model are packed, delayed and cut as those of the large model would be. Only planning uses
this ratio; the small model itself computes at another.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.harness.streams import RATIO
from experiments.paper.fig16.corpus import small_sources, source_files
from wlb.cost import KernelProfile, load_profile, save_profile, workload_of
from wlb.profile.calibrate import scaled_profile
from wlb.spec import RunSpec, load

BASELINE = "original"
CONTROL = "best-fit"
"""Control arm. It cuts as few documents as policies that balance work, but balances only tokens."""
DELAYS = (1, 8, 32, 128)
"""Forced delays in steps."""
LONG = 0.2
"""Shortest document that is delayed, in windows. It is also Algorithm 1's first threshold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """An arm of the study: a way to train, which is repeated with several seeds."""

    name: str
    title: str
    group: str  # "policy", "normaliser" or "delay"
    keys: Mapping[str, Any] = field(default_factory=dict[str, Any])  # its configuration keys

    @property
    def packing(self) -> str:
        """Returns the name of the packing. Arms that share it differ only in the normaliser."""
        return self.name.removesuffix("-constant")


_FIXED = {"packing.policy": "fixed"}
_VAR_LEN = {
    "packing.policy": "var_len",
    "packing.s_max": 1.1,
    "packing.queue_thresholds": (0.2, 0.63),
}
_BOUNDED = {"packing.policy": "bounded", "packing.s_max": 2.0, "packing.step_tokens": 1.5}
_CONSTANT = {"training.loss_normalizer": "constant"}
_HELD = _VAR_LEN | {"packing.s_max": 2.0, "packing.queue_thresholds": ()}


def _arm(name: str, title: str, keys: Mapping[str, Any], group: str = "policy") -> Arm:
    return Arm(name=name, title=title, group=group, keys=keys)


ARMS = (
    _arm(BASELINE, "original (Plain-4D)", {"packing.policy": "original"}),
    _arm("fixed-1", "fixed greedy, W = 1", _FIXED | {"packing.window_batches": 1}),
    _arm("fixed-8", "fixed greedy, W = 8", _FIXED | {"packing.window_batches": 8}),
    _arm("var_len", "Algorithm 1, two queues", _VAR_LEN),
    _arm("bounded", "bounded, T 1.5", _BOUNDED),
    _arm("even", "bounded, T 1.1 (even steps)", _BOUNDED | {"packing.step_tokens": 1.1}),
    _arm(CONTROL, "best-fit packing", {"packing.policy": "capacity"}),
    _arm(
        "var_len-constant", "Algorithm 1, constant normaliser", _VAR_LEN | _CONSTANT, "normaliser"
    ),
    _arm("bounded-constant", "bounded, constant normaliser", _BOUNDED | _CONSTANT, "normaliser"),
    _arm("hold-0", "long documents at once", _HELD, "delay"),
    *(
        _arm(
            f"hold-{steps}",
            f"long documents {steps} step{'s' * (steps > 1)} late",
            _HELD | {"packing.hold": steps, "packing.queue_thresholds": (LONG,)},
            "delay",
        )
        for steps in DELAYS
    ),
)


def arm_of(name: str) -> Arm:
    return next(arm for arm in ARMS if arm.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large the study is: its model and its corpus."""

    name: str
    preset: str  # preset of `wlb train`
    keys: Mapping[str, Any]  # settings on top of the preset
    eval_tokens: int  # tokens between evaluations
    vocabulary: int  # vocabulary of the corpus's tokenizer
    sources: Callable[[], list[Path]]  # returns the source files of the corpus
    heldout_fraction: float = 0.01  # share of the corpus that is held out


SMALL = Scale(
    name="small",
    preset="demo_single",
    keys={
        "model.hidden_size": 256,
        "model.num_layers": 2,
        "model.num_heads": 2,
        "model.num_kv_heads": 2,
        "model.head_dim": 64,
        "model.ffn_hidden_size": 832,
        "data.context_window": 2048,
        "data.num_windows": 4,
        "training.learning_rate": 4e-3,
        "training.min_learning_rate": 4e-4,
        "training.warmup_steps": 100,
        "checkpoint.interval": 200,
        "checkpoint.keep": 1,
        # On an AMD CPU, matrix products in bfloat16 (oneDNN) took a quarter of the time of float32
        # (MKL).
        "training.dtype": "bfloat16",
        "training.compile": True,
        "training.loss_chunk": 1024,
        "run.device": "cpu",
    },
    eval_tokens=2_000_000,
    vocabulary=1024,
    sources=source_files,
)
QUICK = replace(
    SMALL,
    name="quick",
    keys=dict(SMALL.keys)
    | {
        "model.hidden_size": 32,
        "model.num_layers": 2,
        "model.num_heads": 2,
        "model.num_kv_heads": 2,
        "model.head_dim": 16,
        "model.ffn_hidden_size": 64,
        "data.context_window": 512,
        "training.warmup_steps": 5,
        "checkpoint.interval": 0,
        "training.dtype": "float32",
        "training.compile": False,
    },
    eval_tokens=50_000,
    vocabulary=320,
    heldout_fraction=0.05,
    sources=small_sources,
)


def deciding_profile(scale: Scale, vocabulary: int) -> KernelProfile:
    """Returns the kernel profile that policies decide by.

    It is the preset's profile with attention scaled so that W_a / W_l is RATIO at a full window.
    """
    spec = load(scale.preset, settings(dict(scale.keys) | {"model.vocab_size": vocabulary}))
    base = load_profile("cpu" if spec.cost.profile == "auto" else spec.cost.profile)
    window = [spec.data.context_window]
    cost = workload_of(spec, base)
    factor = RATIO * int(cost.linear_ns(window)[0]) / int(cost.attention_ns(window)[0])
    return scaled_profile(
        base,
        attention_forward=factor,
        attention_backward=factor,
        linear_forward=1.0,
        linear_backward=1.0,
        name=f"{base.name}-convergence",
        provenance=replace(
            base.provenance,
            source=f"{base.name}, attention times {factor:.3g}: W_a / W_l = {RATIO} at a window",
        ),
    )


def write_profile(scale: Scale, vocabulary: int, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_profile(path, deciding_profile(scale, vocabulary))


def settings(keys: Mapping[str, Any]) -> list[str]:
    """Formats keys as arguments of `--set`."""
    return [f"{name}={_text(value)}" for name, value in keys.items()]


def spec_of(scale: Scale, keys: Mapping[str, Any]) -> RunSpec:
    return load(scale.preset, settings(dict(scale.keys) | dict(keys)))


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)

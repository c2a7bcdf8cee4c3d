"""Defines the arms (packing policies, loss normalisers, forced delays) and scales of the study.

Every arm trains the same documents once, from the same weights, on a cosine to its own last step.
Policies decide by one cost: attention of a full window takes 1.67 times its linear layers' time, as
the 7B model's at 128K does (`experiments/harness/streams.py`), so that the small model's documents
are packed, held back and cut as the large one's would be. The model itself computes at its own
ratio.
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
"""This arm cuts as little as the policies that balance work, but balances tokens alone."""
DELAYS = (1, 8, 32, 128)
LONG = 0.2
"""Forced delays are for documents of at least this many windows, those that Algorithm 1 queues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Describes an arm.

    keys: keys of the run's TOML
    group: group in tables and pictures
    """

    name: str
    title: str
    group: str
    keys: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def packing(self) -> str:
        """Returns the arm's packing; arms that share it differ in the normaliser alone."""
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
    """Describes how large the study is.

    preset: preset of `wlb train`
    keys: settings on top of the preset
    eval_tokens: tokens between evaluations
    vocabulary: size of the vocabulary of the corpus that is made
    heldout_fraction: share of that corpus that is held out
    sources: returns the source files of that corpus
    """

    name: str
    preset: str
    keys: Mapping[str, Any]
    eval_tokens: int
    vocabulary: int
    sources: Callable[[], list[Path]]
    heldout_fraction: float = 0.01


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
        # bfloat16 products took a quarter of the time of float32 ones (oneDNN against MKL, on an
        # AMD CPU).
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
    """Returns the preset's kernel profile with attention scaled to RATIO at a full window."""
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
    """Returns keys as `--set` takes them."""
    return [f"{name}={_text(value)}" for name, value in keys.items()]


def spec_of(scale: Scale, keys: Mapping[str, Any]) -> RunSpec:
    return load(scale.preset, settings(dict(scale.keys) | dict(keys)))


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)

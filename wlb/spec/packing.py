"""The [packing] section: policies, their options in units of windows and global batches, checks."""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from wlb.plan import Layout
from wlb.spec.keys import key
from wlb.spec.methods import keys_of


class Policy(StrEnum):
    """Packing policies that a run can train with (`wlb.packing` has a file for each)."""

    ORIGINAL = "original"
    FIXED = "fixed"
    VAR_LEN = "var_len"
    BOUNDED = "bounded"
    CAPACITY = "capacity"
    EXAMPLES = "examples"


METHOD_POLICIES = (Policy.ORIGINAL, Policy.CAPACITY, Policy.EXAMPLES)
"""That fine-tuning methods are made of, in any layout."""


class WindowCut(StrEnum):
    """Which documents a loader cuts at the end of a window (original)."""

    ANYWHERE = "anywhere"
    SHORT = "short"


class StepGrouping(StrEnum):
    """Which micro-batches of a packing window are trained in the same step (fixed)."""

    BY_LOAD = "by_load"
    IN_ORDER = "in_order"


class BinMethod(StrEnum):
    """How `capacity` fills its bins."""

    FIRST_FIT_DECREASING = "first_fit_decreasing"
    BEST_FIT_DECREASING = "best_fit_decreasing"
    NEXT_FIT = "next_fit"
    BEST_FIT = "best_fit"
    NEXT_FIT_DECREASING = "next_fit_decreasing"

    @property
    def is_streaming(self) -> bool:
        """Whether documents are placed in arrival order."""
        return self in (BinMethod.NEXT_FIT, BinMethod.BEST_FIT)

    @property
    def keeps_order(self) -> bool:
        """Whether bins are trained in the order they were opened in."""
        return self.is_streaming or self == BinMethod.NEXT_FIT_DECREASING


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingSection:
    method: str = key(
        "",
        "a grouping method of packed fine-tuning (wlb/spec/methods.py): sets policy, layout and "
        "what else it is made of; empty = none",
    )
    packs: str = key(
        "",
        "file of packs that `wlb pack` made of data.store, trained as they are; empty = none",
    )
    policy: Policy = key(
        Policy.VAR_LEN,
        "original = Plain-4D; fixed = greedy windows; var_len = Algorithm 1; bounded = ours, under "
        "caps on delay and memory; capacity = bin packing by tokens; examples = so many documents",
    )
    num_micro_batches: int = key(
        0,
        "M: micro-batches that a global batch is packed into (var_len, bounded); more make a "
        "pipeline's bubbles shorter, until the longest document is too much for one; 0 = N",
    )
    s_max: float = key(
        1.5,
        "S_max: longest micro-batch (var_len, bounded); 0 = the longest that fits the memory of a "
        "device beside the rest of a step, at most 2 windows, with step_tokens lowered to fit",
        unit="context windows",
    )
    step_tokens: float = key(
        0.0,
        "T: most tokens of a step (var_len, bounded); 0 = only S_max limits it; where steps vary "
        "much in tokens (1.5, 0), training.loss_normalizer = constant weighs labels alike",
        unit="global batches",
    )
    memory_gib: float = key(
        0.0,
        "memory of a GPU: lowers s_max and step_tokens until the memory estimate fits (var_len, "
        "bounded); 0 = taken as given",
        unit="GiB",
    )
    queue_thresholds: tuple[float, ...] = key(
        (0.2, 0.63),
        "L_i: shortest document of each outlier queue (var_len)",
        unit="context windows",
    )
    literal: bool = key(False, "Algorithm 1 line by line, its traps included (var_len)")
    hold: int = key(
        0,
        "steps that every queued document waits, in place of counting them: to study what delay "
        "does to training (var_len); 0 = a queue waits until it has M",
        unit="steps",
    )
    max_delay: int = key(
        10,
        "D: most steps a document is held back, as far as step_tokens permit (bounded)",
        unit="steps",
    )
    delay_price: float = key(
        0.0,
        "what holding a global batch back for a step may cost (bounded); 0 = 0.15 / sqrt(N)",
        unit="micro-batch times",
    )
    window_batches: int = key(
        1, "W: batches packed together (fixed, capacity)", unit="global batches"
    )
    grouping: StepGrouping = key(
        StepGrouping.BY_LOAD, "which micro-batches of a window share a step (fixed)"
    )
    window_cut: WindowCut = key(
        WindowCut.ANYWHERE,
        "what the loader cuts at a window's end (original, and the baseline): any document, or "
        "only short ones",
    )
    bin_method: BinMethod = key(BinMethod.BEST_FIT_DECREASING, "how bins are filled (capacity)")
    open_bins: int = key(32, "bins open at a time with best_fit (capacity)")
    bin_windows: int = key(
        1, "size of a bin: the paper's bs where a micro-batch is flat (capacity)", unit="windows"
    )
    examples: int = key(4, "documents of a micro-batch (examples)")
    by_length: bool = key(
        False, "documents of like length together, 50 steps' at a time (examples)"
    )
    layout: Layout = key(
        Layout.SEPARATE,
        "separate = documents attend to themselves; padded = and are filled up to the longest of "
        "their micro-batch; joined = to all before them, boundaries are trained (original, "
        "capacity, examples)",
    )

    @property
    def ungrouped(self) -> "PackingSection":
        """Without a grouping method or packs, documents apart: what policies that balance need."""
        return replace(self, method="", packs="", layout=Layout.SEPARATE)

    def check(self, window: int) -> None:
        """ValueError for what no packer could work with; window: the context window in tokens."""
        self._check_method()
        if not (self.s_max >= 1.0 or self.takes_s_max_from_memory):
            raise ValueError(
                f"packing.s_max = {self.s_max} context windows must be at least 1, or a document "
                f"of {window} tokens could never be placed (or 0: what fits the memory)"
            )
        for name in ("memory_gib", "delay_price"):
            if getattr(self, name) < 0:
                raise ValueError(f"packing.{name} = {getattr(self, name)} must be at least 0")
        if self.hold < 0 or (self.hold and (self.literal or not self.queue_thresholds)):
            raise ValueError(
                f"packing.hold = {self.hold} must be at least 0, and 0 with packing.literal or "
                f"without packing.queue_thresholds, which say what is held"
            )
        for name in ("max_delay", "window_batches", "open_bins", "bin_windows", "examples"):
            if getattr(self, name) < 1:
                raise ValueError(f"packing.{name} = {getattr(self, name)} must be at least 1")
        if self.step_tokens and not self.step_tokens > 1.0:
            raise ValueError(
                f"packing.step_tokens = {self.step_tokens} must be above 1 global batch (or 0 for "
                f"no cap): what is held back could never be caught up"
            )
        is_literal = self.policy == Policy.VAR_LEN and self.literal and self.s_max > 0
        if is_literal and self.s_max_tokens(window) <= window:
            raise ValueError(
                f"packing.s_max = {self.s_max} with packing.literal: Algorithm 1 taken literally "
                f"places a document only where it stays below S_max; use more than 1"
            )
        if self.layout != Layout.SEPARATE and self.policy not in METHOD_POLICIES:
            raise ValueError(
                f"packing.layout = {self.layout} with packing.policy = {self.policy}: it balances "
                f"documents that attend to themselves; use {', '.join(METHOD_POLICIES)}"
            )
        self._check_thresholds(window)

    def _check_method(self) -> None:
        for name, value in keys_of(self.method).items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"packing.method = {self.method} has packing.{name} = {value}, the run says "
                    f"{getattr(self, name)}; leave one of them out"
                )

    def _check_thresholds(self, window: int) -> None:
        given, previous = list(self.queue_thresholds), 0.0
        for i, threshold in enumerate(given):
            if not previous < threshold <= 1.0:
                raise ValueError(
                    f"packing.queue_thresholds = {given}: entry {i} must be above {previous} and "
                    f"at most 1 context window"
                )
            previous = threshold
        tokens = self.thresholds_tokens(window)
        for i in range(1, len(tokens)):
            if tokens[i] == tokens[i - 1]:
                raise ValueError(
                    f"packing.queue_thresholds = {given}: entries {i - 1} and {i} are both "
                    f"{tokens[i]} tokens (window {window}); leave one out"
                )

    @property
    def varies_lengths(self) -> bool:
        """Whether micro-batches may be longer or shorter than a window."""
        return self.policy in (Policy.VAR_LEN, Policy.BOUNDED)

    @property
    def takes_s_max_from_memory(self) -> bool:
        """Whether S_max is still to be filled in (`wlb.packing.with_s_max`)."""
        return self.s_max == 0

    def s_max_tokens(self, window: int) -> int:
        if self.takes_s_max_from_memory:
            raise ValueError(
                "packing.s_max = 0 takes S_max from the memory of a device, which is not known "
                "here; give packing.s_max in context windows"
            )
        return math.floor(round(self.s_max * window, 6))

    def step_tokens_of(self, tokens_per_step: int) -> int | None:
        """T in tokens, or None without a cap; tokens_per_step: N x C."""
        return math.floor(round(self.step_tokens * tokens_per_step, 6)) or None

    def thresholds_tokens(self, window: int) -> tuple[int, ...]:
        return tuple(math.ceil(round(t * window, 6)) for t in self.queue_thresholds)

"""The [packing] section: policies and their options, in context windows and global batches."""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from wlb.plan import Layout, UserError
from wlb.spec.keys import check_declared, key
from wlb.spec.methods import GROUPED_BY_LENGTH, BinMethod, bin_method_of, keys_of


class Policy(StrEnum):
    """Packing policies that a run can train with (`wlb.packing` has a file for each)."""

    ORIGINAL = "original"
    FIXED = "fixed"
    VAR_LEN = "var_len"
    BOUNDED = "bounded"
    CAPACITY = "capacity"
    EXAMPLES = "examples"


METHOD_POLICIES = (Policy.ORIGINAL, Policy.CAPACITY, Policy.EXAMPLES)
"""Policies that support every layout; fine-tuning methods use these."""


class WindowCut(StrEnum):
    """Documents that may be cut at the end of a window (original)."""

    ANYWHERE = "anywhere"
    SHORT = "short"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingSection:
    method: str = key(
        "",
        "grouping method for packed fine-tuning (wlb/spec/methods.py), which sets policy, "
        "layout and related keys; empty = none",
    )
    packs: str = key(
        "",
        "file that `wlb pack` wrote for data.store; its packs are trained unchanged; empty = none",
    )
    policy: Policy = key(
        Policy.VAR_LEN,
        "original = Plain-4D; fixed = greedy packing in windows; var_len = Algorithm 1; bounded"
        " = wlb's own, with caps on delay and memory; capacity = bin packing by tokens; "
        "examples = a fixed number of documents",
    )
    num_micro_batches: int = key(
        0,
        "M: micro-batches per global batch (var_len, bounded); more of them shorten pipeline "
        "bubbles, until the longest document takes too long; 0 = N",
        at_least=0,
        at_most=2**17,
    )
    s_max: float = key(
        1.5,
        "S_max: longest micro-batch (var_len, bounded); 0 = the longest that fits the device "
        "memory, at most 2 windows, with step_tokens lowered to fit",
        unit="context windows",
        at_least=0,
        at_most=1000,
    )
    step_tokens: float = key(
        0.0,
        "T: most tokens per step (var_len, bounded); 0 = only S_max limits it; where steps vary"
        " much in tokens (1.5 or 0), training.loss_normalizer = constant weighs labels equally",
        unit="global batches",
        at_least=0,
        at_most=1000,
    )
    memory_gib: float = key(
        0.0,
        "GPU memory: s_max and step_tokens are lowered until the memory estimate fits it "
        "(var_len, bounded); 0 = use them as given",
        unit="GiB",
        at_least=0,
        at_most=1e6,
    )
    queue_thresholds: tuple[float, ...] = key(
        (0.2, 0.63),
        "L_i: shortest document of each outlier queue (var_len)",
        unit="context windows",
        above=0,
        at_most=1,
    )
    hold: int = key(
        0,
        "every outlier document waits exactly this many steps, to study what delay does to "
        "training (var_len); 0 = a queue is released when it holds M documents",
        unit="steps",
        at_least=0,
        at_most=10**6,
    )
    max_delay: int = key(
        10,
        "D: most steps that a document is delayed, as far as step_tokens permits (bounded)",
        unit="steps",
        at_least=1,
        at_most=10**6,
    )
    delay_price: float = key(
        0.0,
        "price of delaying a global batch by one step (bounded); 0 = 0.15 / sqrt(N), "
        "0.1 / sqrt(N) with a price_range",
        unit="micro-batch times",
        at_least=0,
        at_most=1e9,
    )
    price_range: tuple[float, ...] = key(
        (1.0, 1.0),
        "balance holds if attention costs between these factors times its price, as in forward "
        "passes and where the kernel profile is wrong, say 0.7 1.6; a wider range holds documents "
        "back for longer, 1.0 1.0 = at the price only (bounded, var_len)",
        above=0,
        at_most=1e6,
    )
    window_batches: int = key(
        1,
        "W: batches packed together (fixed, capacity)",
        unit="global batches",
        at_least=1,
        at_most=10**6,
    )
    window_cut: WindowCut = key(
        WindowCut.ANYWHERE,
        "documents that are cut at the end of a window (original and the baseline): anywhere = "
        "any document; short = only short ones",
    )
    bin_windows: int = key(
        1,
        "size of a bin; bs in the paper's flat micro-batches (capacity)",
        unit="windows",
        at_least=1,
        at_most=10_000,
    )
    examples: int = key(4, "documents per micro-batch (examples)", at_least=1, at_most=10**6)
    layout: Layout = key(
        Layout.SEPARATE,
        "separate = documents attend only to themselves; padded = likewise, each padded to the "
        "longest of its micro-batch; joined = documents attend to all before them, and "
        "boundaries are trained (padded and joined: original, capacity, examples)",
    )

    @property
    def bin_method(self) -> BinMethod:
        """How `capacity` fills its bins, which packing.method chooses."""
        return bin_method_of(self.method)

    @property
    def groups_by_length(self) -> bool:
        """Whether `examples` takes documents of similar length together."""
        return self.method == GROUPED_BY_LENGTH

    @property
    def ungrouped(self) -> "PackingSection":
        """Without method and packs and with separate documents, as balancing policies require."""
        return replace(self, method="", packs="", layout=Layout.SEPARATE)

    def check(self, window: int) -> None:
        """UserError for settings that no packer can use; window: context window in tokens."""
        check_declared(self, prefix="packing.")
        self._check_method()
        if not (self.s_max >= 1.0 or self.takes_s_max_from_memory):
            raise UserError(
                f"packing.s_max = {self.s_max} context windows must be at least 1, or a document "
                f"of {window} tokens could never be placed (or 0 = what fits the memory)"
            )
        if self.hold and not self.queue_thresholds:
            raise UserError(
                f"packing.hold = {self.hold} must be 0 without packing.queue_thresholds"
            )
        if self.step_tokens and not self.step_tokens > 1.0:
            raise UserError(
                f"packing.step_tokens = {self.step_tokens} must be above 1 global batch (or 0 for "
                f"no cap), or delayed documents could never be caught up with"
            )
        if self.layout != Layout.SEPARATE and self.policy not in METHOD_POLICIES:
            raise UserError(
                f"packing.layout = {self.layout} with packing.policy = {self.policy}: this policy "
                f"needs separate documents; use {', '.join(METHOD_POLICIES)}"
            )
        self._check_thresholds(window)
        self._check_prices()

    def _check_prices(self) -> None:
        given = list(self.price_range)
        if len(given) != 2 or not 0 < given[0] <= 1 <= given[1] < math.inf:
            raise UserError(
                f"packing.price_range = {given} must be two factors of attention's price, one "
                f"above 0 and at most 1 and one of at least 1; [1.0, 1.0] = the price only"
            )

    def _check_method(self) -> None:
        for name, value in keys_of(self.method).items():
            if getattr(self, name) != value:
                raise UserError(
                    f"packing.method = {self.method} sets packing.{name} = {value}, but the run "
                    f"sets {getattr(self, name)}; remove one of them"
                )

    def _check_thresholds(self, window: int) -> None:
        given, previous = list(self.queue_thresholds), 0.0
        for i, threshold in enumerate(given):
            if not previous < threshold <= 1.0:
                raise UserError(
                    f"packing.queue_thresholds = {given}: entry {i} must be above {previous} and "
                    f"at most 1 context window"
                )
            previous = threshold
        tokens = self.thresholds_tokens(window)
        for i in range(1, len(tokens)):
            if tokens[i] == tokens[i - 1]:
                raise UserError(
                    f"packing.queue_thresholds = {given}: entries {i - 1} and {i} are both "
                    f"{tokens[i]} tokens (window {window}); leave one out"
                )

    @property
    def varies_lengths(self) -> bool:
        """Whether micro-batches may be longer or shorter than a window."""
        return self.policy in (Policy.VAR_LEN, Policy.BOUNDED)

    @property
    def takes_s_max_from_memory(self) -> bool:
        """Whether `wlb.packing.with_s_max` still has to fill in S_max."""
        return self.s_max == 0

    def s_max_tokens(self, window: int) -> int:
        if self.takes_s_max_from_memory:
            raise UserError(
                "packing.s_max = 0 derives S_max from device memory, which is not known here; give "
                "packing.s_max in context windows"
            )
        return math.floor(round(self.s_max * window, 6))

    def step_tokens_of(self, tokens_per_step: int) -> int | None:
        """T in tokens, or None without a cap; tokens_per_step: N x C."""
        return math.floor(round(self.step_tokens * tokens_per_step, 6)) or None

    def thresholds_tokens(self, window: int) -> tuple[int, ...]:
        return tuple(math.ceil(round(t * window, 6)) for t in self.queue_thresholds)

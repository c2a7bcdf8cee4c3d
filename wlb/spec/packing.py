"""Section [packing]: packing policies and their options.

Lengths are given in context windows and global batches, so that a setting suits every window.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from wlb.plan import Layout, UserError
from wlb.spec.keys import check_declared, key
from wlb.spec.methods import GROUPED_BY_LENGTH, BinMethod, bin_method_of, keys_of


class Policy(StrEnum):
    """Rule that groups documents into micro-batches. `wlb.packing` has a file for each."""

    ORIGINAL = "original"
    FIXED = "fixed"
    VAR_LEN = "var_len"
    BOUNDED = "bounded"
    CAPACITY = "capacity"
    EXAMPLES = "examples"


METHOD_POLICIES = (Policy.ORIGINAL, Policy.CAPACITY, Policy.EXAMPLES)
"""Policies that support every `packing.layout`. Fine-tuning methods use only these."""


class WindowCut(StrEnum):
    """Which documents the policy `original` may cut at the end of a window."""

    ANYWHERE = "anywhere"
    SHORT = "short"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingSection:
    """Section [packing]. Help names in parentheses the policies that a key is for."""

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
        "rule that groups documents into micro-batches: original = fill windows in order and cut "
        "documents at their ends (window_cut); fixed = balance windows greedily by work; var_len = "
        "the paper's Algorithm 1; bounded = wlb's own, with caps on delay and memory; capacity = "
        "bin packing by tokens; examples = a fixed number of documents",
    )
    num_micro_batches: int = key(
        0,
        "M: micro-batches per step over all pipelines (var_len, bounded); more of them shorten "
        "pipeline bubbles, as long as the longest document does not outlast a mean micro-batch; 0 "
        "= N",
        at_least=0,
        at_most=2**17,
    )
    s_max: float = key(
        1.5,
        "S_max: longest micro-batch (var_len, bounded); 0 = the longest that fits the device's "
        "memory, at most 2 windows; step_tokens is lowered to fit too",
        unit="context windows",
        at_least=0,
        at_most=1000,
    )
    step_tokens: float = key(
        0.0,
        "T: most tokens per step (var_len, bounded); 0 = limited by S_max only; if steps may vary "
        "much in tokens (1.5 or 0), training.loss_normalizer = constant weighs labels equally",
        unit="global batches",
        at_least=0,
        at_most=1000,
    )
    memory_gib: float = key(
        0.0,
        "GPU memory for plans: s_max and step_tokens are lowered until the memory estimate fits "
        "it (var_len, bounded); 0 = use them as given",
        unit="GiB",
        at_least=0,
        at_most=1e6,
    )
    queue_thresholds: tuple[float, ...] = key(
        (0.2, 0.63),
        "L_i: length of the shortest document in each outlier queue (var_len)",
        unit="context windows",
        above=0,
        at_most=1,
    )
    hold: int = key(
        0,
        "delay every outlier document by exactly this many steps, to study what delay does to "
        "training (var_len); 0 = release a queue when it has M documents",
        unit="steps",
        at_least=0,
        at_most=10**6,
    )
    max_delay: int = key(
        10,
        "D: most steps by which a document is delayed, as far as step_tokens permits (bounded)",
        unit="steps",
        at_least=1,
        at_most=10**6,
    )
    delay_price: float = key(
        0.0,
        "price of delaying a global batch by one step, weighed against imbalance (bounded); 0 = "
        "0.15 / sqrt(N), or 0.1 / sqrt(N) with a price_range",
        unit="micro-batch times",
        at_least=0,
        at_most=1e9,
    )
    price_range: tuple[float, ...] = key(
        (1.0, 1.0),
        "micro-batches stay balanced while attention costs between these two factors times its "
        "price, because attention's share differs in forward passes and the kernel profile may be "
        "wrong; try [0.7, 1.6]; a wider range delays documents longer; [1.0, 1.0] = balance at the "
        "price only (bounded, var_len)",
        above=0,
        at_most=1e6,
    )
    window_batches: int = key(
        1,
        "W: global batches packed together (fixed, capacity)",
        unit="global batches",
        at_least=1,
        at_most=10**6,
    )
    window_cut: WindowCut = key(
        WindowCut.ANYWHERE,
        "which documents are cut at the end of a window (original and the usual loader of "
        "planner.baseline): anywhere = any document; short = mostly those of at most C / 8 tokens",
    )
    bin_windows: int = key(
        1,
        "size of a bin, which is a micro-batch (capacity)",
        unit="windows",
        at_least=1,
        at_most=10_000,
    )
    examples: int = key(4, "documents per micro-batch (examples)", at_least=1, at_most=10**6)
    layout: Layout = key(
        Layout.SEPARATE,
        "separate = documents attend only to themselves; padded = the same, but each is padded to "
        "the longest of its micro-batch; joined = documents also attend to those before them in "
        "the micro-batch, and the first token of a document is predicted from the one before it "
        "(padded and joined: original, capacity, examples)",
    )

    @property
    def bin_method(self) -> BinMethod:
        """Bin-packing algorithm of `capacity`, chosen by packing.method."""
        return bin_method_of(self.method)

    @property
    def groups_by_length(self) -> bool:
        """Whether `examples` groups documents of similar length."""
        return self.method == GROUPED_BY_LENGTH

    @property
    def ungrouped(self) -> "PackingSection":
        """This section without method and packs and with separate documents.

        Balancing policies require that.
        """
        return replace(self, method="", packs="", layout=Layout.SEPARATE)

    def check(self, window: int) -> None:
        """Raise UserError for settings that no packer can use.

        Args:
            window: Context window in tokens.
        """
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
                f"no cap), or no step would have room for delayed documents"
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
        """Whether S_max is derived from memory and `wlb.packing.with_s_max` must fill it in."""
        return self.s_max == 0

    def s_max_tokens(self, window: int) -> int:
        """Return S_max in tokens for a context window of `window` tokens."""
        if self.takes_s_max_from_memory:
            raise UserError(
                "packing.s_max = 0 derives S_max from device memory, which is not known here; give "
                "packing.s_max in context windows"
            )
        # Round first: in floating point, 1.15 * 100 is 114.99999999999999.
        return math.floor(round(self.s_max * window, 6))

    def step_tokens_of(self, tokens_per_step: int) -> int | None:
        """Return T in tokens, or None if there is no cap.

        Args:
            tokens_per_step: Tokens of a global batch, N x C.
        """
        return math.floor(round(self.step_tokens * tokens_per_step, 6)) or None

    def thresholds_tokens(self, window: int) -> tuple[int, ...]:
        """Return L_i in tokens for a context window of `window` tokens."""
        return tuple(math.ceil(round(t * window, 6)) for t in self.queue_thresholds)

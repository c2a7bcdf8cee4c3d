"""Section [packing]: packing policies and their options.

Lengths are given in context windows and global batches, so that the same setting works for every
length of the context window.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from wlb.plan import Layout, UserError
from wlb.spec.keys import check_declared, key
from wlb.spec.methods import GROUPED_BY_LENGTH, BinMethod, bin_method_of, keys_of


class Policy(StrEnum):
    """Rule that groups documents into micro-batches. Each rule has a file in `wlb.packing`."""

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

    ANYWHERE = "anywhere"  # any document
    # A document that fits in no open window, if it has at most C / 8 tokens, or if four windows for
    # each micro-batch of a step are already open.
    SHORT = "short"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingSection:
    """Section [packing]. Each help text names, in parentheses, the policies that use the key."""

    method: str = key(
        "",
        "named method of packed fine-tuning (listed in wlb/spec/methods.py), which sets "
        "packing.policy, packing.layout and related keys; empty = set these keys directly",
    )
    packs: str = key(
        "",
        "file of packs that `wlb pack` wrote for data.store; the run trains these packs "
        "unchanged; empty = pack documents during the run",
    )
    policy: Policy = key(
        Policy.VAR_LEN,
        "rule that groups documents into micro-batches: original = fill windows in order and cut "
        "documents where a window ends (window_cut); fixed = micro-batches of equal tokens, whose "
        "work is balanced greedily; var_len = micro-batches of unequal tokens by the paper's "
        "Algorithm 1; bounded = micro-batches of unequal tokens by wlb's algorithm, which limits "
        "delay and memory; capacity = bin packing by tokens; examples = a fixed number of "
        "documents per micro-batch",
    )
    num_micro_batches: int = key(
        0,
        "M: micro-batches per step over all pipelines (var_len, bounded); more micro-batches "
        "shorten pipeline bubbles, unless the longest document takes longer than a mean "
        "micro-batch; 0 = data.num_windows",
        at_least=0,
        at_most=2**17,
    )
    s_max: float = key(
        1.5,
        "S_max: most tokens of a micro-batch, in context windows (var_len, bounded); 0 = as many "
        "as fit in the device's memory, but at most 2; with 0, step_tokens is also lowered until "
        "the activations of a step fit",
        unit="context windows",
        at_least=0,
        at_most=1000,
    )
    step_tokens: float = key(
        0.0,
        "T: most tokens of a step (var_len, bounded); 0 = only S_max limits "
        "steps; with 0 or a large value such as 1.5, steps differ much in tokens, so set "
        "training.loss_normalizer = constant to weigh all targets equally",
        unit="global batches",
        at_least=0,
        at_most=1000,
    )
    memory_gib: float = key(
        0.0,
        "memory per GPU that planned steps may use (var_len, bounded): s_max and step_tokens are "
        "lowered until the memory estimate is at most this value; 0 = do not lower them",
        unit="GiB",
        at_least=0,
        at_most=1e6,
    )
    queue_thresholds: tuple[float, ...] = key(
        (0.2, 0.63),
        "L_i: length of the shortest document that waits in outlier queue i; increasing, one value "
        "for each queue (var_len)",
        unit="context windows",
        above=0,
        at_most=1,
    )
    hold: int = key(
        0,
        "delay every outlier by exactly this many steps, to study how delay affects training "
        "(var_len); 0 = train the outliers of a queue as soon as it has one for each micro-batch "
        "of a step",
        unit="steps",
        at_least=0,
        at_most=10**6,
    )
    max_delay: int = key(
        10,
        "D: most steps by which a document is delayed (bounded); a document waits longer only if "
        "step_tokens leaves no room for it",
        unit="steps",
        at_least=1,
        at_most=10**6,
    )
    delay_price: float = key(
        0.0,
        "cost of delaying a whole global batch by one step (bounded); with a larger value the "
        "packer delays less and balances less; 0 = 0.15 / sqrt(micro-batches of a step), or 0.1 "
        "in place of 0.15 if price_range is set",
        unit="micro-batch times",
        at_least=0,
        at_most=1e9,
    )
    price_range: tuple[float, ...] = key(
        (1.0, 1.0),
        "[low, high]: keep micro-batches balanced even if attention takes low to high times its "
        "predicted time (bounded, var_len); this helps because the kernel profile may be wrong, "
        "and attention's share of the time differs between forward and backward; a wider range "
        "delays documents longer; try [0.7, 1.6]; [1.0, 1.0] = balance predicted times only",
        above=0,
        at_most=1e6,
    )
    window_batches: int = key(
        1,
        "W: number of global batches that are packed together (fixed, capacity); more batches "
        "improve the packing, but delay documents longer",
        unit="global batches",
        at_least=1,
        at_most=10**6,
    )
    window_cut: WindowCut = key(
        WindowCut.ANYWHERE,
        "which documents may be cut to fill a window (policy original, and planner.baseline): "
        "anywhere = any document; short = documents of at most an eighth of a window, and longer "
        "ones only while too many windows are partly filled (4 x the micro-batches of a step)",
    )
    bin_windows: int = key(
        1,
        "size of a bin, which becomes one micro-batch (capacity); larger bins need more memory",
        unit="context windows",
        at_least=1,
        at_most=10_000,
    )
    examples: int = key(
        4,
        "number of documents per micro-batch, used only by policy = examples",
        at_least=1,
        at_most=10**6,
    )
    layout: Layout = key(
        Layout.SEPARATE,
        "how documents of a micro-batch are laid out: separate = tokens attend only to their own "
        "document; padded = like separate, but every document is padded to the length of the "
        "longest one in its micro-batch; joined = tokens also attend to earlier documents in the "
        "micro-batch, and each document's first token is predicted from the last token of the "
        "document before it; padded and joined need policy = original, capacity or examples",
    )

    @property
    def bin_method(self) -> BinMethod:
        """Bin-packing algorithm of the policy `capacity`, which packing.method determines."""
        return bin_method_of(self.method)

    @property
    def groups_by_length(self) -> bool:
        """Whether the policy `examples` groups documents of similar length."""
        return self.method == GROUPED_BY_LENGTH

    @property
    def ungrouped(self) -> "PackingSection":
        """A copy of this section with `method` and `packs` empty and `layout` = separate.

        The policies that balance work (fixed, var_len and bounded) accept no other values of these
        three keys.
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
                f"packing.s_max = {self.s_max} must be at least 1 context window, so that a "
                f"document of {window} tokens fits; set 0 to derive it from the device's memory"
            )
        if self.hold and not self.queue_thresholds:
            raise UserError(
                f"packing.hold = {self.hold} must be 0 if packing.queue_thresholds is empty, "
                f"because no document is then an outlier"
            )
        if self.step_tokens and not self.step_tokens > 1.0:
            raise UserError(
                f"packing.step_tokens = {self.step_tokens} must be above 1 global batch, so that "
                f"steps have room for delayed documents; set 0 for no limit"
            )
        if self.layout != Layout.SEPARATE and self.policy not in METHOD_POLICIES:
            raise UserError(
                f"packing.layout = {self.layout} is not supported by packing.policy = "
                f"{self.policy}; set packing.layout = separate, or packing.policy to one of "
                f"{', '.join(METHOD_POLICIES)}"
            )
        self._check_thresholds(window)
        self._check_prices()

    def _check_prices(self) -> None:
        given = list(self.price_range)
        if len(given) != 2 or not 0 < given[0] <= 1 <= given[1] < math.inf:
            raise UserError(
                f"packing.price_range = {given} must be two factors by which attention may be "
                f"cheaper (above 0, at most 1) and dearer (at least 1) than predicted; set [1.0, "
                f"1.0] to balance for the predicted times only"
            )

    def _check_method(self) -> None:
        for name, value in keys_of(self.method).items():
            if getattr(self, name) != value:
                raise UserError(
                    f"packing.method = {self.method} sets packing.{name} = {value}, but the run "
                    f"sets packing.{name} = {getattr(self, name)}; remove one of the two keys"
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
                    f"packing.queue_thresholds = {given}: with data.context_window = {window}, "
                    f"{given[i - 1]} and {given[i]} are both rounded up to {tokens[i]} tokens; "
                    "remove one of them"
                )

    @property
    def varies_lengths(self) -> bool:
        """Whether micro-batches may be longer or shorter than a window."""
        return self.policy in (Policy.VAR_LEN, Policy.BOUNDED)

    @property
    def takes_s_max_from_memory(self) -> bool:
        """Whether S_max follows from the device's memory; `wlb.packing.with_s_max` fills it in."""
        return self.s_max == 0

    def s_max_tokens(self, window: int) -> int:
        """Return S_max in tokens for a context window of `window` tokens."""
        if self.takes_s_max_from_memory:
            raise UserError(
                "packing.s_max = 0 derives S_max from the memory of a device, but no device is "
                "known; set packing.s_max to a number of context windows"
            )
        # Round before taking the floor, because in floating point 1.15 * 100 is 114.99999999999999.
        return math.floor(round(self.s_max * window, 6))

    def step_tokens_of(self, tokens_per_step: int) -> int | None:
        """Return T, the most tokens of a step, or None if there is no limit.

        Args:
            tokens_per_step: Tokens of a global batch, N x C.
        """
        return math.floor(round(self.step_tokens * tokens_per_step, 6)) or None

    def thresholds_tokens(self, window: int) -> tuple[int, ...]:
        """Return the thresholds L_i in tokens, for a context window of `window` tokens."""
        return tuple(math.ceil(round(t * window, 6)) for t in self.queue_thresholds)

"""Systems that are compared, each as overrides of a run's settings.

usual is what Megatron-LM and torchtitan do: their loaders cut documents wherever a window ends, and
shard windows as Llama 3 does. It is the baseline of everything that is said about savings.

The others are those of the paper's tables. plain_4d, fixed_4d and paper are Plain-4D, Fixed-4D and
WLB-LLM of the paper (Section 7.1). The paper's Plain-4D differs from usual: its loader keeps long
documents whole. Fixed-4D uses the better of two static shardings.

wlb is this project's own system. It recomputes MLPs where memory limits packing and that is faster.
It packs for a range of prices, because a run's GPUs may differ from the measured one
(`experiments/beyond/system_defaults`). It takes the constant loss normalizer: with steps of up to
1.5 global batches, a mean per step would weigh long documents' labels less (0.80 in
`experiments/paper/fig16`, with a higher held-out loss on long documents in every seed).
"""

from collections.abc import Mapping

from wlb.plan import UserError
from wlb.spec.keys import did_you_mean

_OWN = ("packing.method=", "packing.packs=", "packing.layout=separate")
"""Resets a grouping method of the run, which would contradict the system's policy."""
_IN_WINDOWS = (*_OWN, "packing.num_micro_batches=0")
_FIXED = ("packing.policy=fixed", *_IN_WINDOWS, "packing.window_batches=1")
_PAPER_SHARDS = ("sharding.remainder=one_by_one",)
_MERGED = ("sharding.remainder=merged",)

USUAL = "usual"
_USUAL = (
    "packing.policy=original",
    *_IN_WINDOWS,
    "packing.window_cut=anywhere",
    "sharding.strategy=per_sequence",
    *_MERGED,
)

SYSTEMS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "plain_4d": (
        (
            "packing.policy=original",
            *_IN_WINDOWS,
            "packing.window_cut=short",
            "sharding.strategy=per_sequence",
            *_MERGED,
        ),
    ),
    "fixed_4d": (
        (*_FIXED, "sharding.strategy=per_sequence", *_MERGED),
        (*_FIXED, "sharding.strategy=per_document", *_PAPER_SHARDS),
    ),
    "paper": (
        ("packing.policy=var_len", *_IN_WINDOWS, "sharding.strategy=adaptive", *_PAPER_SHARDS),
    ),
    "wlb": tuple(
        (
            *_OWN,
            "packing.policy=bounded",
            "packing.s_max=2.0",
            "packing.step_tokens=1.5",
            "packing.price_range=[0.7,1.6]",
            "packing.memory_gib={memory_gib:g}",
            "training.loss_normalizer=constant",
            "sharding.strategy=balanced",
            *_MERGED,
            f"training.recompute={recompute}",
        )
        for recompute in ("none", "selective")
    ),
}
"""`--set` overrides of each compared system; the fastest of several alternatives counts."""
KNOWN_SYSTEMS = (USUAL, *SYSTEMS)
"""Names of all systems."""


def system_overrides(name: str, *, planned_gib: float) -> tuple[tuple[str, ...], ...]:
    """Return a system's alternatives; UserError listing known systems. planned_gib: memory of a
    device that plans may use (`wlb.cost.planned_gib`).
    """
    if name not in KNOWN_SYSTEMS:
        raise UserError(
            f"unknown system {name!r}; known: {', '.join(KNOWN_SYSTEMS)}"
            f"{did_you_mean(name, KNOWN_SYSTEMS)}"
        )
    return tuple(
        tuple(override.format(memory_gib=planned_gib) for override in overrides)
        for overrides in ((_USUAL,) if name == USUAL else SYSTEMS[name])
    )


def system_choices(text: str, *, planned_gib: float) -> tuple[tuple[str, ...], ...]:
    """Return the alternatives of "NAME", best first, or the one of "NAME:2".

    The first is faster where it leaves packing room (`wlb.packing.first_with_room` takes it then).
    """
    name, _, number = text.partition(":")
    alternatives = system_overrides(name, planned_gib=planned_gib)
    numbers = [str(i + 1) for i in range(len(alternatives))]
    if number and number not in numbers:
        raise UserError(
            f"system {text!r}: {name} has alternatives {', '.join(numbers)}, as in {name}:1"
        )
    return (alternatives[int(number) - 1],) if number else alternatives

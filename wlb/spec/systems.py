"""The systems that are compared: what each changes in a run's settings.

plain_4d, fixed_4d and paper are the paper's Plain-4D, Fixed-4D and WLB-LLM (Section 7.1): their
per-document sharding deals tokens over one by one. Fixed-4D uses one static sharding for all
batches, the better one of its two for a configuration. wlb is ours: it recomputes MLPs where memory
would limit packing, if that is faster. Its steps hold up to 1.5 global batches, where a step's mean
would give a label of a long document less weight (0.80 in `experiments/convergence`, whose held-out
loss is higher on long documents then, in every seed); the constant normaliser weighs all alike.
"""

from collections.abc import Mapping

_OWN = ("packing.method=", "packing.packs=", "packing.layout=separate")
"""What a run's own grouping would contradict."""
_IN_WINDOWS = (*_OWN, "packing.num_micro_batches=0")
_PAPER_SHARDS = ("sharding.remainder=one_by_one",)
_MERGED = ("sharding.remainder=merged",)

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
        (
            "packing.policy=fixed",
            *_IN_WINDOWS,
            "packing.window_batches=1",
            "sharding.strategy=per_sequence",
            *_MERGED,
        ),
        (
            "packing.policy=fixed",
            *_IN_WINDOWS,
            "packing.window_batches=1",
            "sharding.strategy=per_document",
            *_PAPER_SHARDS,
        ),
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
            "packing.memory_gib={memory_gib:g}",
            "training.loss_normalizer=constant",
            "sharding.strategy=balanced",
            *_MERGED,
            f"training.recompute={recompute}",
        )
        for recompute in ("none", "selective")
    ),
}
"""Overrides (as of `--set`) of each system; several: alternatives, the fastest of which counts."""
PLANNED_MEMORY = 0.95
"""Share of a device's memory that is planned with; the rest is for the context and libraries."""


def system_overrides(name: str, *, memory_gib: float) -> tuple[tuple[str, ...], ...]:
    """The alternatives of a system on devices of that memory; ValueError listing the known ones."""
    if name not in SYSTEMS:
        raise ValueError(f"unknown system {name!r}; known: {', '.join(SYSTEMS)}")
    planned = memory_gib * PLANNED_MEMORY
    return tuple(
        tuple(override.format(memory_gib=planned) for override in overrides)
        for overrides in SYSTEMS[name]
    )


def system_choice(text: str, *, memory_gib: float) -> tuple[str, ...]:
    """Overrides of "NAME", a system's first alternative, or of "NAME:2", its second.

    The first one is the faster on nearly all of Table 1's configurations (`wlb simulate` tells).
    """
    name, _, number = text.partition(":")
    alternatives = system_overrides(name, memory_gib=memory_gib)
    numbers = [str(i + 1) for i in range(len(alternatives))]
    if (number or "1") not in numbers:
        raise ValueError(
            f"system {text!r}: {name} has the alternatives {', '.join(numbers)}, as in {name}:1"
        )
    return alternatives[int(number or "1") - 1]

"""Systems that wlb compares, each as `--set` overrides of a run's settings.

- `usual`: Megatron-LM and torchtitan. Their loaders cut documents wherever a window ends, and CP
  shards each window as Llama 3 does. Savings are relative to this system.
- `plain_4d`: the paper's Plain-4D (Section 7.1). Unlike `usual`, its loader keeps long documents
  whole.
- `fixed_4d`: the paper's Fixed-4D, with the better of two static sharding strategies.
- `paper`: the paper's WLB-LLM.
- `wlb`: this project's recommendation.
  - It recomputes MLPs in backward if memory limits packing and recomputing is faster.
  - It keeps micro-batches balanced for a range of attention times, because a run's GPUs may differ
    from those of the kernel profile (`experiments/beyond/system_defaults`).
  - It divides the loss by a constant, because its steps have up to 1.5 global batches. With a mean
    per step, targets in long documents had 0.80 times the weight of others in
    `experiments/paper/fig16`, and the held-out loss on long documents was higher for every seed.
"""

from collections.abc import Mapping

from wlb.plan import UserError
from wlb.spec.keys import did_you_mean

_NO_METHOD = ("packing.method=", "packing.packs=", "packing.layout=separate")
"""Overrides that remove a run's grouping method, which sets another policy than the system."""
_IN_WINDOWS = (*_NO_METHOD, "packing.num_micro_batches=0")
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
            *_NO_METHOD,
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
"""Alternative settings of each system except `usual`, each as a tuple of `--set` overrides.

Comparisons use the fastest alternative of a system."""
KNOWN_SYSTEMS = (USUAL, *SYSTEMS)
"""Names of all systems."""


def system_overrides(name: str, *, planned_gib: float) -> tuple[tuple[str, ...], ...]:
    """Return settings with which wlb trains as another system, such as Megatron-LM, would.

    Some systems have several alternative settings, for example one with recomputation.

    Args:
        name: One of KNOWN_SYSTEMS.
        planned_gib: Memory of a device that plans may use, in GiB.

    Returns:
        A tuple of `--set` overrides for each alternative.

    Raises:
        UserError: If the system is unknown.
    """
    if name not in KNOWN_SYSTEMS:
        raise UserError(
            f"unknown system {name!r}; use one of {', '.join(KNOWN_SYSTEMS)}"
            f"{did_you_mean(name, KNOWN_SYSTEMS)}"
        )
    return tuple(
        tuple(override.format(memory_gib=planned_gib) for override in overrides)
        for overrides in ((_USUAL,) if name == USUAL else SYSTEMS[name])
    )


def system_choices(text: str, *, planned_gib: float) -> tuple[tuple[str, ...], ...]:
    """Return the alternative settings that `--system TEXT` names, each as `--set` overrides.

    Args:
        text: "NAME" for all alternatives of the system NAME, or "NAME:2" for the second one only.
        planned_gib: Memory of a device that plans may use, in GiB.

    Returns:
        Alternatives in order of preference. An earlier one is faster if it leaves enough memory
        for packing, which `wlb.packing.first_with_room` checks.
    """
    name, _, number = text.partition(":")
    alternatives = system_overrides(name, planned_gib=planned_gib)
    numbers = [str(i + 1) for i in range(len(alternatives))]
    if number and number not in numbers:
        raise UserError(
            f"system {text!r} does not exist, because {name} has only the alternatives "
            f"{', '.join(f'{name}:{i}' for i in numbers)}; use one of them, or {name} for all"
        )
    return (alternatives[int(number) - 1],) if number else alternatives

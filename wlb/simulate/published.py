"""The errors of simulated speeds of training runs that others measured on H100s and published.

`python -m experiments.beyond.published_runs` computes the errors, and a test checks that the
numbers here are its results. All runs train dense models in bfloat16 on whole sequences; none of
them packs documents.
"""

from typing import NamedTuple

from wlb.cost import KernelProfile
from wlb.spec import RunSpec


class PublishedError(NamedTuple):
    """How well the tokens per second of published runs of one kind were predicted."""

    runs: int  # number of published runs of this kind
    largest: float  # largest error of a run, as a fraction of the published tokens per second

    def __str__(self) -> str:
        return f"step times of published runs were predicted within {self.largest:.0%}"


BEST = "h100_runs"
"""The profile that predicts published runs best.

Some of its constants, such as the throughput of matrix products, were fitted to published runs. For
its errors here, each run was predicted with constants fitted without the runs of the same source.
"""
ERRORS = {
    (BEST, False): PublishedError(19, 0.0966),
    (BEST, True): PublishedError(5, 0.0562),
    ("h100", False): PublishedError(19, 0.1436),
    ("h100", True): PublishedError(5, 0.0842),
    ("h100_sxm", False): PublishedError(19, 0.2506),
    ("h100_sxm", True): PublishedError(5, 0.2393),
}
"""Errors by (name of the profile, whether the run has TP, CP or PP)."""


def published_error(spec: RunSpec, profile: KernelProfile) -> PublishedError | None:
    """Return the error of predictions of published runs like this one; None if there are none.

    A profile for a 500 W power limit (name ending in "_500w") gets the error of the profile from
    which it was derived.

    Args:
        spec: The run.
        profile: The profile with which the run is predicted.
    """
    if _unlike_published(spec):
        return None
    return ERRORS.get((profile.name.removesuffix("_500w"), has_model_parallelism(spec)))


def _unlike_published(spec: RunSpec) -> bool:
    """Return whether the model has a kind of layer that no published run had."""
    model = spec.model
    return bool(model.experts.num or model.sliding_window or model.linear.num_value_heads)


def has_model_parallelism(spec: RunSpec) -> bool:
    """Return whether several ranks share a copy of the model, by TP, CP or PP."""
    return spec.parallel.model_ranks > 1


def trust_line(spec: RunSpec, profile: KernelProfile) -> str:
    """Return a sentence for users that says how well published runs like this were predicted.

    Args:
        spec: The run.
        profile: The profile with which the run is predicted.
    """
    error = published_error(spec, profile)
    if _unlike_published(spec):
        return (
            "how far to trust this: no published run that was predicted had experts, sliding "
            "windows or linear layers; wlb/simulate/README.md says what is known"
        )
    if error is None:
        return (
            f"how far to trust this: no published run was predicted with profile {profile.name}; "
            f"wlb/simulate/README.md says what is known"
        )
    is_parallel = has_model_parallelism(spec)
    kind = "with TP, CP or PP" if is_parallel else "with data parallelism alone"
    line = (
        f"how far to trust this: with profile {profile.name}, tokens/s of {error.runs} published "
        f"H100 runs {kind} were predicted within {error.largest:.0%}; none of them packed documents"
    )
    best = ERRORS[BEST, is_parallel]
    if best.largest < error.largest:
        line += f". With cost.profile={BEST} it is {best.largest:.0%}"
    return line

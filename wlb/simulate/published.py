"""How well the simulator predicts the speeds of training runs that others published for H100s.

`python -m experiments.beyond.published_runs` computes the errors of the predictions, and a test
checks that the numbers in this file are its results. All published runs train dense models in
bfloat16 on whole sequences; none of them packs documents.
"""

from typing import NamedTuple

from wlb.cost import KernelProfile
from wlb.spec import RunSpec


class PublishedError(NamedTuple):
    """How well the tokens per second of published runs of one kind were predicted."""

    runs: int  # number of published runs of this kind
    largest: float  # largest error of a run, as a fraction of the published tokens per second

    def __str__(self) -> str:
        return f"predicted step times of published runs were wrong by at most {self.largest:.0%}"


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
    """Return how well published runs like this one were predicted; None if there are none.

    A profile for a power limit of 500 W (its name ends in "_500w") gets the error of the profile
    from which it was derived.

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
    """Return whether TP, CP or PP divides a copy of the model among several ranks."""
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
            "how far to trust this: predictions were compared only with published runs without "
            "experts, sliding windows and linear attention; see wlb/simulate/README.md"
        )
    if error is None:
        return (
            "how far to trust this: predictions with the profile "
            f"{profile.name} were not compared with published runs; see wlb/simulate/README.md"
        )
    is_parallel = has_model_parallelism(spec)
    kind = "with TP, CP or PP" if is_parallel else "with data parallelism alone"
    line = (
        f"how far to trust this: with the profile {profile.name}, predicted tokens/s of "
        f"{error.runs} published H100 runs {kind} were wrong by at most {error.largest:.0%}; none "
        "of these runs packed documents"
    )
    best = ERRORS[BEST, is_parallel]
    if best.largest < error.largest:
        line += f". With cost.profile={BEST} the largest error is {best.largest:.0%}"
    return line

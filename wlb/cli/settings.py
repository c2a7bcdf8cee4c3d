"""What `wlb plan` and `wlb tune packing` recommend, as a TOML file and as a command line."""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from wlb.cli import output
from wlb.spec import LossNormalizer, PackingSection, RunSpec, check, to_toml
from wlb.spec.methods import kept_method


def packed_as(
    given: RunSpec, section: PackingSection, options: argparse.Namespace, *, is_constant: bool
) -> RunSpec:
    """The run with other packing, and the store that was planned. section: of a filled-in run.
    is_constant: labels of unequal steps are to be weighed alike.
    """
    data, training = given.data, given.training
    if options.corpus:
        data = replace(data, store=options.corpus, blend=())
    if is_constant:
        training = replace(training, loss_normalizer=LossNormalizer.CONSTANT)
    packing = replace(section, method=kept_method(section.method, section.policy), packs="")
    return check(replace(given, packing=packing, data=data, training=training))


def as_toml(spec: RunSpec, options: argparse.Namespace, *, why: str) -> str:
    """The file's text; why: a sentence on what was found."""
    comments = (why, f"found by: {output.command_of(options)}")
    return to_toml(spec, comments=comments, whole=())


def all_keys(
    options: argparse.Namespace, overrides: Sequence[str], *, is_constant: bool
) -> list[str]:
    """KEY=VALUE of the user and of the recommendation, as --set takes them."""
    more = ["training.loss_normalizer=constant"] if is_constant else []
    store = [f"data.store={options.corpus}"] if options.corpus else []
    return [*options.overrides, *store, *overrides, *more]


def priced_model(options: argparse.Namespace, spec: RunSpec, profile: str) -> str:
    """Which model at which prices; says so where NAME was left out. spec: filled in."""
    size = spec.model.num_parameters
    words = f"{options.name} ({size / 1e9:.3g} billion parameters) at prices of profile {profile}"
    if options.name not in options.words:
        words += "; that model is the default, give NAME for yours"
    return words

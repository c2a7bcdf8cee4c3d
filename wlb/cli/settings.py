"""Recommended settings of `wlb plan` and `wlb tune packing`, as a TOML file and as options."""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from wlb.cli import output
from wlb.spec import LossNormalizer, PackingSection, RunSpec, check, to_toml
from wlb.spec.methods import kept_method


def packed_as(
    given: RunSpec, section: PackingSection, options: argparse.Namespace, *, is_constant: bool
) -> RunSpec:
    """Return the run with another packing, and with the token store that was planned.

    Args:
        given: The run as the user wrote it.
        section: The recommended [packing] section, with all values filled in.
        options: The command line; --corpus names the store.
        is_constant: Set training.loss_normalizer = constant, so that labels weigh the same in all
            steps.
    """
    data, training = given.data, given.training
    if options.corpus:
        data = replace(data, store=options.corpus, blend=())
    if is_constant:
        training = replace(training, loss_normalizer=LossNormalizer.CONSTANT)
    # A method of another policy, or a file of packs, would contradict the section.
    packing = replace(section, method=kept_method(section.method, section.policy), packs="")
    return check(replace(given, packing=packing, data=data, training=training))


def as_toml(spec: RunSpec, options: argparse.Namespace, *, why: str) -> str:
    """Return the text of a TOML file; `why` says in a comment what was found."""
    comments = (why, f"found by: {output.command_of(options)}")
    return to_toml(spec, comments=comments, whole=())


def all_keys(
    options: argparse.Namespace, overrides: Sequence[str], *, is_constant: bool
) -> list[str]:
    """Return KEY=VALUE for --set: the user's, then the recommended ones."""
    more = ["training.loss_normalizer=constant"] if is_constant else []
    store = [f"data.store={options.corpus}"] if options.corpus else []
    return [*options.overrides, *store, *overrides, *more]


def priced_model(options: argparse.Namespace, spec: RunSpec, profile: str) -> str:
    """Name the priced model, its GPUs and the profile; say so if the model is only the default.

    Args:
        options: The command line.
        spec: The run, with all values filled in.
        profile: Name of the kernel profile.
    """
    size, gpus = spec.model.num_parameters, spec.parallel.world_size
    words = (
        f"{options.name} ({size / 1e9:.3g} billion parameters) on {gpus:,} GPU{'s' * (gpus > 1)}, "
        f"with kernel times of profile {profile}"
    )
    if options.name not in options.words:
        words += "; that model is the default, give NAME for yours"
    return words

"""The settings that `wlb plan` and `wlb tune packing` recommend, as a TOML file and as options."""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from wlb.cli import output
from wlb.spec import LossNormalizer, PackingSection, RunSpec, check, to_toml
from wlb.spec.methods import kept_method


def packed_as(
    given: RunSpec, section: PackingSection, options: argparse.Namespace, *, is_constant: bool
) -> RunSpec:
    """Return a run with the recommended packing, and with the token store of --corpus if given.

    Args:
        given: The configuration as the user wrote it.
        section: The recommended [packing] section, with all values filled in.
        options: The parsed command line, whose --corpus names the store.
        is_constant: Whether to set training.loss_normalizer = constant, so that a label has the
            same weight in all steps.
    """
    data, training = given.data, given.training
    if options.corpus:
        data = replace(data, store=options.corpus, blend=())
    if is_constant:
        training = replace(training, loss_normalizer=LossNormalizer.CONSTANT)
    # Clear packing.packs, and packing.method if it implies another policy, because they would
    # contradict the recommended section.
    packing = replace(section, method=kept_method(section.method, section.policy), packs="")
    return check(replace(given, packing=packing, data=data, training=training))


def as_toml(spec: RunSpec, options: argparse.Namespace, *, why: str) -> str:
    """Return the configuration as a TOML file, with comments on where it comes from.

    Args:
        spec: The configuration.
        options: The parsed command line, which a comment repeats.
        why: Sentence about the result, for a comment.
    """
    comments = (why, f"found by: {output.command_of(options)}")
    return to_toml(spec, comments=comments, whole=())


def all_keys(
    options: argparse.Namespace, overrides: Sequence[str], *, is_constant: bool
) -> list[str]:
    """Return the values KEY=VALUE of --set that give the recommended run.

    Args:
        options: The parsed command line, whose values of --set and --corpus begin the result.
        overrides: The recommended packing settings as KEY=VALUE.
        is_constant: Whether to set training.loss_normalizer = constant.
    """
    more = ["training.loss_normalizer=constant"] if is_constant else []
    store = [f"data.store={options.corpus}"] if options.corpus else []
    return [*options.overrides, *store, *overrides, *more]


def priced_model(options: argparse.Namespace, spec: RunSpec, profile: str) -> str:
    """Return a text that names the model, its number of GPUs and the profile of a prediction.

    If the user gave no NAME, the text says that the model is only the default.

    Args:
        options: The parsed command line.
        spec: The run, with all values filled in.
        profile: Name of the kernel profile.
    """
    size, gpus = spec.model.num_parameters, spec.parallel.world_size
    words = (
        f"{options.name} ({size / 1e9:.3g} billion parameters) on {gpus:,} GPU{'s' * (gpus > 1)}, "
        f"with kernel times of profile {profile}"
    )
    if options.name not in options.words:
        words += f"; no NAME was given, so {options.name} was used"
    return words

"""Document lengths for `wlb plan`, `tune` and `simulate`: read from files or stores, or drawn."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from wlb.cli.options import add_flag, add_overrides, add_text, number
from wlb.data import (
    DRAWN,
    FAMILIES,
    BlendedBatches,
    BlendedStore,
    GlobalBatches,
    LengthSource,
    StoreName,
    enough_of_family,
    lengths_of_file,
    open_store,
)
from wlb.data.folder import refuse_file
from wlb.memory import planned_gib
from wlb.packing import with_s_max
from wlb.plan import GlobalBatch, IntArray, UserError, check_at_least
from wlb.report.packing.tables import SourceFacts, facts_of
from wlb.report.plots import require_matplotlib
from wlb.report.tables import console
from wlb.simulate.forecast import batches_to_compare
from wlb.spec import USUAL, RunSpec, load, presets, system_overrides

MOST_PASSES = 1000
"""Most times that a source of documents may be repeated to fill --steps global batches."""
MOST_TOKENS = 1 << 40
"""Most tokens that all global batches together may have. Planning more would take days."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredSource(LengthSource):
    """The lengths of the documents of a token store."""

    masks_labels: bool  # whether the store marks which tokens have labels, as in fine-tuning


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlendedSource(StoredSource):
    """The lengths of the documents of several token stores, which `data.blend` mixes."""

    stores: BlendedStore  # the stores with their weights


def add_arguments(
    parser: argparse.ArgumentParser,
    *,
    steps: int | None = None,
    steps_default: str = "enough for about 2,048 micro-batches, at least 8",
) -> Any:
    """Add the arguments that give a run and the source of document lengths.

    Args:
        parser: Parser of the command.
        steps: Default of --steps; None if the command computes a default.
        steps_default: Text that describes the default of --steps in the help.

    Returns:
        The argument group of the sources, to which a command may add further sources.
    """
    parser.add_argument(
        "name",
        nargs="?",
        default="7b_128k",
        help=f"the configuration: a TOML file, or a preset: {', '.join(presets())} (default: "
        f"7b_128k)",
    )
    group = parser.add_argument_group(
        "documents",
        "give at most one of these sources; the default is data.store or data.blend of the "
        "configuration or, if both are empty, random lengths with the paper's distribution",
    )
    source = group.add_mutually_exclusive_group()
    text = (
        "file of document lengths in tokens: .npy, .npz, .csv, .json, .jsonl, .parquet, or text "
        "with one length in each line; - reads text from stdin"
    )
    add_text(source, "--lengths", "FILE", text)
    text = "token store, given as the path of its .bin file without the suffix"
    add_text(source, "--corpus", "STORE", text)
    text = f"draw random lengths from a distribution: {', '.join(FAMILIES)}"
    add_text(source, "--synthetic", "FAMILY", text)
    add_overrides(parser, metavar="KEY=VALUE", help="set keys of the configuration to other values")
    text = f"number of global batches to pack (default: {steps if steps else steps_default})"
    parser.add_argument("--steps", type=number(int), default=steps, help=text)
    add_flag(parser, "--in-order", "read documents in their order instead of shuffling them")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="device whose kernel profile is used if cost.profile is auto (default: cuda)",
    )
    return source


def open_source(options: argparse.Namespace, spec: RunSpec) -> LengthSource:
    """Return the document lengths from the source that the command line or the run names.

    Raises:
        UserError: The source cannot be read, or its documents or global batches are too large.
    """
    if options.steps is None:
        options.steps = batches_to_compare(spec)
    check_at_least("--steps", options.steps, 1)
    if options.steps * spec.tokens_per_step > MOST_TOKENS:
        raise UserError(
            f"--steps = {options.steps} is too large: that many global batches of "
            f"{spec.tokens_per_step:,} tokens have more than {MOST_TOKENS:,} tokens together; "
            f"lower --steps"
        )
    _draw_if_none(options, spec)
    source = _source(options, spec)
    row = int(source.lengths.argmax())
    longest = int(source.lengths[row])
    if longest > MOST_TOKENS:
        raise UserError(
            f"{source.name}: document {row} has {longest} tokens but must have at most "
            f"{MOST_TOKENS}; correct the lengths"
        )
    return source


def _source(options: argparse.Namespace, spec: RunSpec) -> LengthSource:
    """Return the lengths from --lengths, --synthetic or --corpus, or else from the run's store."""
    if options.lengths:
        return lengths_of_file(options.lengths)
    if options.synthetic:
        return enough_of_family(
            options.synthetic,
            window=spec.data.context_window,
            num_tokens=spec.tokens_per_step * (options.steps + 1),
            seed=spec.run.seed,
        )
    store = open_store(_store_of(options, spec))
    about: dict[str, Any] = {"lengths": store.lengths, "masks_labels": store.has_targets}
    if isinstance(store, BlendedStore):
        name = " + ".join(Path(entry).name for entry in spec.data.blend)
        return BlendedSource(name=name, stores=store, **about)
    return StoredSource(name=Path(store.prefix).name, **about)


def _store_of(options: argparse.Namespace, spec: RunSpec) -> StoreName:
    """Return the token store of --corpus, or else the run's data.blend or data.store."""
    return options.corpus or spec.data.blend or spec.data.store


def _draw_if_none(options: argparse.Namespace, spec: RunSpec) -> None:
    """If no documents are given, set --synthetic to the paper's distribution, and print a note."""
    if options.lengths or options.synthetic or _store_of(options, spec):
        return
    options.synthetic = DRAWN
    console(stderr=True, markup=False).print(
        f"No documents were given, so random lengths with the paper's distribution ({DRAWN}) are "
        f"used. To use your documents, add --lengths FILE or --corpus STORE."
    )


def usual_of(options: argparse.Namespace, spec: RunSpec) -> RunSpec:
    """Return the run with the usual loader of Megatron-LM and torchtitan (`wlb.spec.USUAL`)."""
    (overrides,) = system_overrides(USUAL, planned_gib=planned_gib(spec))
    made = filled_in(load(options.name, [*options.overrides, *overrides]), options)
    return replace(made, parallel=spec.parallel)


def masks_labels(source: LengthSource) -> bool:
    """Return whether the source is a token store that marks which tokens have labels."""
    return isinstance(source, StoredSource) and source.masks_labels


def batches_of(
    options: argparse.Namespace, spec: RunSpec, source: LengthSource
) -> list[GlobalBatch]:
    """Return the first --steps global batches of a source.

    A source with fewer documents is repeated. If data.epochs limits the repetitions, the result has
    fewer global batches.

    Args:
        options: The parsed command line.
        spec: The run.
        source: The document lengths.
    """
    total = options.steps * spec.tokens_per_step
    passes = max(total * share / tokens for _, share, tokens in _parts(source))
    if not spec.data.epochs and passes > MOST_PASSES:
        raise UserError(
            f"{source.name} has only {source.num_tokens:,} tokens, so {options.steps} global "
            f"batches of {spec.tokens_per_step:,} would repeat its documents {passes:,.0f} times; "
            f"lower --steps, shorten the context window, or add --set data.epochs=1"
        )
    data: dict[str, Any] = {
        "tokens_per_batch": spec.tokens_per_step,
        "seed": spec.run.seed,
        "epochs": spec.data.epochs,
    }
    if not isinstance(source, BlendedSource):
        stream = GlobalBatches(source, shuffle=not options.in_order, **data)
    elif options.in_order:
        raise UserError(
            f"--in-order cannot be used with data.blend ({source.name}), because a blend "
            "does not say in which order to read its stores; remove --in-order, or set data.store "
            "instead of data.blend"
        )
    else:
        # Pass only lengths, because predicted times do not depend on which tokens have labels.
        lengths = [LengthSource(name=s.prefix, lengths=s.lengths) for s in source.stores.stores]
        stream = BlendedBatches(lengths, source.stores.weights, **data)
    return [batch for batch, _ in islice(stream.iterate(), options.steps)]


def _parts(source: LengthSource) -> list[tuple[str, float, int]]:
    """Return for each store its name, its share of a step's tokens, and its number of tokens.

    A source that is not a blend counts as one store.
    """
    if not isinstance(source, BlendedSource):
        return [(source.name, 1.0, source.num_tokens)]
    stores, weights = source.stores.stores, source.stores.weights
    return [
        (store.prefix, weight / sum(weights), store.num_tokens)
        for store, weight in zip(stores, weights, strict=True)
    ]


def passes_of(source: LengthSource, batches: Sequence[GlobalBatch]) -> dict[str, float]:
    """Return how many times the global batches read each store, by the name of the store.

    1.5 means that the batches have one and a half times as many tokens as the store.

    Args:
        source: The document lengths.
        batches: The global batches.
    """
    parts = _parts(source)
    read = np.zeros(len(parts), np.int64)
    for batch in batches:
        np.add.at(read, batch.documents.source, batch.documents.length)
    return {name: int(n) / size for n, (name, _, size) in zip(read, parts, strict=True)}


def facts_shown(source: LengthSource, batches: Sequence[GlobalBatch], spec: RunSpec) -> SourceFacts:
    """Return statistics of document lengths for tables and pages.

    Args:
        source: The document lengths.
        batches: The global batches that were read from the source. For a blend, the statistics are
            of the documents in these batches, otherwise of all documents of the source.
        spec: The run, whose context window the statistics refer to.
    """
    lengths = lengths_shown(source, batches)
    return facts_of(source.name, lengths, window=spec.data.context_window)


def lengths_shown(source: LengthSource, batches: Sequence[GlobalBatch]) -> IntArray:
    """Return the document lengths that tables and pages describe.

    These are all lengths of the source. For a blend they are the lengths in `batches`, in which the
    stores are mixed by their weights.
    """
    if not isinstance(source, BlendedSource):
        return source.lengths
    return np.concatenate([batch.documents.length for batch in batches])


def check_outputs(*paths: str | None, needs_plots: bool, settings: str | None = None) -> None:
    """Before any work is done, check that files can be written and that matplotlib is installed.

    Args:
        *paths: Files that will be written; None, "" and "-" (stdout) are ignored.
        needs_plots: Whether matplotlib is needed.
        settings: A further file that will be written. Only this file may be a .toml file.

    Raises:
        UserError: A file cannot be written, or matplotlib is needed and not installed.
    """
    for path in paths:
        if path in presets() or (path and path.endswith(".toml")):
            raise UserError(
                f"{path} is a preset or a TOML file with settings, but stands where an option "
                f"expects the file to write; move {path} before the options, or write --json - to "
                "print JSON"
            )
    for path in (*paths, settings):
        if path not in (None, "", "-"):
            refuse_file(Path(path))
    if needs_plots:
        require_matplotlib()


def filled_in(spec: RunSpec, options: argparse.Namespace) -> RunSpec:
    """Return the run with the values that training fills in: vocabulary size and S_max.

    If parallel.dp is not set, it becomes 1.
    """
    spec = replace(spec, parallel=replace(spec.parallel, dp=max(1, spec.parallel.dp)))
    spec = with_vocabulary(spec, options)
    return with_s_max(spec, planned_gib=planned_gib(spec))


def with_vocabulary(spec: RunSpec, options: argparse.Namespace) -> RunSpec:
    """Return the run with model.vocab_size set.

    If model.vocab_size is 0, it becomes the vocabulary size of the token store or, without a store,
    the vocabulary size of the BPE that training would make.
    """
    if spec.model.vocab_size:
        return spec
    size = None
    _draw_if_none(options, spec)
    if not (options.lengths or options.synthetic):
        size = open_store(_store_of(options, spec)).vocab_size
    model = replace(spec.model, vocab_size=size or spec.data.bpe_vocab_size)
    return replace(spec, model=model)

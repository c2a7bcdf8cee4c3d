"""Document lengths for `wlb plan`, `tune` and `simulate`: from files, stores, or drawn."""

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
MOST_TOKENS = 1 << 40
"""Most tokens of all global batches together. More would take days to plan."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredSource(LengthSource):
    """Documents of a token store."""

    masks_labels: bool  # whether the store marks which tokens are trained


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlendedSource(StoredSource):
    """Several token stores mixed by weights; `lengths` has the documents of all of them."""

    stores: BlendedStore


def add_arguments(
    parser: argparse.ArgumentParser,
    *,
    steps: int | None = None,
    steps_default: str = "enough for about 2,048 micro-batches, at least 8",
) -> Any:
    """Add the arguments that choose a run and one source of document lengths.

    Args:
        parser: The command's parser.
        steps: Default of --steps; None if the command chooses it.
        steps_default: Description of that choice, for the help.

    Returns:
        The group of the sources, to which a command may add others.
    """
    parser.add_argument(
        "name",
        nargs="?",
        default="7b_128k",
        help=f"a TOML file, or a preset: {', '.join(presets())} (default: 7b_128k); decides "
        f"window, micro-batches, model, layout and [packing] options",
    )
    group = parser.add_argument_group(
        "documents",
        "at most one of these; default: data.store or data.blend of the run, and without them "
        "lengths that are drawn like the paper's",
    )
    source = group.add_mutually_exclusive_group()
    text = (
        "document lengths in tokens: .npy, .npz, .csv, .json, .jsonl, .parquet, or one a line; - "
        "reads stdin"
    )
    add_text(source, "--lengths", "FILE", text)
    add_text(source, "--corpus", "STORE", "prefix of a .bin/.idx token store")
    add_text(source, "--synthetic", "FAMILY", f"random lengths: {', '.join(FAMILIES)}")
    add_overrides(parser, metavar="KEY=VALUE")
    text = f"global batches packed (default: {steps_default or steps})"
    parser.add_argument("--steps", type=number(int), default=steps, help=text)
    add_flag(parser, "--in-order", "keep the order of the documents, no shuffling")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="device whose kernel profile is used if cost.profile is auto (default: cuda)",
    )
    return source


def open_source(options: argparse.Namespace, spec: RunSpec) -> LengthSource:
    """Open the source of document lengths; UserError if it cannot be planned."""
    if options.steps is None:
        options.steps = batches_to_compare(spec)
    check_at_least("--steps", options.steps, 1)
    if options.steps * spec.tokens_per_step > MOST_TOKENS:
        raise UserError(
            f"--steps = {options.steps} global batches of {spec.tokens_per_step:,} tokens are too "
            f"many to plan at once; use fewer"
        )
    _draw_if_none(options, spec)
    source = _source(options, spec)
    row = int(source.lengths.argmax())
    longest = int(source.lengths[row])
    if longest > MOST_TOKENS:
        raise UserError(f"{source.name}: document {row} has {longest} tokens; check the lengths")
    return source


def _source(options: argparse.Namespace, spec: RunSpec) -> LengthSource:
    """Open the file, family or store that the options or the run name."""
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
    """Return the store of --corpus, or else the run's."""
    return options.corpus or spec.data.blend or spec.data.store


def _draw_if_none(options: argparse.Namespace, spec: RunSpec) -> None:
    """Draw lengths like the paper's if no documents are given, and print that they are drawn."""
    if options.lengths or options.synthetic or _store_of(options, spec):
        return
    options.synthetic = DRAWN
    console(stderr=True, markup=False).print(
        f"No documents were given: lengths are drawn like the paper's ({DRAWN}). For yours add "
        f"--lengths FILE or --corpus STORE."
    )


def usual_of(options: argparse.Namespace, spec: RunSpec) -> RunSpec:
    """Return the same run as Megatron-LM and torchtitan would train it (`wlb.spec.USUAL`)."""
    (overrides,) = system_overrides(USUAL, planned_gib=planned_gib(spec))
    made = filled_in(load(options.name, [*options.overrides, *overrides]), options)
    return replace(made, parallel=spec.parallel)


def masks_labels(source: LengthSource) -> bool:
    """Return whether the documents are from a store that marks which tokens are trained."""
    return isinstance(source, StoredSource) and source.masks_labels


def batches_of(
    options: argparse.Namespace, spec: RunSpec, source: LengthSource
) -> list[GlobalBatch]:
    """Return up to --steps global batches; a short source repeats unless data.epochs limits it."""
    total = options.steps * spec.tokens_per_step
    passes = max(total * share / tokens for _, share, tokens in _parts(source))
    if not spec.data.epochs and passes > MOST_PASSES:
        raise UserError(
            f"{source.name} has {source.num_tokens:,} tokens: {options.steps} global batches of "
            f"{spec.tokens_per_step:,} would repeat it {passes:,.0f} times; use fewer --steps, a "
            f"smaller window, or --set data.epochs=1"
        )
    data: dict[str, Any] = {
        "tokens_per_batch": spec.tokens_per_step,
        "seed": spec.run.seed,
        "epochs": spec.data.epochs,
    }
    if not isinstance(source, BlendedSource):
        stream = GlobalBatches(source, shuffle=not options.in_order, **data)
    elif options.in_order:
        raise UserError(f"--in-order: {source.name} are mixed and have no order; leave it out")
    else:
        # Lengths are enough: predicted times do not depend on which tokens are trained.
        lengths = [LengthSource(name=s.prefix, lengths=s.lengths) for s in source.stores.stores]
        stream = BlendedBatches(lengths, source.stores.weights, **data)
    return [batch for batch, _ in islice(stream.iterate(), options.steps)]


def _parts(source: LengthSource) -> list[tuple[str, float, int]]:
    """Return each store's name, its share of a step's tokens, and its number of tokens."""
    if not isinstance(source, BlendedSource):
        return [(source.name, 1.0, source.num_tokens)]
    stores, weights = source.stores.stores, source.stores.weights
    return [
        (store.prefix, weight / sum(weights), store.num_tokens)
        for store, weight in zip(stores, weights, strict=True)
    ]


def passes_of(source: LengthSource, batches: Sequence[GlobalBatch]) -> dict[str, float]:
    """Return how many passes over each store the batches contain, by the store's name."""
    parts = _parts(source)
    read = np.zeros(len(parts), np.int64)
    for batch in batches:
        np.add.at(read, batch.documents.source, batch.documents.length)
    return {name: int(n) / size for n, (name, _, size) in zip(read, parts, strict=True)}


def facts_shown(source: LengthSource, batches: Sequence[GlobalBatch], spec: RunSpec) -> SourceFacts:
    """Return facts about `lengths_shown`, for tables and pages."""
    lengths = lengths_shown(source, batches)
    return facts_of(source.name, lengths, window=spec.data.context_window)


def lengths_shown(source: LengthSource, batches: Sequence[GlobalBatch]) -> IntArray:
    """Return the source's lengths; for a blend those in `batches`, which follow its weights."""
    if not isinstance(source, BlendedSource):
        return source.lengths
    return np.concatenate([batch.documents.length for batch in batches])


def check_outputs(*paths: str | None, needs_plots: bool, settings: str | None = None) -> None:
    """Raise a UserError, before any work, if a file cannot be written or plots cannot be drawn.

    Args:
        *paths: Files to write; None for those that are not requested.
        needs_plots: Whether matplotlib is needed.
        settings: A file for settings, which unlike the others may be a .toml file.
    """
    for path in paths:
        if path in presets() or (path and path.endswith(".toml")):
            raise UserError(
                f"{path} is the name of a preset or of a settings file, but would be written; put "
                f"NAME before the options, or use --json - to print"
            )
    for path in (*paths, settings):
        if path not in (None, "", "-"):
            refuse_file(Path(path))
    if needs_plots:
        require_matplotlib()


def filled_in(spec: RunSpec, options: argparse.Namespace) -> RunSpec:
    """Fill in values as training would: dp (1 if unknown), vocabulary size, and S_max."""
    spec = replace(spec, parallel=replace(spec.parallel, dp=max(1, spec.parallel.dp)))
    spec = with_vocabulary(spec, options)
    return with_s_max(spec, planned_gib=planned_gib(spec))


def with_vocabulary(spec: RunSpec, options: argparse.Namespace) -> RunSpec:
    """Fill in the vocabulary size of the store, or of the BPE that training would make."""
    if spec.model.vocab_size:
        return spec
    size = None
    _draw_if_none(options, spec)
    if not (options.lengths or options.synthetic):
        size = open_store(_store_of(options, spec)).vocab_size
    model = replace(spec.model, vocab_size=size or spec.data.bpe_vocab_size)
    return replace(spec, model=model)

"""Where `wlb plan` and `wlb tune packing` take document lengths from."""

import argparse
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from wlb.corpus import (
    FAMILIES,
    GlobalBatches,
    LengthSource,
    TokenStore,
    lengths_of_family,
    lengths_of_file,
)
from wlb.plan import GlobalBatch
from wlb.report import require_matplotlib
from wlb.spec import LongDocuments, RunSpec, presets

MOST_PASSES = 1000
MOST_TOKENS = 1 << 40
"""Of all global batches together; a plan of more would take days."""


def add_arguments(
    parser: argparse.ArgumentParser, *, steps: int | None, steps_default: str = ""
) -> Any:
    """The run's settings, and exactly one source; returns the sources' group, to add others.

    steps: None where a command fills it in, as `steps_default` says.
    """
    parser.add_argument(
        "name",
        nargs="?",
        default="7b_128k",
        help=f"a TOML file, or a preset: {', '.join(presets())} (default: 7b_128k); gives window, "
        f"micro-batches, model and layout for the cost, [packing] options",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--lengths", metavar="FILE", help="document lengths: .npy, .json, or one a line"
    )
    source.add_argument("--corpus", metavar="STORE", help="prefix of a .bin/.idx token store")
    source.add_argument(
        "--synthetic", metavar="FAMILY", help=f"drawn lengths: {', '.join(FAMILIES)}"
    )
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", dest="overrides"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=steps,
        help=f"global batches packed (default: {steps_default or steps})",
    )
    parser.add_argument(
        "--in-order", action="store_true", help="documents in the source's order, not shuffled"
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="whose kernel profile prices documents where cost.profile is auto (default: cuda)",
    )
    return source


def open_source(options: argparse.Namespace, spec: RunSpec) -> LengthSource:
    """The lengths that were asked for; ValueError for what is none."""
    if options.steps < 1:
        raise ValueError(f"--steps = {options.steps} must be at least 1")
    window = spec.data.context_window
    if options.steps * spec.tokens_per_step > MOST_TOKENS:
        raise ValueError(
            f"--steps = {options.steps} global batches of {spec.tokens_per_step:,} tokens are more "
            f"than can be planned at once; use fewer"
        )
    if options.lengths:
        source = lengths_of_file(options.lengths)
    elif options.corpus:
        store = TokenStore(options.corpus)
        source = LengthSource(name=Path(options.corpus).name, lengths=store.lengths)
    else:
        some = lengths_of_family(options.synthetic, window=window, num_documents=4096, seed=0)
        needed = spec.tokens_per_step * (options.steps + 1) * some.num_documents / some.num_tokens
        source = lengths_of_family(
            options.synthetic,
            window=window,
            num_documents=int(needed * 1.1) + 1,
            seed=spec.run.seed,
        )
    if int(source.lengths.max()) > MOST_TOKENS:
        row = int(source.lengths.argmax())
        raise ValueError(
            f"{source.name}: document {row} has {source.lengths[row]} tokens; check the lengths"
        )
    if spec.data.long_documents == LongDocuments.REFUSE and int(source.lengths.max()) > window:
        row = int(source.lengths.argmax())
        raise ValueError(
            f"{source.name}: document {row} has {source.lengths[row]} tokens, more than the "
            f'context window of {window}; use data.long_documents = "split" or a larger window'
        )
    return source


def batches_of(
    options: argparse.Namespace, spec: RunSpec, source: LengthSource
) -> list[GlobalBatch]:
    """At most --steps global batches; a short source is repeated unless data.epochs limits it."""
    passes = options.steps * spec.tokens_per_step / source.num_tokens
    if not spec.data.epochs and passes > MOST_PASSES:
        raise ValueError(
            f"{source.name} has {source.num_tokens:,} tokens: {options.steps} global batches of "
            f"{spec.tokens_per_step:,} would repeat it {passes:,.0f} times; use fewer --steps, a "
            f"smaller window, or --set data.epochs=1"
        )
    stream = GlobalBatches(
        source,
        tokens_per_batch=spec.tokens_per_step,
        seed=spec.run.seed,
        epochs=spec.data.epochs,
        shuffle=not options.in_order,
    )
    return [batch for batch, _ in islice(stream.iterate(), options.steps)]


def check_outputs(*paths: str | None, needs_plots: bool) -> None:
    """ValueError before any work where a file cannot be written or plots cannot be drawn."""
    for path in paths:
        if (
            path
            and path != "-"
            and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir())
        ):
            raise ValueError(f"{path} cannot be written: it is a folder, or its folder is missing")
    if needs_plots:
        require_matplotlib()


def with_vocabulary(spec: RunSpec) -> RunSpec:
    """`spec` with the vocabulary of the BPE that training would make, where the model has none."""
    if spec.model.vocab_size:
        return spec
    return replace(spec, model=replace(spec.model, vocab_size=spec.data.bpe_vocab_size))

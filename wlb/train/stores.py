"""Opens the token stores that a run names, or makes a token store from `data.corpus`."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from wlb.data import BlendedStore, StoreName, open_store
from wlb.plan import UserError, digest
from wlb.prepare import StoreReport, docstring_prefix, prepare, prepare_docstrings, text_documents
from wlb.spec import RunSpec, check, resolve_dp

SPLIT_SEED = 0
"""Seed of the random choice of held-out documents.

It does not depend on run.seed, so that runs with different seeds hold out the same documents. The
value is arbitrary."""
DOCSTRINGS, STDLIB = "docstrings", "stdlib"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """The token stores of a run."""

    train: StoreName  # name of the training store, or of a blend of stores
    heldout: str  # prefix of the held-out store; "" without one
    vocab_size: int  # vocabulary size of the model
    note: str  # description of the training store, for the log


def named_stores(spec: RunSpec) -> Stores | None:
    """Return the token stores that a run names. Only their indices are read.

    Returns:
        The stores, or None if the run names no store.

    Raises:
        UserError: If neither the run nor its store says how large the vocabulary is.
    """
    name = spec.data.blend or spec.data.store
    if not name:
        return None
    store = open_store(name)
    vocab = spec.model.vocab_size or store.vocab_size
    if not vocab:
        raise UserError(
            f"the store {store.prefix} does not record the size of its vocabulary; set "
            "model.vocab_size"
        )
    note = store.summary
    if isinstance(store, BlendedStore):
        total = sum(store.weights)
        shares = zip(store.stores, store.weights, strict=True)
        note += "; " + ", ".join(f"{s.prefix} {w / total:.1%}" for s, w in shares)
    return Stores(train=name, heldout=spec.data.heldout_store, vocab_size=vocab, note=note)


def open_stores(spec: RunSpec, console: Console) -> Stores:
    """Return the token stores that a run names, or make a store if the run names none.

    The store is made from `data.corpus`. This may take hours, unless an earlier run has made the
    same store.
    """
    named = named_stores(spec)
    if named is not None:
        return named
    if spec.data.corpus == DOCSTRINGS:
        with console.status("making a token store of conversations about Python's docstrings"):
            made = prepare_docstrings(spec.run.stores_dir, **_docstring_options(spec))
        trained = f", {made.num_targets / made.num_tokens:.0%} of them targets"
        return _stores_of(made, spec, f"conversations, {made.num_tokens:,} tokens{trained}")
    prefix = _store_prefix(spec, spec.run.stores_dir)
    with console.status(f"making a token store of {spec.data.corpus}") as status:

        def progress(done: int, total: int) -> None:
            status.update(f"making a token store of {spec.data.corpus}: {done / max(1, total):.0%}")

        made = prepare(
            text_documents(spec.data.corpus),
            prefix,
            vocab_size=spec.data.bpe_vocab_size,
            heldout_fraction=spec.data.heldout_fraction,
            seed=SPLIT_SEED,
            progress=progress,
        )
    left_out = ", ".join(f"{count} {why}" for why, count in made.skipped.items() if count)
    stores = _stores_of(made, spec, f"documents, {made.num_tokens:,} tokens")
    return replace(stores, note=f"{stores.note}; left out: {left_out}") if left_out else stores


def _stores_of(made: StoreReport, spec: RunSpec, what: str) -> Stores:
    """Return the `Stores` for a store that was made from a corpus, now or by an earlier run.

    Args:
        made: How the store was made.
        spec: The run.
        what: Continues the description of the store, which begins with the number of documents;
            for example "documents, 9 tokens".
    """
    how = "reused" if made.reused else f"made in {made.time_s:.1f} s"
    return Stores(
        train=made.prefix,
        heldout=made.heldout if made.num_heldout_documents else "",
        vocab_size=spec.model.vocab_size or made.vocab_size,
        note=f"{made.num_documents:,} {what} ({how})",
    )


def train_store(spec: RunSpec, *, stores: Path | None = None) -> StoreName:
    """Return the name of a run's token store, which may not have been made yet.

    Args:
        spec: The run.
        stores: The folder in which stores are made; None means `run.stores_dir`.
    """
    folder = stores or spec.run.stores_dir
    data = spec.data
    if data.blend or data.store:
        return data.blend or data.store
    if data.corpus == DOCSTRINGS:
        return str(docstring_prefix(folder, **_docstring_options(spec)))
    return f"{_store_prefix(spec, folder)}-train"


def _docstring_options(spec: RunSpec) -> dict[str, Any]:
    """Return the keyword arguments of `prepare_docstrings`, which also decide the store's name."""
    data = spec.data
    return {
        "vocab_size": data.bpe_vocab_size,
        "limit": data.context_window,
        "heldout_fraction": data.heldout_fraction,
        "seed": SPLIT_SEED,
    }


def _store_prefix(spec: RunSpec, folder: Path) -> Path:
    """Return the prefix of the store that is made from `data.corpus`.

    The prefix depends on the corpus, the vocabulary size and the share of held-out documents. So
    runs for which these three are equal share a store.
    """
    data = spec.data
    is_builtin = data.corpus == STDLIB
    corpus = data.corpus if is_builtin else os.path.realpath(data.corpus)
    mark = digest(corpus, data.bpe_vocab_size, str(data.heldout_fraction)) % 16**6
    name = corpus if is_builtin else Path(corpus).name
    return folder / f"{name}-bpe{data.bpe_vocab_size}-{mark:06x}"


def with_vocabulary(spec: RunSpec) -> RunSpec:
    """Fill in the vocabulary size for a run whose store has not been made yet.

    If `model.vocab_size` is not set, the size is `data.bpe_vocab_size`, that of the BPE vocabulary
    that would be made from `data.corpus`.
    """
    size = spec.model.vocab_size or spec.data.bpe_vocab_size
    return replace(spec, model=replace(spec.model, vocab_size=size))


def ready(spec: RunSpec, stores: Stores, world_size: int) -> RunSpec:
    """Fill in the data-parallel size and the vocabulary size of a run.

    Args:
        spec: The run.
        stores: The run's token stores.
        world_size: Number of ranks.

    Raises:
        UserError: If the vocabulary of the training store is larger than the model's.
    """
    spec = resolve_dp(spec, world_size)
    store = open_store(stores.train)
    if store.vocab_size and store.vocab_size > stores.vocab_size:
        raise UserError(
            f"model.vocab_size = {stores.vocab_size} is smaller than the vocabulary of "
            f"the store {store.prefix}, which has {store.vocab_size} entries; raise "
            "model.vocab_size, or set it to 0 to use the store's size"
        )
    return check(replace(spec, model=replace(spec.model, vocab_size=stores.vocab_size)))

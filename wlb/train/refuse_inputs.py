"""Refuses token stores, checkpoints and telemetry settings that a run cannot use.

This module does not import torch, so that dry runs can use it too.
"""

from operator import attrgetter
from pathlib import Path

from wlb.data import BlendedStore, StoreName, TokenStore, check_tokenizers, open_store
from wlb.plan import UserError
from wlb.spec import ExpertBalance, ModelSpec, RunSpec, apply
from wlb.train.checkpoint import folder as checkpoint

SHAPES = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "ffn_hidden_size",
    "qkv_bias",
    "qk_norm",
    "qk_norm_rows",
    "branch_norms",
    "tied_embeddings",
    "attention_gate",
    "linear",
    "experts.num",
    "experts.every",
    "experts.dense_layers",
    "experts.hidden_size",
    "experts.shared",
    "experts.shared_gate",
)
"""Keys of the section [model] that decide the names and shapes of a model's tensors.

A run can load a checkpoint only if these keys have the same values in both."""


def check_stores(spec: RunSpec, *, train: StoreName, heldout: str) -> None:
    """Raise UserError if the training store has no targets or the held-out store does not fit it.

    Args:
        spec: The run.
        train: Name of the training store.
        heldout: Prefix of the held-out store; "" without one.
    """
    store = open_store(train)
    if not store.num_targets.any():
        has = "no token that is a target" if store.has_targets else "only one token"
        raise UserError(
            f"every document of the store {store.prefix} has {has}, so the model has "
            "nothing to predict; use another data.store or data.corpus"
        )
    if spec.eval.steps and heldout:
        held_out = TokenStore(heldout)
        _check_vocabulary(spec, store, held_out)


def refuse_snapshots(spec: RunSpec, device: str) -> None:
    """Raise UserError if `telemetry.snapshot_steps` is set but the run does not use a GPU.

    `device` is "cpu" or "cuda".
    """
    steps = list(spec.telemetry.snapshot_steps)
    if device == "cuda" or not steps:
        return
    raise UserError(
        f"telemetry.snapshot_steps = {steps} records the memory of GPUs, but this run "
        f"computes on {device}; remove telemetry.snapshot_steps, or set run.device = "
        "cuda"
    )


def _check_vocabulary(spec: RunSpec, train: TokenStore | BlendedStore, heldout: TokenStore) -> None:
    """Raise UserError if the held-out store does not fit the training store or the model.

    Its tokenizer must be that of the training store, and its vocabulary must not be larger than the
    model's.
    """
    stores = train.stores if isinstance(train, BlendedStore) else (train,)
    key = "data.blend" if isinstance(train, BlendedStore) else "data.store"
    check_tokenizers([*stores, heldout], f"{key} and data.heldout_store")
    if heldout.vocab_size and heldout.vocab_size > spec.model.vocab_size:
        raise UserError(
            f"model.vocab_size = {spec.model.vocab_size} is smaller than the "
            f"vocabulary of the held-out store {heldout.prefix}, which has "
            f"{heldout.vocab_size} entries; raise model.vocab_size to at least "
            f"{heldout.vocab_size}"
        )


def begins_with(spec: RunSpec) -> Path | None:
    """Return the checkpoint that the key `checkpoint.init_from` selects; None if it is not set."""
    path = spec.checkpoint.init_from
    return checkpoint.resolve(Path(path), f"checkpoint.init_from = {path}") if path else None


def check_weights(model: ModelSpec, saved_in: Path, option: str) -> None:
    """Raise UserError if a checkpoint is damaged or its weights do not fit the run's model.

    Args:
        model: The run's model.
        saved_in: The checkpoint.
        option: The option that names the checkpoint, such as "--resume", for the message.
    """
    checkpoint.check_files(saved_in)
    theirs = model_of(saved_in)
    for name in SHAPES:
        read = attrgetter(name)
        if read(theirs) != read(model):
            raise UserError(
                f"{option}: the checkpoint {saved_in} has model.{name} = "
                f"{read(theirs)}, but this run has model.{name} = {read(model)}; set "
                f"model.{name} to the checkpoint's value, or start without {option}"
            )
    kinds = [each.experts.balance for each in (theirs, model)]
    if kinds[0] == ExpertBalance.BIAS != kinds[1]:
        raise UserError(
            f"{option}: the checkpoint {saved_in} was trained with "
            "model.experts.balance = bias, but this run has model.experts.balance = "
            f"{kinds[1]}; set model.experts.balance = bias, or start without {option}"
        )


def model_of(saved_in: Path) -> ModelSpec:
    """Return the model whose weights a checkpoint has, read from its run.json."""
    saved = checkpoint.read_run(saved_in)["spec"]["model"]
    return apply(ModelSpec(), saved, source=str(saved_in), prefix="model.", is_stored=True)

"""Test whether a model keeps the documents of a packed row apart, on the model that trains.

    check_documents_apart(model, batch)   # before the first step of your own loop, on all ranks

No configuration says it: masks, short convolutions and recurrent states each read document
boundaries in their own way or not at all. A model that ignores them trains across documents without
an error. So the probe computes rows of two short documents and changes the first one:

    row A   [first document | second document]
    row B   [other document | second document]   the second document's logits must equal row A's
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wlb.adapters.boundary_keys import FLASH_KEYS, SEQ_IDX, boundary_keys, unwrapped
from wlb.adapters.collate import PaddingFreeCollator
from wlb.parallel.collectives import agree
from wlb.plan import UserError

LENGTH = 16
"""Tokens of each of the two documents.

More than a short convolution reads, and few enough for any model's table of positions."""
LEAK = 1e-4
"""Smallest effect on the other document that is a leak, relative to the effect within one document.

The effect is the change of logits that new tokens in the first document cause."""
NOISE = 8
"""A leak must exceed the effect of rounding by this factor.

Rounding is measured as the effect of a change on the document before it, which causal attention
makes zero. It is not zero in numerics: matrix products of experts change their sizes, and a nearly
tied choice of experts can flip."""
TRIES = 3
"""Number of probes that must all show a leak, because rounding differs by chance between rows."""


def check_documents_apart(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Raise UserError if a document's logits depend on another document of the packed row.

    This is a collective call. All ranks must make it for the same model, wrapped and placed as in
    training, and all ranks raise if one of them finds a leak. It runs a few forwards of 32 tokens
    in evaluation mode without gradients, and restores modes, buffers and the state of random
    numbers.

    Args:
        model: The model that trains, with its wrappers.
        batch: A micro-batch as the model gets it. The probe uses its tokens and those of its keys
            that say where documents begin. A batch of padded rows is not probed.
    """
    # Ranks agree on every branch, because a wrapped model's forward may communicate.
    if not _anywhere(_is_packed(batch)):
        return
    problem: UserError | None = None
    with _untouched(model, batch["input_ids"].device):
        leaks, try_ = True, 0
        while leaks and try_ < TRIES and problem is None:
            share = 0.0
            try:
                share = _leaked_share(_callable(model), batch, try_)
            except Exception as error:
                problem = _unknown(model, error)
            leaks, try_ = _anywhere(share > LEAK or problem is not None), try_ + 1
    if problem is None and leaks:
        problem = _leak(model, batch, share) if share > LEAK else None
    agree({}, problem, group=dist.group.WORLD if _is_distributed() else None)


def _is_packed(batch: Mapping[str, Any]) -> bool:
    """Return whether the batch is one row with document boundaries.

    Padded rows have an attention mask.
    """
    keys = ("position_ids", *FLASH_KEYS, SEQ_IDX)
    has_boundaries = any(batch.get(key) is not None for key in keys)
    tokens = batch.get("input_ids")
    is_row = isinstance(tokens, Tensor) and tokens.ndim == 2 and tokens.shape[0] == 1
    return is_row and has_boundaries and batch.get("attention_mask") is None


def _leaked_share(model: nn.Module, batch: Mapping[str, Any], try_: int) -> float:
    """Return the effect of the first document on the second, relative to that within one document.

    The result is 0 where the effect is not larger than rounding.
    """
    first, other, second = (_tokens(batch["input_ids"], 3 * try_ + i) for i in range(3))
    before = [_logits(model, batch, [x, second])[-LENGTH:] for x in (first, other)]
    behind = [_logits(model, batch, [second, x])[:LENGTH] for x in (first, other)]
    within = [_logits(model, batch, [x + second])[-LENGTH:] for x in (first, other)]
    # before: the changed document precedes the one that is compared. behind: it follows it, so that
    # only rounding can differ. within: both are one document, so that the effect is full.
    across, rounding, within_one = _change(*before), _change(*behind), _change(*within)
    if within_one == 0:
        warnings.warn(
            f"{type(unwrapped(model)).__name__}: a token's logits do not depend on the tokens "
            f"before it (perhaps its weights are zero at the start), so the probe cannot tell "
            f"whether the documents of a packed row are kept apart",
            stacklevel=4,
        )
    return across / within_one if within_one and across > NOISE * rounding else 0.0


def _change(one: Tensor, other: Tensor) -> float:
    """Return the difference of logits at the position where it is largest.

    Root mean square over the vocabulary, maximum over positions: a convolution over a few tokens
    changes only the first positions of the second document.
    """
    return float((one - other).square().mean(-1).sqrt().max())


def _tokens(input_ids: Tensor, which: int) -> list[int]:
    """Return a document made of the batch's tokens, which are surely in the vocabulary.

    Documents of different `which` differ at every position.
    """
    known = input_ids[0, : 4 * LENGTH].unique().tolist()
    if len(known) == 1:  # an id below one that occurs is in the vocabulary, too
        known.append(known[0] - 1 if known[0] else 1)
    # Use different strides, so that one probe document is never a shift of another.
    return [known[(which + (1 + which // 3) * i) % len(known)] for i in range(LENGTH)]


def _row(batch: Mapping[str, Any], documents: list[list[int]]) -> dict[str, Any]:
    """Return a packed row of these documents, with the batch's keys and on its device."""
    tokens, positions = batch["input_ids"], batch.get("position_ids")
    collator = PaddingFreeCollator(
        return_flash_attn_kwargs=batch.get("cu_seq_lens_q") is not None,
        return_seq_idx=batch.get(SEQ_IDX) is not None,
        position_ids_start=0 if positions is None else int(positions.flatten()[0]),
    )
    made = collator([{"input_ids": document} for document in documents])
    made = {key: value for key, value in made.items() if batch.get(key) is not None}
    made.pop("labels", None)
    return {
        key: value.to(tokens.device) if isinstance(value, Tensor) else value
        for key, value in made.items()
    }


def _logits(model: nn.Module, batch: Mapping[str, Any], documents: list[list[int]]) -> Tensor:
    """Return the logits of a packed row's tokens, float32 [2 * LENGTH, vocabulary]."""
    row = _row(batch, documents)
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        row["use_cache"] = False  # recomputed layers of transformers have no cache
    out: Any = model(**row)
    logits: Any = getattr(out, "logits", None)
    if logits is None and isinstance(out, Mapping):
        logits = out.get("logits")
    if logits is None and isinstance(out, tuple):
        logits = out[0]
    if isinstance(logits, Tensor) and hasattr(logits, "full_tensor"):
        logits = logits.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(logits, Tensor) or logits.ndim not in (2, 3):
        raise UserError(f"its forward returns {type(out).__name__} without logits of each token")
    # PEFT's prompt tuning puts tokens in front of the row.
    return logits.reshape(-1, logits.shape[-1])[-2 * LENGTH :].float()


def _callable(model: nn.Module) -> nn.Module:
    """Return the model inside of DDP and torch.compile, which is the one to call.

    DDP's own forward would synchronise buffers. FSDP must stay, because it gathers the parameters.
    """
    while True:
        if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        else:
            return model


@contextlib.contextmanager
def _untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluate without gradients, and restore modes, buffers and random numbers at the end."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=devices),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),  # do not compile a graph just for the probe
    ):
        try:
            # Do not call `eval()`: some libraries then merge adapters into the weights.
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, is_training in modes:
                module.training = is_training
            for module, name, buffer, was in buffers:
                module._buffers[name] = buffer
                buffer.copy_(was)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _anywhere(here: bool) -> bool:
    """Return whether `here` is true on any rank."""
    if not _is_distributed():
        return here
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, here)
    return any(everyone)


def _name(model: nn.Module) -> str:
    inner = unwrapped(model)
    attention = getattr(getattr(inner, "config", None), "_attn_implementation", None)
    return f"{type(inner).__name__} (attn_implementation = {attention!r})"


def _unknown(model: nn.Module, error: Exception) -> UserError:
    cause = f"{type(error).__name__}: {error}".rstrip(".")
    return UserError(
        f"{_name(model)} failed on a packed row of two short documents, by which wlb tests whether "
        f"it keeps documents apart: {cause}. Repair what it names; or train it unpacked by the "
        f"library's own trainer; or, if you know that it keeps them apart, leave the test out "
        f"(check_documents=False of the trainer, or no call of check_documents_apart)"
    )


def _leak(model: nn.Module, batch: Mapping[str, Any], share: float) -> UserError:
    inner = unwrapped(model)
    config = getattr(inner, "config", None)
    missing = [key for key in boundary_keys(inner) if batch.get(key) is None]
    remedies: list[str] = []
    if missing:
        remedies.append(
            f"its forward takes {', '.join(missing)}, which the collator leaves out: give "
            f"PaddingFreeCollator(return_flash_attn_kwargs=True, return_seq_idx=True), or none"
        )
    if getattr(config, "use_cache", False):
        remedies.append("set model.config.use_cache = False")
    if "flash" not in str(getattr(config, "_attn_implementation", None)):
        remedies.append("load it with attn_implementation='flash_attention_2' where it has that")
    remedies.append("train it unpacked by the library's own trainer")
    return UserError(
        f"{_name(model)} lets documents of a packed row see each other: other tokens in the first "
        f"of two change the second one's logits ({share:.2g} of what they do within one document), "
        f"so it would train across documents; {'; or '.join(remedies)}"
    )

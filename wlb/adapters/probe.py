"""Whether a model keeps the documents of a packed row apart: asked of the model that trains.

    check_documents_apart(model, batch)   # of a loop's own, before its first step, on all ranks

Nothing in a configuration says it: masks, short convolutions and recurrent states each read
boundaries in their own way or not at all, and a model that reads none trains across documents
without a word. Here the first of two documents changes, and the second one's logits must not.
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
"""Tokens of each of the two documents; longer than short convolutions, within any table of
positions."""
LEAK = 1e-4
"""Least share of what the change does within one document that is a leak."""
NOISE = 8
"""Least multiple of what a change behind a document does to it, which is rounding alone: experts'
products have other sizes, and a choice of experts that is nearly a tie can tip."""
TRIES = 3
"""Documents that must all show a leak, since rounding differs by chance from row to row."""


def check_documents_apart(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """UserError if the model's logits of a document depend on another one of its packed row.

    A collective call: all ranks make one for the same model, wrapped and placed as it trains, and
    all raise if one finds a leak. batch: a micro-batch as the model gets it; the probe has its keys
    that say where documents begin, and its tokens. A batch of padded rows is not probed. A few
    forwards of 32 tokens run in evaluation mode and without gradients. Modes, buffers and the
    state of random numbers are afterwards what they were.
    """
    if not _anywhere(_is_packed(batch)):
        return
    problem: UserError | None = None
    with _untouched(model, batch["input_ids"].device):
        leaks, try_ = True, 0
        while leaks and try_ < TRIES and problem is None:
            share = 0.0
            try:
                share = _share(_callable(model), batch, try_)
            except Exception as error:
                problem = _unknown(model, error)
            leaks, try_ = _anywhere(share > LEAK or problem is not None), try_ + 1
    if problem is None and leaks:
        problem = _leak(model, batch, share) if share > LEAK else None
    agree({}, problem, group=dist.group.WORLD if _is_distributed() else None)


def _is_packed(batch: Mapping[str, Any]) -> bool:
    """Whether it is one row that says where documents begin; padded rows have a mask."""
    keys = ("position_ids", *FLASH_KEYS, SEQ_IDX)
    has_boundaries = any(batch.get(key) is not None for key in keys)
    tokens = batch.get("input_ids")
    is_row = isinstance(tokens, Tensor) and tokens.ndim == 2 and tokens.shape[0] == 1
    return is_row and has_boundaries and batch.get("attention_mask") is None


def _share(model: nn.Module, batch: Mapping[str, Any], try_: int) -> float:
    """What a change in the first document does to the second, over what it does where both are one
    document; 0 if it is rounding.
    """
    first, other, second = (_tokens(batch["input_ids"], 3 * try_ + i) for i in range(3))
    before = [_logits(model, batch, [x, second])[-LENGTH:] for x in (first, other)]
    behind = [_logits(model, batch, [second, x])[:LENGTH] for x in (first, other)]
    within = [_logits(model, batch, [x + second])[-LENGTH:] for x in (first, other)]
    leaked, rounding, whole = _change(*before), _change(*behind), _change(*within)
    if whole == 0:
        warnings.warn(
            f"{type(unwrapped(model)).__name__}: a token's logits do not depend on those before "
            f"it, as where weights begin at zero, so the probe cannot tell whether the documents "
            f"of a packed row are kept apart",
            stacklevel=4,
        )
    return leaked / whole if whole and leaked > NOISE * rounding else 0.0


def _change(one: Tensor, other: Tensor) -> float:
    """Root mean square over the vocabulary, at the position of the second document that changes
    most: a convolution of a few tokens changes its first ones only.
    """
    return float((one - other).square().mean(-1).sqrt().max())


def _tokens(input_ids: Tensor, which: int) -> list[int]:
    """A document of the batch's own tokens, which are in the vocabulary; another one for each
    `which`, different at every place.
    """
    known = input_ids[0, : 4 * LENGTH].unique().tolist()
    if len(known) == 1:  # ids below one that occurs are in the vocabulary too
        known.append(known[0] - 1 if known[0] else 1)
    # Strides that differ keep a document from being the other one moved by some places.
    return [known[(which + (1 + which // 3) * i) % len(known)] for i in range(LENGTH)]


def _row(batch: Mapping[str, Any], documents: list[list[int]]) -> dict[str, Any]:
    """A packed row with the batch's keys, on its device."""
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
    """Logits of a packed row's own tokens, [2 * LENGTH, vocabulary], float32."""
    row = _row(batch, documents)
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        row["use_cache"] = False  # transformers leaves the cache out of recomputed layers
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
    return logits.reshape(-1, logits.shape[-1])[-2 * LENGTH :].float()  # after PEFT's prompt


def _callable(model: nn.Module) -> nn.Module:
    """The model inside of DDP, which has all parameters and would sync for the probe."""
    while True:
        if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        else:
            return model


@contextlib.contextmanager
def _untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation without gradients, that leaves modes, buffers and random numbers as they were."""
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
        torch.compiler.set_stance("force_eager"),  # or a graph is compiled for the probe alone
    ):
        try:
            # No `eval()`, which some libraries take as a sign to merge adapters into weights.
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
    """Whether it is so on any rank, so that all make the same forwards."""
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
    told = f"{type(error).__name__}: {error}".rstrip(".")
    return UserError(
        f"{_name(model)} failed on a packed row of two short documents, by which wlb tests whether "
        f"it keeps documents apart: {told}. Repair what it names; or train it unpacked by the "
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

"""Test whether the model that trains keeps the documents of a packed row apart.

    check_documents_apart(model, batch)   # before the first step of your own loop, on all ranks

This cannot be read from a configuration: attention masks, short convolutions and recurrent states
each read document boundaries in a different way, or not at all. A model that ignores boundaries
trains across documents without an error. So the probe runs the model on rows of two short
documents, and changes only the first one:

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
"""Number of tokens of each of the two documents in a row of the test.

This is longer than the kernel of any short convolution, and short enough for every model's table of
positions."""
LEAK = 1e-4
"""Share of the full effect from which an effect across documents counts as a leak.

An effect is how much the second document's logits change if the first document gets other tokens.
The full effect is measured with both documents joined to one."""
NOISE = 8
"""A leak must exceed the effect of rounding errors by this factor.

The effect of rounding is measured as how much the first document's logits change if the second
document gets other tokens. With causal attention it should be zero. In floating point it is not:
the matrix products of experts change their sizes, and a token may be routed to another expert if
two experts have nearly equal scores."""
TRIES = 3
"""Number of tests with different tokens, which must all show a leak, to rule out chance."""


def check_documents_apart(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Raise UserError if a document's logits depend on another document of the packed row.

    All ranks must call this function together, with the model wrapped and placed as in training. If
    one rank finds such a dependence, all ranks raise UserError. The test runs a few forward passes
    of 32 tokens in evaluation mode without gradients. Afterwards it restores the training modes,
    buffers and random number generators.

    Args:
        model: The model that trains, with its wrappers (DDP, FSDP, PEFT, ...).
        batch: A micro-batch as passed to the model. The test takes token ids from it, and passes
            document boundaries under the same keys. If its rows are padded, nothing is tested.
    """
    # All ranks must take the same branches, because a wrapped model's forward may communicate.
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
    """Return whether the batch is one row with document boundaries and without attention mask.

    A batch of padded rows has an attention mask.
    """
    keys = ("position_ids", *FLASH_KEYS, SEQ_IDX)
    has_boundaries = any(batch.get(key) is not None for key in keys)
    tokens = batch.get("input_ids")
    is_row = isinstance(tokens, Tensor) and tokens.ndim == 2 and tokens.shape[0] == 1
    return is_row and has_boundaries and batch.get("attention_mask") is None


def _leaked_share(model: nn.Module, batch: Mapping[str, Any], try_: int) -> float:
    """Return how strongly the first document of a packed row affects the logits of the second.

    The number is usually from 0 to 1. 0 means no effect, or one so small that it may be a rounding
    error. 1 means the same effect as if both were one document.

    Args:
        model: The model.
        batch: A micro-batch as passed to the model.
        try_: Number of the test, from 0. Every test uses other tokens.
    """
    first, other, second = (_tokens(batch["input_ids"], 3 * try_ + i) for i in range(3))
    before = [_logits(model, batch, [x, second])[-LENGTH:] for x in (first, other)]
    behind = [_logits(model, batch, [second, x])[:LENGTH] for x in (first, other)]
    within = [_logits(model, batch, [x + second])[-LENGTH:] for x in (first, other)]
    # `before`: the changed document is before the compared one. `behind`: it is behind the compared
    # one, so that logits can differ only by rounding. `within`: both are joined to one document.
    across, rounding, within_one = _change(*before), _change(*behind), _change(*within)
    if within_one == 0:
        warnings.warn(
            f"{type(unwrapped(model)).__name__}: a token's logits do not depend on the tokens "
            "before it (perhaps the model's weights are still zero), so wlb cannot test whether "
            "the model keeps the documents of a packed row apart",
            stacklevel=4,
        )
    return across / within_one if within_one and across > NOISE * rounding else 0.0


def _change(one: Tensor, other: Tensor) -> float:
    """Return how much two tensors of logits differ, both of shape [tokens, vocabulary].

    The difference at a token is the root mean square over the vocabulary. The result is the largest
    difference of all tokens, because a mean over tokens would hide a leak through a short
    convolution, which affects only the first tokens of a document.
    """
    return float((one - other).square().mean(-1).sqrt().max())


def _tokens(input_ids: Tensor, which: int) -> list[int]:
    """Return the `LENGTH` tokens of one of the test's documents.

    They are taken from the first tokens of the batch, so they are in the vocabulary. If these
    tokens are all equal, a neighbouring token id is used as well.

    Args:
        input_ids: Tokens of the batch.
        which: Number of the document, from 0. Every test has three documents; the first two of them
            (3 n and 3 n + 1 in test n) differ at every position.
    """
    known = input_ids[0, : 4 * LENGTH].unique().tolist()
    if len(known) == 1:  # add an id that the vocabulary surely has: the one below, or 1 after 0
        known.append(known[0] - 1 if known[0] else 1)
    # The documents of test n take every (n + 1)-th of these ids. Each document begins one id later
    # than the one before it.
    return [known[(which + (1 + which // 3) * i) % len(known)] for i in range(LENGTH)]


def _row(batch: Mapping[str, Any], documents: list[list[int]]) -> dict[str, Any]:
    """Return the documents as a packed row, a batch for the model.

    The row is on the device of `batch`, and describes document boundaries by the keys of `batch`.
    """
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
    """Return the logits of the documents, computed as one packed row, in float32.

    The documents have 2 * LENGTH tokens in all, so the shape is [2 * LENGTH, vocabulary].

    Args:
        model: The model.
        batch: A batch that shows which keys describe document boundaries, and on which device.
        documents: Token ids of each document.
    """
    row = _row(batch, documents)
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        row["use_cache"] = False  # transformers supports no KV cache with gradient checkpointing
    out: Any = model(**row)
    logits: Any = getattr(out, "logits", None)
    if logits is None and isinstance(out, Mapping):
        logits = out.get("logits")
    if logits is None and isinstance(out, tuple):
        logits = out[0]
    if isinstance(logits, Tensor) and hasattr(logits, "full_tensor"):
        logits = logits.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(logits, Tensor) or logits.ndim not in (2, 3):
        raise UserError(
            f"its forward returned {type(out).__name__} without logits of shape [batch, tokens, "
            "vocabulary]"
        )
    # Take the last logits, because PEFT's prompt tuning puts more tokens in front of the row.
    return logits.reshape(-1, logits.shape[-1])[-2 * LENGTH :].float()


def _callable(model: nn.Module) -> nn.Module:
    """Return the model without the wrappers of DDP, DataParallel and torch.compile.

    DDP's forward would synchronise buffers. FSDP's wrapper is kept, because it gathers parameters.
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
    """Within this context, the model is in evaluation mode, and no gradients are computed.

    At the end, training modes, buffers and random number generators are restored.

    Args:
        model: The model.
        device: Device of the batches, whose random number generator is restored as well.
    """
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
        torch.compiler.set_stance("force_eager"),  # compile nothing for the probe
    ):
        try:
            # Set the flags directly: in some libraries, `eval()` merges adapters into the weights.
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
    """Return whether `here` is true on at least one rank. All ranks must call this."""
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
        f"{_name(model)} failed in wlb's test of whether it keeps the documents of a packed row "
        f"apart: {cause}. Fix this error; or train the model unpacked with the library's own "
        "trainer; or, if you know that it keeps documents apart, skip the test "
        "(check_documents=False of the trainer, or no call of check_documents_apart)"
    )


def _leak(model: nn.Module, batch: Mapping[str, Any], share: float) -> UserError:
    inner = unwrapped(model)
    config = getattr(inner, "config", None)
    missing = [key for key in boundary_keys(inner) if batch.get(key) is None]
    remedies: list[str] = []
    if missing:
        remedies.append(
            f"pass {', '.join(missing)} to its forward by "
            "PaddingFreeCollator(return_flash_attn_kwargs=True, return_seq_idx=True), or use the "
            "default collator"
        )
    if getattr(config, "use_cache", False):
        remedies.append("set model.config.use_cache = False")
    if "flash" not in str(getattr(config, "_attn_implementation", None)):
        remedies.append(
            "load the model with attn_implementation='flash_attention_2', if it supports that"
        )
    remedies.append("train the model unpacked with the library's own trainer")
    return UserError(
        f"{_name(model)} does not keep the documents of a packed row apart: changing the first "
        f"document changes the logits of the second ({share:.2g} times as much as within one "
        f"document). To fix this, {'; or '.join(remedies)}"
    )

"""Find which arguments a model's forward accepts for document boundaries in a packed row."""

import inspect
from typing import Any

FLASH_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments for FlashAttention and recurrent layers: document offsets and the longest document.

A model gets either all four or none of them."""
SEQ_IDX = "seq_idx"
"""Argument for short convolutions: for each token, the index of its document."""
_WRAPPERS = {
    "DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine",
}  # fmt: skip
"""Class names of wrappers that store the model in the attribute `module`.

Names are compared instead of classes, because DeepSpeed may not be installed."""


def boundary_keys(model: Any) -> tuple[str, ...]:
    """Return the arguments for document boundaries that a model's forward accepts.

    A forward with **kwargs counts as accepting all of these arguments. In transformers,
    linear-attention layers, recurrent layers and convolutions do not read position_ids. Without
    these arguments, such layers treat a packed row as one document.

    Args:
        model: The model, which may be wrapped (see `unwrapped`).

    Returns:
        Names from `FLASH_KEYS` and `SEQ_IDX`; empty if forward accepts none.
    """
    forward = getattr(unwrapped(model), "forward", None)
    if not callable(forward):
        return ()
    accepted = inspect.signature(forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()):
        return (*FLASH_KEYS, SEQ_IDX)
    flash = FLASH_KEYS if all(key in accepted for key in FLASH_KEYS) else ()
    return (*flash, *(key for key in (SEQ_IDX,) if key in accepted))


def unwrapped(model: Any) -> Any:
    """Return a model without its wrappers.

    Known wrappers are those of torch.compile, DDP, DataParallel, FSDP, DeepSpeed and PEFT.
    """
    while True:
        kinds = {kind.__name__ for kind in type(model).__mro__}
        if "OptimizedModule" in kinds:
            model = model._orig_mod
        elif kinds & _WRAPPERS:
            model = model.module
        elif callable(getattr(model, "get_base_model", None)):
            return model.get_base_model()
        else:
            return model

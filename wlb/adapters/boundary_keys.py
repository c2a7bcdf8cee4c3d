"""Find which arguments of a model's forward say where the documents of a packed row begin."""

import inspect
from typing import Any

FLASH_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Offsets and longest length of the documents, for FlashAttention and for recurrent layers.

A model gets all four or none."""
SEQ_IDX = "seq_idx"
"""Index of each token's document, which short convolutions read."""
_WRAPPERS = {
    "DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine",
}  # fmt: skip
"""Wrappers that keep the model in their attribute `module`.

They are compared by class name, because DeepSpeed may not be installed."""


def boundary_keys(model: Any) -> tuple[str, ...]:
    """Return the boundary arguments that the model's forward accepts, by name or by **kwargs.

    Linear attention, recurrent layers and convolutions of transformers do not read position_ids.
    Without these arguments they compute a packed row as one document. TRL passes all of them.

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
    """Return the model inside torch.compile, DDP, DataParallel, FSDP, DeepSpeed and PEFT."""
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

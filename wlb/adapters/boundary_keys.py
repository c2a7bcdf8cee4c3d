"""What a model's forward can be told of where documents begin, besides position_ids."""

import inspect
from typing import Any

FLASH_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""For kernels of variable lengths, of attention and of recurrent layers; all or none of them."""
SEQ_IDX = "seq_idx"
"""For short convolutions."""
_WRAPPERS = {
    "DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine",
}  # fmt: skip
"""Classes, by name since DeepSpeed may be missing, that call the model in their `module`."""


def boundary_keys(model: Any) -> tuple[str, ...]:
    """Those of the keys that the model's forward takes, by name or by **kwargs.

    TRL sends all of them: linear attention, recurrent layers and convolutions of transformers read
    no position_ids, and without these keys they compute a packed row as one document.
    """
    forward = getattr(unwrapped(model), "forward", None)
    if not callable(forward):
        return ()
    taken = inspect.signature(forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
        return (*FLASH_KEYS, SEQ_IDX)
    flash = FLASH_KEYS if all(key in taken for key in FLASH_KEYS) else ()
    return (*flash, *(key for key in (SEQ_IDX,) if key in taken))


def unwrapped(model: Any) -> Any:
    """The model inside of torch.compile, DDP, DataParallel, FSDP, DeepSpeed and PEFT."""
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

"""What each part of the model is worth: one row of each kind with that part left out."""

from collections.abc import Callable
from dataclasses import replace

from experiments.beyond.published_runs.mapping import Mapped
from experiments.beyond.published_runs.prediction import Constants, predict
from kernels_profile.derive import H100_SXM
from wlb.cost import KernelProfile
from wlb.simulate import FsdpExecution

Change = Callable[[Mapped, Constants], tuple[Mapped, Constants]]


def _gathered_once(case: Mapped, constants: Constants) -> tuple[Mapped, Constants]:
    fsdp = replace(case.spec.fsdp, reshard_after_forward=False)
    spec, execution = replace(case.spec, fsdp=fsdp), FsdpExecution()
    execution = replace(execution, update_values=case.execution.update_values)
    return replace(case, spec=spec, execution=execution), constants


def _without_copies(case: Mapped, constants: Constants) -> tuple[Mapped, Constants]:
    how = replace(case.execution, gather_copy_bytes=0, reduce_copy_bytes=0)
    return replace(case, execution=how), constants


def _fused_update(case: Mapped, constants: Constants) -> tuple[Mapped, Constants]:
    how = replace(case.execution, update_values=FsdpExecution().update_values)
    return replace(case, execution=how), constants


CHANGES: dict[str, Change] = {
    "700 W": lambda case, constants: (replace(case, gpu=H100_SXM), constants),
    "FlashAttention-2": lambda case, constants: (replace(case, kernel="flash_2"), constants),
    "fused operators": lambda case, constants: (replace(case, traffic={}), constants),
    "wlb's recompute": lambda case, constants: (replace(case, recomputed=None), constants),
    "gathered once": _gathered_once,
    "no slowdown": lambda case, constants: (case, replace(constants, fsdp_slowdown=0.0)),
    "no copies": _without_copies,
    "fused update": _fused_update,
}
"""Parts of the model by what stands in their place: the GPU's power limit and memory, the attention
kernel, unfused operators, what is recomputed, FSDP that gathers in every pass, what its collectives
cost the computation beside them, FSDP2's copies, and AdamW in plain torch."""


def reasons(
    case: Mapped, profile: KernelProfile, constants: Constants, ratio: float
) -> list[float | None]:
    """Predicted over measured throughput with each of `CHANGES` alone; None where the row has not
    that part. ratio: that of the whole model.
    """
    out: list[float | None] = []
    for change in CHANGES.values():
        changed, values = change(case, constants)
        is_same = changed == case and (
            values == constants or not case.spec.fsdp.reshard_after_forward
        )
        found = ratio if is_same else predict(changed, profile, values).ratio
        out.append(None if is_same or abs(found / ratio - 1) < 1e-4 else found)
    return out

"""Shows how much each part of the prediction matters, by leaving out one part at a time."""

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
"""Changes that each replace one property of the trainer, by the name of the replacement.

In this order they replace: the GPU's power limit and memory; the attention kernel; unfused
operators; the trainer's recomputation; FSDP that gathers parameters in every pass; the slowdown of
computation beside collectives; FSDP2's copies; and AdamW in plain torch.
"""


def reasons(
    case: Mapped, profile: KernelProfile, constants: Constants, ratio: float
) -> list[float | None]:
    """Returns predicted over measured throughput with each of `CHANGES` alone.

    Args:
        case: The run.
        profile: Profile that prices it.
        constants: The fitted constants.
        ratio: Predicted over measured throughput without any change.

    Returns:
        A ratio for each change, or None where the change makes no difference for this run.
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

"""The forms in which users can give a cost: workloads, kernel profiles, names and ratios.

Two of the names are cost formulas of other frameworks. "verl" prices a sample of d tokens as
24,576 * d + d^2, which is its `calculate_workload` for a 7B model. "slime" can only price whole
samples (`wlb.balance.sample_costs`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from wlb.cost.config_json import counted_workload
from wlb.cost.profile import KernelProfile
from wlb.cost.profile_file import profile_names
from wlb.cost.protocol import LLAMA2_7B, TILE_ROWS, FlopsWorkload, WorkloadModel
from wlb.cost.workload import workload_of
from wlb.plan import FloatArray, IntArray, UserError
from wlb.spec import load

Prices = Callable[[IntArray], Sequence[float] | FloatArray | IntArray]
"""Function from the lengths of samples, shape [n], to their prices, shape [n]."""
Cost = (
    WorkloadModel | KernelProfile | Prices | Sequence[float] | FloatArray | IntArray | str | float
)
"""Everything that `wlb.balance.balance_step` accepts as a cost.

Planners accept only the forms that `workload_model` can turn into a workload model.
"""
COST_NAMES = ("llama2_7b", "verl", "slime")
"""Names that can be given as a cost."""


def model_of(cost: Cost) -> WorkloadModel | None:
    """Return the workload model of a cost, or None if the cost can only price whole samples.

    A string is one of `COST_NAMES`, or the path of a Hugging Face config.json or of its folder. A
    number is the length of a document, in tokens, at which attention costs as much as everything
    else.

    Raises:
        UserError: The name or the model is unknown, or the number is not positive.
    """
    # A profile prices a model with given degrees of parallelism. Here no run says which, so both
    # are taken from the preset 7b_128k.
    if isinstance(cost, KernelProfile):
        return workload_of(load("7b_128k"), cost)
    if isinstance(cost, str):
        if cost not in COST_NAMES and _is_path(cost):
            return counted_workload(cost)
        if cost not in COST_NAMES:
            is_profile = cost in profile_names()
            remedy = f"; for the kernel profile, give load_profile({cost!r})" if is_profile else ""
            raise UserError(
                f"cost = {cost!r} is unknown; give one of {', '.join(COST_NAMES)}, or the path of "
                f"a config.json{remedy}"
            )
        # slime's formula prices whole samples, not segments.
        if cost == "slime":
            return None
        verl = FlopsWorkload(linear_ns_per_token=24576.0, tile_rows=TILE_ROWS)
        return LLAMA2_7B if cost == "llama2_7b" else verl
    if isinstance(cost, int | float | np.number):
        # A number is the length of a document at which attention costs as much as everything else.
        ratio = float(cast(float, cost))
        if not 0 < ratio < float("inf"):
            raise UserError(
                f"cost = {cost} must be above 0 and finite; it is the length in tokens of a "
                "document whose attention costs as much as everything else"
            )
        return FlopsWorkload(quadratic_ns=1e3, linear_ns_per_token=1e3 * ratio, tile_rows=TILE_ROWS)
    return cast(WorkloadModel, cost) if hasattr(cost, "workload_ns") else None


def _is_path(text: str) -> bool:
    try:
        return text.endswith(".json") or (bool(text) and Path(text).exists())
    except (OSError, ValueError):
        return False


def workload_model(cost: Cost) -> WorkloadModel:
    """Return the workload model of a cost.

    Raises:
        UserError: The cost can only price whole samples, for example because it is a list of
            prices.
    """
    model = model_of(cost)
    if model is None:
        said = repr(cost) if isinstance(cost, str) else f"a {type(cost).__name__}"
        raise UserError(
            f"cost is {said}, which can price only whole samples, but a planner also prices parts "
            "of samples; give a WorkloadModel, load_profile(NAME), the path of a config.json, "
            "'llama2_7b', 'verl', or the length of a document in tokens at which attention costs "
            "as much as everything else"
        )
    return model

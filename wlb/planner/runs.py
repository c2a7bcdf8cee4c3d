"""Makes the planners of a run: for training, for evaluation and for packs that are made offline."""

from dataclasses import replace
from typing import Any

from wlb.cost import WorkloadModel, workload_for
from wlb.data import GlobalBatches, StoreName, TokenStore, open_batches
from wlb.packing import PackedBatches, Packs, SavedPacker, options_for
from wlb.plan import Layout, UserError
from wlb.planner.compose import Planner
from wlb.spec import Policy, RunSpec, WindowCut

_PLAIN_PACKING: dict[str, Any] = {
    "packs": "",
    "num_micro_batches": 0,
    "window_cut": WindowCut.ANYWHERE,
    "layout": Layout.SEPARATE,
    "bin_windows": 1,
    "window_batches": 1,
}
"""Settings of [packing] with which every run packs the held-out documents of evaluations."""


def open_planner(spec: RunSpec, store: StoreName, device: str) -> Planner:
    """Make the planner of a run's training steps.

    It is called in the planner process, so the planner opens its own files and shares none with the
    training process.

    Args:
        spec: The run.
        store: Name of a token store, or of the stores of a blend.
        device: "cpu" or "cuda": the device for which times are predicted.
    """
    cost = workload_for(spec, device)
    if spec.packing.packs:
        return _of_packs(spec, store, cost)
    source = open_batches(
        store, tokens_per_batch=spec.tokens_per_step, seed=spec.run.seed, epochs=spec.data.epochs
    )
    return Planner.from_spec(spec, source, cost)


def _of_packs(spec: RunSpec, name: StoreName, cost: WorkloadModel) -> Planner:
    """Make a planner for steps that were packed offline, after checking that they fit the run.

    Args:
        spec: The run, with the file of packs in `packing.packs`.
        name: Name of the token store.
        cost: Predicts the work of micro-batches.
    """
    if not isinstance(name, str):
        raise UserError(
            "packing.packs can be used only with one token store, but data.blend has several; set "
            "data.store instead of data.blend, or leave packing.packs empty"
        )
    store, options = TokenStore(name), options_for(spec, cost)
    packs = Packs.load(spec.packing.packs)
    packs.check(store, options)
    planner = Planner.from_spec(spec, PackedBatches(packs, store, epochs=spec.data.epochs), cost)
    return replace(planner, packer=SavedPacker(options=options, packs=packs))


def packs_of(spec: RunSpec, store: TokenStore, cost: WorkloadModel) -> Packs:
    """Pack one epoch of a token store as the run would, and return its packed steps."""
    source = GlobalBatches(
        store, tokens_per_batch=spec.tokens_per_step, seed=spec.run.seed, epochs=1
    )
    plain = replace(spec, planner=replace(spec.planner, baseline=False))
    plans = (plan.packing for plan in Planner.from_spec(plain, source, cost).steps())
    return Packs.of(plans, store, window=spec.data.context_window)


def open_heldout_planner(spec: RunSpec, store: str, device: str) -> Planner:
    """Make the planner of evaluations, which reads the held-out store once, in order.

    In pre-training it packs documents into windows, as the usual loader does. If the run uses a
    method of fine-tuning (`packing.method`), it packs whole examples one after the other, and
    begins a new micro-batch when the next example does not fit. The run's own packing policy is not
    used, so that the held-out loss does not depend on it.

    Args:
        spec: The run.
        store: Name of the held-out token store.
        device: "cpu" or "cuda": the device for which times are predicted.
    """
    source = GlobalBatches(
        TokenStore(store),
        tokens_per_batch=spec.tokens_per_step,
        seed=spec.run.seed,
        epochs=1,
        shuffle=False,
    )
    # "random_posid" is the method that packs examples in order, one after the other (next fit).
    is_tuned = bool(spec.packing.method)
    policy, method = (Policy.CAPACITY, "random_posid") if is_tuned else (Policy.ORIGINAL, "")
    packing = replace(spec.packing, policy=policy, method=method, **_PLAIN_PACKING)
    plain = replace(spec, packing=packing, planner=replace(spec.planner, baseline=False))
    return Planner.from_spec(plain, source, workload_for(spec, device))

"""Sums loss and counts over ranks in one all-reduce per step, and checks that ranks plan the same.

Every node plans for itself, so different versions, configurations or data would cause a hang or
wrong gradients. Therefore the same all-reduce also compares digests of the plans that will be
executed two steps later. This needs no further communication.

Two sums suffice for the comparison, because n numbers x are equal exactly if n * sum(x^2) equals
sum(x)^2. A digest of 60 bits is cut into four chunks of 15 bits, and each chunk x is sent as x and
x^2. With such small numbers, both sums are exact in float64 for more than eight million ranks.

The all-reduce sums a vector with these float64 values:

    loss, squared gradient norm      2
    loads of experts                 `num_load_values`; none in a model without experts
    counts (`_counts`)               5, and one for each sharding strategy
    requests to stop                 one for a stop file, and one for a signal
    digests                          8 for the packing, and 8 for the sharding of each pipeline
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from wlb.kernels.segments import copy_to_device
from wlb.parallel.expert_parallel import num_load_values
from wlb.parallel.mesh import Mesh
from wlb.plan import ExpertLoad, FloatArray, KeyRows, PipelinePlan, StepPlan, key_rows
from wlb.spec import ModelSpec
from wlb.train.faults.stop import Stop

_CHUNKS, _BITS = 4, 15  # number of chunks of a digest, and number of bits of a chunk
_STOPS = (Stop.FILE, Stop.SIGNAL)
_SUMS = 2
"""Number of values at the vector's beginning: the loss and the squared gradient norm."""
_BEFORE_STRATEGIES = 5
"""Number of values in `_counts` before the counts of sharding strategies."""

# A pair for each step: the plan of all pipelines, and the plan of this rank's pipeline.
Plans = list[tuple[StepPlan, PipelinePlan]]


class PlanMismatch(RuntimeError):
    """Raised if ranks have different plans for the same step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """A step's sums over all ranks, equal on all of them."""

    loss: float  # sum of the losses of all targets, times `RunSpec.loss_scale`
    gradient_norm: float  # global norm of the gradients before clipping
    # The predicted attention time of the slowest CP rank over the mean time of the CP ranks. Both
    # times are summed over micro-batches before they are divided.
    cp_imbalance: float
    shardings: dict[str, int]  # number of micro-batches that each sharding strategy divided
    # Numbers of rows of keys that CP ranks exchanged; None if they exchanged none.
    key_rows: KeyRows | None = None
    experts: ExpertLoad | None = None  # loads of experts; None for a model without experts
    stop: Stop = Stop.NO  # what asks the run to stop; the largest value that any rank has noticed

    @property
    def is_finite(self) -> bool:
        """Whether both the loss and the gradient norm are finite."""
        return math.isfinite(self.loss + self.gradient_norm)


class StepReducer:
    """Sums a step's values over ranks with one all-reduce, and compares the digests of plans.

    Args:
        mesh: This rank's place in the layout, with its process groups.
        strategies: Names of all sharding strategies, the same on all ranks.
        model: The model. If the model has experts, their loads are summed too. If it has layers
            with a sliding window, these layers exchange fewer rows of keys, which is counted. None
            stands for a model with neither.
    """

    def __init__(
        self, mesh: Mesh, strategies: tuple[str, ...], model: ModelSpec | None = None
    ) -> None:
        self.mesh, self.strategies = mesh, strategies
        self._sliding: dict[str, Any] = {}
        if model is not None and model.num_sliding_layers:
            share = model.num_sliding_layers / model.num_layers
            self._sliding = {"sliding": model.sliding_window, "sliding_share": share}
        self._num_layers = model.num_layers if model is not None and model.experts.num else 0
        ep = mesh.parallel.ep
        self._num_loads = num_load_values(self._num_layers, ep) if self._num_layers else 0
        # Number of digests in the vector: that of the packing, which all ranks have, and that of
        # each pipeline's sharding. `_ranks` is the number of ranks that have each digest.
        self._slots = 1 + mesh.parallel.dp
        self._ranks = [mesh.world_size] + [mesh.parallel.model_ranks] * mesh.parallel.dp

    def reduce(
        self,
        ahead: Plans,
        *,
        loss: Tensor | None = None,
        gradient_square: Tensor | None = None,
        expert_load: Tensor | None = None,
        done: PipelinePlan | None = None,
        stop: Stop = Stop.NO,
    ) -> StepSums:
        """Sum one step's loss, gradient norm and counts over all ranks. A collective call.

        Args:
            ahead: Plans of coming steps, which are compared across ranks.
            loss: This rank's loss; None for a step without targets.
            gradient_square: This rank's part of the squared gradient norm; None counts as 0.
            expert_load: Loads of the experts in this rank's layers
                (`wlb.parallel.expert_parallel.load_values`); None without experts.
            done: The plan of this rank's pipeline for the executed step. Its exchanged rows and
                sharding strategies are counted. With None, nothing is counted.
            stop: The request to stop that this rank has noticed.

        Returns:
            The sums, equal on all ranks.

        Raises:
            PlanMismatch: If ranks have different plans in `ahead`. All ranks raise it.
        """
        mesh = self.mesh
        counts = self._counts(done) + [float(stop == kind) for kind in _STOPS]
        before = _SUMS + self._num_loads
        host = np.concatenate([np.zeros(before), counts, self._digests(ahead)])
        # This copy does not make the host wait for the device.
        vector = copy_to_device(host, mesh.device)
        # All TP ranks have the same loss, so only one of them adds it.
        if loss is not None and mesh.at.tp == 0:
            vector[0] = loss
        if gradient_square is not None:
            vector[1] = gradient_square
        # All ranks of a stage have the same loads, so only one rank puts them into the sum.
        at = mesh.at
        if expert_load is not None and (at.tp, at.cp, at.dp) == (0, 0, 0):
            vector[_SUMS:before] = expert_load
        dist.all_reduce(vector)
        # `tolist` makes the host wait for the device. This is the only such wait in a step.
        total = vector.tolist()
        num_values = before + len(counts)
        self._check(total[num_values:], ahead)
        slowest, mean, by_need, received, gathered, *rest = total[before:num_values]
        counts, requests = rest[: -len(_STOPS)], rest[-len(_STOPS) :]
        return StepSums(
            loss=total[0],
            gradient_norm=math.sqrt(total[1]),
            cp_imbalance=slowest / mean if mean else 1.0,
            shardings={n: int(c) for n, c in zip(self.strategies, counts, strict=True)},
            key_rows=KeyRows(
                num_by_need=int(by_need), received=int(received), gathered=int(gathered)
            )
            if gathered
            else None,
            experts=self._expert_load(total[_SUMS:before]),
            stop=max((k for k, n in zip(_STOPS, requests, strict=True) if n), default=Stop.NO),
        )

    def _expert_load(self, values: list[float]) -> ExpertLoad | None:
        """Return the loads of experts as a record; None if there are no loads.

        `values` are the `load_values` of `wlb.parallel.expert_parallel`, summed over all stages.
        """
        num = self._num_layers
        layers = tuple(layer for layer in range(num) if values[layer])
        if not layers:
            return None
        mean = sum(values[2 * num :]) / len(values[2 * num :])
        return ExpertLoad(
            layers=layers,
            expert=tuple(values[layer] for layer in layers),
            rank=tuple(values[num + layer] for layer in layers),
            ranks=tuple(value / mean for value in values[2 * num :]),
        )

    def _counts(self, done: PipelinePlan | None) -> list[float]:
        """Return the counts of an executed step that this rank adds to the sums over ranks.

        One rank of each pipeline counts for the whole pipeline, and the other ranks return zeros.
        `done` is the pipeline's plan of the step. With None nothing is counted.

        Returns:
            Sums over the pipeline's micro-batches: the predicted attention time (ns) of the slowest
                CP rank, the mean attention time of the CP ranks, the three numbers of `KeyRows`,
                and for each sharding strategy the number of micro-batches that it divided.
        """
        out = [0.0] * (_BEFORE_STRATEGIES + len(self.strategies))
        mesh = self.mesh
        if done is None or mesh.at.tp or mesh.at.cp or mesh.at.pp:
            # Another rank of this pipeline counts for the whole pipeline.
            return out
        rows = key_rows(done.shardings, done.local_tokens, **self._sliding)
        out[2:_BEFORE_STRATEGIES] = [rows.num_by_need, rows.received, rows.gathered]
        for sharding in done.shardings:
            out[0] += float(sharding.latency_ns.max())
            out[1] += float(sharding.latency_ns.mean())
            out[_BEFORE_STRATEGIES + self.strategies.index(sharding.strategy)] += 1
        return out

    def _digests(self, ahead: Plans) -> FloatArray:
        """Return digests of the plans `ahead`, in a form that a sum over ranks can compare.

        The first 8 numbers are one digest of the packing in all these plans. Then follow 8 numbers
        for each pipeline: one digest of its sharding in all these plans, or zeros if it is not this
        rank's pipeline. The 8 numbers are x and x^2 for each of the digest's four chunks x of 15
        bits (see the module docstring).
        """
        out = np.zeros((self._slots, _CHUNKS, 2))
        plan_digest = pipeline_digest = 0
        for plan, pipeline in ahead:
            plan_digest = (plan_digest * 31 + plan.digest()) % 2**60
            pipeline_digest = (pipeline_digest * 31 + pipeline.digest()) % 2**60
        for slot, number in ((0, plan_digest), (1 + self.mesh.at.dp, pipeline_digest)):
            chunks = [number >> (i * _BITS) & (2**_BITS - 1) for i in range(_CHUNKS)]
            out[slot] = [(chunk, chunk * chunk) for chunk in chunks]
        return out.ravel()

    def _check(self, total: list[float], ahead: Plans) -> None:
        sums = np.reshape(total, (self._slots, _CHUNKS, 2))
        for slot, ranks in enumerate(self._ranks):
            for i in range(_CHUNKS):
                first, second = int(sums[slot, i, 0]), int(sums[slot, i, 1])
                if ranks * second != first * first:
                    raise PlanMismatch(self._explain(slot, ahead))

    def _explain(self, slot: int, ahead: Plans) -> str:
        what = "the packing" if slot == 0 else f"the sharding of pipeline {slot - 1}"
        steps = (
            ", ".join(str(plan.step) for plan, _ in ahead)
            or "none, because this rank's data has ended"
        )
        own = ", ".join(f"{plan.digest():015x}" for plan, _ in ahead)
        return (
            f"ranks planned {what} of the coming steps differently (steps: {steps}; "
            f"digests on rank {self.mesh.rank}: {own}). All ranks must run the same "
            "wlb version with the same configuration and token store; compare these "
            "between nodes, then start again with --resume"
        )

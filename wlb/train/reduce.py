"""One all-reduce a step: the loss, counts, and proof that all ranks execute the same plans.

Every node plans for itself, so different versions, configurations or data would cause a hang or
wrong gradients. Therefore the digests of the plans two steps ahead are part of the all-reduce: a
digest of 60 bits is four chunks of 15, and n numbers are equal exactly if n * sum(x^2) = sum(x)^2,
in float64 for more than eight million ranks. Each pipeline has its own slots.
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

_CHUNKS, _BITS = 4, 15
_STOPS = (Stop.FILE, Stop.SIGNAL)
_SUMS = 2
"""Loss and squared norm, before experts' loads and the counts."""
_BEFORE_STRATEGIES = 5
"""Counts of a pipeline before those of its strategies."""

Plans = list[tuple[StepPlan, PipelinePlan]]


class PlanMismatch(RuntimeError):
    """Ranks hold different plans for the same step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """A step's sums over all ranks, equal on all of them. loss: token losses times loss_scale.
    cp_imbalance: predicted attention time of the slowest CP rank over the mean rank, of all
    micro-batches. shardings: micro-batches by strategy. key_rows: what CP ranks exchanged, None
    without any. experts: None without them. stop: the strongest request to stop.
    """

    loss: float
    gradient_norm: float
    cp_imbalance: float
    shardings: dict[str, int]
    key_rows: KeyRows | None = None
    experts: ExpertLoad | None = None
    stop: Stop = Stop.NO

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss + self.gradient_norm)


class StepReducer:
    """Builds a rank's contribution, reduces it, and checks the digests."""

    def __init__(
        self, mesh: Mesh, strategies: tuple[str, ...], model: ModelSpec | None = None
    ) -> None:
        """model: whose sliding layers exchange fewer key rows and whose experts have loads; None:
        without both.
        """
        self.mesh, self.strategies = mesh, strategies
        self._sliding: dict[str, Any] = {}
        if model is not None and model.num_sliding_layers:
            share = model.num_sliding_layers / model.num_layers
            self._sliding = {"sliding": model.sliding_window, "sliding_share": share}
        self._num_layers = model.num_layers if model is not None and model.experts.num else 0
        ep = mesh.parallel.ep
        self._num_loads = num_load_values(self._num_layers, ep) if self._num_layers else 0
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
        """Sums of a step; PlanMismatch on every rank if the plans in `ahead` differ anywhere.

        loss, gradient_square, stop: this rank's share. expert_load: of its layers
        (`wlb.parallel.expert_parallel.load_values`). done: the executed pipeline plan.
        """
        mesh = self.mesh
        counts = self._counts(done) + [float(stop == kind) for kind in _STOPS]
        before = _SUMS + self._num_loads
        host = np.concatenate([np.zeros(before), counts, self._digests(ahead)])
        # The copy does not wait for the device.
        vector = copy_to_device(host, mesh.device)
        # TP ranks hold copies of the loss.
        if loss is not None and mesh.at.tp == 0:
            vector[0] = loss
        if gradient_square is not None:
            vector[1] = gradient_square
        # All ranks of a stage know the same loads.
        at = mesh.at
        if expert_load is not None and (at.tp, at.cp, at.dp) == (0, 0, 0):
            vector[_SUMS:before] = expert_load
        dist.all_reduce(vector)
        # This is the step's only wait for the device.
        total = vector.tolist()
        num_values = before + len(counts)
        self._check(total[num_values:], ahead)
        slowest, mean, by_need, received, gathered, *rest = total[before:num_values]
        counts, asked = rest[: -len(_STOPS)], rest[-len(_STOPS) :]
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
            stop=max((k for k, n in zip(_STOPS, asked, strict=True) if n), default=Stop.NO),
        )

    def _expert_load(self, values: list[float]) -> ExpertLoad | None:
        """values: as in `wlb.parallel.expert_parallel.load_values`, of all stages."""
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
        """Slowest and mean CP rank's predicted ns, key rows, and how often each strategy was
        chosen.
        """
        out = [0.0] * (_BEFORE_STRATEGIES + len(self.strategies))
        mesh = self.mesh
        if done is None or mesh.at.tp or mesh.at.cp or mesh.at.pp:
            # One rank of each pipeline contributes its counts.
            return out
        rows = key_rows(done.shardings, done.local_tokens, **self._sliding)
        out[2:_BEFORE_STRATEGIES] = [rows.num_by_need, rows.received, rows.gathered]
        for sharding in done.shardings:
            out[0] += float(sharding.latency_ns.max())
            out[1] += float(sharding.latency_ns.mean())
            out[_BEFORE_STRATEGIES + self.strategies.index(sharding.strategy)] += 1
        return out

    def _digests(self, ahead: Plans) -> FloatArray:
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
        steps = ", ".join(str(plan.step) for plan, _ in ahead) or "none (this rank's data ended)"
        own = ", ".join(f"{plan.digest():015x}" for plan, _ in ahead)
        return (
            f"ranks planned {what} of the coming steps differently (step {steps}; digest on rank "
            f"{self.mesh.rank}: {own}). All ranks must run the same wlb version and configuration "
            f"on the same token store; compare those between nodes and start again with --resume"
        )

"""Predicted beside measured times: each rank compares its cells, and all ranks reduce the sums.

A cell is a micro-batch on a stage on a rank. Predictions are those of the profile that plans are
priced with, for the rank's own spans; on CPU without collectives, which CPU time does not hold
either. Terms of linear layers are predicted for the rows that experts computed, so that a profile
fitted to them has no run's load. Not compared: cells without a document's token (padding has no
price) and, under FSDP, the passes that hold its collectives.
"""

from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch

from wlb.cost import (
    StageLayers,
    StageTimes,
    end_times_ns,
    experts_ns_per_token,
    stage_times,
    without_collectives,
    workload_for,
)
from wlb.parallel.host import all_reduce_hosts
from wlb.parallel.mesh import Mesh
from wlb.parallel.observe import Cell, Part, Pass
from wlb.plan import TERMS, FloatArray, Moments, PipelinePlan, Spread, Telemetry
from wlb.spec import RunSpec
from wlb.train.telemetry.clock import StepTimes

_LATENCIES = ("", "predicted_", "whole_")
"""Times of a micro-batch in decoder layers, measured and predicted, and of the whole pass."""
_IN_LAYERS = (Part.ATTENTION, Part.LAYERS)
_COLUMNS = tuple(f.name for f in fields(Moments))


class Exposed(NamedTuple):
    """Times of a step on a rank, in ns: waits for inputs and for plans, making records, and all."""

    loading_ns: int = 0
    planning_ns: int = 0
    records_ns: int = 0
    step_ns: int = 0


_MEANS = ("embedding_ns", "head_ns", "predicted_embedding_ns", "predicted_head_ns")
_SPREADS = ("compute_ns", "bubble_ns")
_SUMMED = (*_MEANS, *Exposed._fields, *_SPREADS)


class TelemetryMeter:
    """Collects this rank's steps; all ranks add the same ones and `reduce` them together."""

    def __init__(self, spec: RunSpec, mesh: Mesh) -> None:
        self.spec, self.mesh = spec, mesh
        self.cost = workload_for(spec, mesh.device.type)
        self._priced = self.cost if self.times_hold_collectives else without_collectives(self.cost)
        self._experts_ns = experts_ns_per_token(self._priced)
        # `StragglerWatch` compares ranks by the terms that hold no wait for other ranks.
        is_alone = mesh.device.type == "cpu" and torch.get_num_threads() == 1
        self._own_terms = [t for t in TERMS if is_alone or t.startswith("attention")]
        self._layers = {s: StageLayers.of(spec, s) for s in spec.stages_of(mesh.at.pp)}
        self._clear()

    def _clear(self) -> None:
        self._moments: dict[str, Moments] = dict.fromkeys(TERMS, Moments())
        self._latencies_ns: list[np.ndarray] = []
        self._sums = dict.fromkeys(_SUMMED, 0)
        self._own_measured_ns = self._own_predicted_ns = 0

    @property
    def times_hold_collectives(self) -> bool:
        return self.mesh.device.type == "cuda"

    @property
    def num_steps(self) -> int:
        """Steps that were added and that no record has yet."""
        return len(self._latencies_ns)

    @property
    def own_ns(self) -> np.ndarray:
        """int64 [5] of the steps that no record has yet: own time of the terms that ranks are
        compared by, measured and predicted, and compute, bubble and loading time.
        """
        own = (self._own_measured_ns, self._own_predicted_ns)
        times = (self._sums[name] for name in (*_SPREADS, "loading_ns"))
        return np.array([*own, *times], np.int64)

    def add(
        self,
        plan: PipelinePlan,
        times: StepTimes,
        exposed: Exposed | None = None,
        experts: FloatArray | None = None,
    ) -> None:
        """A step that this rank executed. experts: tokens of each micro-batch whose experts'
        products are in its times (`wlb.train.telemetry.measure.expert_tokens`).
        """
        predicted = {
            layers: stage_times(plan, self._priced, layers) for layers in set(self._layers.values())
        }
        num = len(plan.micro_batches)
        latencies = np.zeros((self.spec.num_micro_batches, self.spec.num_stages, 3), np.int64)
        for i in range(num):
            for stage, layers in self._layers.items():
                row = self.mesh.at.dp * num + i
                latencies[row, stage] = self._forward_ns(i, stage, predicted[layers], times)
                if layers.layers and plan.shardings[i].tokens[self.mesh.at.cp]:
                    tokens = plan.shardings[i].num_tokens * self._priced.expert_load
                    more = 0.0 if experts is None else float(experts[i]) - tokens
                    self._compare(i, num - 1, stage, predicted[layers], times, more)
        self._latencies_ns.append(latencies)
        embedding_ns, head_ns = end_times_ns(plan, self._priced)
        step = {
            "embedding_ns": times.total_ns(Part.EMBEDDING),
            "head_ns": times.total_ns(Part.HEAD),
            "predicted_embedding_ns": embedding_ns if 0 in self._layers else 0,
            "predicted_head_ns": head_ns if self.spec.num_stages - 1 in self._layers else 0,
            "compute_ns": times.compute_ns,
            "bubble_ns": times.bubble_ns,
            **(exposed or Exposed())._asdict(),
        }
        self._sums = {name: total + step[name] for name, total in self._sums.items()}

    def _forward_ns(
        self, i: int, stage: int, predicted: StageTimes, times: StepTimes
    ) -> tuple[int, int, int]:
        """A micro-batch's forward times on this rank, as in `_LATENCIES`."""
        forward = Cell(Pass.FORWARD, stage, i)
        layers = times.part_ns(forward, *_IN_LAYERS)
        attention = int(predicted.attention_forward_ns[i, self.mesh.at.cp])
        whole = layers + times.part_ns(forward, Part.EMBEDDING, Part.HEAD)
        return layers, attention + int(predicted.linear_forward_ns[i]), whole

    def _compare(
        self, i: int, last: int, stage: int, predicted: StageTimes, times: StepTimes, more: float
    ) -> None:
        """more: tokens that experts computed beyond those that are priced."""
        of = self._layers[stage]
        experts = (round(ns * more * of.with_experts) for ns in self._experts_ns)
        more_ns: dict[str, int] = dict(zip(TERMS[2:], experts, strict=True))
        forward, backward, weight = (Cell(kind, stage, i) for kind in Pass)
        measured = {
            "attention_forward": times.part_ns(forward, Part.ATTENTION),
            "linear_forward": times.part_ns(forward, Part.LAYERS),
            "attention_backward": times.part_ns(backward, Part.ATTENTION, Part.RECOMPUTE),
            "linear_backward": times.part_ns(backward, Part.LAYERS)
            + times.part_ns(weight, Part.LAYERS),
        }
        has_fsdp = self.mesh.fsdp_size > 1
        left_out = ("forward" if i == 0 else "", "backward" if i == last else "")
        for name, measured_ns in measured.items():
            if measured_ns <= 0:
                continue
            # Attention has a column for each CP rank.
            column = getattr(predicted, f"{name}_ns")
            expected_ns = int(column[i, self.mesh.at.cp] if column.ndim == 2 else column[i])
            expected_ns += more_ns.get(name, 0)
            if name in self._own_terms:
                self._own_measured_ns += measured_ns
                self._own_predicted_ns += expected_ns
            if not (has_fsdp and name.endswith(tuple(filter(None, left_out)))):
                self._moments[name] += Moments.of(expected_ns * 1e-9, measured_ns * 1e-9)

    def reduce(self) -> Telemetry:
        """The record of all ranks' steps that no record has yet. A collective call."""
        sums = [float(getattr(m, c)) for m in self._moments.values() for c in _COLUMNS]
        total = torch.tensor([*sums, *self._sums.values()], dtype=torch.float64)
        # Each code holds a time and a rank, so that one maximum gives the largest time, and of the
        # ranks that have it the lowest.
        world, rank = self.mesh.world_size, self.mesh.rank
        codes = torch.tensor([self._sums[name] * world + world - 1 - rank for name in _SPREADS])
        peaks = torch.cat([codes, torch.from_numpy(np.stack(self._latencies_ns)).flatten()])
        all_reduce_hosts(total)
        all_reduce_hosts(peaks, "max")
        record = self._record(total.tolist(), peaks)
        self._clear()
        return record

    def _record(self, total: list[float], peaks: torch.Tensor) -> Telemetry:
        steps = self.num_steps
        width = len(_COLUMNS)
        of_terms = width * len(TERMS)
        terms = (total[i : i + width] for i in range(0, of_terms, width))
        means: dict[str, Any] = {
            name.replace("_ns", "_s"): x * 1e-9 / steps / self.mesh.world_size
            for name, x in zip(_SUMMED, total[of_terms:], strict=True)
        }
        compute_s, bubble_s = means.pop("compute_s"), means.pop("bubble_s")
        shape = (steps, self.spec.num_micro_batches, self.spec.num_stages, 3)
        # The result has shape [steps, micro-batches, 3].
        latencies = peaks[2:].view(shape).sum(2)
        slowest = latencies.amax(1).sum(0).tolist()
        mean = latencies.double().mean(1).sum(0).tolist()
        return Telemetry(
            num_steps=steps,
            **{f"{of}slowest_ns": ns for of, ns in zip(_LATENCIES, slowest, strict=True)},
            **{f"{of}mean_ns": ns for of, ns in zip(_LATENCIES, mean, strict=True)},
            terms=tuple(
                (name, Moments(int(count), *sums))
                for name, (count, *sums) in zip(TERMS, terms, strict=True)
            ),
            compute=self._spread(compute_s, int(peaks[0]), steps),
            bubble=self._spread(bubble_s, int(peaks[1]), steps),
            **means,
        )

    def _spread(self, mean_s: float, code: int, steps: int) -> Spread:
        time_ns, behind = divmod(code, self.mesh.world_size)
        rank = self.mesh.world_size - 1 - behind
        return Spread(mean_s=mean_s, max_s=time_ns * 1e-9 / steps, max_rank=rank)

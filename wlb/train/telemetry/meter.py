"""Predicted beside measured times: each rank compares its cells, and all ranks reduce the sums.

A cell is a micro-batch on a stage on a rank. Predictions are those of the profile that plans are
priced with, for the rank's own spans; on CPU without collectives, which CPU time does not hold
either. Not compared: cells without a document's token (padding has no price) and, under FSDP, the
passes that hold its collectives. Cost of a record: two all-reduces of host tensors in flight
together (through Gloo), a float64 sum of 38 numbers and an int64 maximum of 2 + 3 * K * N * stages.
"""

from dataclasses import fields
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from wlb.cost import (
    StageTimes,
    end_times_ns,
    stage_times,
    without_collectives,
    workload_for,
)
from wlb.parallel.mesh import Mesh
from wlb.parallel.observe import Cell, Part, Pass
from wlb.plan import TERMS, Moments, PipelinePlan, Spread, Telemetry
from wlb.spec import RunSpec
from wlb.train.telemetry.clock import StepTimes

_MEASURED, _PREDICTED, _WHOLE = range(3)
_IN_LAYERS = (Part.ATTENTION, Part.LAYERS)
_COLUMNS = tuple(f.name for f in fields(Moments))


class Exposed(NamedTuple):
    """Times of a step on a rank, in ns: waits for inputs and for plans, making records, and the
    whole step."""

    loading_ns: int = 0
    planning_ns: int = 0
    records_ns: int = 0
    step_ns: int = 0

    def __add__(self, other: "Exposed") -> "Exposed":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Exposed(*(a + b for a, b in zip(self, other, strict=True)))


class TelemetryMeter:
    """Collects this rank's steps; `reduce` makes one record of all ranks' steps since the last.

    All ranks add the same steps and reduce together.
    """

    def __init__(self, spec: RunSpec, mesh: Mesh) -> None:
        self.spec, self.mesh = spec, mesh
        self.cost = workload_for(spec, mesh.device.type)
        self._priced = self.cost
        if not self.times_hold_collectives:
            self._priced = without_collectives(self.cost)
        all_layers = spec.stage_layers
        # Ranks are compared (`telemetry.stragglers`) by terms that hold no wait for other ranks.
        is_alone = mesh.device.type == "cpu" and torch.get_num_threads() == 1
        self._own_terms = (
            TERMS if is_alone else tuple(t for t in TERMS if t.startswith("attention"))
        )
        self._layers = {stage: all_layers[stage] for stage in spec.stages_of(mesh.pp_rank)}
        self._clear()

    def _clear(self) -> None:
        self._moments: dict[str, Moments] = dict.fromkeys(TERMS, Moments())
        self._latencies_ns: list[np.ndarray] = []
        self._embedding_ns = self._head_ns = self._compute_ns = self._bubble_ns = 0
        self._predicted_embedding_ns = self._predicted_head_ns = 0
        self._exposed = Exposed()
        self._own_measured_ns = self._own_predicted_ns = 0

    @property
    def times_hold_collectives(self) -> bool:
        return self.mesh.device.type == "cuda"

    @property
    def num_steps(self) -> int:
        """Steps added since the last record."""
        return len(self._latencies_ns)

    @property
    def own_ns(self) -> np.ndarray:
        """This rank's times since the last record, int64 [5], for a table of ranks: measured and
        predicted time of the terms that ranks are compared by, compute, bubble, loading."""
        own = (self._own_measured_ns, self._own_predicted_ns)
        times = (*own, self._compute_ns, self._bubble_ns, self._exposed.loading_ns)
        return np.array(times, np.int64)

    def add(self, plan: PipelinePlan, times: StepTimes, exposed: "Exposed | None" = None) -> None:
        """A step that this rank executed."""
        predicted = {
            layers: stage_times(plan, self._priced, layers=layers)
            for layers in set(self._layers.values())
        }
        num = len(plan.micro_batches)
        latencies = np.zeros((self.spec.num_micro_batches, self.spec.num_stages, 3), np.int64)
        for i in range(num):
            for stage, layers in self._layers.items():
                row = self.mesh.dp_rank * num + i
                latencies[row, stage] = self._forward_ns(i, stage, predicted[layers], times)
                if layers and plan.shardings[i].tokens[self.mesh.cp_rank]:
                    self._compare(i, num - 1, stage, predicted[layers], times)
        self._latencies_ns.append(latencies)
        self._embedding_ns += times.total_ns(Part.EMBEDDING)
        self._head_ns += times.total_ns(Part.HEAD)
        embedding_ns, head_ns = end_times_ns(plan, self._priced)
        if 0 in self._layers:
            self._predicted_embedding_ns += embedding_ns
        if self.spec.num_stages - 1 in self._layers:
            self._predicted_head_ns += head_ns
        self._compute_ns += times.compute_ns
        self._bubble_ns += times.bubble_ns
        self._exposed += exposed or Exposed()

    def _forward_ns(
        self, i: int, stage: int, predicted: StageTimes, times: StepTimes
    ) -> tuple[int, int, int]:
        """Forward time of a micro-batch on this rank: measured in decoder layers, predicted, and
        measured with embedding, head and loss."""
        forward = Cell(Pass.FORWARD, stage, i)
        layers = times.part_ns(forward, *_IN_LAYERS)
        attention = int(predicted.attention_forward_ns[i, self.mesh.cp_rank])
        whole = layers + times.part_ns(forward, Part.EMBEDDING, Part.HEAD)
        return layers, attention + int(predicted.linear_forward_ns[i]), whole

    def _compare(
        self, i: int, last: int, stage: int, predicted: StageTimes, times: StepTimes
    ) -> None:
        forward, backward, weight = (Cell(kind, stage, i) for kind in Pass)
        cp_rank = self.mesh.cp_rank
        pairs: dict[str, tuple[int, int]] = {
            "attention_forward": (
                predicted.attention_forward_ns[i, cp_rank],
                times.part_ns(forward, Part.ATTENTION),
            ),
            "linear_forward": (
                predicted.linear_forward_ns[i],
                times.part_ns(forward, Part.LAYERS),
            ),
            "attention_backward": (
                predicted.attention_backward_ns[i, cp_rank],
                times.part_ns(backward, Part.ATTENTION, Part.RECOMPUTE),
            ),
            "linear_backward": (
                predicted.linear_backward_ns[i],
                times.part_ns(backward, Part.LAYERS) + times.part_ns(weight, Part.LAYERS),
            ),
        }
        has_fsdp = self.mesh.fsdp_size > 1
        left_out = ("forward" if i == 0 else "", "backward" if i == last else "")
        for name, (expected_ns, measured_ns) in pairs.items():
            if measured_ns <= 0:
                continue
            if name in self._own_terms:
                self._own_measured_ns += int(measured_ns)
                self._own_predicted_ns += int(expected_ns)
            if not (has_fsdp and name.endswith(tuple(filter(None, left_out)))):
                self._moments[name] += Moments.of(int(expected_ns) * 1e-9, measured_ns * 1e-9)

    def reduce(self) -> Telemetry:
        """The record of all ranks' steps since the last record. A collective call."""
        sums = [float(getattr(m, c)) for m in self._moments.values() for c in _COLUMNS]
        sums += [self._embedding_ns, self._head_ns, self._compute_ns, self._bubble_ns]
        sums += [self._predicted_embedding_ns, self._predicted_head_ns, *self._exposed]
        total = torch.tensor(sums, dtype=torch.float64)
        codes = torch.tensor([self._code(self._compute_ns), self._code(self._bubble_ns)])
        peaks = torch.cat([codes, torch.from_numpy(np.stack(self._latencies_ns)).flatten()])
        waiting = [
            dist.all_reduce(total, async_op=True),
            dist.all_reduce(peaks, op=dist.ReduceOp.MAX, async_op=True),
        ]
        for work in waiting:
            assert work is not None
            work.wait()
        record = self._record(total.tolist(), peaks)
        self._clear()
        return record

    def _code(self, time_ns: int) -> int:
        """Encodes time and rank, so that the maximum over ranks is the largest time and, of the
        ranks that have it, the lowest."""
        world = self.mesh.world_size
        return time_ns * world + world - 1 - self.mesh.rank

    def _record(self, total: list[float], peaks: torch.Tensor) -> Telemetry:
        steps = self.num_steps
        width = len(_COLUMNS)
        of_terms = width * len(TERMS)
        terms = (total[i : i + width] for i in range(0, of_terms, width))
        means = [x * 1e-9 / steps / self.mesh.world_size for x in total[of_terms:]]
        embedding, head, compute, bubble, predicted_embedding, predicted_head = means[:6]
        loading, planning, records, step = means[6:]
        shape = (steps, self.spec.num_micro_batches, self.spec.num_stages, 3)
        latencies = peaks[2:].view(shape).sum(2)  # [steps, micro-batches, 3]
        slowest = latencies.amax(1).sum(0).tolist()
        mean = latencies.double().mean(1).sum(0).tolist()
        return Telemetry(
            num_steps=steps,
            slowest_ns=slowest[_MEASURED],
            mean_ns=mean[_MEASURED],
            predicted_slowest_ns=slowest[_PREDICTED],
            predicted_mean_ns=mean[_PREDICTED],
            whole_slowest_ns=slowest[_WHOLE],
            whole_mean_ns=mean[_WHOLE],
            terms=tuple(
                (name, Moments(int(count), *sums))
                for name, (count, *sums) in zip(TERMS, terms, strict=True)
            ),
            embedding_s=embedding,
            head_s=head,
            compute=self._spread(compute, int(peaks[0]), steps),
            bubble=self._spread(bubble, int(peaks[1]), steps),
            predicted_embedding_s=predicted_embedding,
            predicted_head_s=predicted_head,
            loading_s=loading,
            planning_s=planning,
            records_s=records,
            step_s=step,
        )

    def _spread(self, mean_s: float, code: int, steps: int) -> Spread:
        time_ns, behind = divmod(code, self.mesh.world_size)
        rank = self.mesh.world_size - 1 - behind
        return Spread(mean_s=mean_s, max_s=time_ns * 1e-9 / steps, max_rank=rank)

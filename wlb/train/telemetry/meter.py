"""Compares predicted with measured times of passes on each rank, and sums the result over ranks.

The time of a micro-batch in a stage is predicted for the spans of this rank, with the kernel
profile that also prices plans. On a CPU the prediction leaves out collectives, because the measured
CPU time does not include waits for them. The time of experts is predicted for the number of tokens
that they really computed, so that a profile fitted to these times does not depend on a run's
routing.

Two kinds of passes are not compared: those of a rank that has only padding in the micro-batch,
because they have no price; and with FSDP each step's first forward and last backward passes,
because they include FSDP's collectives, which the prediction leaves out.
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
"""Prefixes of the names of three forward times in a `Telemetry` record.

These times are the measured time of the decoder layers, the predicted time of the decoder layers,
and the measured time of the whole pass."""
# The parts of a forward pass that the decoder layers compute.
_IN_LAYERS = (Part.ATTENTION, Part.LAYERS)
_COLUMNS = tuple(f.name for f in fields(Moments))


class Exposed(NamedTuple):
    """Times (ns) of a step on one rank: its waits, the work of hooks, and the whole step."""

    loading_ns: int = 0  # time that the rank waited for inputs
    planning_ns: int = 0  # time that the rank waited for plans
    records_ns: int = 0  # CPU time that hooks spent on measuring and recording
    step_ns: int = 0  # wall time of the whole step, with the wait for its plan


# Times whose mean over ranks is recorded. For `_SPREADS`, the largest time and its rank are
# recorded too.
_MEANS = ("embedding_ns", "head_ns", "predicted_embedding_ns", "predicted_head_ns")
_SPREADS = ("compute_ns", "bubble_ns")
_SUMMED = (*_MEANS, *Exposed._fields, *_SPREADS)


class TelemetryMeter:
    """Collects measured and predicted times of this rank's steps, and sums them over ranks.

    All ranks add the same steps and call `reduce` together.
    """

    def __init__(self, spec: RunSpec, mesh: Mesh) -> None:
        self.spec, self.mesh = spec, mesh
        self.cost = workload_for(spec, mesh.device.type)
        self._priced = self.cost if self.times_hold_collectives else without_collectives(self.cost)
        self._experts_ns = experts_ns_per_token(self._priced)
        # `StragglerWatch` compares ranks by those of `TERMS` whose times do not include waits for
        # other ranks: all if the CPU time of one thread is measured, else only attention.
        excludes_waits = mesh.device.type == "cpu" and torch.get_num_threads() == 1
        self._own_terms = [t for t in TERMS if excludes_waits or t.startswith("attention")]
        self._layers = {s: StageLayers.of(spec, s) for s in spec.stages_of(mesh.at.pp)}
        self._clear()

    def _clear(self) -> None:
        self._moments: dict[str, Moments] = dict.fromkeys(TERMS, Moments())
        self._latencies_ns: list[np.ndarray] = []
        self._sums = dict.fromkeys(_SUMMED, 0)
        self._own_measured_ns = self._own_predicted_ns = 0

    @property
    def times_hold_collectives(self) -> bool:
        """Whether measured times include waits in collectives: true on CUDA, false on a CPU."""
        return self.mesh.device.type == "cuda"

    @property
    def num_steps(self) -> int:
        """Number of steps that were added since the last call of `reduce`."""
        return len(self._latencies_ns)

    @property
    def own_ns(self) -> np.ndarray:
        """This rank's times (ns), summed over the steps since the last `reduce`; int64 [5].

        The first two are the measured and the predicted time of the work by which stragglers are
        found (`StragglerWatch`): decoder layers, or only attention kernels. The others are the
        times of computing, of pipeline bubbles and of waiting for inputs.
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
        """Add a step that this rank executed.

        Args:
            plan: The plan of this rank's pipeline for the step.
            times: Measured times of the step's passes.
            exposed: Times outside of the passes; None means that all are 0.
            experts: For each micro-batch, the number of tokens whose expert work is in the measured
                times, shape [n] (`wlb.train.telemetry.measure.expert_tokens`). None for a model
                without experts.
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
                    # The price assumes that experts compute `tokens` tokens. `extra` is the number
                    # of tokens that they really computed, minus `tokens`.
                    tokens = plan.shardings[i].num_tokens * self._priced.expert_load
                    extra = 0.0 if experts is None else float(experts[i]) - tokens
                    self._compare(i, num - 1, stage, predicted[layers], times, extra)
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
        """Return three forward times (ns) of micro-batch `i` in a stage on this rank.

        The first two are the measured and the predicted time of the decoder layers. The third is
        the measured time of the whole pass, including embedding and head.
        """
        forward = Cell(Pass.FORWARD, stage, i)
        layers = times.part_ns(forward, *_IN_LAYERS)
        attention = int(predicted.attention_forward_ns[i, self.mesh.at.cp])
        whole = layers + times.part_ns(forward, Part.EMBEDDING, Part.HEAD)
        return layers, attention + int(predicted.linear_forward_ns[i]), whole

    def _compare(
        self, i: int, last: int, stage: int, predicted: StageTimes, times: StepTimes, extra: float
    ) -> None:
        """Add the measured and predicted times of one micro-batch in one stage to the sums.

        Args:
            i: Index of the micro-batch.
            last: Index of the step's last micro-batch.
            stage: Number of the stage.
            predicted: Predicted times of all micro-batches in this stage.
            times: Measured times of all passes of the step.
            extra: Number of tokens that experts computed, minus the number that the price assumes.
        """
        of = self._layers[stage]
        experts = (round(ns * extra * of.with_experts) for ns in self._experts_ns)
        extra_ns: dict[str, int] = dict(zip(TERMS[2:], experts, strict=True))
        forward, backward, weight = (Cell(kind, stage, i) for kind in Pass)
        measured = {
            "attention_forward": times.part_ns(forward, Part.ATTENTION),
            "linear_forward": times.part_ns(forward, Part.LAYERS),
            "attention_backward": times.part_ns(backward, Part.ATTENTION, Part.RECOMPUTE),
            "linear_backward": times.part_ns(backward, Part.LAYERS)
            + times.part_ns(weight, Part.LAYERS),
        }
        has_fsdp = self.mesh.fsdp_size > 1
        # With FSDP, leave out the first forward pass, in which parameters are gathered, and the
        # last backward pass, in which gradients are reduced.
        left_out = ("forward" if i == 0 else "", "backward" if i == last else "")
        for name, measured_ns in measured.items():
            if measured_ns <= 0:
                continue
            # Predicted attention times have shape [micro-batches, CP ranks]. Other predicted times
            # have shape [micro-batches].
            column = getattr(predicted, f"{name}_ns")
            expected_ns = int(column[i, self.mesh.at.cp] if column.ndim == 2 else column[i])
            expected_ns += extra_ns.get(name, 0)
            if name in self._own_terms:
                self._own_measured_ns += measured_ns
                self._own_predicted_ns += expected_ns
            if not (has_fsdp and name.endswith(tuple(filter(None, left_out)))):
                self._moments[name] += Moments.of(expected_ns * 1e-9, measured_ns * 1e-9)

    def reduce(self) -> Telemetry:
        """Sum the times of the added steps over all ranks, and return the sums as a record.

        The steps are then forgotten. A collective call.
        """
        sums = [float(getattr(m, c)) for m in self._moments.values() for c in _COLUMNS]
        total = torch.tensor([*sums, *self._sums.values()], dtype=torch.float64)
        # Each code is an integer that combines a time with a rank, so that the maximum over ranks
        # gives both the largest time and its rank. If ranks have equal times, it gives the lowest
        # rank.
        world, rank = self.mesh.world_size, self.mesh.rank
        codes = torch.tensor([self._sums[name] * world + world - 1 - rank for name in _SPREADS])
        peaks = torch.cat([codes, torch.from_numpy(np.stack(self._latencies_ns)).flatten()])
        all_reduce_hosts(total)
        all_reduce_hosts(peaks, "max")
        record = self._record(total.tolist(), peaks)
        self._clear()
        return record

    def _record(self, total: list[float], peaks: torch.Tensor) -> Telemetry:
        """Build the record from the sums and maxima over ranks.

        Args:
            total: Sums over ranks: for each time in `TERMS` its statistics (the fields of
                `Moments`), then each time in `_SUMMED`.
            peaks: Maxima over ranks: for each time in `_SPREADS` an integer that encodes the
                largest time and its rank (see `reduce`), then the three forward times of
                `_forward_ns` for each step, micro-batch and stage.
        """
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
        # Forward times summed over stages, with shape [steps, micro-batches, 3].
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
        """Return a time's mean over ranks, its maximum, and the rank with the maximum, per step.

        Args:
            mean_s: Mean time over ranks and steps, in seconds.
            code: An integer that encodes the largest time (ns) of a rank, summed over the steps,
                and the number of this rank (see `reduce`).
            steps: Number of steps.
        """
        time_ns, behind = divmod(code, self.mesh.world_size)
        rank = self.mesh.world_size - 1 - behind
        return Spread(mean_s=mean_s, max_s=time_ns * 1e-9 / steps, max_rank=rank)

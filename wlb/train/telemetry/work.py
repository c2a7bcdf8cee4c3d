"""Computes TFLOP/s and MFU from the model FLOPs and the wall time of executed steps.

Every rank has the plan of all pipelines, so it knows the FLOPs of all ranks without communication.
The time is this rank's wall time of whole steps, as for tokens/s. This time is nearly the same on
all ranks, because ranks wait for each other in every step.
"""

import torch

from wlb.cost import document_flops, rank_peak_tflops, window_flops
from wlb.cost.machine import cpu_name
from wlb.parallel.mesh import Mesh
from wlb.plan import PackingPlan, Work
from wlb.spec import RunSpec


class WorkMeter:
    """Adds up model FLOPs and wall time of steps.

    Attributes:
        peak_tflops: Peak TFLOP/s of one rank's device; 0 if not known.
    """

    def __init__(self, spec: RunSpec, mesh: Mesh) -> None:
        self.spec, self.num_ranks = spec, mesh.world_size
        is_gpu = mesh.device.type == "cuda"
        self.device = torch.cuda.get_device_name(mesh.device) if is_gpu else cpu_name()
        self.peak_tflops = rank_peak_tflops(spec, self.device)
        self._sum = Work()

    @property
    def note(self) -> str:
        """A line for the log that says why MFU cannot be computed; "" if it can be."""
        if self.peak_tflops:
            return ""
        return (
            f"model TFLOP/s without MFU, because the peak of {self.device} in "
            f"{self.spec.training.dtype} is not known; to get MFU, set cluster.peak_tflops"
        )

    def add(self, plan: PackingPlan, wall_s: float) -> None:
        """Add an executed step's wall time, and the forward and backward FLOPs of its tokens.

        Args:
            plan: The packing of the step.
            wall_s: Wall time of the step.
        """
        model, rank_s = self.spec.model, wall_s * self.num_ranks
        window = self.spec.data.context_window
        self._sum += Work(
            rank_s=rank_s,
            model_flops=float(document_flops(model, plan.attended).sum()),
            window_flops=window_flops(model, plan.num_tokens, window=window),
            peak_flops=rank_s * self.peak_tflops * 1e12,
        )

    def take(self) -> Work:
        """Return FLOPs and wall time, summed over the steps that were added since the last call."""
        taken, self._sum = self._sum, Work()
        return taken

"""Held-out loss: forward only, through the same pipeline and context parallelism.

It has its own planner over the held-out store, always from its beginning and in Plain-4D's windows,
so the number depends on the weights alone: not on the training loader's position, nor on the
packing policy under study.
"""

from itertools import islice

import torch
import torch.distributed as dist

from wlb.data.reader import StoreReader
from wlb.parallel.execute import Executor
from wlb.plan import PipelinePlan, StepPlan
from wlb.planner import open_heldout_planner
from wlb.spec import RunSpec


class Evaluator:
    """Evaluates on the first eval.steps global batches of the held-out store."""

    def __init__(self, spec: RunSpec, store: str, executor: Executor) -> None:
        self.executor = executor
        self.reader = StoreReader(store, spec.model.vocab_size)
        planner = open_heldout_planner(spec, store, executor.mesh.device.type)
        pipeline = executor.mesh.dp_rank
        self.plans: list[tuple[StepPlan, PipelinePlan]] = [
            (plan, planner.shard(plan, pipeline))
            for plan in islice(planner.steps(), spec.eval.steps)
        ]

    @property
    def num_targets(self) -> int:
        return sum(plan.num_targets for plan, _ in self.plans)

    def run(self) -> float:
        """Mean loss per labelled token, the same on every rank."""
        mesh = self.executor.mesh
        total = torch.zeros((), dtype=torch.float64, device=mesh.device)
        for _, pipeline in self.plans:
            loss = self.executor.evaluate(pipeline, self.reader)
            if mesh.tp_rank == 0:
                total += loss.double()
        dist.all_reduce(total)
        return float(total) / max(1, self.num_targets)

"""Gives a rank the plans of its steps, which a planner process on the same node makes.

One process per node plans ahead of training and sends the plans to all ranks of the node. Every
node plans the same steps, so nodes exchange no plans.
"""

import time
from pathlib import Path

import torch.distributed as dist

from wlb.data import StoreName
from wlb.parallel.host import host_group
from wlb.parallel.mesh import Mesh
from wlb.parallel.world import World
from wlb.plan import PipelinePlan, PlannerState, StepPlan
from wlb.planner import open_planner
from wlb.planner.liveness import SILENCE_S, Address
from wlb.planner.service import PlanClient, PlannerProcess
from wlb.spec import RunSpec

STEPS_AHEAD = 3
"""How many steps the planner plans ahead of the step that training requests.

With a larger number, training waits less often for steps that are slow to plan, but more plans are
in memory. The number must be at least 2, because the training loop compares the plans of the step
after the next one across ranks."""


class PlanFeed:
    """Gives this rank the plans of its steps in order. The plans of later steps can be looked at.

    All ranks construct it together. The first rank of each node starts the node's planner process.

    Args:
        spec: The run. Its kernels.attention is the kernel for which plans are priced, not `auto`.
        store: Name of the token store.
        world: This rank's place among the processes of the launcher.
        mesh: This rank's place in the layout.
        state: The planner's state in the checkpoint that the run resumes from; None for a new run.

    Attributes:
        waited_ns: Time (ns) spent in `next` and `peek` since the caller last set `waited_ns` to 0.
    """

    def __init__(
        self, spec: RunSpec, store: StoreName, world: World, mesh: Mesh, state: PlannerState | None
    ) -> None:
        token: list[str | None] = [None]
        if world.rank == 0:
            token = [Address.new().key.decode()]
        dist.broadcast_object_list(token, src=0, group=host_group())
        # Local ranks share a rendezvous file in a temporary folder, which their launcher removes.
        # The planner's socket is put into the same folder, so that it is removed too.
        shared = world.rendezvous_file
        folder = str(Path(shared).parent) if shared else ""
        address = Address.new(token[0] or "", world.node_rank, folder)
        self._process: PlannerProcess | None = None
        if world.local_rank == 0:
            self._process = PlannerProcess(
                open_planner,
                (spec, store, mesh.device.type),
                state=state,
                ahead=STEPS_AHEAD,
                num_clients=world.local_world_size,
                address=address,
                silence_s=SILENCE_S,
            )
        # Wait until the planner process of every node has been started.
        dist.barrier(host_group())
        # Only rank 0 receives the planner's state with every plan, because it writes the
        # checkpoints.
        self._client = PlanClient(
            address, mesh.at.dp, needs_state=world.rank == 0, silence_s=SILENCE_S
        )
        self.waited_ns = 0

    def next(self) -> tuple[StepPlan, PipelinePlan] | None:
        """Return the next step's plans. Wait for them if the planner has not made them yet.

        Returns:
            The plan of all pipelines and the plan of this rank's pipeline; None after the last
                step.
        """
        begin = time.perf_counter_ns()
        item = self._client.next()
        self.waited_ns += time.perf_counter_ns() - begin
        return item

    def peek(self, steps_ahead: int) -> list[tuple[StepPlan, PipelinePlan]]:
        """Return the plans of a later step, which `next` will still return when its turn comes.

        Args:
            steps_ahead: How many steps to look ahead. 1 is the step whose plans `next` returns
                next.

        Returns:
            A list with one pair: the plan of all pipelines and the plan of this rank's pipeline.
                The list is empty if the data end before that step.
        """
        begin = time.perf_counter_ns()
        item = self._client.peek(steps_ahead)
        self.waited_ns += time.perf_counter_ns() - begin
        return [] if item is None else [item]

    def close(self) -> None:
        """Disconnect, and end the planner process if this rank started it."""
        self._client.close()
        if self._process is not None:
            self._process.close()

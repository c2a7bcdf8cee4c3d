"""A rank's life once its process group stands: limits, layout, watch, training."""

import torch

from wlb.launch.position import Position
from wlb.parallel.mesh import build_mesh, limit_collectives
from wlb.parallel.world import World
from wlb.plan.tally import Tally
from wlb.spec import RunSpec
from wlb.train import checkpoint
from wlb.train.checkpoint.shared_folder import refuse_unshared
from wlb.train.faults.stop import StopRequest
from wlb.train.faults.watched import watched
from wlb.train.job import Job
from wlb.train.loop import Trainer


def run_rank(world: World, job: Job, device: torch.device, request: StopRequest) -> Tally:
    """Train `job` on this rank; all ranks call it together."""
    if job.calibrate is not None and device.type == "cpu":
        # Profiles are measured with one thread, whose CPU time is the work done.
        torch.set_num_threads(1)
    spec = job.spec
    if world.world_size > 1:
        refuse_unshared(
            job.directory,
            world,
            within_s=min(checkpoint.SEEN_WITHIN_S, spec.training.timeout_s / 2),
        )
    mesh = build_mesh(spec.parallel, device, shard_size=spec.fsdp.shard_size)
    limit_s = collective_limit_s(spec, world, device)
    limit_collectives(limit_s)
    limit_collectives(limit_s, mesh)
    position = Position()
    with watched(job.directory, spec, world=world, mesh=mesh, position=position):
        return Trainer(job, world, mesh, position, request).run()


def collective_limit_s(spec: RunSpec, world: World, device: torch.device) -> float:
    """How long a collective may take.

    On CUDA with a watch, longer than the watch gives a rank that hangs: NCCL ends the process of a
    rank that waited too long, and the watch would report that rank in place of the one it waited
    for. Gloo raises instead, which the watch recognises as waiting.
    """
    is_watched = bool(spec.training.heartbeat_s) and world.world_size > 1
    timeout_s = spec.training.timeout_s
    return 2 * timeout_s + 30 if is_watched and device.type == "cuda" else timeout_s

"""Tests how long ranks wait for each other."""

from dataclasses import replace

import torch

from wlb.parallel.world import World
from wlb.spec import RunSpec
from wlb.train.start import collective_limit_s


def test_a_collective_may_outlast_the_watch_where_nccl_would_end_who_waits() -> None:
    spec, two = RunSpec(), World(rank=0, world_size=2, local_world_size=2, rendezvous_file="f")
    spec = replace(spec, training=replace(spec.training, timeout_s=100.0))
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert collective_limit_s(spec, two, gpu) == 230.0
    assert collective_limit_s(spec, two, cpu) == 100.0
    assert collective_limit_s(spec, World(), gpu) == 100.0
    alone = replace(spec, training=replace(spec.training, heartbeat_s=0.0))
    assert collective_limit_s(alone, two, gpu) == 100.0

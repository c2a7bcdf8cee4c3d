"""Provokes a data race between the worker threads of a Gloo group.

`python gloo_race.py SECONDS default|one` runs collectives in one process. With `default`, torch's
two workers per group, the process dies of a corrupt heap within a minute. With `one`, as
`wlb.parallel.world.init` sets it, the process survives. It prints the number of worker threads and
of collectives.

It uses nothing of wlb except wlb/parallel/gloo.py, so that it can be sent upstream together with
that file.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

COLLECTIVES = 16


def num_workers() -> int:
    """Returns the number of threads of this process that run Gloo's collectives."""
    names = [comm.read_text() for comm in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo_runloop" in name for name in names)


def race(seconds: float) -> int:
    """Runs collectives with long and with short names, many at once, and returns their number."""
    group = dist.group.WORLD
    assert group is not None
    name, x, ops = group.group_name, torch.zeros(4), torch.ops._c10d_functional
    begin, done = time.monotonic(), 0
    while not done or time.monotonic() - begin < seconds:
        moving = []
        for _ in range(COLLECTIVES):
            moving += [ops.all_gather_into_tensor(x, 1, name), ops.all_reduce(x, "sum", name)]
        for tensor in moving:
            ops.wait_tensor(tensor)
        done += len(moving)
    return done


def main(seconds: str, how: str) -> None:
    torch.set_num_threads(1)
    if how == "one":
        from wlb.parallel.gloo import use_one_worker

        use_one_worker(loopback=True)
    meeting = tempfile.mktemp()
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    dist.barrier()  # a thread gets its name when it works for the first time
    sys.stdout.write(f"{num_workers()} {race(float(seconds))}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

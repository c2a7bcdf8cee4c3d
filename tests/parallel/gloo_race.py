"""One process races the workers of a Gloo group: `python gloo_race.py SECONDS default|one`.

`default` (torch's two workers a group) dies within a minute of a corrupt heap; `one` (what
`wlb.parallel.world.init` sets) survives. Prints the number of worker threads and of collectives.
Takes nothing else of wlb, so that it can be sent upstream with the wrapper of wlb/parallel/gloo.py.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

COLLECTIVES = 16


def num_workers() -> int:
    """Returns how many threads of this process run Gloo's collectives."""
    names = [comm.read_text() for comm in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo_runloop" in name for name in names)


def race(seconds: float) -> int:
    """Runs collectives of long and of short names, many in flight, for `seconds`; returns how
    many.
    """
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
    dist.barrier()  # threads have their names once they have worked
    sys.stdout.write(f"{num_workers()} {race(float(seconds))}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

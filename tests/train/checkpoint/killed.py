"""Kills a save at each of its file changes, resumes, and checks the checkpoints.

`python -m tests.train.checkpoint.killed FOLDER naming|all AGAIN` is a separate program because it
forks, which a process with threads should not do. It starts torch's threads only in its children.
"""

import json
import os
import shutil
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.faults import NAMING, changes, is_killed
from tests.train.case import small_spec
from wlb.parallel import world as worlds
from wlb.parallel.execute import Executor
from wlb.parallel.mesh import build_mesh
from wlb.parallel.world import World
from wlb.spec import RunSpec
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.checkpoint.saver import CheckpointSaver, load
from wlb.train.optimizer import Optimizers

NOTHING_WAITS = {"carry": {"next_step": 0, "policy": "bounded"}, "ready": []}
STATE: Any = SimpleNamespace(to_json=lambda: NOTHING_WAITS)


def spec_of(folder: Path) -> RunSpec:
    spec = small_spec(folder, folder / "texts", checkpoint={"keep": 1})
    return replace(spec, model=replace(spec.model, vocab_size=320))


def save(spec: RunSpec, folder: Path, *, steps: tuple[int, ...], at: int, kinds: Any) -> None:
    """Saves a checkpoint after each of `steps` and ends this process.

    The process is killed at change `at` of the last save.
    """
    device = torch.device("cpu")
    worlds.init(World(), device, timeout_s=600)
    mesh = build_mesh(spec.parallel, device)
    executor = Executor(spec, mesh)
    optimizers = Optimizers(spec, dict(executor.stages))
    trained: dict[str, Any] = {"stages": executor.stages, "optimizers": optimizers}
    if found := checkpoint.list_complete(folder):
        load(found[-1], mesh, **trained)
    saver = CheckpointSaver(folder, spec, mesh, **trained, profile="none")
    for step in steps[:-1]:
        saver.save(step, STATE)
        saver.wait()
    with changes(folder, at=at, action=is_killed, kinds=kinds):
        saver.save(steps[-1], STATE)
        (saved,) = saver.wait()
    sys.stderr.write(saved.error)
    sys.stderr.flush()
    os._exit(1 if saved.error else 0)


def run(*arguments: Any, **named: Any) -> int:
    pid = os.fork()
    if not pid:
        save(*arguments, **named)
    return os.waitpid(pid, 0)[1]


def main(folder: Path, kinds: tuple[str, ...], *, again: bool) -> None:
    spec, last = spec_of(folder), 1 if again else 2
    for at in count(1):
        checkpoints = folder / str(at) / "checkpoints"
        checkpoints.parent.mkdir()
        status = run(spec, checkpoints, steps=(1, last), at=at, kinds=kinds)
        found = checkpoint.resolve_resume(checkpoints, "").checkpoint
        if found is None:
            raise SystemExit(f"after a kill at change {at} no checkpoint is left")
        checkpoint.check_share(found, index=0, num=1)
        checkpoint.prepare_for_resume(checkpoints, found)
        left = sorted(path.name for path in checkpoints.iterdir() if "partial" in path.name)
        if left or checkpoint.step_of(found) not in (1, last):
            raise SystemExit(f"after a kill at change {at}: {found}, {left}")
        # Sometimes check that a resumed run can load the checkpoint and save the same step.
        if at % 5 == 1 and run(spec, checkpoints, steps=(last,), at=0, kinds=kinds):
            raise SystemExit(f"after a kill at change {at} nothing can be saved any more")
        shutil.rmtree(checkpoints.parent)
        if not os.WIFSIGNALED(status):
            if status:
                raise SystemExit(f"a save that was not killed ended with {status}")
            sys.stdout.write(json.dumps({"kills": at - 1}))
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), NAMING if sys.argv[2] == "naming" else (), again=bool(int(sys.argv[3])))

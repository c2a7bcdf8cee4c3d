"""Tests that README's table of the way from lengths to loss names the files in which code runs."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from tests.parity.case import Reader
from wlb import Planner, load
from wlb.launch.local import run_local
from wlb.parallel.execute import Executor
from wlb.parallel.mesh import build_mesh
from wlb.parallel.world import World, rank_device
from wlb.plan import PipelinePlan
from wlb.spec import RunSpec

ROOT = Path(__file__).parents[1] / "wlb"
LENGTHS = np.array([60, 40, 30, 20, 20, 15, 12, 9, 7, 5])
SETTINGS = ["parallel.cp=2", "parallel.tp=1", "parallel.dp=1", "parallel.pp=1"]
SETTINGS += ["pp.virtual_stages=1", "model.vocab_size=320"]
MOST_FILES = 25
T = TypeVar("T")


def traced(run: Callable[[], T]) -> tuple[T, set[str]]:
    """What `run` returns, and the files of wlb in which it called functions. It runs once before,
    so that imports and what is made once do not count.
    """
    run()
    seen: set[str] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            seen.add(str(path.relative_to(ROOT)))

    sys.setprofile(note)
    try:
        return run(), seen
    finally:
        sys.setprofile(None)


def planned() -> PipelinePlan:
    """A step of ten documents, packed and sharded, without the comparison with Plain-4D."""
    made = Planner.for_lengths(LENGTHS, context_window=64, num_micro_batches=2, cp=2)
    planner = replace(made, baseline=None)
    return planner.shard(next(planner.steps()), pipeline=0)


def trained(world: World, spec: RunSpec, plan: PipelinePlan) -> tuple[float, set[str]]:
    """The loss of a rank, both passes run, and the files."""
    mesh = build_mesh(spec.parallel, rank_device(world, "cpu"), model=spec.model)
    executor = Executor(spec, mesh)

    def step() -> float:
        for parameter in executor.named_parameters().values():
            parameter.grad = None
        return float(executor.train_step(plan, Reader(), loss_scale=1.0))

    return traced(step)


@pytest.mark.full
@pytest.mark.dist
def test_the_table_names_the_files_from_lengths_to_loss() -> None:
    spec = load("demo", SETTINGS)
    plan, seen = traced(planned)
    for loss, files in run_local(trained, 2, spec, plan, start_group=True, timeout_s=600):
        assert loss > 0
        seen |= files
    text = (ROOT / "README.md").read_text("utf-8")
    section = text.split("## The way from lengths to loss")[1].split("The records that they")[0]
    named = re.findall(r"^\| \[([\w/]+\.py)\]", section, flags=re.MULTILINE)
    assert sorted(named) == sorted(seen)
    assert len(named) <= MOST_FILES

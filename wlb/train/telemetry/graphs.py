"""The hook that reports steps that waited for torch.compile, which explains their time."""

import torch

from wlb.parallel.compiled import num_graphs
from wlb.parallel.host import all_reduce_hosts
from wlb.train.hooks import ExecutedStep, Hook, RunContext


class CountGraphs(Hook):
    """Counts compiled graphs of decoder layers on this rank, and the most on any rank."""

    def __init__(self) -> None:
        self._num_before = num_graphs()
        self._num_told = 0

    def record(self, run: RunContext, step: ExecutedStep) -> None:
        total = num_graphs() - self._num_before
        if new := total - self._num_told:
            self._num_told = total
            run.report.write("compiled", steps_done=run.steps_done, graphs=new, total=total)
            run.report.say(
                f"compiled {new} graphs of a decoder layer by step {run.steps_done}, {total} in all"
            )

    def finished(self, run: RunContext) -> None:
        most = torch.tensor(num_graphs() - self._num_before)
        all_reduce_hosts(most, "max")
        if self._num_told:
            told = f"{self._num_told} graphs of a layer, {int(most)} at most on a rank"
            run.tally.rows["compiled"] = told

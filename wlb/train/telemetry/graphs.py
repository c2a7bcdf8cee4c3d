"""The hook that reports when torch.compile has compiled new graphs. All ranks wait for that."""

import torch

from wlb.parallel.compiled import num_graphs
from wlb.parallel.host import all_reduce_hosts
from wlb.train.hooks import ExecutedStep, Hook, RunContext


class CountGraphs(Hook):
    """Counts the graphs of decoder layers that torch.compile has compiled on this rank.

    The summary that the run prints shows rank 0's number, and the largest number of any rank.
    """

    def __init__(self) -> None:
        self._num_before = num_graphs()
        self._num_reported = 0

    def record(self, run: RunContext, step: ExecutedStep) -> None:
        """Report graphs that torch.compile has compiled during this step."""
        total = num_graphs() - self._num_before
        if new := total - self._num_reported:
            self._num_reported = total
            run.report.write("compiled", steps_done=run.steps_done, graphs=new, total=total)
            run.report.say(
                f"compiled {new} graphs of a decoder layer by step {run.steps_done}, {total} in all"
            )

    def finished(self, run: RunContext) -> None:
        """Add the numbers of compiled graphs to the summary that the run prints."""
        most = torch.tensor(num_graphs() - self._num_before)
        all_reduce_hosts(most, "max")
        if self._num_reported:
            text = f"{self._num_reported} graphs of a layer, {int(most)} at most on a rank"
            run.tally.rows["compiled"] = text

"""A batcher for torchtitan 0.3's RL experiment that balances work over ranks.

In the controller's configuration, write `BalancedBatcher.Config` in place of `Batcher.Config`.
"""

from dataclasses import dataclass
from typing import Any

from wlb.adapters.versions import require

require("torchtitan>=0.3")

from torchtitan.experiments.rl.components.batcher import Batcher

from wlb.balance import Cost, balance_step
from wlb.planner import LLAMA2_7B


@dataclass(kw_only=True, slots=True)
class BalancedBatcherConfig(Batcher.Config):
    """Batcher.Config for `BalancedBatcher`; torchtitan requires a Config class for each batcher."""


class BalancedBatcher(Batcher):
    """torchtitan's Batcher, changed to choose the samples of each packed row by their work.

    Within a micro-batch, all rows of all ranks take nearly equal time. If there are fewer samples
    than rows, UserError is raised, because some ranks would get only padding. In this case, lower
    local_batch_size.
    """

    Config = BalancedBatcherConfig
    cost: Cost = LLAMA2_7B  # predicts the time of a sample, see `balance_step`

    def _assign_training_samples_to_rows(self, training_samples: list[Any]) -> list[list[Any]]:
        rows = self.local_batch_size
        step = balance_step(
            [self.num_tokens_to_pack(sample) for sample in training_samples],
            num_ranks=self._dp_degree * rows,
            max_tokens=self.seq_len,
            cost=self.cost,
        )
        num = int(step.num_micro_batches[0])
        # torchtitan expects row i of micro-batch m on rank r at index (i * num + m) * dp + r of the
        # list, so return the rows in this order.
        return [
            [training_samples[s] for s in step.samples(0, rank * rows + row, m)]
            for row in range(rows)
            for m in range(num)
            for rank in range(self._dp_degree)
        ]

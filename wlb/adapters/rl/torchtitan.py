"""torchtitan 0.3's RL experiment: a batcher whose rows are balanced over ranks.

In the controller's configuration give `BalancedBatcher.Config` where `Batcher.Config` stands.
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
    """Batcher's configuration once more, since torchtitan lets a Config build only one class."""


class BalancedBatcher(Batcher):
    """torchtitan's Batcher with each row's samples chosen by work; `cost` as for `balance_step`.

    torchtitan deals rows to micro-batches and ranks in turn, so they come in that order: rows of a
    micro-batch take nearly as long on every rank. UserError for fewer samples than rows, where
    ranks would get only padding; lower local_batch_size.
    """

    Config = BalancedBatcherConfig
    cost: Cost = LLAMA2_7B

    def _assign_training_samples_to_rows(self, training_samples: list[Any]) -> list[list[Any]]:
        rows = self.local_batch_size
        step = balance_step(
            [self.num_tokens_to_pack(sample) for sample in training_samples],
            num_ranks=self._dp_degree * rows,
            max_tokens=self.seq_len,
            cost=self.cost,
        )
        num = int(step.num_micro_batches[0])
        # Row i of a (micro-batch, rank) comes i x micro-batches x ranks after its first.
        return [
            [training_samples[s] for s in step.samples(0, rank * rows + row, m)]
            for row in range(rows)
            for m in range(num)
            for rank in range(self._dp_degree)
        ]

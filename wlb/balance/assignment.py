"""`StepBalance`: which samples each rank trains in each micro-batch, with predicted times.

Printing it shows a table of mini-batches. Adapters turn its arrays into batches.
"""

from dataclasses import dataclass

import numpy as np

from wlb.cost import WorkloadModel
from wlb.plan import IntArray, ShardingPlan, UserError, digest
from wlb.plan.arrays import FloatArray
from wlb.sharding import shard


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBalance:
    """The assignment of a step's samples, made by `balance_step`.

    A block is the set of samples that form one micro-batch. It is trained by one rank, or, with
    `dynamic_cp`, by all ranks of a context-parallel group.
    """

    lengths: IntArray  # tokens of each sample, shape [num_samples]
    order: IntArray  # samples grouped by block, ascending in each block, shape [num_samples]
    offsets: IntArray  # block b has the samples order[offsets[b]:offsets[b + 1]]
    # blocks[k][rank, m] is the block that a rank trains as its m-th micro-batch of mini-batch k.
    # Each array has shape [num_ranks, num_micro_batches[k]].
    blocks: tuple[IntArray, ...]
    # Predicted time that each rank of a block needs for the block, shape [num_blocks]. The unit is
    # that of the argument `cost` of `balance_step`, which is ns for a workload model.
    times: FloatArray
    # Lower bound on the time of each mini-batch, in the unit of `times`: no assignment of the same
    # samples is faster. Shape [num_mini_batches].
    bounds: FloatArray
    max_tokens: int  # most tokens of a micro-batch
    cp: int = 1  # ranks of a context-parallel group
    wait: str = "micro_batch"  # when ranks wait for each other: "micro_batch" or "step"
    # Predicts the work of parts of samples, for `shard`. None if the caller gave only a cost for
    # each whole sample.
    model: WorkloadModel | None = None

    def __post_init__(self) -> None:
        if not np.array_equal(np.sort(self.order), np.arange(self.lengths.size)):
            raise ValueError(
                f"order must contain each index of the {self.lengths.size} samples exactly once, "
                "but some are missing, repeated or out of range"
            )

    @property
    def num_mini_batches(self) -> int:
        """Number of mini-batches, each of which is an optimiser step."""
        return len(self.blocks)

    @property
    def num_ranks(self) -> int:
        """Number of data-parallel ranks."""
        return self.blocks[0].shape[0]

    @property
    def num_micro_batches(self) -> IntArray:
        """Number of micro-batches of a rank in each mini-batch, shape [num_mini_batches]."""
        return np.array([grid.shape[1] for grid in self.blocks])

    def samples(self, mini_batch: int, rank: int, micro_batch: int) -> IntArray:
        """Return the samples of a micro-batch, as ascending indices into `lengths`."""
        block = self.blocks[mini_batch][rank, micro_batch]
        return self.order[self.offsets[block] : self.offsets[block + 1]]

    def of_rank(self, rank: int, mini_batch: int = 0) -> list[IntArray]:
        """Return the indices of the samples in each of a rank's micro-batches, in order."""
        num = self.blocks[mini_batch].shape[1]
        return [self.samples(mini_batch, rank, m) for m in range(num)]

    def cp_degree(self, mini_batch: int, rank: int, micro_batch: int) -> int:
        """Return how many ranks train a rank's micro-batch together by context parallelism."""
        column = self.blocks[mini_batch][:, micro_batch]
        return int((column == column[rank]).sum()) * self.cp

    def time(self, mini_batch: int) -> FloatArray:
        """Return the predicted times of a mini-batch, shape [num_ranks, num_micro_batches].

        The unit is that of the argument `cost` of `balance_step`: ns for a workload model.
        """
        return self.times[self.blocks[mini_batch]]

    def tokens(self, mini_batch: int) -> IntArray:
        """Return the tokens of each micro-batch, shape [num_ranks, num_micro_batches].

        If several ranks train a micro-batch together, each has the tokens of the whole micro-batch
        here.
        """
        each = np.add.reduceat(self.lengths[self.order], self.offsets[:-1])
        return each[self.blocks[mini_batch]]

    @property
    def step_time(self) -> float:
        """Predicted time of the step, including the time that ranks wait for slower ones.

        The unit is that of the argument `cost` of `balance_step`: ns for a workload model.
        """
        return sum(slowest_time(self.time(k), self.wait) for k in range(self.num_mini_batches))

    @property
    def imbalance(self) -> float:
        """Predicted time of the step over the mean time that a rank computes in it; 1.0 is best."""
        return self.step_time / self._mean if self.step_time else 1.0

    @property
    def lower_bound(self) -> float:
        """Least `imbalance` that any assignment of these mini-batches can have; at least 1.0."""
        return float(self.bounds.sum()) / self._mean if self.step_time else 1.0

    @property
    def digest(self) -> int:
        """Hash of the assignment. Ranks compare it to notice that they planned differently."""
        return digest(self.order, self.offsets, *(grid.ravel() for grid in self.blocks))

    def shard(
        self, mini_batch: int, rank: int, micro_batch: int, *, strategy: str = "adaptive"
    ) -> ShardingPlan:
        """Shard a micro-batch over the ranks of its context-parallel group.

        Args:
            mini_batch: Index of the mini-batch.
            rank: Any rank of the group, by its data-parallel number.
            micro_batch: Index of the micro-batch.
            strategy: Sharding strategy (`wlb.sharding.NAMES`).

        Raises:
            UserError: If only costs of whole samples were given to `balance_step`. Strategies need
                predicted times of parts of samples.
        """
        if self.model is None:
            raise UserError(
                "cost gives only the costs of whole samples, but sharding needs the costs of "
                "their parts; give balance_step a WorkloadModel, a kernel profile or the path of "
                "a config.json as cost"
            )
        lengths = self.lengths[self.samples(mini_batch, rank, micro_batch)]
        degree = self.cp_degree(mini_batch, rank, micro_batch)
        return shard(lengths, cp=degree, strategy=strategy, cost=self.model)

    def __str__(self) -> str:
        rows = [("mini-batch", "samples", "micro-batches", "most tokens", "imbalance", "bound")]
        for k in range(self.num_mini_batches):
            time, tokens = self.time(k), self.tokens(k)
            samples = sum(map(len, self._blocks(k)))
            mean = float(time.sum()) / self.num_ranks
            # If all samples cost nothing, no rank waits.
            over = slowest_time(time, self.wait) / mean if mean else 1.0
            bound = self.bounds[k] / mean if mean else 1.0
            rows.append(
                (
                    str(k),
                    str(samples),
                    f"{self.num_ranks} x {time.shape[1]}",
                    str(tokens.max()),
                    f"{over:.4f}",
                    f"{bound:.4f}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(c.rjust(w) for c, w in zip(r, widths, strict=True)) for r in rows]
        return "\n".join([*lines, f"imbalance {self.imbalance:.4f}, bound {self.lower_bound:.4f}"])

    def _blocks(self, mini_batch: int) -> list[IntArray]:
        """Return the sample indices of each block (the samples of one micro-batch), in order."""
        used = np.unique(self.blocks[mini_batch]).tolist()
        return [self.order[self.offsets[b] : self.offsets[b + 1]] for b in used]

    @property
    def _mean(self) -> float:
        """Mean over ranks of the predicted time that a rank computes in this step."""
        times = (float(self.time(k).sum()) for k in range(self.num_mini_batches))
        return sum(times) / self.num_ranks


def slowest_time(time: FloatArray, wait: str) -> float:
    """Return the time of a mini-batch, including the time that ranks wait for slower ones.

    Args:
        time: Time of each micro-batch, shape [num_ranks, num_micro_batches].
        wait: "micro_batch" if ranks wait for each other after every micro-batch. The result is then
            the sum over micro-batches of the slowest rank's time. "step" if ranks wait once. The
            result is then the slowest rank's total time.
    """
    return float(time.max(0).sum() if wait == "micro_batch" else time.sum(1).max())

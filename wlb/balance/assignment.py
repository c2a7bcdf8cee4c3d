"""assignment: which samples each rank trains in each micro-batch, and how long that is predicted.

`StepBalance` prints as a table of mini-batches. Its arrays are what adapters turn into batches.
"""

from dataclasses import dataclass

import numpy as np

from wlb.cost import WorkloadModel
from wlb.plan import IntArray, ShardingPlan, UserError, digest
from wlb.plan.arrays import FloatArray
from wlb.sharding import shard


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBalance:
    """The samples of a training step by mini-batch, rank and micro-batch; made by `balance_step`.

    lengths: tokens of each sample, shape [num_samples]. order, offsets: samples of block b are
    order[offsets[b]:offsets[b + 1]], ascending. blocks: of each mini-batch, the block that a rank
    trains as its m-th micro-batch, shape [num_ranks, num_micro_batches[k]]; with dynamic_cp ranks
    of one context-parallel group have the same block. times: predicted time of each block, in the
    unit of `cost` (ns for a workload model), of each of its ranks. bounds: of each mini-batch's
    time, shape [num_mini_batches]: no assignment of its samples is faster. max_tokens, cp: as
    given. wait: "micro_batch" or "step". model: prices `shard`, None where only samples have costs.
    """

    lengths: IntArray
    order: IntArray
    offsets: IntArray
    blocks: tuple[IntArray, ...]
    times: FloatArray
    bounds: FloatArray
    max_tokens: int
    cp: int = 1
    wait: str = "micro_batch"
    model: WorkloadModel | None = None

    def __post_init__(self) -> None:
        if not np.array_equal(np.sort(self.order), np.arange(self.lengths.size)):
            raise ValueError("an assignment must have every sample exactly once")

    @property
    def num_mini_batches(self) -> int:
        """Optimiser steps of the batch."""
        return len(self.blocks)

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks in all."""
        return self.blocks[0].shape[0]

    @property
    def num_micro_batches(self) -> IntArray:
        """Micro-batches of every rank, by mini-batch."""
        return np.array([grid.shape[1] for grid in self.blocks])

    def samples(self, mini_batch: int, rank: int, micro_batch: int) -> IntArray:
        """Indices into `lengths`, ascending."""
        block = self.blocks[mini_batch][rank, micro_batch]
        return self.order[self.offsets[block] : self.offsets[block + 1]]

    def of_rank(self, rank: int, mini_batch: int = 0) -> list[IntArray]:
        """A rank's micro-batches of a mini-batch, in the order of execution."""
        num = self.blocks[mini_batch].shape[1]
        return [self.samples(mini_batch, rank, m) for m in range(num)]

    def cp_degree(self, mini_batch: int, rank: int, micro_batch: int) -> int:
        """Ranks that share the micro-batch with this one, times `cp`."""
        column = self.blocks[mini_batch][:, micro_batch]
        return int((column == column[rank]).sum()) * self.cp

    def time(self, mini_batch: int) -> FloatArray:
        """Predicted time of each rank's micro-batches, shape [num_ranks, num_micro_batches]."""
        return self.times[self.blocks[mini_batch]]

    def tokens(self, mini_batch: int) -> IntArray:
        """Tokens of each rank's micro-batches over its CP group, shape as `time`."""
        each = np.add.reduceat(self.lengths[self.order], self.offsets[:-1])
        return each[self.blocks[mini_batch]]

    @property
    def step_time(self) -> float:
        """Predicted time of all mini-batches, with what ranks wait."""
        return sum(waited(self.time(k), self.wait) for k in range(self.num_mini_batches))

    @property
    def imbalance(self) -> float:
        """`step_time` over that of ranks that never wait: 1.0 is perfect."""
        return self.step_time / self._mean if self.step_time else 1.0

    @property
    def lower_bound(self) -> float:
        """The imbalance that no assignment of these mini-batches is below; at least 1.0."""
        return float(self.bounds.sum()) / self._mean if self.step_time else 1.0

    @property
    def digest(self) -> int:
        """Of the assignment; equal on ranks that train the same."""
        return digest(self.order, self.offsets, *(grid.ravel() for grid in self.blocks))

    def shard(
        self, mini_batch: int, rank: int, micro_batch: int, *, strategy: str = "adaptive"
    ) -> ShardingPlan:
        """Rows of each context-parallel rank of a micro-batch, by a strategy of `wlb.shard`.

        UserError where `cost` was no workload model, because strategies price segments.
        """
        if self.model is None:
            raise UserError("sharding prices segments: give balance_step a workload model as cost")
        lengths = self.lengths[self.samples(mini_batch, rank, micro_batch)]
        degree = self.cp_degree(mini_batch, rank, micro_batch)
        return shard(lengths, cp=degree, strategy=strategy, cost=self.model)

    def __str__(self) -> str:
        rows = [("mini-batch", "samples", "micro-batches", "most tokens", "imbalance", "bound")]
        for k in range(self.num_mini_batches):
            time, tokens = self.time(k), self.tokens(k)
            samples = sum(map(len, self._blocks(k)))
            mean = float(time.sum()) / self.num_ranks
            # Samples that cost nothing leave no rank waiting.
            over = waited(time, self.wait) / mean if mean else 1.0
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
        """Samples of each of a mini-batch's blocks."""
        used = np.unique(self.blocks[mini_batch]).tolist()
        return [self.order[self.offsets[b] : self.offsets[b + 1]] for b in used]

    @property
    def _mean(self) -> float:
        times = (float(self.time(k).sum()) for k in range(self.num_mini_batches))
        return sum(times) / self.num_ranks


def waited(time: FloatArray, wait: str) -> float:
    """Time of a step of ranks x micro-batches: of the slowest rank, in each slot or in all."""
    return float(time.max(0).sum() if wait == "micro_batch" else time.sum(1).max())

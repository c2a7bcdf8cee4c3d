"""NeMo-RL 0.6: a sequence packer whose bins are balanced over ranks.

    import wlb.adapters.nemo_rl
    wlb.adapters.nemo_rl.install()    # then sequence_packing.algorithm = "wlb"

NeMo-RL deals bins to ranks in turn, so bins come slot by slot, as many as ranks, of nearly the same
work. Leave `positive_example_nll_weight` at 0: its mean depends on how any packer cuts a step.
"""

from typing import Any

from wlb.adapters.versions import require

require("nemo-rl>=0.6")

from nemo_rl.data.packing import algorithms  # pyright: ignore[reportMissingImports]

from wlb.adapters.swap import Swap
from wlb.balance import Cost, balance_step
from wlb.planner import LLAMA2_7B

PLACE = "nemo_rl.data.packing.algorithms:get_packer"
ALGORITHM = "wlb"


class BalancedPacker(algorithms.SequencePacker):
    """A SequencePacker: bins of at most bin_capacity tokens, a multiple of bin_count_multiple (the
    ranks), as few as fit, each run of so many of nearly equal work. cost: see `balance_step`.

    UserError for a sequence above bin_capacity and for fewer sequences than bins.
    """

    cost: Cost = LLAMA2_7B

    def _pack_implementation(self, sequence_lengths: list[int]) -> list[list[int]]:
        ranks = self.bin_count_multiple or 1
        step = balance_step(
            sequence_lengths,
            num_ranks=ranks,
            max_tokens=self.bin_capacity,
            cost=self.cost,
            at_least=-(-(self.min_bin_count or 1) // ranks),
        )
        num = int(step.num_micro_batches[0])
        return [step.samples(0, r, m).tolist() for m in range(num) for r in range(ranks)]


def get_packer(algorithm: Any, bin_capacity: int, *args: Any, **kwargs: Any) -> Any:
    """NeMo-RL's function of this name, with one more algorithm, "wlb"."""
    if isinstance(algorithm, str) and algorithm.lower() == ALGORITHM:
        return BalancedPacker(bin_capacity, *args, **kwargs)
    return _swap.theirs[PLACE](algorithm, bin_capacity, *args, **kwargs)


def install(*, cost: Cost = LLAMA2_7B) -> None:
    """Make NeMo-RL know the algorithm "wlb" in this process."""
    BalancedPacker.cost = cost
    _swap.install()


def uninstall() -> None:
    """Give NeMo-RL its own function back."""
    _swap.uninstall()


_swap = Swap("nemo_rl", {PLACE: get_packer})

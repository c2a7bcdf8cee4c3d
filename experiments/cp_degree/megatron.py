"""Runs Megatron's own schedulers on the lengths of a step.

Megatron-Core 0.16 to 0.19 has `BalancedCPScheduler` (hybrid CP): ranks run samples one by one and
meet at the end of a group. Megatron-LM's branch dev has `DefaultDynamicCPScheduler`, which packs
what a rank has in a group into one micro-batch, and `DpBalancedScheduler`, which fills
micro-batches of a fixed degree in the samples' order. All decide without processes.
"""

from collections.abc import Callable, Sequence
from typing import Any

from experiments.cp_degree.groups import Schedule, sub_groups
from experiments.beyond.step_balance.sources import Missing, Sources
from wlb.plan import IntArray

PACKAGE = "pip install megatron-core"
BRANCH = "git clone --depth 1 -b dev https://github.com/NVIDIA/Megatron-LM FOLDER/Megatron-LM"
CORE = "megatron.core"
SCHEDULES = "megatron/core/datasets/data_schedule"
BESIDE_UTILS = ("extensions", "extensions.transformer_engine", "rerun_state_machine")
BESIDE_SCHEDULES = (
    *("datasets", "packed_seq_params", "pipeline_parallel"),
    *("pipeline_parallel.hybrid_cp_schedule", "process_groups_config"),
    *("transformer", "transformer.multi_token_prediction"),
)
Estimate = Callable[[int, int], float]
"""Work of a rank for a sample of so many tokens on so many ranks."""


class _Ranks:
    """Provides the method of a process group that the hybrid scheduler calls."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


class Failed(Exception):
    """Says that a scheduler raised an error for a step."""


def hybrid_scheduler() -> tuple[type, str]:
    """Returns the class of the installed package, and its version; raises Missing without it."""
    try:
        from importlib.metadata import version

        from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler
    except ImportError:
        raise Missing(PACKAGE) from None
    return BalancedCPScheduler, version("megatron-core")


def hybrid(
    lengths: IntArray, *, num_ranks: int, rows: int, estimate: Estimate | None = None
) -> Schedule:
    """Returns the hybrid scheduler's groups; ranks meet at the end of each.

    rows: most tokens of a rank. estimate: None for the scheduler's own, tokens^2 over the degree.
    Raises Missing without the package, Failed if the scheduler gives up.
    """
    base, _ = hybrid_scheduler()
    scheduler: Any = base(rows, _Ranks(num_ranks))
    if estimate is not None:
        needed = scheduler.gpus_needed
        scheduler.get_total_workload = lambda tokens, degree=None: estimate(
            tokens, degree or needed(tokens)
        )
    try:
        _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())), None)
    except (AssertionError, IndexError, ValueError, TypeError) as error:
        raise Failed(f"{type(error).__name__}: {error}") from error
    return [sub_groups(group, packed=False) for group in groups]


class DevSchedulers:
    """Holds the schedulers of branch dev, executed from a source tree below a folder.

    Raises Missing without one.
    """

    def __init__(self, sources: Sources) -> None:
        def names(beside: Sequence[str]) -> list[str]:
            return ["megatron", CORE, *(f"{CORE}.{name}" for name in beside)]

        utils, _ = sources.load(f"{SCHEDULES}_utils.py", BRANCH, nothing=names(BESIDE_UTILS))
        module, _ = sources.load(
            f"{SCHEDULES}.py",
            BRANCH,
            nothing=names(BESIDE_SCHEDULES),
            beside={f"{CORE}.datasets.data_schedule_utils": utils},
        )
        if not hasattr(module, "DefaultDynamicCPScheduler"):
            raise Missing(BRANCH)
        self._module: Any = module

    def dynamic(self, lengths: IntArray, *, num_ranks: int, cp: int, rows: int) -> Schedule:
        """Returns the dynamic scheduler's micro-batches, one after the other without a barrier."""
        return self._run("DefaultDynamicCPScheduler", lengths, num_ranks, cp, rows)

    def in_order(self, lengths: IntArray, *, num_ranks: int, cp: int, rows: int) -> Schedule:
        """Returns micro-batches of the fixed degree `cp`, filled in the samples' order."""
        return self._run("DpBalancedScheduler", lengths, num_ranks, cp, rows)

    def _run(self, name: str, lengths: IntArray, num_ranks: int, cp: int, rows: int) -> Schedule:
        scheduler = getattr(self._module, name)(rows, cp, num_ranks // cp, None)
        try:
            groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())))
        except (AssertionError, IndexError, ValueError, TypeError) as error:
            raise Failed(f"{type(error).__name__}: {error}") from error
        return [sub_groups(group, packed=True) for group in groups]

"""Prepare a rehearsal: the job of a run on the GPUs of section [cluster], and its first plans.

Documents come from data.store or data.blend if the run sets one. Otherwise their lengths are drawn
from `wlb.data.lengths`, and their tokens are zeros in a sparse file.
"""

from array import array
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from rich.console import Console

from wlb.data import lengths_of_family
from wlb.data.index import write_index
from wlb.data.store import store_path, token_dtype
from wlb.memory.budget import cluster_gib
from wlb.packing import with_s_max
from wlb.plan import PipelinePlan, StepPlan, UserError
from wlb.planner import Planner
from wlb.spec import Device, LinearBackend, RunSpec, resolve_dp
from wlb.train.job import Job
from wlb.train.memory_check import budget_of, check_budget, within
from wlb.train.refuse import refuse_early
from wlb.train.stores import Stores, open_stores, ready

VOCABULARY = 128_256
"""Vocabulary size of a run that sets none: the vocabulary of Llama 3."""
_MEAN_LENGTH = 900
"""Estimate of the mean length of drawn documents in tokens, to draw enough of them."""
_SPARE_STEPS = 8
"""Number of global batches that are drawn in addition to one for each rehearsed step.

They are needed because documents may be delayed and because the loop plans ahead."""


@dataclass(slots=True)
class Rehearsal:
    """A job with the plans of its first steps."""

    job: Job  # the same for all ranks
    planner: Planner  # the planner that made `plans`, and that shards them
    plans: list[StepPlan]  # the rehearsed steps, then two steps that the loop looks ahead to

    def items(self, pipeline: int) -> list[tuple[StepPlan, PipelinePlan]]:
        """Return (plan of the step, plan of pipeline `pipeline`) for each step."""
        return [(plan, self.planner.shard(plan, pipeline)) for plan in self.plans]


def prepare(spec: RunSpec, folder: Path, *, steps: int) -> Rehearsal:
    """Return the job and plans of a rehearsal.

    Args:
        spec: Configuration of the run.
        folder: Temporary folder for the run's files.
        steps: Number of steps to rehearse.

    Raises:
        UserError: If the run would be refused on the cluster.
    """
    # Do what a run does before its first step: fill in what depends on devices and stores, check
    # the memory estimate, and refuse what cannot work.
    spec = resolve_dp(spec, spec.parallel.world_size)
    spec = _for_rehearsal(spec, folder, steps)
    stores = _stores(spec, folder, steps)
    spec = ready(spec, stores, spec.parallel.world_size)
    budget = budget_of(spec, "cuda")
    spec = with_s_max(spec, planned_gib=budget.planned_gib if budget else None)
    spec, _ = within(spec, budget)
    check_budget(spec, budget)
    planner = refuse_early(
        spec, train=stores.train, heldout=stores.heldout, device="cuda", resume=None, init_from=None
    )
    job = Job(
        spec=spec,
        train_store=stores.train,
        heldout_store=stores.heldout,
        resume=None,
        title="rehearsal",
        started_s=0.0,
        calibrate=folder / "calibrated.json",
    )
    job.directory.mkdir(parents=True, exist_ok=True)
    # The training loop looks two steps ahead.
    plans = list(islice(planner.steps(), steps + 2))
    if len(plans) < steps:
        raise UserError(
            f"--steps {steps} is more than the {len(plans)} steps for which there are documents; "
            f"lower --steps or raise data.epochs"
        )
    return Rehearsal(job, planner, plans)


def _for_rehearsal(spec: RunSpec, folder: Path, steps: int) -> RunSpec:
    """Return the configuration of a run with the changes that a rehearsal needs.

    Args:
        spec: Configuration of the run.
        folder: Temporary folder for the run's files.
        steps: Number of steps to rehearse.

    Raises:
        UserError: The run uses kernels that cannot run on fake tensors.
    """
    model = replace(spec.model, vocab_size=spec.model.vocab_size or VOCABULARY)
    run = replace(spec.run, device=Device.CUDA, output_dir=str(folder), stop_file="")
    cluster = replace(spec.cluster, memory_gib=cluster_gib(spec))
    training = replace(spec.training, steps=steps)
    planner = replace(spec.planner, baseline=False)
    # Rehearse only one batch of an evaluation, because all batches use the GPU in the same way, and
    # rehearsing all of them would take longer than the training steps.
    evaluation = replace(spec.eval, steps=min(spec.eval.steps, 1))
    # Kernels of flash_linear_attention need the values of tensors, which fake tensors do not have.
    if spec.kernels.linear == LinearBackend.FLASH_LINEAR_ATTENTION:
        raise UserError(
            f"kernels.linear = {spec.kernels.linear} cannot be rehearsed, because its kernels need "
            f"the values of tensors, which a rehearsal does not have; set kernels.linear = torch "
            f"for the rehearsal (it uses more kernels and more memory)"
        )
    kernels = replace(spec.kernels, linear=LinearBackend.TORCH)
    made = {"model": model, "run": run, "training": training, "planner": planner}
    made |= {"kernels": kernels}
    return replace(spec, eval=evaluation, cluster=cluster, **made)


def _stores(spec: RunSpec, folder: Path, steps: int) -> Stores:
    """Return the run's token stores, or a store of random lengths if the run names no store.

    Args:
        spec: Configuration of the run.
        folder: Folder in which the store is made.
        steps: Number of steps to rehearse.
    """
    if spec.data.store or spec.data.blend:
        return open_stores(spec, Console(quiet=True))
    tokens = spec.tokens_per_step * (steps + _SPARE_STEPS)
    source = lengths_of_family(
        window=spec.data.context_window, num_documents=max(4096, tokens // _MEAN_LENGTH), seed=0
    )
    prefix = folder / "drawn"
    dtype = token_dtype(spec.model.vocab_size)
    with store_path(prefix, ".idx").open("wb") as file:
        write_index(file, array("q", source.lengths.tolist()), dtype)
    with store_path(prefix, ".bin").open("wb") as file:
        file.truncate(int(source.lengths.sum()) * dtype.itemsize)
    held = str(prefix) if spec.eval.steps else ""
    vocabulary = spec.model.vocab_size
    return Stores(train=str(prefix), heldout=held, vocab_size=vocabulary, note="drawn lengths")

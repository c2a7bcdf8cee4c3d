"""Work that is done once before a run's first step, so that no step pauses for it."""

import gc

import torch.distributed as dist

from wlb.parallel.warm import warm
from wlb.spec import ExchangeChoice
from wlb.train.hooks import ExecutedStep, Hook, RunContext


class ConnectRanks(Hook):
    """Uses every communicator once, before hooks that communicate begin, and reports their
    number."""

    def begin(self, run: RunContext) -> None:
        if dist.get_world_size() == 1:
            return
        run.position.enter("connecting communicators", is_slow=True)
        done = warm(
            run.mesh,
            # With tied embeddings the ends of a pipeline exchange their gradients.
            wraps=run.spec.pp.virtual_stages > 1 or run.spec.model.tied_embeddings,
            all_to_all=run.spec.sharding.exchange != ExchangeChoice.GATHER,
        )
        run.report.write("connected", **done._asdict())
        run.report.say(
            f"connected {done.communicators} communicators and {done.neighbours} pipeline "
            f"neighbours of rank 0 in {done.seconds:.2f} s"
        )


class CollectGarbage(Hook):
    """Collects garbage between steps, on all ranks after the same one, as torchtitan does.

    Python's automatic collections come at other moments on each rank, and all ranks wait for each:
    a full one walks all objects of torch and of the run. Those are frozen when training begins, so
    that only objects of later steps are walked.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._num_steps = 0
        self._is_frozen = False

    def begin(self, run: RunContext) -> None:
        if gc.isenabled():
            gc.collect()
            gc.freeze()
            gc.disable()
            self._is_frozen = True

    def after_step(self, run: RunContext, step: ExecutedStep) -> None:
        self._num_steps += 1
        if self._num_steps % self.interval == 0:
            gc.collect()

    def close(self) -> None:
        if self._is_frozen:
            gc.unfreeze()
            gc.enable()
            self._is_frozen = False

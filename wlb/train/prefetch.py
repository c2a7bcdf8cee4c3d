"""Loads the inputs of the next step while the current step is computed.

A thread reads tokens, builds index arrays and copies both to the device. On a GPU, the thread
copies in a CUDA stream of its own, and the computing stream waits for an event of that stream. The
tensors are recorded on the computing stream (`record_stream`), because the caching allocator would
otherwise reuse their memory while kernels still read them.
"""

import time
from concurrent.futures import Future

import torch

from wlb.parallel.execute import Executor, StepInputs
from wlb.parallel.rows import TokenReader
from wlb.parallel.world import device_thread
from wlb.plan import PipelinePlan
from wlb.train.feed import PlanFeed

STEPS_LOADED = 1
"""Number of steps whose inputs are loaded in advance.

One step is enough, because loading takes less time than a step. More would only take memory of the
device."""
Loaded = tuple[StepInputs, torch.cuda.Event | None]


class InputPrefetcher:
    """Loads the inputs of the next `STEPS_LOADED` steps in a thread.

    Args:
        executor: Builds the inputs of a step.
        reader: Reads tokens from the token store.

    Attributes:
        exposed_ns: Time (ns) that the most recent call of `take` waited for inputs.
    """

    def __init__(self, executor: Executor, reader: TokenReader) -> None:
        self.executor, self.reader = executor, reader
        self.exposed_ns = 0
        self._loading: dict[int, Future[Loaded]] = {}
        device = executor.mesh.device
        self._pool = device_thread("inputs", device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Let the loading stream wait for the current stream, whose kernels may still be computing
        # the rotary frequencies that the loading stream reads.
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def start(self, plan: PipelinePlan, *, loss_scale: float) -> None:
        """Begin to load the inputs of a step in the thread.

        Does nothing if the thread has begun to load that step already, or if it has begun to load
        `STEPS_LOADED` other steps that were not taken yet.

        Args:
            plan: The plan of this rank's pipeline for the step.
            loss_scale: Factor by which the step multiplies its loss.
        """
        if plan.step in self._loading or len(self._loading) >= STEPS_LOADED:
            return
        self._loading[plan.step] = self._pool.submit(self._load, plan, loss_scale)

    def start_next(self, feed: PlanFeed) -> None:
        """Begin to load the inputs of the next `STEPS_LOADED` steps."""
        for ahead in range(1, STEPS_LOADED + 1):
            for plan, pipeline in feed.peek(ahead):
                # A step without targets computes nothing, so it needs no inputs.
                if plan.num_targets:
                    scale = self.executor.spec.loss_scale(plan.num_targets)
                    self.start(pipeline, loss_scale=scale)

    def take(self, plan: PipelinePlan, *, loss_scale: float) -> StepInputs:
        """Return the inputs of a step. They are loaded now if `start` was not called for the step.

        If loading failed in the thread, its exception is raised here.

        Args:
            plan: The plan of this rank's pipeline for the step.
            loss_scale: Factor by which the step multiplies its loss.
        """
        begin = time.perf_counter_ns()
        future = self._loading.pop(plan.step, None)
        inputs, event = self._load(plan, loss_scale) if future is None else future.result()
        self.exposed_ns = time.perf_counter_ns() - begin
        if event is not None:
            stream = torch.cuda.current_stream(self.executor.mesh.device)
            stream.wait_event(event)
            for tensor in inputs.tensors:
                tensor.record_stream(stream)
        return inputs

    def _load(self, plan: PipelinePlan, loss_scale: float) -> Loaded:
        if self._stream is None:
            return self.executor.load(plan, self.reader, loss_scale=loss_scale), None
        with torch.cuda.stream(self._stream):
            inputs = self.executor.load(plan, self.reader, loss_scale=loss_scale)
            event = torch.cuda.Event()
            event.record(self._stream)
        return inputs, event

    def close(self) -> None:
        """End the loading thread, and drop inputs that were loaded but not used."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._loading.clear()

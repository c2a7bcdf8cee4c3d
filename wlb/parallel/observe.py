"""Protocols for watching a rank execute a step: which chunk runs, and how long its parts take.

A **chunk** is one pass (forward, backward or weight gradients) of one micro-batch in one pipeline
stage. The executor reports each chunk to a `Progress` and a `Timer`. They are implemented in
`wlb.launch.position` and `wlb.train.telemetry.clock`.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from wlb.model import Llama


class Pass(StrEnum):
    """What a micro-batch's pass in a stage computes."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"  # weight gradients computed separately (zero-bubble schedules)


class Part(StrEnum):
    """Parts of the model. A timer divides the time of each pass among them."""

    ATTENTION = "attention"  # attention kernels
    LAYERS = "layers"  # the rest of the decoder layers, and the final norm
    EMBEDDING = "embedding"
    HEAD = "head"  # output head and loss, whose forward pass also computes their gradients
    # forward kernels of attention that run in a backward pass, because activations are recomputed;
    # other recomputed work counts as LAYERS
    RECOMPUTE = "recompute"


class Cell(NamedTuple):
    """The key of one chunk: one pass of one micro-batch in one pipeline stage."""

    kind: Pass
    stage: int  # index of the pipeline stage
    micro_batch: int  # index of the micro-batch in the pipeline's plan


class Progress(Protocol):
    """Receives each chunk (a micro-batch's pass in a stage) as it begins on this rank."""

    def chunk(self, kind: str, stage: int, micro_batch: int, /) -> None:
        """Record that a pass of a micro-batch in a stage begins now.

        Args:
            kind: A value of `Pass`.
            stage: Index of the pipeline stage.
            micro_batch: Index of the micro-batch in the pipeline's plan.
        """
        ...


class Timer(Protocol):
    """Measures how long each `Part` takes in each chunk (a micro-batch's pass in a stage)."""

    def step(self) -> AbstractContextManager[None]:
        """Return a context in which a training step runs. Passes outside of it are not timed."""
        ...

    def chunk(
        self, kind: Pass, *, stage: int, micro_batch: int, first: Part = ...
    ) -> AbstractContextManager[None]:
        """Return a context that times one chunk: one pass of a micro-batch in a stage.

        Args:
            kind: What the pass computes.
            stage: Index of the pipeline stage.
            micro_batch: Index of the micro-batch in the pipeline's plan.
            first: The part of the model with which the pass begins. Time counts as this part until
                `switch` is called.
        """
        ...

    def switch(self, part: Part) -> None:
        """Count the rest of the current chunk as time of `part`, until `switch` is called again."""
        ...


@dataclass(frozen=True, slots=True)
class Watchers:
    """The observers of a rank's chunks (a micro-batch's pass in a stage); either may be None."""

    progress: Progress | None = None  # is told which chunk begins
    timer: Timer | None = None  # measures the time of chunks

    def step(self) -> AbstractContextManager[None]:
        """Return the timer's context for a training step; without a timer it does nothing."""
        return nullcontext() if self.timer is None else self.timer.step()

    def chunk(
        self, kind: Pass, stage: int, micro_batch: int, first: Part
    ) -> AbstractContextManager[None]:
        """Tell `progress` and `timer` that a chunk (a pass) begins; returns a context to run it in.

        Args:
            kind: What the pass computes.
            stage: Index of the pipeline stage.
            micro_batch: Index of the micro-batch in the pipeline's plan.
            first: The part of the model with which the pass begins.
        """
        if self.progress is not None:
            self.progress.chunk(kind, stage, micro_batch)
        if self.timer is None:
            return nullcontext()
        return self.timer.chunk(kind, stage=stage, micro_batch=micro_batch, first=first)


def watch_ends(stage: Llama, clock: Timer) -> None:
    """Make a timer count a stage's embedding and head separately from its layers.

    For this, hooks switch the timer to another part of the model: in forward at the input of the
    first layer and at the decoder's output, and in backward when the gradients of these two tensors
    are computed.

    Args:
        stage: The stage.
        clock: The timer.
    """
    decoder = stage.model
    if decoder.embed_tokens is not None:

        def enter(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            clock.switch(Part.LAYERS)
            _when_differentiated(inputs[0], clock, Part.EMBEDDING)

        layers = list(decoder.layers.values())
        if layers:
            layers[0].register_forward_pre_hook(enter)
        else:
            decoder.register_forward_hook(lambda module, _, out_TC: enter(module, (out_TC,)))
    if stage.is_last:

        def leave(_: nn.Module, __: tuple[Any, ...], out_TC: Tensor) -> None:
            clock.switch(Part.HEAD)
            _when_differentiated(out_TC, clock, Part.LAYERS)

        decoder.register_forward_hook(leave)


def _when_differentiated(x_TC: Tensor, clock: Timer, part: Part) -> None:
    """Switch the timer to `part` as soon as backward has computed the gradient of x_TC."""
    if x_TC.requires_grad:
        x_TC.register_hook(lambda _: clock.switch(part))

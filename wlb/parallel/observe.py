"""Protocols for watching a rank execute a step: which chunk runs, and how long its parts take.

The executor reports each chunk (one pass of one micro-batch in one stage) to a `Progress` and a
`Timer`. They are implemented in `wlb.launch.position` and `wlb.train.telemetry.clock`.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from wlb.model import Llama


class Pass(StrEnum):
    """Kind of a chunk."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"  # weight gradients computed separately (zero-bubble schedules)


class Part(StrEnum):
    """Part of a chunk to which time is counted."""

    ATTENTION = "attention"  # attention kernels
    LAYERS = "layers"  # the rest of the decoder layers, and the final norm
    EMBEDDING = "embedding"
    HEAD = "head"  # output head and loss; its forward pass also computes their gradients
    # Forward kernels of attention inside a backward pass. Other recomputed work counts as layers.
    RECOMPUTE = "recompute"


class Cell(NamedTuple):
    """One chunk of a schedule."""

    kind: Pass
    stage: int
    micro_batch: int  # index in the pipeline's plan


class Progress(Protocol):
    """Receives each chunk as it begins."""

    def chunk(self, kind: str, stage: int, micro_batch: int, /) -> None:
        """Receive the chunk that begins now."""
        ...


class Timer(Protocol):
    """Times the chunks of a step."""

    def step(self) -> AbstractContextManager[None]:
        """Return a context for all chunks of a training step; nothing outside is timed."""
        ...

    def chunk(
        self, kind: Pass, *, stage: int, micro_batch: int, first: Part = ...
    ) -> AbstractContextManager[None]:
        """Return a context for a chunk; its time counts as `first` until `switch` is called."""
        ...

    def switch(self, part: Part) -> None:
        """Count the current chunk's time as `part` from now on."""
        ...


@dataclass(frozen=True, slots=True)
class Watchers:
    """Observers of a rank's chunks; either may be missing."""

    progress: Progress | None = None
    timer: Timer | None = None

    def step(self) -> AbstractContextManager[None]:
        """Return a context for all chunks of a training step."""
        return nullcontext() if self.timer is None else self.timer.step()

    def chunk(
        self, kind: Pass, stage: int, micro_batch: int, first: Part
    ) -> AbstractContextManager[None]:
        """Report that a chunk begins, and return a context to run it in."""
        if self.progress is not None:
            self.progress.chunk(kind, stage, micro_batch)
        if self.timer is None:
            return nullcontext()
        return self.timer.chunk(kind, stage=stage, micro_batch=micro_batch, first=first)


def watch_ends(stage: Llama, clock: Timer) -> None:
    """Time a stage's embedding and head separately from its layers.

    Hooks on the first layer's input (or the embedding), on the decoder's output, and on the
    gradients of both switch the timer.
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
    """Switch to `part` as soon as backward has computed the gradient of x_TC."""
    if x_TC.requires_grad:
        x_TC.register_hook(lambda _: clock.switch(part))

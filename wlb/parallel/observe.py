"""Protocols for watching a rank execute a step: the running chunk, and its time by part.

The executor reports each chunk of the schedule to a `Progress` and a `Timer`. Implementations are
`wlb.launch.position` and `wlb.train.telemetry.clock`.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from wlb.model import Llama


class Pass(StrEnum):
    """Kind of a chunk. weight: weight gradients computed separately (zero-bubble schedules)."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"


class Part(StrEnum):
    """Parts of a chunk's time. attention: attention kernels. recompute: attention's forward
    kernels inside a backward pass; other recomputed work counts as layers. layers: the rest of the
    decoder layers, with the final norm. head: with the loss, whose gradients its forward pass
    computes.
    """

    ATTENTION = "attention"
    LAYERS = "layers"
    EMBEDDING = "embedding"
    HEAD = "head"
    RECOMPUTE = "recompute"


class Cell(NamedTuple):
    """One chunk of a schedule. micro_batch: index in the pipeline's plan."""

    kind: Pass
    stage: int
    micro_batch: int


class Progress(Protocol):
    """Receives each chunk as it begins."""

    def chunk(self, kind: str, stage: int, micro_batch: int, /) -> None: ...


class Timer(Protocol):
    """Times the chunks of a step."""

    def step(self) -> AbstractContextManager[None]:
        """Entered around all chunks of a training step; nothing else is timed."""
        ...

    def chunk(
        self, kind: Pass, *, stage: int, micro_batch: int, first: Part = ...
    ) -> AbstractContextManager[None]:
        """Entered around a chunk; its time counts as `first` until `switch` is called."""
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
        return nullcontext() if self.timer is None else self.timer.step()

    def chunk(
        self, kind: Pass, stage: int, micro_batch: int, first: Part
    ) -> AbstractContextManager[None]:
        """The context that a chunk runs in."""
        if self.progress is not None:
            self.progress.chunk(kind, stage, micro_batch)
        if self.timer is None:
            return nullcontext()
        return self.timer.chunk(kind, stage=stage, micro_batch=micro_batch, first=first)


def watch_ends(stage: Llama, clock: Timer) -> None:
    """Time a stage's embedding and head separately from its layers, by hooks on the first layer's
    input (or the embedding), on the decoder's output, and on the gradients of both.
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
    """Switch to `part` once backward has computed the gradient of x_TC."""
    if x_TC.requires_grad:
        x_TC.register_hook(lambda _: clock.switch(part))

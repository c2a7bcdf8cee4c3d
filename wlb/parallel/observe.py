"""Protocols for watching a rank execute a step: which chunk runs, and where its time goes.

The executor reports each chunk of the schedule to a `Progress` and a `Timer`. Implementations are
`wlb.launch.position` and `wlb.train.telemetry.clock`.
"""

from contextlib import AbstractContextManager
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
    """What a chunk's time is spent on.

    attention: attention kernels. recompute: attention's forward kernels inside a backward pass;
    other recomputed work counts as layers. layers: the rest of the decoder layers, with the final
    norm. head: with the loss, whose gradients are computed in its forward pass.
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


class NoProgress:
    """A `Progress` that ignores everything."""

    def chunk(self, kind: str, stage: int, micro_batch: int, /) -> None:
        pass


def watch_ends(stage: Llama, clock: Timer) -> None:
    """Time a stage's embedding and head separately from its layers, by hooks.

    The hooks are on the first layer's input (the decoder's output if there are no layers), on the
    decoder's output, and on the gradients of both. A chunk's `first` part is where its pass begins.
    """
    decoder = stage.model
    if decoder.embed_tokens is not None:

        def enter(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            clock.switch(Part.LAYERS)
            _when_differentiated(inputs[0], clock, Part.EMBEDDING)

        def embedded(module: nn.Module, _: Any, out_TC: Tensor) -> None:
            enter(module, (out_TC,))

        layers = list(decoder.layers.values())
        if layers:
            layers[0].register_forward_pre_hook(enter)
        else:
            decoder.register_forward_hook(embedded)
    if stage.lm_head is not None:

        def leave(_: nn.Module, __: tuple[Any, ...], out_TC: Tensor) -> None:
            clock.switch(Part.HEAD)
            _when_differentiated(out_TC, clock, Part.LAYERS)

        decoder.register_forward_hook(leave)


def _when_differentiated(x_TC: Tensor, clock: Timer, part: Part) -> None:
    """Switch to `part` once backward has computed the gradient of x_TC."""
    if x_TC.requires_grad:
        x_TC.register_hook(lambda _: clock.switch(part))

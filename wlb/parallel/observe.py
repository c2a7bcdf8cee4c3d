"""What watches a rank execute a step: which chunk is at work, and where its time goes.

The executor tells a `Progress` and a `Timer` about each chunk of the schedule, and knows nothing
else about them (`wlb.launch.position` and `wlb.train.telemetry.clock` are ours).
"""

from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from wlb.model import Llama


class Pass(StrEnum):
    """weight: weight gradients computed apart (zero-bubble schedules)."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"


class Part(StrEnum):
    """attention: kernels alone. recompute: attention's forward kernels in a backward pass (all else
    that runs again is part of its layers). layers: the rest of the decoder layers, the final norm
    included. head: with the loss, whose gradients are part of its forward pass."""

    ATTENTION = "attention"
    LAYERS = "layers"
    EMBEDDING = "embedding"
    HEAD = "head"
    RECOMPUTE = "recompute"


class Cell(NamedTuple):
    """What one chunk of a schedule works on. micro_batch: its place in the pipeline's plan."""

    kind: Pass
    stage: int
    micro_batch: int


class Progress(Protocol):
    """Is told which chunk begins."""

    def chunk(self, kind: str, stage: int, micro_batch: int, /) -> None: ...


class Timer(Protocol):
    """Times the chunks of a step."""

    def step(self) -> AbstractContextManager[None]:
        """Around all chunks of a training step; outside of it nothing is timed."""
        ...

    def chunk(
        self, kind: Pass, *, stage: int, micro_batch: int, first: Part = ...
    ) -> AbstractContextManager[None]:
        """Around a chunk, whose time belongs to `first` until `switch` says otherwise."""
        ...

    def switch(self, part: Part) -> None:
        """From now on time belongs to `part` of the chunk at work."""
        ...


class NoProgress:
    """A `Progress` that tells nobody."""

    def chunk(self, kind: str, stage: int, micro_batch: int, /) -> None:
        pass


def watch_ends(stage: Llama, clock: Timer) -> None:
    """Have the embedding and the head of a stage, where it has them, timed apart from its layers.

    By hooks on what lies between: the first layer's input (a stage without layers has the
    decoder's output), the decoder's output, their gradients. A chunk's `first` part must say where
    its pass begins.
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
    """Backward passes switch to `part` when they have the gradient of x_TC."""
    if x_TC.requires_grad:
        x_TC.register_hook(lambda _: clock.switch(part))

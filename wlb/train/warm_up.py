"""Hooks that avoid pauses in steps: they connect ranks, compile kernels and collect garbage."""

import gc
import time
from collections.abc import Iterator
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from wlb.kernels import BACKENDS, Scores, Segments
from wlb.kernels.flash_package import FlashBackend
from wlb.kernels.op import SavedTensors
from wlb.parallel.build import compute_dtype, kernel_of
from wlb.parallel.connect import warm
from wlb.spec import ExchangeChoice, RunSpec
from wlb.train.hooks import ExecutedStep, Hook, RunContext

GARBAGE_INTERVAL = 50
"""Number of steps between two garbage collections.

With a larger number, reference cycles and the tensors in them stay in memory for longer. With a
smaller number, more time is lost, because each collection takes milliseconds on all ranks."""


class ConnectRanks(Hook):
    """Makes one call on every communicator before training, and reports how many there are.

    NCCL and Gloo connect ranks in a communicator's first call. Without this hook, the first calls
    would lengthen the first step.
    """

    def begin(self, run: RunContext) -> None:
        """Call a collective on every communicator of this rank's mesh."""
        if dist.get_world_size() == 1:
            return
        run.position.enter("connecting communicators")
        done = warm(run.mesh, all_to_all=run.spec.sharding.exchange != ExchangeChoice.GATHER)
        run.report.write("connected", **done._asdict())
        run.report.say(
            f"rank 0 connected its {done.communicators} communicators in {done.seconds:.2f} s, "
            f"{done.links} of which are links to its pipeline neighbours"
        )


class CompileAttention(Hook):
    """Compiles the variants of FlashAttention-4's kernels that the run needs, before training.

    FlashAttention-4 compiles a kernel in its first call. If that call were in a step, all ranks
    would wait for seconds. The package stores compiled kernels on disk (`CUDA_DEFAULTS` in
    `wlb.parallel.world` says where), so later starts of the run only read them.
    """

    def begin(self, run: RunContext) -> None:
        """Compile each needed variant of the attention kernel by one call with few tokens."""
        device = run.mesh.device
        backend = BACKENDS[kernel_of(run.spec, device).kernel]
        if not isinstance(backend, FlashBackend):
            return
        calls = list(_compiled_calls(run.spec, backend, device))
        if not calls:
            return
        begin = time.perf_counter()
        run.position.enter("compiling attention kernels")
        for segments in calls:
            _attend(run.spec, backend, segments, device)
        run.report.say(
            f"compiled attention kernels for {len(calls)} kinds of calls, or read them from the "
            f"cache, in {time.perf_counter() - begin:.0f} s"
        )


def _compiled_calls(
    spec: RunSpec, backend: FlashBackend, device: torch.device
) -> Iterator[Segments]:
    """Yield the segments of small attention calls, one for each kernel that must be compiled.

    The calls cover the combinations of sliding window and causal mask that the run's layers use.
    """
    model, cp = spec.model, spec.parallel.cp
    heads, kv_heads = _heads(spec)
    slides = {model.slides(layer) for layer in range(model.num_layers)}
    # With cp.overlap_stages, layers without a sliding window make a separate attention call,
    # without a causal mask, for the keys of other CP ranks. Layers with a window make one call for
    # all keys.
    no_mask = [(False, False)] if spec.cp.overlap and cp > 1 and False in slides else []
    for is_sliding, is_causal in [*product(sorted(slides), [True]), *no_mask]:
        for lengths in backend.compiled_calls(heads // kv_heads, is_causal=is_causal):
            queries, keys = np.concatenate([[(0, 0)], lengths]).cumsum(axis=0).T
            yield Segments.from_offsets(
                queries,
                keys,
                device=device,
                is_causal=is_causal,
                scores=Scores.of(model, slides=is_sliding),
            )


def _attend(spec: RunSpec, backend: FlashBackend, segments: Segments, device: torch.device) -> None:
    """Run attention forward and backward on zeros, with as many heads as one TP rank has.

    The backend is called directly, so that telemetry does not count the time.
    """
    heads, kv_heads = _heads(spec)

    def zeros(rows: int, heads: int) -> Tensor:
        size = (rows, heads, spec.model.head_size)
        return torch.zeros(size, dtype=compute_dtype(spec), device=device)

    q = zeros(segments.num_queries, heads)
    k, v = (zeros(segments.num_keys, kv_heads) for _ in range(2))
    out, lse = backend.forward(q, k, v, segments)
    backend.backward(out, SavedTensors(q, k, v, out, lse), segments)


def _heads(spec: RunSpec) -> tuple[int, int]:
    """Return how many query heads and how many key-value heads one TP rank has."""
    model, tp = spec.model, spec.parallel.tp
    return model.num_heads // tp, model.with_kv_copies(tp).num_kv_heads // tp


class CollectGarbage(Hook):
    """Collects garbage between steps, on all ranks after the same step, as torchtitan does.

    Automatic collections happen at a different moment on each rank, and all other ranks wait each
    time. So this hook switches automatic collection off. Objects that exist when training begins
    are frozen (`gc.freeze`), so that a collection only visits objects that were made later.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._is_frozen = False

    def begin(self, run: RunContext) -> None:
        """Switch automatic garbage collection off, and freeze all present objects (`gc.freeze`)."""
        if gc.isenabled():
            gc.collect()
            gc.freeze()
            gc.disable()
            self._is_frozen = True

    def after_step(self, run: RunContext, step: ExecutedStep) -> None:
        """Collect garbage after every `GARBAGE_INTERVAL` steps."""
        self._num_steps += 1
        if self._num_steps % GARBAGE_INTERVAL == 0:
            gc.collect()

    def close(self) -> None:
        """Switch automatic garbage collection on again, if `begin` has switched it off."""
        if self._is_frozen:
            gc.unfreeze()
            gc.enable()
            self._is_frozen = False

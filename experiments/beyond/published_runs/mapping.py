"""Maps each published run to a `RunSpec` and to how its trainer differs from wlb.

`SOURCES` has everything that is taken as known about the trainer of a source; it is printed with
each row. Where a source does not say something, `SourceTraits.assumed` states the assumption.
"""

from collections.abc import Mapping as AnyMapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from experiments.beyond.published_runs.rows import PublishedRun
from kernels_profile.derive import H100_500W, H100_SXM, GpuVariant
from wlb.cost import PLAIN_TORCH, RecomputedWork
from wlb.plan import UserError
from wlb.simulate import FsdpExecution
from wlb.spec import (
    ModelSpec,
    PackingSection,
    ParallelSpec,
    Recompute,
    RunSpec,
    Schedule,
    WindowCut,
)


def _llama(hidden: int, layers: int, heads: int, ffn: int) -> ModelSpec:
    return ModelSpec(
        vocab_size=128_256,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        ffn_hidden_size=ffn,
        rope_theta=500_000.0,
    )


def _mpt(hidden: int, layers: int) -> ModelSpec:
    """Returns a model with as many weights as MPT's.

    MPT's MLP has two matrices of width 4 x hidden. wlb's MLP is gated and has three matrices, so a
    width of 8/3 x hidden gives as many weights.
    """
    return ModelSpec(
        vocab_size=50_368,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=hidden // 128,
        num_kv_heads=hidden // 128,
        ffn_hidden_size=round(8 * hidden / 3),
        tied_embeddings=True,
    )


LLAMA_8B = _llama(4096, 32, 32, 14_336)
LLAMA_70B = _llama(8192, 80, 64, 28_672)
LLAMA_405B = _llama(16_384, 126, 128, 53_248)
MODELS = {
    "mpt": {
        "760m": _mpt(1536, 24),
        "1b": _mpt(2048, 24),
        "3b": _mpt(2560, 32),
        "7b": _mpt(4096, 32),
        "13b": _mpt(5120, 40),
        "30b": _mpt(7168, 48),
        "70b": _mpt(8192, 80),
    },
    "titan": {"llama3.1-8b": LLAMA_8B, "llama3.1-70b": LLAMA_70B, "llama3.1-405b": LLAMA_405B},
    "llama3": {"llama3.1-405b": LLAMA_405B},
    "automodel": {"llama3-8b": LLAMA_8B, "llama3-70b": LLAMA_70B},
}

EVERY_SECOND_PRODUCT = RecomputedWork(
    matrices=(1, 3, 5),
    calls={"norm": 2, "rotary": 2, "swiglu": 1, "residual": 1},
    tp=(2, 0),
    attention=False,
)
"""What torchtitan's selective activation checkpointing by operator recomputes.

It stores the results of attention, of reduce-scatters and of every second matrix product (in the
order Q, K, V, O, gate, up, down). Everything else is recomputed in backward.
"""
PLAIN_UPDATE_VALUES = 20
"""float32 values that plain torch reads and writes for the AdamW update of one parameter.

They are mul and add of the first moment (2 + 3), mul and addcmul of the second (2 + 3), its root,
division and epsilon (6), and addcdiv (4).
"""

WITH_DROPOUT = {"residual": (11 / 6, 11 / 6)}
"""Memory traffic of MPT's residual additions, over that of plain additions.

MPT's blocks call nn.Dropout(0) before both additions, and torch runs it. In both passes it reads
and writes the row and a mask of one byte per value.
"""


class FlopsCount(StrEnum):
    """Query-key pairs that the TFLOP/s of a source count, besides 6 FLOPs per weight and token."""

    CAUSAL = "pairs below the diagonal"
    SQUARE = "all pairs"
    NONE = "no attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTraits:
    """Hardware and trainer that all runs of a source have in common."""

    gpu: GpuVariant
    kernel: str  # attention kernel, a key of `prediction.KERNELS`
    kernel_words: str  # the kernel's name on the page
    # Memory traffic of element-wise operators without torch.compile, over that of fused kernels.
    # Empty: they are fused.
    traffic: AnyMapping[str, tuple[float, float]]
    resharded: bool  # whether FSDP frees parameters after each pass, if there is no pipeline
    # How FSDP works. FSDP2 copies each gathered bfloat16 value (4 bytes of traffic) and each
    # gradient into the buffer to reduce (4 bytes, or 6 if that buffer is float32).
    execution: FsdpExecution
    # What backward recomputes, by the value of the column `recompute`. For values that are missing
    # here it recomputes what wlb does.
    recomputed: AnyMapping[str, RecomputedWork] = field(default_factory=dict[str, RecomputedWork])
    flops: FlopsCount = FlopsCount.CAUSAL
    logit_bytes: int = 14  # memory of one logit in the loss: bfloat16 once and float32 three times
    unknown_stages: int = 1  # virtual stages of a rank if the row does not print them
    unknown_recompute: str = "none"  # value of `recompute` if the row does not print it
    assumed: tuple[str, ...] = ()  # assumptions, as clauses for the page


SOURCES = {
    "mpt": SourceTraits(
        gpu=H100_SXM,
        kernel="triton_1",
        kernel_words="Triton's FlashAttention-1 with ALiBi",
        traffic=WITH_DROPOUT,
        resharded=True,
        execution=FsdpExecution(
            reduces_every_pass=True,
            gradient_bytes=2,
            prefetches_backward=False,
            update_values=PLAIN_UPDATE_VALUES,
        ),
        logit_bytes=4,  # the loss is fused, and its gradients overwrite the logits
        assumed=(
            "norms and GELU are one kernel each; positions (ALiBi) are priced as a rotation",
            "FSDP prefetches after each backward (Composer's default, BACKWARD_POST)",
        ),
    ),
    "titan": SourceTraits(
        gpu=H100_500W,
        kernel="flash_2",
        kernel_words="FlashAttention-2 of torch's SDPA",
        traffic=PLAIN_TORCH,
        resharded=True,
        execution=FsdpExecution(
            reduces_every_pass=True,
            update_values=PLAIN_UPDATE_VALUES,
            gather_copy_bytes=4,
            reduce_copy_bytes=6,
        ),
        recomputed={"selective": EVERY_SECOND_PRODUCT},
        unknown_stages=2,
        assumed=("SDPA takes FlashAttention-2, not cuDNN",),
    ),
    "llama3": SourceTraits(
        gpu=H100_SXM,
        kernel="flash_3",
        kernel_words="FlashAttention-3 class",
        traffic={},
        resharded=False,
        execution=FsdpExecution(),
        unknown_stages=8,
        assumed=(
            "a FlashAttention-3 class kernel: with FlashAttention-2's speed, attention over whole "
            "sequences of 128K would leave too little time for the rest",
            "8 virtual stages: the first stage's first chunk has the embedding alone after one "
            "layer was taken from it, so chunks have one layer",
            "TFLOP/s count attention's pairs below the diagonal of whole sequences",
        ),
    ),
    "automodel": SourceTraits(
        gpu=H100_SXM,
        kernel="flash_3",
        kernel_words="cuDNN's by Transformer Engine, FlashAttention-3 class",
        traffic={},
        resharded=True,
        execution=FsdpExecution(
            reduces_every_pass=True, gradient_bytes=2, gather_copy_bytes=4, reduce_copy_bytes=4
        ),
        unknown_recompute="full",
        assumed=(
            "gradients are reduced in bfloat16, the default of its FSDP2 manager",
            "whole layers are recomputed: without that, activations do not fit in 80 GB",
            "gradients are reduced after every pass: unsharded ones do not fit",
        ),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """A published run in the form that `prediction.predict` simulates.

    Fields have the meaning of the same fields of `SourceTraits`.
    """

    run: PublishedRun
    spec: RunSpec
    gpu: GpuVariant
    kernel: str
    kernel_words: str
    traffic: AnyMapping[str, tuple[float, float]]
    execution: FsdpExecution
    recomputed: RecomputedWork | None
    flops: FlopsCount
    logit_bytes: int
    assumed: tuple[str, ...]

    def flops_per_token(self) -> float:
        """Returns the model FLOPs of a token as the source counts them."""
        model = self.spec.model
        # Six FLOPs for each weight of a product; the embedding is a look-up.
        weights = model.num_layers * model.num_layer_parameters
        weights += model.vocab_size * model.hidden_size
        pairs = {FlopsCount.CAUSAL: 0.5, FlopsCount.SQUARE: 1.0, FlopsCount.NONE: 0.0}[self.flops]
        attention = 12 * model.num_layers * model.q_dim * self.run.seq * pairs
        return 6.0 * weights + attention

    @property
    def measured(self) -> float:
        """Returns the measured tokens per second and GPU."""
        if self.run.tokens_per_s_gpu is not None:
            return self.run.tokens_per_s_gpu
        assert self.run.tflops_gpu is not None
        return self.run.tflops_gpu * 1e12 / self.flops_per_token()

    def words(self) -> str:
        """Describes the simulated configuration in one line."""
        spec, how = self.spec, self.execution
        p = spec.parallel
        recompute = "every second product" if self.recomputed else str(spec.training.recompute)
        fsdp = "resharded after passes" if spec.fsdp.reshard_after_forward else "gathered once"
        operators = "unfused" if "norm" in self.traffic else "fused"
        operators += " with dropout" * (self.traffic == WITH_DROPOUT)
        reduced = "every pass" if how.reduces_every_pass else "once"
        return (
            f"TP {p.tp} CP {p.cp} PP {p.pp} x {spec.pp.virtual_stages} DP {p.dp}; {self.gpu.name}; "
            f"{self.kernel_words}; operators {operators}; recompute "
            f"{recompute}; FSDP {fsdp}, {8 * how.gradient_bytes}-bit gradients reduced {reduced}"
        )


def mapped(run: PublishedRun) -> Mapped:
    """Maps a published run to its configuration and its trainer.

    Raises:
        UserError: If the source or the model is unknown. The message has the line's number.
    """
    where = f"line {run.line}"
    if run.source not in SOURCES:
        raise UserError(
            f"{where}: source {run.source!r} is not known; known are {', '.join(SOURCES)}"
        )
    if run.model not in MODELS[run.source]:
        raise UserError(
            f"{where}: model {run.model!r} is not known of source {run.source}; known are "
            f"{', '.join(MODELS[run.source])}"
        )
    traits = SOURCES[run.source]
    how = traits.unknown_recompute if run.recompute == "?" else run.recompute
    return Mapped(
        run=run,
        spec=spec_of(run, traits, how),
        gpu=traits.gpu,
        kernel=traits.kernel,
        kernel_words=traits.kernel_words,
        traffic={} if run.is_compiled else traits.traffic,
        execution=traits.execution,
        recomputed=traits.recomputed.get(how),
        flops=traits.flops,
        logit_bytes=traits.logit_bytes,
        assumed=traits.assumed,
    )


def as_wlb_runs(case: Mapped) -> Mapped:
    """Returns the run as if wlb's executor trained it on an H100 of 700 W.

    Then attention is FlashAttention-2, operators are fused, and parameters are gathered once per
    step.
    """
    spec = case.spec
    return replace(
        case,
        spec=replace(spec, fsdp=replace(spec.fsdp, reshard_after_forward=False)),
        gpu=H100_SXM,
        kernel="flash_2",
        traffic={},
        execution=FsdpExecution(),
        recomputed=None,
    )


def spec_of(run: PublishedRun, traits: SourceTraits, recompute: str) -> RunSpec:
    """Returns the configuration of a run, whose sequences are one full-length document each."""
    base, model = RunSpec(), MODELS[run.source][run.model]
    # With a pipeline and without accumulation, the sequences of a batch are its micro-batches.
    splits = run.pp > 1 and run.ga == 1
    mbs, ga = (1, run.mbs) if splits else (run.mbs, run.ga)
    stages = run.vp or traits.unknown_stages
    is_interleaved = run.pp > 1 and stages > 1
    schedule = Schedule.INTERLEAVED_1F1B if is_interleaved else Schedule.ONE_F_ONE_B
    return replace(
        base,
        model=model,
        parallel=ParallelSpec(tp=run.tp, cp=run.cp, pp=run.pp, dp=run.dp),
        fsdp=replace(base.fsdp, reshard_after_forward=traits.resharded and run.pp == 1),
        pp=replace(
            base.pp,
            schedule=schedule,
            virtual_stages=stages if run.pp > 1 else 1,
            stage_layers=layers_of_stages(model.num_layers, run.pp * stages) if run.pp > 1 else (),
        ),
        data=replace(
            base.data, context_window=run.seq * mbs, num_windows=ga * run.dp, row_multiple=128
        ),
        packing=PackingSection(policy=base.packing.policy, window_cut=WindowCut.ANYWHERE),
        training=replace(
            base.training,
            dtype=type(base.training.dtype)("bfloat16"),
            recompute=Recompute(recompute),
        ),
        planner=replace(base.planner, baseline=False),
    )


def layers_of_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Divides layers over stages as equally as possible.

    Stages get the same number, rounded up. Layers that are then missing are taken from the last
    stage, the first, the last but one, and so on.
    """
    each = -(-layers // stages)
    out = [each] * stages
    missing = each * stages - layers
    for i in range(missing):
        at = -1 - i // 2 if i % 2 == 0 else i // 2
        out[at] -= 1
    return tuple(out)

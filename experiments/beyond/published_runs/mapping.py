"""Maps each published run to a `RunSpec` and to what its trainer does otherwise than wlb.

Everything that is taken for granted about a source stands in `SOURCES`, and is printed with each
row. What a source does not say is an assumption, and `Mapping.assumed` lists it.
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
    """An MLP of two matrices of 4 x hidden has the weights of a gated one of 8/3 x hidden."""
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
"""torchtitan's selective checkpointing by operator: it keeps attention, reduce-scatters and every
second product (of Q, K, V, O, gate, up, down), and computes all else again."""
PLAIN_UPDATE_VALUES = 20
"""float32 values of a parameter's AdamW update in plain torch: mul and add of the first moment (2 +
3), mul and addcmul of the second (2 + 3), its root, division and epsilon (6), addcdiv (4)."""

WITH_DROPOUT = {"residual": (11 / 6, 11 / 6)}
"""MPT's blocks call nn.Dropout(0) before both additions. torch runs it: it reads and writes the row
and a mask of one byte a value, in both passes."""


class FlopsCount(StrEnum):
    """What a source's TFLOP/s count for attention, beside 6 FLOPs a parameter and token."""

    CAUSAL = "pairs below the diagonal"
    SQUARE = "all pairs"
    NONE = "no attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTraits:
    """What all runs of a source have in common.

    FSDP2 copies a gathered bfloat16 value once more (4 bytes), and a gradient into the buffer that
    is reduced (4 bytes, or 6 if that is float32).
    """

    gpu: GpuVariant
    kernel: str  # attention kernel, as in `KERNELS` of `prediction`
    kernel_words: str  # which kernel that is
    # Traffic of element-wise operators without torch.compile; {}: as fused kernels.
    traffic: AnyMapping[str, tuple[float, float]]
    resharded: bool  # whether FSDP frees parameters after each pass (without a pipeline)
    execution: FsdpExecution
    recomputed: AnyMapping[str, RecomputedWork] = field(default_factory=dict[str, RecomputedWork])
    flops: FlopsCount = FlopsCount.CAUSAL
    logit_bytes: int = 14  # of one logit during the loss: bfloat16, and three times float32
    unknown_stages: int = 1  # virtual stages a rank where the row does not print them
    unknown_recompute: str = "none"
    assumed: tuple[str, ...] = ()


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
        logit_bytes=4,  # a fused loss, whose gradients replace the logits
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
    """A published run as the simulator takes it."""

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
        """Model FLOPs of a token as the source counts them."""
        model = self.spec.model
        # Six FLOPs for each weight of a product; the embedding is a look-up.
        weights = model.num_layers * model.num_layer_parameters
        weights += model.vocab_size * model.hidden_size
        pairs = {FlopsCount.CAUSAL: 0.5, FlopsCount.SQUARE: 1.0, FlopsCount.NONE: 0.0}[self.flops]
        attention = 12 * model.num_layers * model.q_dim * self.run.seq * pairs
        return 6.0 * weights + attention

    @property
    def measured(self) -> float:
        """Measured tokens per second and GPU."""
        if self.run.tokens_per_s_gpu is not None:
            return self.run.tokens_per_s_gpu
        assert self.run.tflops_gpu is not None
        return self.run.tflops_gpu * 1e12 / self.flops_per_token()

    def words(self) -> str:
        """One line that says what the row was mapped to."""
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
    """Map a published run.

    Raises:
        UserError: If its source or model is not known, with the line's number.
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
    """The row under the assumptions that wlb made before it knew of other trainers: its own
    executor on an H100 of 700 W, with FlashAttention-2, fused operators and parameters that are
    gathered once a step.
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
    """The run's configuration: full sequences of one document each."""
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
    """Equal stages; layers that are missing are taken from the last and the first stage in turn."""
    each = -(-layers // stages)
    out = [each] * stages
    missing = each * stages - layers
    for i in range(missing):
        at = -1 - i // 2 if i % 2 == 0 else i // 2
        out[at] -= 1
    return tuple(out)

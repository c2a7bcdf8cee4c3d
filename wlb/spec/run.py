"""RunSpec: everything a run is told. One TOML file plus `--set section.key=value`.

Sections say what belongs to which room. Values that would make a run fail later are refused here
(`wlb.spec.check`), before any rank starts.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from wlb.plan import row_multiple
from wlb.spec.keys import key, to_dict
from wlb.spec.machine import ClusterSection, FsdpSection, TpSection
from wlb.spec.packing import PackingSection
from wlb.spec.records import CheckpointSection, EvalSection, TelemetrySection
from wlb.spec.schedule import DecayedWeights, DecayShape, RateSchedule


class Schedule(StrEnum):
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED_1F1B = "interleaved_1f1b"
    INTERLEAVED_ZERO_BUBBLE = "interleaved_zero_bubble"

    def takes(self, num_micro_batches: int, pp: int) -> bool:
        """Whether torch has an order for so many micro-batches a pipeline: 1F1B for pp and more,
        the interleaved ones for rounds of equally many."""
        if self == Schedule.ONE_F_ONE_B:
            return num_micro_batches >= pp
        return num_micro_batches % max(1, num_micro_batches // pp) == 0


class LongDocuments(StrEnum):
    SPLIT = "split"
    REFUSE = "refuse"


class Strategy(StrEnum):
    PER_SEQUENCE = "per_sequence"
    PER_DOCUMENT = "per_document"
    HYBRID = "hybrid"
    BALANCED = "balanced"
    ADAPTIVE = "adaptive"


class Remainder(StrEnum):
    """What per_document does with the d mod (2 * cp) tokens over of a document."""

    MERGED = "merged"
    ONE_BY_ONE = "one_by_one"


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class OnNonfinite(StrEnum):
    """What follows a loss or gradient that is not finite."""

    STOP = "stop"
    SKIP = "skip"
    ROLLBACK = "rollback"


class Recompute(StrEnum):
    """What backward runs again of a decoder layer instead of keeping its activations."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class OverMemory(StrEnum):
    """What follows a memory estimate above the memory that is there."""

    REFUSE = "refuse"
    WARN = "warn"


class AttentionBackend(StrEnum):
    AUTO = "auto"
    SDPA = "sdpa"
    TORCH_VARLEN = "torch_varlen"
    FLASH_ATTENTION_2 = "flash_attention_2"
    FLASH_ATTENTION_3 = "flash_attention_3"
    FLASH_ATTENTION_4 = "flash_attention_4"


class LossNormalizer(StrEnum):
    VALID_TOKENS = "valid_tokens"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    name: str = key("run", "name of the run; its files go to run.output_dir/run.name")
    output_dir: str = key("runs", "folder of all runs")
    stop_file: str = key(
        "",
        "a file whose existence asks the run to finish its step, save and leave with status 0, as "
        "SIGTERM and SIGUSR1 do; empty = none",
    )
    seed: int = key(0, "seed of weights, document order and order inside a micro-batch")
    device: Device = key(Device.AUTO, "where ranks compute; auto takes CUDA if there is one a rank")
    memory_gib: float = key(
        0.0,
        "memory of a rank's device, that the memory estimate is held against; 0 = the smallest "
        "GPU's own, on the CPU none",
        unit="GiB",
    )
    over_memory: OverMemory = key(
        OverMemory.REFUSE,
        "what to do with a run whose memory estimate exceeds 95% of that: refuse it or only warn",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama-3's frequency scaling; off while factor is 1."""

    factor: float = key(1.0, "how much longer the context is than it was trained for; 1 = off")
    low_freq_factor: float = key(1.0, "wavelengths above original / this are scaled fully")
    high_freq_factor: float = key(4.0, "wavelengths below original / this are left alone")
    original_context: int = key(8192, "context the frequencies were trained for", unit="tokens")

    def check(self) -> None:
        if not self.factor > 0:
            raise ValueError(f"model.rope_scaling.factor = {self.factor} must be above 0")
        if self.original_context < 1:
            raise ValueError(
                f"model.rope_scaling.original_context = {self.original_context} must be at least 1"
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"model.rope_scaling.low_freq_factor = {self.low_freq_factor} must be above 0 and "
                f"below high_freq_factor = {self.high_freq_factor}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A LLaMA decoder: RMSNorm, RoPE, SwiGLU, grouped-query attention, untied head."""

    vocab_size: int = key(0, "tokens of the vocabulary; 0 = the store's", unit="tokens")
    hidden_size: int = key(512, "width of the residual stream")
    num_layers: int = key(8, "decoder layers")
    num_heads: int = key(8, "query heads")
    num_kv_heads: int = key(8, "key/value heads; divides num_heads")
    head_dim: int = key(0, "width of a head; 0 = hidden_size / num_heads")
    ffn_hidden_size: int = key(1408, "inner width of SwiGLU")
    norm_eps: float = key(1e-5, "epsilon of RMSNorm")
    init_std: float = key(0.02, "standard deviation of initial weights")
    rope_theta: float = key(10000.0, "base of rotary frequencies")
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_size

    @property
    def q_dim(self) -> int:
        return self.num_heads * self.head_size

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary rounded up to a multiple of 256, whatever tp is."""
        return -(-self.vocab_size // 256) * 256

    @property
    def num_layer_parameters(self) -> int:
        attention = self.hidden_size * (2 * self.q_dim + 2 * self.kv_dim)
        return attention + 3 * self.hidden_size * self.ffn_hidden_size + 2 * self.hidden_size

    @property
    def num_parameters(self) -> int:
        ends = 2 * self.padded_vocab_size * self.hidden_size + self.hidden_size
        return self.num_layers * self.num_layer_parameters + ends

    def check(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "ffn_hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} = {getattr(self, name)} must be at least 1")
        for name in ("head_dim", "init_std"):
            if getattr(self, name) < 0:
                raise ValueError(f"model.{name} = {getattr(self, name)} must be at least 0")
        for name in ("norm_eps", "rope_theta"):
            if not getattr(self, name) > 0:
                raise ValueError(f"model.{name} = {getattr(self, name)} must be above 0")
        self.rope_scaling.check()
        if not self.head_dim and self.hidden_size % self.num_heads:
            raise ValueError(
                f"model.hidden_size = {self.hidden_size} is not a multiple of model.num_heads = "
                f"{self.num_heads}; change one of them or set model.head_dim"
            )
        if self.head_size % 2:
            raise ValueError(f"head size {self.head_size} is odd; rotary embedding needs pairs")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads = {self.num_heads} is not a multiple of model.num_kv_heads = "
                f"{self.num_kv_heads}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSpec:
    """Degrees of the four axes. Ranks are ordered TP, CP, PP, DP from the inside out."""

    tp: int = key(1, "tensor-parallel ranks (with sequence parallelism)", unit="ranks")
    cp: int = key(1, "context-parallel ranks", unit="ranks")
    pp: int = key(1, "pipeline ranks", unit="ranks")
    dp: int = key(0, "data-parallel pipelines; 0 = all ranks / (tp * cp * pp)", unit="ranks")

    @property
    def model_ranks(self) -> int:
        return self.tp * self.cp * self.pp

    @property
    def fsdp_size(self) -> int:
        """Ranks that share a stage's gradients: dp x cp; dp = 0 counts as 1."""
        return self.cp * max(1, self.dp)

    @property
    def world_size(self) -> int:
        """Ranks of the layout; dp = 0 counts as 1."""
        return self.model_ranks * max(1, self.dp)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSection:
    schedule: Schedule = key(Schedule.INTERLEAVED_1F1B, "order of forward and backward passes")
    virtual_stages: int = key(1, "stages (model chunks) a pipeline rank; more with interleaving")
    stage_layers: tuple[int, ...] = key(
        (),
        "decoder layers of every stage, first to last, such as fewer where the head is; 0 only at "
        "the ends (embedding or head alone); empty = equally many",
    )
    weight_delay: int = key(
        1,
        "interleaved_zero_bubble: passes that weights' gradients wait, times the pipeline rank; 1 "
        "= ZB1P, more where attention is long",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CpSection:
    keep_gathered_kv: bool = key(
        False, "keep all ranks' keys and values for backward: no second all-gather, more memory"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    store: str = key("", "prefix of a .bin/.idx token store; empty = made from data.corpus")
    blend: tuple[str, ...] = key(
        (),
        'stores mixed instead of data.store: a list of "PREFIX:WEIGHT", weights as shares of '
        "tokens; a store too small for its weight is repeated",
    )
    heldout_store: str = key("", "prefix of the held-out store of data.store or data.blend")
    corpus: str = key(
        "stdlib",
        'text to train on: "stdlib" (Python\'s own sources), "docstrings" (conversations about '
        "them) or a folder",
    )
    cache_dir: str = key("runs/stores", "where stores made from data.corpus are kept")
    bpe_vocab_size: int = key(4096, "size of the byte-level BPE trained on data.corpus")
    heldout_fraction: float = key(0.03, "share of documents kept for evaluation")
    context_window: int = key(
        4096, "C: longest piece; a global batch is N x C tokens", unit="tokens"
    )
    num_windows: int = key(
        0,
        "N: context windows of a global batch, and micro-batches of a step over all pipelines "
        "unless packing.num_micro_batches says another number; 0 = pp * dp",
    )
    long_documents: LongDocuments = key(LongDocuments.SPLIT, "documents longer than the window")
    prefetch: int = key(
        1, "steps whose inputs are loaded ahead, in a thread; 0 = when they are computed"
    )
    epochs: int = key(
        0, "passes over the store, of a blend over the store read least; 0 = until training.steps"
    )
    row_multiple: int = key(1, "rows of a rank are a multiple of this (128 on GPUs)", unit="tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingSection:
    strategy: Strategy = key(
        Strategy.ADAPTIVE,
        "how a micro-batch is divided over CP ranks: adaptive = per_sequence or per_document, "
        "whichever is predicted faster; hybrid = long documents per document, the rest per "
        "sequence; balanced = each document over as many ranks as its work asks for",
    )
    remainder: Remainder = key(
        Remainder.MERGED,
        "tokens over when per_document (also in adaptive) cuts a document: merged into its chunks, "
        "or one_by_one as in the paper, each a kernel segment of its own",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSection:
    ahead: int = key(
        3, "steps planned beyond the one that was last asked for; at least 2", unit="steps"
    )
    baseline: bool = key(True, "also predict Plain-4D on the same documents")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSection:
    profile: str = key("auto", "kernel profile: a name, a JSON file, or auto = by device")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSection:
    attention: AttentionBackend = key(
        AttentionBackend.AUTO,
        "attention kernel; auto = the fastest known for the device among those installed",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSection:
    steps: int = key(1000, "optimiser steps", unit="steps")
    learning_rate: float = key(3e-4, "peak learning rate of AdamW")
    min_learning_rate: float = key(
        3e-5, "learning rate at training.steps; schedule = constant has none"
    )
    warmup_steps: int = key(100, "linear warm-up", unit="steps")
    schedule: RateSchedule = key(
        RateSchedule.COSINE,
        "learning rate after the warm-up: cosine or linear down to the minimum at training.steps; "
        "wsd = stable, down to it over the last decay_steps; constant",
    )
    decay_steps: int = key(
        0, "wsd: last steps, whose rate falls; 10% to 20% of training.steps are usual", unit="steps"
    )
    decay_shape: DecayShape = key(
        DecayShape.LINEAR, "wsd: how the rate falls; sqrt = 1 - sqrt(progress)"
    )
    beta1: float = key(0.9, "AdamW beta1")
    beta2: float = key(0.95, "AdamW beta2")
    adam_eps: float = key(1e-8, "AdamW epsilon")
    weight_decay: float = key(0.1, "AdamW weight decay, on what training.decay says")
    decay: DecayedWeights = key(
        DecayedWeights.MATRICES,
        "what weight decay is on: matrices = all but norms; linear = also without embedding and "
        "output head; all = norms as well",
    )
    clip_norm: float = key(1.0, "gradient norm limit; 0 = off")
    dtype: Dtype = key(
        Dtype.FLOAT32,
        "dtype of parameters in compute; gradients reduce in float32, but norms' over tp in this "
        "where a pipeline has one micro-batch",
    )
    loss_normalizer: LossNormalizer = key(
        LossNormalizer.VALID_TOKENS,
        "loss divisor: valid_tokens = the step's own; constant = N * context_window always, which "
        "weighs labels alike where steps differ in tokens",
    )
    recompute: Recompute = key(
        Recompute.NONE,
        "what backward computes again to save memory: selective = a layer's second norm and MLP, "
        "all but the last product; full = the whole layer, attention and its collectives included",
    )
    compile: bool = key(
        False,
        "torch.compile decoder layers: one graph of a layer for all lengths; takes a minute at the "
        "start, and pays where norms, rotation and SiLU are a good part of a layer",
    )
    compile_backend: str = key("inductor", "backend of torch.compile, with training.compile")
    on_nonfinite: OnNonfinite = key(
        OnNonfinite.STOP,
        "at a loss or gradient that is not finite: stop; skip the step's update; or rollback = go "
        "back to the last checkpoint, train again, and skip the step if it fails again",
    )
    max_nonfinite: int = key(
        10, "steps in a row whose update may be skipped before the run stops", unit="steps"
    )
    loss_chunk: int = key(8192, "rows of logits held at a time", unit="tokens")
    timeout_s: float = key(600.0, "collectives that take longer stop the run", unit="s")
    heartbeat_s: float = key(
        60.0,
        "a rank that gives no sign of life for so long (stopped, its node lost) ends the run, with "
        "a report of all ranks; 0 = ranks do not watch over each other",
        unit="s",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Everything about a run, a field a section of its TOML; `wlb.spec.load` makes and checks one.

    Sections: run, model, parallel, fsdp, cluster, pp, tp, cp, data, packing, sharding, planner,
    cost, kernels, training, eval, checkpoint, telemetry. `wlb.spec.list_keys(RunSpec)` has
    all keys with units and defaults, `wlb train --help` prints them.
    """

    run: RunSection = field(default_factory=RunSection)
    model: ModelSpec = field(default_factory=ModelSpec)
    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    fsdp: FsdpSection = field(default_factory=FsdpSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    pp: PipelineSection = field(default_factory=PipelineSection)
    tp: TpSection = field(default_factory=TpSection)
    cp: CpSection = field(default_factory=CpSection)
    data: DataSection = field(default_factory=DataSection)
    packing: PackingSection = field(default_factory=PackingSection)
    sharding: ShardingSection = field(default_factory=ShardingSection)
    planner: PlannerSection = field(default_factory=PlannerSection)
    cost: CostSection = field(default_factory=CostSection)
    kernels: KernelSection = field(default_factory=KernelSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    eval: EvalSection = field(default_factory=EvalSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    telemetry: TelemetrySection = field(default_factory=TelemetrySection)

    @property
    def num_windows(self) -> int:
        """N: context windows of a global batch (Section 7.1: PP x DP by default)."""
        return self.data.num_windows or self.parallel.pp * max(1, self.parallel.dp)

    @property
    def num_micro_batches(self) -> int:
        """Of a step, over all pipelines: N, or M where packing makes another number."""
        return self.packing.num_micro_batches or self.num_windows

    @property
    def micro_batches_per_pipeline(self) -> int:
        """Micro-batches of a step that each pipeline executes: N / dp."""
        return self.num_micro_batches // max(1, self.parallel.dp)

    @property
    def s_max(self) -> int:
        """S_max in tokens."""
        return self.packing.s_max_tokens(self.data.context_window)

    @property
    def queue_thresholds(self) -> tuple[int, ...]:
        """L_i in tokens."""
        return self.packing.thresholds_tokens(self.data.context_window)

    @property
    def tokens_per_step(self) -> int:
        """N x C: tokens of a global batch."""
        return self.num_windows * self.data.context_window

    @property
    def shard_size(self) -> int:
        """Ranks that share one copy of parameters and optimizer state; dp = 0 counts as 1."""
        return self.fsdp.shard_size or self.parallel.fsdp_size

    @property
    def num_stages(self) -> int:
        """Stages of a pipeline, virtual ones included: pp x virtual_stages."""
        return self.parallel.pp * self.pp.virtual_stages

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule computes weight gradients apart from input gradients."""
        is_split = self.pp.schedule == Schedule.INTERLEAVED_ZERO_BUBBLE
        return self.parallel.pp > 1 and is_split

    def stages_of(self, pp_rank: int) -> range:
        """Stages of a pipeline rank: pp_rank, pp_rank + pp, ..."""
        return range(pp_rank, self.num_stages, self.parallel.pp)

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Number of decoder layers of each stage."""
        even = (self.model.num_layers // self.num_stages,) * self.num_stages
        return self.pp.stage_layers or even

    def layers_of(self, stage: int) -> range:
        """Decoder layers of a stage."""
        before = sum(self.stage_layers[:stage])
        return range(before, before + self.stage_layers[stage])

    @property
    def row_multiple(self) -> int:
        """Rows of a rank are a multiple of it."""
        return row_multiple(self.parallel.tp, self.data.row_multiple)

    def to_dict(self) -> dict[str, Any]:
        """Sections and keys as in TOML."""
        return to_dict(self)

"""RunSpec: the whole configuration of a run, from one TOML file plus `--set section.key=value`.

`wlb.spec.check` refuses values that would fail later, before any rank starts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from wlb.plan import row_multiple
from wlb.spec.keys import key, to_dict
from wlb.spec.machine import ClusterSection, EpSection, FsdpSection
from wlb.spec.model import ModelSpec
from wlb.spec.packing import PackingSection
from wlb.spec.records import CheckpointSection, EvalSection, TelemetrySection
from wlb.spec.sharding import ShardingSection
from wlb.spec.training import LossNormalizer, TrainingSection


class Schedule(StrEnum):
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED_1F1B = "interleaved_1f1b"
    INTERLEAVED_ZERO_BUBBLE = "interleaved_zero_bubble"

    def takes(self, num_micro_batches: int, pp: int) -> bool:
        """Whether torch can schedule this many micro-batches per pipeline: 1F1B takes pp or more,
        interleaved schedules take rounds of equal size.
        """
        if self == Schedule.ONE_F_ONE_B:
            return num_micro_batches >= pp
        return num_micro_batches % max(1, num_micro_batches // pp) == 0


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class AttentionBackend(StrEnum):
    AUTO = "auto"
    SDPA = "sdpa"
    TORCH_VARLEN = "torch_varlen"
    FLASH_ATTENTION_2 = "flash_attention_2"
    FLASH_ATTENTION_3 = "flash_attention_3"
    FLASH_ATTENTION_4 = "flash_attention_4"


class LinearBackend(StrEnum):
    """What computes the recurrence of linear layers."""

    AUTO = "auto"
    TORCH = "torch"
    FLASH_LINEAR_ATTENTION = "flash_linear_attention"


class FusedKernels(StrEnum):
    """Kernels of RoPE, SwiGLU, GeGLU, RMSNorm and the sums of gathered keys' gradients."""

    AUTO = "auto"
    TRITON = "triton"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    name: str = key("run", "name of the run; its files go to run.output_dir/run.name")
    output_dir: str = key(
        "runs", "folder that holds all runs, and in stores/ the token stores of data.corpus"
    )
    stop_file: str = key(
        "",
        "the run stops when this file exists: it finishes its step, saves and exits with status"
        " 0, as on Ctrl-C, SIGTERM or SIGUSR1; output_dir/.stop-NAME does the same for every run",
    )
    seed: int = key(
        0,
        "seed of the weights, the document order and the order inside a micro-batch",
        at_least=0,
        at_most=2**64 - 1,
    )
    device: Device = key(
        Device.AUTO, "device of the ranks; auto = CUDA if every rank has a GPU, otherwise the CPU"
    )

    @property
    def stores_dir(self) -> Path:
        """Folder of token stores built from data.corpus, which all runs of output_dir share."""
        return Path(self.output_dir, "stores")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSpec:
    """Degrees of the four axes; ranks are numbered TP, CP, PP, DP from the inside out."""

    tp: int = key(
        1,
        "tensor-parallel degree (with sequence parallelism)",
        unit="ranks",
        at_least=1,
        at_most=1024,
    )
    cp: int = key(1, "context-parallel degree", unit="ranks", at_least=1, at_most=65_536)
    pp: int = key(1, "pipeline-parallel degree", unit="ranks", at_least=1, at_most=4096)
    dp: int = key(
        0,
        "data-parallel degree; 0 = number of ranks / (tp * cp * pp)",
        unit="ranks",
        at_least=0,
        at_most=2**20,
    )
    ep: int = key(
        1,
        "expert-parallel degree: ranks of dp x cp x tp, neighbours first, that hold different "
        "experts (model.experts) and send each other their tokens; with fsdp.shard_size ranks of "
        "one copy of the parameters (shard_size x tp)",
        unit="ranks",
        at_least=1,
        at_most=65_536,
    )

    @property
    def model_ranks(self) -> int:
        return self.tp * self.cp * self.pp

    @property
    def fsdp_size(self) -> int:
        """Ranks that share a stage's gradients: dp x cp; dp = 0 counts as 1."""
        return self.cp * max(1, self.dp)

    @property
    def meeting_pipelines(self) -> int:
        """Neighbouring pipelines whose ranks meet in layers with experts: EP groups span them."""
        return math.lcm(self.ep, self.cp * self.tp) // (self.cp * self.tp)

    @property
    def expert_ranks(self) -> int:
        """Ranks over which a stage's experts are divided: dp x cp x tp; dp = 0 counts as 1."""
        return self.tp * self.fsdp_size

    @property
    def world_size(self) -> int:
        """Ranks of the layout; dp = 0 counts as 1."""
        return self.model_ranks * max(1, self.dp)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSection:
    schedule: Schedule = key(Schedule.INTERLEAVED_1F1B, "order of forward and backward passes")
    virtual_stages: int = key(
        1,
        "virtual stages (model chunks) per pipeline rank; more than 1 needs an interleaved "
        "schedule",
        at_least=1,
        at_most=1000,
    )
    stage_layers: tuple[int, ...] = key(
        (),
        "decoder layers of each stage, first to last, such as fewer beside the output head; "
        "only the first and the last stage may have 0; empty = equally many",
        at_least=0,
        at_most=10_000,
    )
    weight_delay: int = key(
        1,
        "interleaved_zero_bubble: weight gradients wait this many passes times the pipeline "
        "rank; 1 = torch's ZB1P order, more may help where attention is long",
        at_least=1,
        at_most=1000,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CpSection:
    overlap_stages: int = key(
        0,
        "attend to the keys that a CP rank holds while others' travel, in calls whose outputs are "
        "merged: others' arrive in so many exchanges, each hidden behind attention over those "
        "before; costs a launch a stage and copies; 1 in a node, more may pay between nodes; "
        "0 = one call after one exchange",
        at_least=0,
        at_most=64,
    )

    @property
    def overlap(self) -> bool:
        """Whether a rank attends to its own keys while others' travel."""
        return self.overlap_stages > 0

    @property
    def stages(self) -> int:
        """Exchanges in which a micro-batch's keys arrive."""
        return max(1, self.overlap_stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    store: str = key("", "prefix of a .bin/.idx token store; empty = built from data.corpus")
    blend: tuple[str, ...] = key(
        (),
        'token stores to mix, instead of data.store: a list of "PREFIX:WEIGHT" with weights as '
        "shares of tokens; a store that is too small for its weight is repeated",
    )
    heldout_store: str = key("", "prefix of the held-out token store for data.store or data.blend")
    corpus: str = key(
        "stdlib",
        'text to train on: "stdlib" (sources of Python\'s standard library), "docstrings" '
        "(conversations about them) or a folder of UTF-8 files",
    )
    bpe_vocab_size: int = key(
        4096,
        "vocabulary size of the byte-level BPE trained on data.corpus",
        at_least=300,
        at_most=10**6,
    )
    heldout_fraction: float = key(
        0.03, "share of documents held out for evaluation", at_least=0, below=0.5
    )
    context_window: int = key(
        4096,
        "C: length of a context window and of the longest piece of a document; a global batch "
        "has N x C tokens",
        unit="tokens",
        at_least=2,
        at_most=2**30,
    )
    num_windows: int = key(
        0,
        "N: context windows per global batch; also micro-batches per step over all pipelines, "
        "unless packing.num_micro_batches is set; 0 = pp * dp",
        at_least=0,
        at_most=2**17,
    )
    epochs: int = key(
        0,
        "passes over the store, or over the least-read store of a blend; 0 = as many as "
        "training.steps take",
        at_least=0,
        at_most=10**6,
    )
    row_multiple: int = key(
        1,
        "rows of a rank are padded to a multiple of this (use 128 on GPUs)",
        unit="tokens",
        at_least=1,
        at_most=65_536,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSection:
    baseline: bool = key(
        True, "also predict the usual loader, which cuts the same documents wherever a window ends"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSection:
    profile: str = key("auto", "kernel profile: a name, a JSON file, or auto = by device")
    expert_load: float = key(
        1.0,
        "rows of the EP rank that a micro-batch's layer waits for over the mean rank's, with which "
        "experts' work is priced and their memory estimated; 1 = even; a run's own is in its "
        "summary (load of ranks) and in metrics.jsonl (experts.rank); no load is in the factors of "
        "--calibrate",
        at_least=1,
        at_most=4096,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSection:
    attention: AttentionBackend = key(
        AttentionBackend.AUTO,
        "attention kernel; auto = the fastest installed one that supports the run",
    )
    deterministic: bool = key(
        False,
        "have a GPU's attention kernel add gradients in one order, so that the same step gives the "
        "same bits again; takes time, and FlashAttention-2 keeps up to ceil(SMs / heads) float32 "
        "copies of dQ; a CPU's kernel always does",
    )
    fused: FusedKernels = key(
        FusedKernels.AUTO,
        "Triton kernels of RoPE, SwiGLU, GeGLU, RMSNorm and the sums of gathered keys' gradients: "
        "one pass over memory instead of up to 11; auto = on GPUs with Triton; off = plain torch",
    )
    linear: LinearBackend = key(
        LinearBackend.AUTO,
        "what computes the recurrence of linear layers (model.linear); auto = "
        "flash_linear_attention on GPUs where that package is installed and can compute the run, "
        "else torch, which takes many small kernels",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Configuration of a run, one field per TOML section; `wlb.spec.load` reads and checks it.

    `wlb train --help-all` prints all keys with units and defaults.
    """

    run: RunSection = field(default_factory=RunSection)
    model: ModelSpec = field(default_factory=ModelSpec)
    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    fsdp: FsdpSection = field(default_factory=FsdpSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    pp: PipelineSection = field(default_factory=PipelineSection)
    cp: CpSection = field(default_factory=CpSection)
    ep: EpSection = field(default_factory=EpSection)
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
        """Micro-batches of a step over all pipelines: M if packing sets it, else N."""
        return self.packing.num_micro_batches or self.num_windows

    @property
    def micro_batches_per_pipeline(self) -> int:
        """Micro-batches of a step per pipeline."""
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
        """Tokens of a global batch: N x C."""
        return self.num_windows * self.data.context_window

    def loss_scale(self, num_targets: int) -> float:
        """Factor of a step's summed loss. num_targets: labels of the step's global batch."""
        if self.training.loss_normalizer == LossNormalizer.CONSTANT:
            return 1.0 / self.tokens_per_step
        return 1.0 / max(1, num_targets)

    @property
    def shard_size(self) -> int:
        """Ranks that share one copy of parameters and optimizer state; dp = 0 counts as 1."""
        return self.fsdp.shard_size or self.parallel.fsdp_size

    @property
    def num_stages(self) -> int:
        """Stages of a pipeline: pp x virtual_stages."""
        return self.parallel.pp * self.pp.virtual_stages

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule separates weight gradients from input gradients."""
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

    @property
    def stage_kind_layers(self) -> tuple[tuple[int, ...], ...]:
        """Number of decoder layers of each of `ModelSpec.layer_kinds` in each stage."""
        model, kinds = self.model, self.model.layer_kinds
        if len(kinds) == 1:
            return (self.stage_layers,)
        return tuple(
            self._counted(
                lambda i, kind=kind: (
                    (model.has_experts(i), model.is_linear(i)) == (kind.has_experts, kind.is_linear)
                )
            )
            for kind in kinds
        )

    @property
    def stage_expert_layers(self) -> tuple[int, ...]:
        """Number of decoder layers with experts of each stage."""
        share = self.model.num_expert_layers
        if share in (0, self.model.num_layers):
            return self.stage_layers if share else (0,) * self.num_stages
        return self._counted(self.model.has_experts)

    @property
    def stage_other_layers(self) -> tuple[int, ...]:
        """Number of decoder layers of each stage whose queries do not see all keys: with a sliding
        window, or linear.
        """
        return self._counted(lambda layer: not self.model.sees_all(layer))

    @property
    def has_uneven_attention(self) -> bool:
        """Whether stages have unequal shares of layers whose queries do not see all keys."""
        layers, others = self.model.num_layers, self.model.num_layers - self.model.num_full_layers
        if others in (0, layers):
            return False
        counts = zip(self.stage_other_layers, self.stage_layers, strict=True)
        return any(of_stage * layers != others * all_ for of_stage, all_ in counts)

    def _counted(self, is_one: Callable[[int], bool]) -> tuple[int, ...]:
        stages = range(self.num_stages)
        return tuple(sum(map(is_one, self.layers_of(stage))) for stage in stages)

    def layers_of(self, stage: int) -> range:
        """Decoder layers of a stage."""
        before = sum(self.stage_layers[:stage])
        return range(before, before + self.stage_layers[stage])

    @property
    def row_multiple(self) -> int:
        """Rows of every rank are padded to a multiple of this."""
        return row_multiple(self.parallel.tp, self.data.row_multiple)

    def to_dict(self) -> dict[str, Any]:
        """Return sections and keys as in TOML."""
        return to_dict(self)

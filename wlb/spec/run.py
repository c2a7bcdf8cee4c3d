"""`RunSpec`, the whole configuration of a run, and most of its sections.

A run is described by one TOML file plus `--set section.key=value` options. `wlb.spec.load` reads
them. Before any rank starts, `wlb.spec.check` refuses settings that would fail later. Values that
follow from several keys, such as the layers of each stage, are properties of `RunSpec`.
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
    """Order of forward and backward passes on the ranks of a pipeline."""

    ONE_F_ONE_B = "1f1b"
    INTERLEAVED_1F1B = "interleaved_1f1b"
    INTERLEAVED_ZERO_BUBBLE = "interleaved_zero_bubble"

    def takes(self, num_micro_batches: int, pp: int) -> bool:
        """Return whether torch's schedule works with this many micro-batches per pipeline.

        1F1B needs at least `pp` micro-batches. An interleaved schedule processes them in
        `max(1, num_micro_batches // pp)` rounds, which must have equal numbers of micro-batches.

        Args:
            num_micro_batches: Micro-batches per step and pipeline.
            pp: Pipeline-parallel degree.
        """
        if self == Schedule.ONE_F_ONE_B:
            return num_micro_batches >= pp
        return num_micro_batches % max(1, num_micro_batches // pp) == 0


class Device(StrEnum):
    """Kind of device that ranks use."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class AttentionBackend(StrEnum):
    """Attention kernel that ranks call."""

    AUTO = "auto"
    SDPA = "sdpa"
    TORCH_VARLEN = "torch_varlen"
    FLASH_ATTENTION_2 = "flash_attention_2"
    FLASH_ATTENTION_3 = "flash_attention_3"
    FLASH_ATTENTION_4 = "flash_attention_4"


class LinearBackend(StrEnum):
    """Implementation of the recurrence of linear-attention layers."""

    AUTO = "auto"
    TORCH = "torch"
    FLASH_LINEAR_ATTENTION = "flash_linear_attention"


class FusedKernels(StrEnum):
    """Which kernels run the element-wise operators of layers: fused Triton kernels or torch's."""

    AUTO = "auto"
    TRITON = "triton"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """Section [run]: name, folders, seed and device of a run."""

    name: str = key("run", "name of the run; its files go to run.output_dir/run.name")
    output_dir: str = key(
        "runs",
        "folder of all runs; its subfolder stores/ has the token stores built from data.corpus",
    )
    stop_file: str = key(
        "",
        "path of an additional stop file; once this file exists, the run finishes its step, saves "
        "a checkpoint and exits with status 4 (0 under Slurm and torchrun), as after Ctrl-C, "
        "SIGTERM or SIGUSR1; a file .stop-NAME in run.output_dir always stops the run NAME in the "
        "same way; empty = no additional file",
    )
    seed: int = key(
        0,
        "seed of the initial weights, of the order of documents, and of their order inside a "
        "micro-batch",
        at_least=0,
        at_most=2**64 - 1,
    )
    device: Device = key(
        Device.AUTO, "device of the ranks; auto = CUDA if every rank has a GPU, otherwise the CPU"
    )

    @property
    def stores_dir(self) -> Path:
        """Folder of token stores built from data.corpus; all runs in output_dir share it."""
        return Path(self.output_dir, "stores")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSpec:
    """Section [parallel]: degrees of the parallel axes.

    Ranks are numbered with TP as the innermost axis, then CP, PP and DP.
    """

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
        "expert-parallel degree: number of consecutive ranks (in dp x cp x tp order) over which "
        "the experts of a layer (model.experts) are divided; must divide dp x cp x tp, and, if "
        "fsdp.shard_size is set, shard_size x tp, the ranks of one copy of the parameters",
        unit="ranks",
        at_least=1,
        at_most=65_536,
    )

    @property
    def model_ranks(self) -> int:
        """Ranks of one pipeline: tp x cp x pp."""
        return self.tp * self.cp * self.pp

    @property
    def fsdp_size(self) -> int:
        """Ranks that reduce the gradients of a stage together: dp x cp.

        An unknown dp (0) counts as 1.
        """
        return self.cp * max(1, self.dp)

    @property
    def pipelines_per_ep_group(self) -> int:
        """Number of consecutive pipelines whose ranks share EP groups.

        A pipeline has cp * tp ranks in each stage, and an EP group has `ep` consecutive ranks in
        dp x cp x tp order. If a group spans several pipelines, these pipelines wait for each
        other in every layer with experts.
        """
        return math.lcm(self.ep, self.cp * self.tp) // (self.cp * self.tp)

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold a stage's experts, in all EP groups: dp x cp x tp.

        An unknown dp (0) counts as 1.
        """
        return self.tp * self.fsdp_size

    @property
    def world_size(self) -> int:
        """Ranks of the layout. An unknown dp (0) counts as 1."""
        return self.model_ranks * max(1, self.dp)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSection:
    """Section [pp]: schedule and stages of a pipeline."""

    schedule: Schedule = key(
        Schedule.INTERLEAVED_1F1B,
        "order of forward and backward passes; the interleaved ones allow virtual_stages above 1, "
        "and interleaved_zero_bubble also fills idle time with separate weight-gradient passes",
    )
    virtual_stages: int = key(
        1,
        "virtual stages (model chunks) per pipeline rank; more than 1 needs an interleaved "
        "schedule",
        at_least=1,
        at_most=1000,
    )
    stage_layers: tuple[int, ...] = key(
        (),
        "number of decoder layers of each stage, from the first stage to the last; fewer in the "
        "last stage, for example, make up for the time of the output head; only the first and the "
        "last stage may have 0; empty = the same number in each stage",
        at_least=0,
        at_most=10_000,
    )
    weight_delay: int = key(
        1,
        "with schedule = interleaved_zero_bubble: pipeline rank r delays weight gradients by r "
        "times this many passes; 1 = torch's ZB1P order; a larger number may shorten steps if "
        "attention takes long",
        at_least=1,
        at_most=1000,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CpSection:
    """Section [cp]: overlap of attention with the exchange of keys and values between CP ranks."""

    overlap_stages: int = key(
        0,
        "number of parts in which a rank receives the keys and values of other CP ranks; while a "
        "part travels, the rank computes attention to the keys that it has already (first its "
        "own); each part costs a kernel launch and copies, so use 1 within a node (more may help "
        "between nodes); 0 = no overlap: attention in one call after the whole exchange",
        at_least=0,
        at_most=64,
    )

    @property
    def overlap(self) -> bool:
        """Whether a CP rank attends to local keys while keys of other ranks travel."""
        return self.overlap_stages > 0

    @property
    def stages(self) -> int:
        """Number of parts in which the keys of a micro-batch are exchanged; 1 without overlap."""
        return max(1, self.overlap_stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """Section [data]: documents of a run, context window and global batch."""

    store: str = key(
        "",
        "path prefix of a token store, without .bin and .idx; empty = a store built from "
        "data.corpus",
    )
    blend: tuple[str, ...] = key(
        (),
        'token stores to mix, instead of data.store: a list of "PREFIX:WEIGHT", in which a weight '
        "is the store's share of the tokens; a store that is too small for its weight is repeated",
    )
    heldout_store: str = key(
        "",
        "path prefix of the token store for evaluation, used only with data.store or data.blend; "
        "empty = no evaluation",
    )
    corpus: str = key(
        "stdlib",
        'text to train on: "stdlib" (source code of Python\'s standard library), "docstrings" '
        "(chat conversations made from the docstrings in that code) or a folder of UTF-8 files",
    )
    bpe_vocab_size: int = key(
        4096,
        "vocabulary size of the byte-level BPE trained on data.corpus",
        at_least=300,
        at_most=10**6,
    )
    heldout_fraction: float = key(
        0.03,
        "share of documents held out for evaluation, below 0.5; 0 = none",
        at_least=0,
        below=0.5,
    )
    context_window: int = key(
        4096,
        "C: length of a context window and of the longest piece of a document; a global batch "
        "has num_windows * context_window tokens",
        unit="tokens",
        at_least=2,
        at_most=2**30,
    )
    num_windows: int = key(
        0,
        "N: number of context windows in a global batch; a step also has N micro-batches over all "
        "pipelines, unless packing.num_micro_batches is set; 0 = pp * dp",
        at_least=0,
        at_most=2**17,
    )
    epochs: int = key(
        0,
        "epochs over the token store; with data.blend, the run ends once every store was read this "
        "many times; 0 = as many as training.steps requires",
        at_least=0,
        at_most=10**6,
    )
    row_multiple: int = key(
        1,
        "each rank's rows of a micro-batch are padded to a multiple of this number (use 128 on "
        "GPUs)",
        unit="tokens",
        at_least=1,
        at_most=65_536,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSection:
    """Section [planner]: what the planner predicts in addition to the steps of the run."""

    baseline: bool = key(
        True,
        "also predict the times of steps that the usual loader would make, so that the run can "
        "report savings; the usual loader cuts documents wherever a window ends",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSection:
    """Section [cost]: how the times of kernels, collectives and experts are predicted."""

    profile: str = key(
        "auto",
        "kernel profile: name of a profile that comes with wlb, path of a .json file, or auto = "
        "the profile for the device",
    )
    expert_load: float = key(
        1.0,
        "expected load of the busiest rank of an EP group: the number of rows that its experts "
        "process in a layer, divided by the mean over the group; predicted times and memory of "
        "experts are multiplied by it; 1 = equal loads; take the measured load from a run's "
        "summary (load of ranks) or metrics.jsonl (experts.rank), also if the profile is from "
        "--calibrate, because it does not contain the load",
        at_least=1,
        at_most=4096,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSection:
    """Section [kernels]: kernels that ranks call."""

    attention: AttentionBackend = key(
        AttentionBackend.AUTO,
        "attention kernel; auto = the fastest installed kernel that supports the run",
    )
    deterministic: bool = key(
        False,
        "deterministic backward of attention on GPUs, so that repeated runs are bitwise identical "
        "(attention on CPUs is always deterministic); slower, and FlashAttention-2 allocates up to "
        "ceil(SMs / heads) more float32 copies of dQ",
    )
    fused: FusedKernels = key(
        FusedKernels.AUTO,
        "fused kernels, which read and write memory once (plain torch up to 11 times), for RoPE, "
        "SwiGLU, GeGLU, RMSNorm and, with CP, for adding up the key gradients of all ranks; auto = "
        "triton on GPUs if Triton is installed, otherwise off; off = plain torch",
    )
    linear: LinearBackend = key(
        LinearBackend.AUTO,
        "implementation of the recurrence of linear layers (model.linear); auto = "
        "flash_linear_attention on GPUs if this package is installed and supports the run, "
        "otherwise torch; torch launches many small kernels",
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
        """N, the number of context windows in a global batch; pp x dp by default (Section 7.1)."""
        return self.data.num_windows or self.parallel.pp * max(1, self.parallel.dp)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step over all pipelines: M if [packing] sets it, otherwise N."""
        return self.packing.num_micro_batches or self.num_windows

    @property
    def micro_batches_per_pipeline(self) -> int:
        """Micro-batches of a step per pipeline."""
        return self.num_micro_batches // max(1, self.parallel.dp)

    @property
    def s_max(self) -> int:
        """S_max, the most tokens that a micro-batch may have."""
        return self.packing.s_max_tokens(self.data.context_window)

    @property
    def queue_thresholds(self) -> tuple[int, ...]:
        """L_i, the length of the shortest document in each outlier queue, in tokens."""
        return self.packing.thresholds_tokens(self.data.context_window)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch: N x C."""
        return self.num_windows * self.data.context_window

    def loss_scale(self, num_targets: int) -> float:
        """Return the factor by which the summed loss of a step is multiplied.

        Args:
            num_targets: Number of tokens in the step whose prediction counts in the loss.
        """
        if self.training.loss_normalizer == LossNormalizer.CONSTANT:
            return 1.0 / self.tokens_per_step
        return 1.0 / max(1, num_targets)

    @property
    def shard_size(self) -> int:
        """Ranks over which one copy of a stage's parameters is sharded.

        An unknown parallel.dp (0) counts as 1.
        """
        return self.fsdp.shard_size or self.parallel.fsdp_size

    @property
    def num_stages(self) -> int:
        """Number of stages of a pipeline: pp x virtual_stages."""
        return self.parallel.pp * self.pp.virtual_stages

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule computes weight gradients in separate passes."""
        is_split = self.pp.schedule == Schedule.INTERLEAVED_ZERO_BUBBLE
        return self.parallel.pp > 1 and is_split

    def stages_of(self, pp_rank: int) -> range:
        """Return the stages of a pipeline rank: pp_rank, pp_rank + pp, ..."""
        return range(pp_rank, self.num_stages, self.parallel.pp)

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Number of decoder layers of each stage."""
        even = (self.model.num_layers // self.num_stages,) * self.num_stages
        return self.pp.stage_layers or even

    @property
    def stage_kind_layers(self) -> tuple[tuple[int, ...], ...]:
        """Number of decoder layers of each kind in each stage, shape [num_kinds][num_stages].

        Layers of one kind all have experts or all have an MLP, and all have linear attention or all
        have softmax attention. Kinds are in the order of `ModelSpec.layer_kinds`.
        """
        model, kinds = self.model, self.model.layer_kinds
        if len(kinds) == 1:
            return (self.stage_layers,)
        return tuple(
            self._count_by_stage(
                lambda i, kind=kind: (
                    (model.has_experts(i), model.is_linear(i)) == (kind.has_experts, kind.is_linear)
                )
            )
            for kind in kinds
        )

    @property
    def stage_expert_layers(self) -> tuple[int, ...]:
        """Number of decoder layers with experts in each stage."""
        share = self.model.num_expert_layers
        if share in (0, self.model.num_layers):
            return self.stage_layers if share else (0,) * self.num_stages
        return self._count_by_stage(self.model.has_experts)

    @property
    def stage_other_layers(self) -> tuple[int, ...]:
        """Number of layers in each stage that are linear or have a sliding window."""
        return self._count_by_stage(lambda layer: not self.model.sees_all(layer))

    @property
    def has_uneven_attention(self) -> bool:
        """Whether the share of linear or sliding-window layers differs between stages."""
        layers, others = self.model.num_layers, self.model.num_layers - self.model.num_full_layers
        if others in (0, layers):
            return False
        counts = zip(self.stage_other_layers, self.stage_layers, strict=True)
        return any(of_stage * layers != others * all_ for of_stage, all_ in counts)

    def _count_by_stage(self, is_counted: Callable[[int], bool]) -> tuple[int, ...]:
        stages = range(self.num_stages)
        return tuple(sum(map(is_counted, self.layers_of(stage))) for stage in stages)

    def layers_of(self, stage: int) -> range:
        """Return the decoder layers of a stage, counted from 0."""
        before = sum(self.stage_layers[:stage])
        return range(before, before + self.stage_layers[stage])

    @property
    def row_multiple(self) -> int:
        """Each rank's rows of a micro-batch are padded to a multiple of this number."""
        return row_multiple(self.parallel.tp, self.data.row_multiple)

    def to_dict(self) -> dict[str, Any]:
        """Return sections and keys as nested dicts of plain values, as in TOML."""
        return to_dict(self)

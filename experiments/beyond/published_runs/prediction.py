"""Simulates a published run and returns its throughput, where the time goes, and peak memory."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from experiments.beyond.published_runs.mapping import Mapped
from kernels_profile.derive import profile_of_variant, with_product_speed, with_speed
from wlb.cost import KernelProfile, RecomputedWork, workload_of
from wlb.memory.budget import ALLOCATOR_GAPS
from wlb.memory.estimate import layer_activation_bytes
from wlb.plan import Documents, GlobalBatch
from wlb.simulate import ShardedStep, Simulator, critical_path, planner_of
from wlb.simulate.critical import CP_IMBALANCE
from wlb.spec import RunSpec

GIB = 2**30
COMMUNICATION = (
    *("tp_comm", "cp_comm", "p2p", "parameter gather", "gradient reduction"),
    "sharded parameters",
)
"""Terms of the critical path that count as communication.

They are collectives, messages, and the computing time that is lost to collectives beside it.
"""
KERNELS = {"flash_2": "torch_varlen", "flash_3": "flash_attention_3", "triton_1": "torch_varlen"}
"""Attention table of a profile that prices each kernel. `triton_1` is scaled by triton_speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Constants that are fitted to the published runs."""

    # Throughput of matrix products in these runs over the profile's. A profile measures short
    # bursts on one GPU with today's libraries. A run is as fast as the slowest of many GPUs, under
    # a power limit that lowers clocks, with the libraries of its time.
    product_speed: float = 1.0
    # Seconds of computing that are lost for each second of FSDP collectives beside it.
    fsdp_slowdown: float = 0.0
    # Throughput of Triton's FlashAttention-1 with ALiBi over FlashAttention-2's.
    triton_speed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted throughput and memory of a published run."""

    case: Mapped
    tokens_per_s_gpu: float
    shares: Mapping[str, float]  # share of the critical path by its terms
    peak_gib: float  # peak memory that torch reserves: tensors and gaps between them

    @property
    def ratio(self) -> float:
        """Returns predicted over measured throughput."""
        return self.tokens_per_s_gpu / self.case.measured

    @property
    def attention_share(self) -> float:
        return self._share("attention", CP_IMBALANCE)

    @property
    def communication_share(self) -> float:
        return self._share(*COMMUNICATION)

    def _share(self, *names: str) -> float:
        return sum(self.shares.get(name, 0.0) for name in names)


def predict(case: Mapped, profile: KernelProfile, constants: Constants) -> Prediction:
    """Simulates one step of a run, priced by a profile and the fitted constants."""
    spec = case.spec
    cost = replace(
        workload_of(spec, priced(case, profile, constants)),
        backend=KERNELS[case.kernel],
        traffic=case.traffic,
        recomputed=case.recomputed,
    )
    execution = replace(case.execution, slowdown=constants.fsdp_slowdown)
    simulator = Simulator(spec=spec, cost=cost, fsdp=execution)
    planner = planner_of(spec, cost, [full_batch(case)])
    (plan,) = planner.steps()
    # All pipelines train the same, so one is sharded and repeated.
    pipelines = (planner.shard(plan, 0),) * spec.parallel.dp
    step = ShardedStep(plan=plan, pipelines=pipelines)
    simulation = simulator.run(simulator.price([step]))
    path = critical_path(simulation)
    seconds = float(simulation.step_time_s[0])
    return Prediction(
        case=case,
        tokens_per_s_gpu=spec.tokens_per_step / seconds / spec.parallel.world_size,
        shares={term: s / path.step_time_s for term, s in path.by_term.items()},
        peak_gib=peak_gib(case, int(simulation.peak_memory_bytes.max())),
    )


CHUNK_LOGIT_BYTES = 6
"""Memory of one logit in wlb's loss, which computes `training.loss_chunk` rows at a time."""
COMPUTE_BYTES = 2
"""Bytes of a value in bfloat16."""


def peak_gib(case: Mapped, own_bytes: int) -> float:
    """Returns the GiB that torch reserves in the source's trainer.

    The trainer differs from wlb in two ways: its loss computes all rows at once, and selective
    checkpointing by operator stores other activations.

    Args:
        case: The run.
        own_bytes: Peak memory of wlb's tensors for the same configuration.
    """
    spec, model = case.spec, case.spec.model
    rows = spec.data.context_window // spec.parallel.cp
    chunk = min(rows, spec.training.loss_chunk)
    logits = rows * case.logit_bytes - chunk * CHUNK_LOGIT_BYTES
    out = own_bytes + logits * model.vocab_size // spec.parallel.tp
    if case.recomputed:
        own_kept = layer_activation_bytes(spec, micro_batch_tokens=spec.data.context_window)
        out += model.num_layers * (kept_bytes(case.recomputed, spec) - own_kept)
    return float(out) / (1 - ALLOCATOR_GAPS) / GIB


def kept_bytes(recomputed: RecomputedWork, spec: RunSpec) -> int:
    """Returns the bytes of a layer's activations that are stored if backward recomputes others.

    Stored are the input of the layer, the result of attention, and the results of those matrix
    products (Q, K, V, O, gate, up and down projection) that `recomputed` does not list.
    """
    model, ffn = spec.model, spec.model.ffn_hidden_size
    key_dim = model.num_kv_heads * model.head_size
    widths = (model.q_dim, key_dim, key_dim, model.hidden_size, ffn, ffn, model.hidden_size)
    kept = sum(width for i, width in enumerate(widths) if i not in recomputed.matrices)
    rows = spec.data.context_window // spec.parallel.cp
    return COMPUTE_BYTES * rows * (model.hidden_size + model.q_dim + kept) // spec.parallel.tp


def priced(case: Mapped, profile: KernelProfile, constants: Constants) -> KernelProfile:
    """Returns the profile scaled to the run's GPU and attention kernel.

    FP8 matrix products are priced as BF16.
    """
    of_gpu = profile_of_variant(profile, case.gpu)
    of_gpu = with_product_speed(of_gpu, constants.product_speed)
    if case.kernel == "triton_1":
        tables = [with_speed(t, constants.triton_speed, t.provenance) for t in of_gpu.attention]
        of_gpu = replace(of_gpu, attention=tuple(tables))
    return of_gpu


def full_batch(case: Mapped) -> GlobalBatch:
    """Returns a global batch whose sequences are one full-length document each."""
    run = case.run
    lengths = np.full(run.mbs * run.ga * run.dp, run.seq, np.int64)
    return GlobalBatch(index=0, documents=Documents.from_lengths(lengths), is_last=True)

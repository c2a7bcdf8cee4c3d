"""Simulates a published run: tokens per second, where the time goes, peak memory."""

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
"""Terms of the critical path that are collectives and messages, and what they slow down."""
KERNELS = {"flash_2": "torch_varlen", "flash_3": "flash_attention_3", "triton_1": "torch_varlen"}
"""Table of the profile that prices each attention kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What is fitted to the runs, and not read from a profile or from a source's configuration."""

    # Throughput of matrix products in these runs over the profile's. A profile is made of short
    # bursts on one GPU with today's libraries; a run is as fast as the slowest of many GPUs, whose
    # power limit lowers their clocks, with the libraries of its time.
    product_speed: float = 1.0
    # Seconds that computing loses for each second of FSDP's collectives beside it.
    fsdp_slowdown: float = 0.0
    # Throughput of Triton's FlashAttention-1 with ALiBi over FlashAttention-2's.
    triton_speed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A simulated run."""

    case: Mapped
    tokens_per_s_gpu: float
    shares: Mapping[str, float]  # of the critical path, by term
    peak_gib: float  # that torch reserves: tensors, and gaps between them

    @property
    def ratio(self) -> float:
        """Predicted over measured throughput."""
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
    """Simulate one step of a run."""
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
    # All pipelines train equal micro-batches.
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
"""Bytes of one logit in wlb's loss, which takes some rows at a time."""
COMPUTE_BYTES = 2
"""Bytes of a value in bfloat16."""


def peak_gib(case: Mapped, own_bytes: int) -> float:
    """Memory that torch reserves in the trainer, from the peak of wlb's tensors on the same layout.

    Two things differ from wlb: the loss takes all rows at once, and checkpointing by operator keeps
    other values of a layer.
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
    """Bytes of a layer that forward keeps if backward computes `recomputed` again.

    They are the layer's input, attention's result, and the results of the products that are not
    computed again (of Q, K, V, O, gate, up and down projection).
    """
    model, ffn = spec.model, spec.model.ffn_hidden_size
    key_dim = model.num_kv_heads * model.head_size
    widths = (model.q_dim, key_dim, key_dim, model.hidden_size, ffn, ffn, model.hidden_size)
    kept = sum(width for i, width in enumerate(widths) if i not in recomputed.matrices)
    rows = spec.data.context_window // spec.parallel.cp
    return COMPUTE_BYTES * rows * (model.hidden_size + model.q_dim + kept) // spec.parallel.tp


def priced(case: Mapped, profile: KernelProfile, constants: Constants) -> KernelProfile:
    """The profile of the run's GPU and attention kernel. Products in FP8 are priced as in BF16."""
    of_gpu = profile_of_variant(profile, case.gpu)
    of_gpu = with_product_speed(of_gpu, constants.product_speed)
    if case.kernel == "triton_1":
        tables = [with_speed(t, constants.triton_speed, t.provenance) for t in of_gpu.attention]
        of_gpu = replace(of_gpu, attention=tuple(tables))
    return of_gpu


def full_batch(case: Mapped) -> GlobalBatch:
    """One global batch of full sequences, each one document."""
    run = case.run
    lengths = np.full(run.mbs * run.ga * run.dp, run.seq, np.int64)
    return GlobalBatch(index=0, documents=Documents.from_lengths(lengths), is_last=True)

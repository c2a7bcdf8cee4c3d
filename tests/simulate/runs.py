"""Plans and shards small runs that the simulator's tests share."""

from dataclasses import replace

from wlb.cost import ProfiledWorkload, load_profile
from wlb.data import GlobalBatches, LengthSource
from wlb.plan import GlobalBatch, int_array
from wlb.simulate import ShardedStep, Simulator, planner_of, sharded_steps
from wlb.spec import ModelSpec, ParallelSpec, Policy, RunSpec, Schedule, Strategy

MODEL = ModelSpec(
    vocab_size=1000,
    hidden_size=512,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    ffn_hidden_size=1408,
)
DEFAULT = RunSpec()
WINDOW = 4096


def spec_of(
    *,
    tp: int = 2,
    cp: int = 2,
    pp: int = 2,
    dp: int = 2,
    v: int = 1,
    n: int = 2,
    schedule: Schedule = Schedule.INTERLEAVED_1F1B,
) -> RunSpec:
    """Returns a run with n micro-batches per pipeline, each a window of 4,096 tokens."""
    return replace(
        DEFAULT,
        model=MODEL,
        parallel=ParallelSpec(tp=tp, cp=cp, pp=pp, dp=dp),
        pp=replace(DEFAULT.pp, schedule=schedule, virtual_stages=v),
        data=replace(DEFAULT.data, context_window=WINDOW, num_windows=n * dp),
        packing=replace(DEFAULT.packing, policy=Policy.ORIGINAL),
        sharding=replace(DEFAULT.sharding, strategy=Strategy.PER_DOCUMENT),
        planner=replace(DEFAULT.planner, baseline=False),
    )


def cost_of(spec: RunSpec, *, profile: str = "h100") -> ProfiledWorkload:
    return ProfiledWorkload(
        model=spec.model,
        parallel=spec.parallel,
        profile=load_profile(profile),
        micro_batch_tokens=spec.data.context_window,
        recompute=spec.training.recompute,
        tp_overlap=spec.cluster.tp_overlap,
    )


def batches_of(spec: RunSpec, lengths: list[int]) -> list[GlobalBatch]:
    """Returns global batches of documents with these lengths, in this order and without repeats."""
    source = GlobalBatches(
        LengthSource(name="given", lengths=int_array("lengths", lengths)),
        tokens_per_batch=spec.num_micro_batches * spec.data.context_window,
        seed=0,
        epochs=1,
        shuffle=False,
    )
    return [batch for batch, _ in source.iterate()]


def steps_of(spec: RunSpec, cost: ProfiledWorkload, lengths: list[int]) -> tuple[ShardedStep, ...]:
    planner = planner_of(spec, cost, batches_of(spec, lengths))
    return tuple(sharded_steps(planner, dp=spec.parallel.dp))


def made(spec: RunSpec, lengths: list[int]) -> tuple[Simulator, tuple[ShardedStep, ...]]:
    cost = cost_of(spec)
    return Simulator(spec=spec, cost=cost), steps_of(spec, cost, lengths)

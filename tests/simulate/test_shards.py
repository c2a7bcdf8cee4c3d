"""Tests sharded parameters, norm and optimiser: bytes by hand, and what hides behind passes."""

from dataclasses import replace

import numpy as np
import pytest

from tests.simulate.runs import cost_of, made, spec_of
from wlb.cost import Collective, Elementwise
from wlb.memory.estimate import stage_parameters
from wlb.simulate import FsdpExecution, Node, NodeKind, PassKind, Simulator
from wlb.simulate.shards import ShardCosts, fsdp_span, shard_costs
from wlb.spec import ExpertsSpec, FsdpSection, ParallelSpec, RunSpec, Schedule


def costs(spec: RunSpec) -> ShardCosts:
    return shard_costs(spec, cost_of(spec))


def of(spec: RunSpec, kind: NodeKind, *, stage: int = 0, rank: int = 0) -> int:
    return costs(spec).of(Node(kind, rank, stage))


def test_a_stage_of_four_layers_by_hand() -> None:
    """Layers have hidden 512, 8 and 4 heads of 64 and an MLP of 1,408, at tp 2.

    They are gathered in bfloat16 and reduced in float32 over dp 2 x cp 2 ranks, of which a node of
    8 holds two stages' cp ranks: 2.
    """
    spec = spec_of()  # pp 2, dp 2: 16 ranks on two nodes
    layer = 512 * (2 * 512 + 2 * 256) // 2 + 3 * 512 * 1408 // 2 + 2 * 512
    vocabulary = 1024 * 512 // 2
    first, last = 4 * layer + vocabulary, 4 * layer + vocabulary + 512
    assert [stage_parameters(spec, stage=s) for s in range(2)] == [first, last]
    found, profile = costs(spec), cost_of(spec).profile
    for count, gather_ns, reduce_ns in zip(
        (first, last), found.gather_ns, found.reduce_ns, strict=True
    ):
        for op, size, ns in (
            (Collective.ALL_GATHER, 2 * count, gather_ns),
            (Collective.REDUCE_SCATTER, 4 * count, reduce_ns),
        ):
            between = profile.collective(op, span_ranks=16)
            one = profile.collective(op, span_ranks=16, num_ranks=2)  # one member a node
            # Two links a node; 3 of 4 parts come from others; a collective a layer.
            wire = size * 3 / 4 / min(2 * one.bytes_per_s, between.bytes_per_s) * 1e9
            assert ns == pytest.approx(4 * one.alpha_ns + wire, abs=1)


@pytest.mark.parametrize(
    ("tp", "cp", "pp", "dp", "members"),
    [
        (8, 2, 4, 2, 1),  # a node is one tp group
        (2, 4, 4, 2, 4),  # a node is one stage
        (2, 2, 4, 2, 2),  # a node holds two stages
        (2, 1, 2, 4, 2),  # a node holds two pipelines
        (1, 16, 4, 2, 8),  # a stage is two nodes
    ],
)
def test_links_of_a_node_are_those_of_a_stages_ranks(tp, cp, pp, dp, members: int) -> None:
    span = fsdp_span(ParallelSpec(tp=tp, cp=cp, pp=pp, dp=dp), 8)
    assert span > 8
    assert dp * cp * 8 // span == members


@pytest.mark.parametrize(("tp", "cp", "pp", "dp"), [(2, 4, 4, 1), (2, 2, 1, 2), (1, 2, 2, 2)])
def test_a_group_inside_a_node(tp: int, cp: int, pp: int, dp: int) -> None:
    assert fsdp_span(ParallelSpec(tp=tp, cp=cp, pp=pp, dp=dp), 8) <= 8


@pytest.mark.parametrize(
    ("pp", "schedule", "gathered", "reduced"),
    [
        (1, Schedule.INTERLEAVED_1F1B, 8, 8),
        (2, Schedule.ONE_F_ONE_B, 4, 1),
        # torch's pipeline runtime gathers a stage whole, also where it is a rank's only one.
        (2, Schedule.INTERLEAVED_1F1B, 1, 1),
        (2, Schedule.INTERLEAVED_ZERO_BUBBLE, 1, 1),
    ],
)
def test_what_hides_behind_passes(pp: int, schedule: Schedule, gathered: int, reduced: int) -> None:
    spec = spec_of(pp=pp, schedule=schedule)
    found = costs(spec)
    assert of(spec, NodeKind.GATHER) == found.gather_ns[0] // gathered
    assert of(spec, NodeKind.REDUCE) == found.reduce_ns[0] // reduced
    whole = of(spec, NodeKind.GATHER) + of(spec, NodeKind.PREFETCH)
    assert whole == found.gather_ns[0]
    assert of(spec, NodeKind.REDUCE) + of(spec, NodeKind.REDUCE_AHEAD) == found.reduce_ns[0]


def test_adamw_moves_seven_float32_values_a_parameter_of_the_shard() -> None:
    spec = spec_of()
    speed = cost_of(spec).profile.elementwise_of(Elementwise.RESIDUAL).forward_bytes_per_s
    for rank in range(2):
        shard = stage_parameters(spec, stage=rank) / 4
        expected = 7 * 4 * shard / speed * 1e9
        assert of(spec, NodeKind.OPTIMIZER, rank=rank) == pytest.approx(expected, abs=1)


def test_the_norm_reads_the_largest_shard_and_meets_everybody() -> None:
    spec = spec_of()
    profile = cost_of(spec).profile
    speed = profile.elementwise_of(Elementwise.RESIDUAL).forward_bytes_per_s
    reduce = profile.collective(Collective.ALL_REDUCE, span_ranks=16)
    shard = stage_parameters(spec, stage=1) / 4
    expected = 4 * shard / speed * 1e9 + reduce.time_ns(4, num_ranks=16)
    assert of(spec, NodeKind.NORM) == pytest.approx(expected, abs=1)


def test_one_rank_has_nobody_to_gather_from() -> None:
    alone = spec_of(tp=1, cp=1, pp=1, dp=1)
    assert alone.parallel.fsdp_size == 1
    found = costs(alone)
    assert (found.gather_ns, found.reduce_ns) == ((0,), (0,))
    assert found.optimizer_ns[0] > 0
    simulator, _ = made(alone, [4096] * 2)
    kinds = {node.kind for node in simulator.graph.nodes}
    assert kinds == {NodeKind.PASS, NodeKind.NORM, NodeKind.OPTIMIZER, NodeKind.OVERHEAD}


def test_more_pipelines_share_the_optimizer() -> None:
    two, four = (spec_of(dp=dp) for dp in (2, 4))
    assert of(two, NodeKind.OPTIMIZER) == pytest.approx(2 * of(four, NodeKind.OPTIMIZER), rel=1e-3)
    wide = replace(two, parallel=replace(two.parallel, tp=4))
    assert of(wide, NodeKind.OPTIMIZER) < of(two, NodeKind.OPTIMIZER)


def priced(execution: FsdpExecution, **changed: object) -> ShardCosts:
    """A stage of 4 layers whose gathers take 40 ns and whose reductions take 80 ns."""
    made = ShardCosts(
        gather_ns=(40,),
        reduce_ns=(80,),
        norm_ns=1,
        optimizer_ns=(1,),
        gather_parts=(4,),
        reduce_parts=(4,),
        layers=(4,),
        copy_ns=((3.0, 5.0),),
        reshards=True,
        execution=execution,
    )
    return replace(made, **changed)


@pytest.mark.parametrize(
    ("kind", "reduces", "computes_ns", "expected"),
    [
        # One gather of 10 ns before the first layer; three hide behind layers of 100 ns.
        (PassKind.FORWARD, False, 400, 400 + 10 + 3),
        # Layers of 4 ns hide 4 of each of the three others' 10 ns.
        (PassKind.FORWARD, False, 16, 16 + 10 + 3 * 6 + 3),
        # Backward: the first gather and the last reduction are waited for.
        (PassKind.BACKWARD, True, 400, 400 + 10 + 20 + 3 + 5),
        (PassKind.BACKWARD, False, 400, 400 + 10 + 3),
        # Each layer of 16 ns hides as much of the others' 10 + 20 ns.
        (PassKind.BACKWARD, True, 64, 64 + 10 + 20 + 3 * 14 + 3 + 5),
        # The weights' pass of a split backward needs no parameters.
        (PassKind.BACKWARD_WEIGHT, True, 400, 400 + 20 + 5),
    ],
)
def test_a_pass_that_gathers_its_layers(kind, reduces, computes_ns: int, expected: int) -> None:
    found = priced(FsdpExecution(slowdown=0.0)).pass_ns(
        np.array([computes_ns]), 0, kind, reduces=reduces
    )
    assert found.tolist() == [expected]


def test_backward_without_prefetch_waits_for_every_gather() -> None:
    late = priced(FsdpExecution(prefetches_backward=False, slowdown=0.0), copy_ns=((0.0, 0.0),))
    computes = np.array([400])
    backward = late.pass_ns(computes, 0, PassKind.BACKWARD, reduces=True)
    assert backward.tolist() == [400 + 4 * 10 + 20]
    assert late.pass_ns(computes, 0, PassKind.FORWARD, reduces=False).tolist() == [400 + 10]


def test_hidden_collectives_slow_down_what_hides_them() -> None:
    slow = priced(FsdpExecution(slowdown=0.5), copy_ns=((0.0, 0.0),))
    computes = np.array([400])
    # 30 of 40 ns are hidden; in backward 90 of 120.
    assert slow.pass_ns(computes, 0, PassKind.FORWARD, reduces=False).tolist() == [410 + 15]
    assert slow.pass_ns(computes, 0, PassKind.BACKWARD, reduces=True).tolist() == [430 + 45]


def test_nodes_of_collectives_take_no_time_where_passes_gather() -> None:
    spec = replace(spec_of(pp=1), fsdp=FsdpSection(reshard_after_forward=True))
    kinds = (NodeKind.GATHER, NodeKind.PREFETCH, NodeKind.REDUCE, NodeKind.REDUCE_AHEAD)
    assert [of(spec, kind) for kind in kinds] == [0] * 4
    assert of(spec, NodeKind.OPTIMIZER) == of(spec_of(pp=1), NodeKind.OPTIMIZER) > 0
    alone = replace(spec_of(tp=1, cp=1, pp=1, dp=1), fsdp=spec.fsdp)
    assert not costs(alone).reshards


@pytest.mark.parametrize(("bytes_of", "reduced"), [(4, 1.0), (2, 0.5)])
def test_gradients_travel_in_their_own_dtype(bytes_of: int, reduced: float) -> None:
    spec = spec_of(pp=1)
    cost = cost_of(spec)
    plain = shard_costs(spec, cost)
    found = shard_costs(spec, cost, FsdpExecution(gradient_bytes=bytes_of, update_values=21))
    alpha = 8 * cost.profile.collective(Collective.REDUCE_SCATTER, span_ranks=8).alpha_ns
    expected = alpha + (plain.reduce_ns[0] - alpha) * reduced
    assert found.reduce_ns[0] == pytest.approx(expected, abs=4)
    assert found.gather_ns == plain.gather_ns
    assert found.optimizer_ns[0] == pytest.approx(3 * plain.optimizer_ns[0], abs=4)


def test_a_slowdown_is_a_share() -> None:
    with pytest.raises(ValueError, match="slowdown"):
        FsdpExecution(slowdown=1.5)


@pytest.mark.parametrize("pp", [1, 2])
def test_parameters_that_are_gathered_in_every_pass_take_longer(pp: int) -> None:
    """Two micro-batches: gathers of all passes but one are more, and reductions of the first."""
    spec = spec_of(pp=pp, schedule=Schedule.ONE_F_ONE_B)
    again = replace(spec, fsdp=FsdpSection(reshard_after_forward=True))
    times = [_step_s(s, FsdpExecution()) for s in (spec, again)]
    always = _step_s(again, FsdpExecution(reduces_every_pass=True))
    assert times[0] < times[1] < always


def _step_s(spec: RunSpec, execution: FsdpExecution) -> float:
    simulator, steps = made(spec, [4096] * 4)
    other = Simulator(spec=spec, cost=simulator.cost, fsdp=execution)
    return float(other.run(other.price(steps)).step_time_s.sum())


@pytest.mark.parametrize("ep", [0, 1, 2, 4])
def test_copies_of_parameters_add_up_their_shards(ep: int) -> None:
    """Two copies, each of a pipeline's two CP ranks at tp 2. A rank holds 8 / ep experts of each of
    its stage's 4 layers, and 4 / ep ranks of a copy hold the same.
    """
    spec = spec_of()  # pp 2, dp 2 x cp 2, tp 2: 16 ranks on two nodes
    assert costs(replace(spec, fsdp=FsdpSection(shard_size=4))) == costs(spec)
    held = 0
    if ep:
        moe = ExpertsSpec(num=8, hidden_size=64)
        model, parallel = replace(spec.model, experts=moe), replace(spec.parallel, ep=ep)
        spec, held = replace(spec, model=model, parallel=parallel), 8 // ep * 3 * 512 * 64
    spec = replace(spec, fsdp=FsdpSection(shard_size=2))
    found, profile = costs(spec), cost_of(spec).profile
    dense = stage_parameters(spec, stage=0) - 4 * held
    gather, scatter = (
        profile.collective(op, span_ranks=8)  # a node holds a copy
        for op in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    )
    add = profile.collective(Collective.ALL_REDUCE, span_ranks=16, num_ranks=2)
    equal = 4 // ep if ep else 1
    gathered = 4 * gather.time_ns(2 * dense / 4, num_ranks=2)
    gathered += 4 * gather.time_ns(2 * held, num_ranks=equal)
    assert found.gather_ns[0] == pytest.approx(gathered, abs=1)
    reduced = scatter.time_ns(4 * dense / 4, num_ranks=2) + add.time_ns(dense / 2, num_ranks=2)
    if ep:
        reduced += scatter.time_ns(4 * held, num_ranks=equal)
        reduced += add.time_ns(4 * held / equal, num_ranks=2)
    assert found.reduce_ns[0] == pytest.approx(4 * reduced, abs=1)

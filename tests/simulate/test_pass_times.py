"""Tests what passes and messages take: the cost model's sums, shares by hand, bad plans."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulate.runs import MODEL, WINDOW, cost_of, made, spec_of, steps_of
from wlb.cost import Collective, Scope, StageLayers, attention_latency, over_gather_ns, stage_times
from wlb.simulate import PassKind, Simulator, StepPrices
from wlb.simulate.pass_times import end_terms, linear_terms, message_scope, message_terms
from wlb.spec import ExchangeChoice, ParallelSpec, Recompute, RunSpec, Schedule, Strategy

ALIGNED = [WINDOW] * 4
MIXED = [4096, 3000, 1096, 2048, 2048, 1000, 3000, 96]
KINDS = {
    Schedule.ONE_F_ONE_B: (PassKind.FORWARD, PassKind.BACKWARD),
    Schedule.INTERLEAVED_1F1B: (PassKind.FORWARD, PassKind.BACKWARD),
    Schedule.INTERLEAVED_ZERO_BUBBLE: (
        PassKind.FORWARD,
        PassKind.BACKWARD_INPUT,
        PassKind.BACKWARD_WEIGHT,
    ),
}


def of_stages(prices: StepPrices, num: int) -> StepPrices:
    """Returns prices of this many stages like the first.

    Of three stages the second has no ends.
    """
    return replace(prices, kind_layers=(prices.layers[:1] * num,))


def middle_ns(prices: StepPrices, kinds) -> np.ndarray:
    """Returns the times of all passes of a stage without ends, shape [steps, dp, n]."""
    return sum(of_stages(prices, 3).pass_ns(kind, stage=1) for kind in kinds)


@pytest.mark.parametrize("v", [1, 2])
def test_stages_add_up_to_what_the_planner_prices(v: int) -> None:
    """V stages of a rank have W_l, attention of the slowest CP rank, and a micro-batch's fixed
    cost.
    """
    spec = spec_of(v=v)
    simulator, steps = made(spec, ALIGNED)
    prices = simulator.price(steps)
    work = v * middle_ns(prices, KINDS[spec.pp.schedule])
    cost = simulator.cost
    (step,) = steps
    for d, pipeline in enumerate(step.pipelines):
        for i, sharding in enumerate(pipeline.shardings):
            expected = (
                cost.linear_ns([sharding.num_tokens])[0]
                + attention_latency(sharding, cost).slowest_kernels_ns
                + sum(cost.linear.call_ns)
            )
            assert work[0, d, i] == pytest.approx(expected, abs=4 * v + 4)


@pytest.mark.parametrize("exchange", ExchangeChoice)
def test_passes_are_the_stage_times_that_telemetry_compares_with(exchange: ExchangeChoice) -> None:
    spec = spec_of(v=2)
    spec = replace(spec, sharding=replace(spec.sharding, exchange=exchange))
    simulator, steps = made(spec, ALIGNED)
    prices = simulator.price(steps)
    for d, pipeline in enumerate(steps[0].pipelines):
        layers = spec.stage_layers[1]
        times = stage_times(pipeline, simulator.cost, StageLayers(counts=(layers,)))
        for kind, attention, linear in (
            (PassKind.FORWARD, times.attention_forward_ns, times.linear_forward_ns),
            (PassKind.BACKWARD, times.attention_backward_ns, times.linear_backward_ns),
        ):
            # Prices are of whole nanoseconds a layer.
            assert np.abs(prices.attention_ns(kind, 1)[0, d] - attention).max() <= layers
            assert np.abs(prices.linear_ns(kind, 1)[0, d] - linear).max() <= 2


def test_attention_of_many_steps_at_once_is_that_of_one_plan() -> None:
    simulator, steps = made(spec_of(cp=4, v=2), MIXED * 3)
    prices = simulator.price(steps)
    layers = simulator.cost.num_layers_per_rank
    for s, step in enumerate(steps):
        for d, pipeline in enumerate(step.pipelines):
            for i, sharding in enumerate(pipeline.shardings):
                alone = attention_latency(sharding, simulator.cost)
                assert np.array_equal(
                    prices.attention_forward_ns[s, d, i], alone.forward_ns // layers
                )
                assert np.array_equal(
                    prices.attention_backward_ns[s, d, i], alone.backward_ns // layers
                )


def test_a_pass_waits_for_its_slowest_context_parallel_rank() -> None:
    simulator, steps = made(spec_of(), ALIGNED)
    prices = simulator.price(steps)
    uneven = prices.attention_forward_ns.copy()
    uneven[0, 0, 0] = [10_000, 70_000]
    changed = replace(prices, attention_forward_ns=uneven)
    linear = prices.linear_ns(PassKind.FORWARD, stage=1)[0, 0, 0]
    passes = changed.pass_ns(PassKind.FORWARD, stage=1)
    assert passes[0, 0, 0] == round(prices.layers[1] * 70_000 + linear)


def test_a_pass_takes_its_own_exchange_of_keys() -> None:
    """By need it differs from one with all-gathers by `over_gather_ns`, with padding."""
    spec = spec_of(cp=4, v=2)
    spec = replace(spec, sharding=replace(spec.sharding, strategy=Strategy.PER_SEQUENCE))
    needed = replace(spec, sharding=replace(spec.sharding, exchange=ExchangeChoice.NEEDED))
    simulator, gathers = made(spec, MIXED)
    _, steps = made(needed, MIXED)
    cost, prices, plain = simulator.cost, simulator.price(steps), simulator.price(gathers)
    layers = cost.num_layers_per_rank
    assert (prices.exchange_forward_ns < 0).any()
    assert not plain.exchange_forward_ns.any()
    for d, pipeline in enumerate(steps[0].pipelines):
        for i, sharding in enumerate(pipeline.shardings):
            rows = pipeline.local_tokens[i] * 4
            for k, kind in enumerate((PassKind.FORWARD, PassKind.BACKWARD)):
                over = round(over_gather_ns(sharding, cost, num_rows=rows)[k] / layers)
                passes = [p.linear_ns(kind, stage=1)[0, d, i] for p in (prices, plain)]
                assert passes[0] - passes[1] == pytest.approx(over * prices.layers[1])
    assert not prices.exchange_ns(PassKind.BACKWARD_WEIGHT, 1).any()


def test_filler_is_computed_too() -> None:
    """1 token on two CP ranks of 128 rows each has linear work of 256."""
    spec = spec_of(n=2, dp=1)
    spec = replace(spec, data=replace(spec.data, row_multiple=128))
    simulator, steps = made(spec, [1])
    assert simulator.price(steps).tokens.tolist() == [[[256, 256]]]  # the other one is empty


@pytest.mark.parametrize("how", list(Recompute))
@pytest.mark.parametrize("overlap", [0.0, 0.25])
def test_split_backward_is_backward_and_two_gathers_more(how: Recompute, overlap: float) -> None:
    """A layer's weights' pass gathers four [tokens, hidden], two of them backward would have."""
    whole, split = (spec_of(v=2, schedule=s) for s in (Schedule.INTERLEAVED_1F1B, ZERO_BUBBLE))
    specs = [with_(s, how, overlap) for s in (whole, split)]
    plain, apart = (linear_terms(s, cost_of(s).linear) for s in specs)
    backward, inputs, weights = (
        plain[PassKind.BACKWARD],
        apart[PassKind.BACKWARD_INPUT],
        apart[PassKind.BACKWARD_WEIGHT],
    )
    cost = cost_of(specs[0])
    gather = cost.profile.collective(Collective.ALL_GATHER, span_ranks=2)
    wire = gather.wire_ns(512 * 2 / 2, num_ranks=2)  # bfloat16 over cp = 2
    for name in ("gemm", "elementwise", "cp_comm"):
        parts = inputs.per_token[name] + weights.per_token.get(name, 0.0)
        assert parts == pytest.approx(backward.per_token[name])
    more = inputs.per_token["tp_comm"] + weights.per_token["tp_comm"]
    expected = backward.per_token["tp_comm"] + 2 * wire * (1 - overlap)
    assert more == pytest.approx(expected)
    calls = inputs.call_ns + weights.call_ns - backward.call_ns
    assert calls == pytest.approx(2 * gather.alpha_ns)
    assert apart[PassKind.FORWARD] == plain[PassKind.FORWARD]


ZERO_BUBBLE = Schedule.INTERLEAVED_ZERO_BUBBLE


def with_(spec: RunSpec, how: Recompute, overlap: float) -> RunSpec:
    return replace(
        spec,
        training=replace(spec.training, recompute=how),
        cluster=replace(spec.cluster, tp_overlap=overlap),
    )


def test_tp_overlap_hides_its_share_of_bandwidth_and_no_latency() -> None:
    none, half = (with_(spec_of(), Recompute.NONE, share) for share in (0.0, 0.5))
    before, after = (linear_terms(s, cost_of(s).linear) for s in (none, half))
    for kind in (PassKind.FORWARD, PassKind.BACKWARD):
        assert after[kind].per_token["tp_comm"] == before[kind].per_token["tp_comm"] / 2
        assert after[kind].per_token["gemm"] == before[kind].per_token["gemm"]
        assert after[kind].call_ns == before[kind].call_ns


def test_embedding_and_head_are_at_the_ends() -> None:
    spec = spec_of()
    simulator, steps = made(spec, ALIGNED)
    prices = simulator.price(steps)
    cost = simulator.cost
    first, middle, last, only = (
        [of_stages(prices, num).linear_ns(kind, stage)[0, 0, 0] for kind in KINDS[ONE_F]]
        for num, stage in ((3, 0), (3, 1), (3, 2), (1, 0))
    )
    wire, alpha = {}, {}
    for op in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
        found = cost.profile.collective(op, span_ranks=2)
        # 4,096 tokens of 512 bfloat16 values, half of them on a CP rank.
        wire[op] = found.wire_ns(WINDOW * 512 * 2 / 2, num_ranks=2)
        alpha[op] = found.alpha_ns
    gather, scatter = (wire[op] + alpha[op] for op in wire)
    embedding = [WINDOW * ns for ns in cost.linear.embedding_ns_per_token]
    head = WINDOW * cost.linear.head_ns_per_token
    assert first[0] - middle[0] == pytest.approx(embedding[0] + scatter)
    assert first[1] - middle[1] == pytest.approx(embedding[1] + gather)
    assert last[0] - middle[0] == pytest.approx(head + gather + scatter)
    assert last[1] - middle[1] == pytest.approx(cost.linear.head_backward_ns)
    for kind in range(2):
        assert only[kind] == pytest.approx(first[kind] + last[kind] - middle[kind])


ONE_F = Schedule.ONE_F_ONE_B


def test_the_weights_pass_has_no_ends_and_no_attention() -> None:
    simulator, steps = made(spec_of(schedule=ZERO_BUBBLE), ALIGNED)
    prices = simulator.price(steps)
    weight = PassKind.BACKWARD_WEIGHT
    passes = [of_stages(prices, 3).pass_ns(weight, stage) for stage in range(3)]
    assert np.array_equal(passes[0], passes[1])
    assert np.array_equal(passes[1], passes[2])
    assert not prices.attention_ns(weight, 1).any()


def test_one_tensor_parallel_rank_sends_nothing() -> None:
    cost = cost_of(spec_of(tp=1))
    terms = [*linear_terms(spec_of(tp=1), cost.linear).values(), *end_terms(cost).values()]
    assert all(not t.per_token.get("tp_comm", 0.0) for t in terms)
    alone = cost_of(spec_of(tp=1, cp=1))
    for t in linear_terms(spec_of(tp=1, cp=1), alone.linear).values():
        assert not t.per_token["cp_comm"]


def test_a_message_is_the_rows_of_a_rank() -> None:
    """4,096 tokens over cp 2 and tp 2 are 1,024 rows of 512 bfloat16 values, 1 MiB."""
    spec = spec_of()
    cost = cost_of(spec)
    terms = message_terms(spec, cost)
    for scope, span in ((Scope.INTRA_NODE, 2), (Scope.INTER_NODE, 16)):
        p2p = cost.profile.collective(Collective.P2P, span_ranks=span)
        expected = p2p.alpha_ns + 2**20 / p2p.bytes_per_s * 1e9
        found = terms[scope].per_token["p2p"] * WINDOW + terms[scope].call_ns
        assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("tp", "cp", "inside"),
    [(2, 2, [True, False, True, False]), (8, 1, [False] * 4), (1, 1, [True] * 4)],
)
def test_messages_cross_nodes_where_stages_lie_in_two(tp: int, cp: int, inside: list[bool]) -> None:
    """Four stages on nodes of 8 are two per node at 4 ranks per stage, so every other message
    leaves.
    """
    parallel = ParallelSpec(tp=tp, cp=cp, pp=4)
    hops = [(0, 1), (1, 2), (3, 2), (3, 0)]
    scopes = [message_scope(parallel, a, b, node=8) == Scope.INTRA_NODE for a, b in hops]
    assert scopes == inside


def test_evened_out_prices_have_the_same_work() -> None:
    simulator, steps = made(spec_of(cp=4), MIXED * 3)
    prices = simulator.price(steps)
    even = prices.balanced()
    for name in ("tokens", "attention_forward_ns", "attention_backward_ns"):
        before, after = (getattr(p, name).reshape(len(steps), -1) for p in (prices, even))
        assert np.abs(before.sum(1) - after.sum(1)).max() <= before.shape[1]  # rounding
        assert (after == after[:, :1]).all()
    # Of equal micro-batches only CP ranks are evened out, which makes nothing slower.
    simulator, steps = made(spec_of(cp=4), ALIGNED)
    prices = simulator.price(steps)
    slow, fast = (simulator.run(p).step_time_s for p in (prices, prices.balanced()))
    assert (fast <= slow).all()


@given(st.lists(st.integers(1, WINDOW), min_size=1, max_size=40), st.sampled_from((1, 2, 4)))
def test_work_of_any_documents_is_that_of_its_micro_batches(lengths, cp: int) -> None:
    spec = spec_of(cp=cp, dp=1, tp=1)
    simulator, steps = made(spec, lengths)
    prices = simulator.price(steps)
    assert (prices.attention_forward_ns >= 0).all()
    assert int(prices.tokens.sum()) >= sum(lengths)
    found = [s.num_tokens for step in steps for p in step.pipelines for s in p.shardings]
    assert sum(found) == sum(lengths)


def test_plans_of_another_layout_are_refused() -> None:
    simulator, _ = made(spec_of(), ALIGNED)
    for other, words in (
        (spec_of(dp=1), r"have \[2\] micro-batches with cp = 2, but the run has 2 pipelines of 2"),
        (spec_of(n=4), r"have \[4, 4\] micro-batches"),
        (
            spec_of(cp=1),
            "with cp = 1, but the run has 2 pipelines of 2 micro-batches each with cp = 2",
        ),
    ):
        steps = steps_of(other, cost_of(other), ALIGNED)
        with pytest.raises(ValueError, match=words):
            simulator.price(steps)


def test_specs_that_cannot_be_simulated_are_refused() -> None:
    spec = spec_of()
    cost = cost_of(spec)
    without = replace(spec, model=replace(MODEL, vocab_size=0))
    undecided = replace(spec, parallel=replace(spec.parallel, dp=0))
    for bad, words in (
        (without, "model.vocab_size is 0"),
        (undecided, "parallel.dp = 0"),
        (spec_of(cp=1), "another model or layout"),
        (
            replace(spec, pp=replace(spec.pp, virtual_stages=8)),
            "must be at least pp 2 x virtual stages 8",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            Simulator(spec=bad, cost=cost)

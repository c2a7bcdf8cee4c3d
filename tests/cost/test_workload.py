"""Tests W_a(d) + W_l(d): literal values, additivity, monotonicity, what is and is not priced."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models import LLAMA2_7B as MODEL
from wlb.cost import (
    Collective,
    Elementwise,
    FlopsWorkload,
    ProfiledWorkload,
    WorkloadModel,
    exchange_ns,
    load_profile,
    mismatches,
    rows_of_layer,
    workload_for,
    workload_of,
)
from wlb.cost.flops import linear_flops_per_token, rank_model
from wlb.cost.mismatch import extrapolated
from wlb.plan import KeyExchange, rows_moved
from wlb.sharding.paper import per_sequence
from wlb.spec import AttentionBackend, ModelSpec, ParallelSpec, Recompute, RunSpec, load

SMALL = ModelSpec(hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, ffn_hidden_size=192)
LAYOUTS = {
    "h100-cp1": ("h100", MODEL, ParallelSpec(tp=1, cp=1, pp=1)),
    "h100-cp2": ("h100", MODEL, ParallelSpec(tp=8, cp=2, pp=4)),
    "h100-cp3": ("h100", MODEL, ParallelSpec(tp=2, cp=3, pp=2)),
    "h100-cp8": ("h100", MODEL, ParallelSpec(tp=4, cp=8, pp=2)),
    "cpu-cp1": ("cpu", SMALL, ParallelSpec(tp=1, cp=1, pp=1)),
    "cpu-cp2": ("cpu", SMALL, ParallelSpec(tp=2, cp=2, pp=2)),
}


def make(name: str) -> ProfiledWorkload:
    profile, model, parallel = LAYOUTS[name]
    return ProfiledWorkload(
        model=model, parallel=parallel, profile=load_profile(profile), micro_batch_tokens=16384
    )


WORKLOADS = {name: make(name) for name in LAYOUTS}
TERMS = ("gemm", "elementwise", "tp_comm", "cp_comm")
every_layout = pytest.mark.parametrize("work", WORKLOADS.values(), ids=LAYOUTS.keys())


def segments_ns(work: WorkloadModel, q, kv) -> np.ndarray:
    """Returns forward plus backward time of each segment."""
    forward, backward = work.segment_times_ns(q, kv)
    assert forward.dtype == backward.dtype == np.int64
    return forward + backward


def test_flops_workload_states_a_ratio_literally():
    work: WorkloadModel = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=10)
    lengths = np.array([0, 1, 3, 10])
    assert work.workload_ns(lengths).tolist() == [0, 11, 39, 200]
    assert work.attention_ns(lengths).tolist() == [0, 1, 9, 100]
    assert work.linear_ns(lengths).tolist() == [0, 10, 30, 100]
    # However a piece of 10 is cut, its segments add up to 100.
    assert segments_ns(work, [10], [10]).tolist() == [100]
    assert segments_ns(work, [4, 6], [4, 10]).tolist() == [16, 84]


@every_layout
def test_zero_is_free_and_terms_add_up(work):
    lengths = np.array([0, 1, 7, 128, 1000, 16384, 40000])
    terms = work.terms(lengths)
    assert list(terms) == [
        "attention_forward",
        "attention_backward",
        *(f"{term}_{p}" for term in TERMS for p in ("forward", "backward")),
    ]
    total = work.workload_ns(lengths)
    assert total.dtype == np.int64
    assert total[0] == 0
    assert np.array_equal(sum(terms.values()), total)
    assert np.array_equal(work.attention_ns(lengths) + work.linear_ns(lengths), total)
    assert (total[1:] > 0).all()
    assert work.workload_ns(np.zeros(0, np.int64)).size == 0


def test_norms_of_heads_are_priced_apart_where_the_profile_has_them():
    model = replace(MODEL, qk_norm=True)
    profile = load_profile("h100")
    assert Elementwise.HEAD_NORM not in {cost.op for cost in profile.elementwise}
    norm = profile.elementwise_of(Elementwise.NORM)
    assert profile.elementwise_of(Elementwise.HEAD_NORM) == norm
    slow = replace(norm, op=Elementwise.HEAD_NORM, forward_bytes_per_s=norm.forward_bytes_per_s / 4)
    took = []
    for elementwise in (profile.elementwise, (*profile.elementwise, slow)):
        work = ProfiledWorkload(
            model=model,
            parallel=ParallelSpec(),
            profile=replace(profile, elementwise=elementwise),
            micro_batch_tokens=16384,
        )
        took.append(int(work.terms(np.array([16384]))["elementwise_forward"][0]))
    values = 2 * (model.q_dim + model.kv_dim) * 16384 * model.num_layers
    more_ns = 3 * values * 2 / norm.forward_bytes_per_s * 1e9 * profile.layer.forward_factor
    assert took[1] - took[0] == pytest.approx(more_ns, rel=1e-3)


@every_layout
def test_monotone_over_every_length(work):
    lengths = np.arange(20000)
    for values in (work.attention_ns(lengths), work.linear_ns(lengths)):
        assert (np.diff(values) >= 0).all()
    far = np.unique(np.geomspace(16000, 1 << 21, 4000).astype(np.int64))
    assert (np.diff(work.workload_ns(far)) >= 0).all()


@given(st.sampled_from(list(WORKLOADS)), st.integers(1, 5000), st.integers(0, 140000))
def test_more_keys_never_cost_less(name, q, more):
    kv = q + more + np.arange(300)
    times = segments_ns(WORKLOADS[name], np.full(300, q), kv)
    assert (np.diff(times) >= 0).all()


@every_layout
def test_prices_beyond_the_table_go_on_smoothly(work):
    """The table ends at 16,384 here; a workload tabled further agrees but for tile steps."""
    further = replace(work, micro_batch_tokens=1 << 17)
    lengths = np.array([16384, 16385, 20000, 50000, 131072])
    got, want = work.attention_ns(lengths), further.attention_ns(lengths)
    assert np.allclose(got, want, rtol=0.02)
    mixed = work.attention_ns(np.array([100, 20000]))
    assert mixed.tolist() == [work.attention_ns([100])[0], got[2]]


def test_one_rank_prices_a_piece_as_its_segment():
    """The prices agree except for small dips inside a tile, which packing must not see.

    Beyond 4,096 tokens they also differ within the 8 or more tokens between knots over which a
    tile's step is spread.
    """
    work = WORKLOADS["h100-cp1"]
    lengths = np.arange(16000)
    price, segment = work.attention_ns(lengths), segments_ns(work, lengths, lengths)
    assert (price[:4096] >= segment[:4096]).all()
    assert np.allclose(price, segment, rtol=0.05)
    assert np.abs(price[1:] / segment[1:] - 1).mean() < 0.002


def test_cp_shares_a_long_piece_evenly():
    cp = 8
    whole = ProfiledWorkload(
        model=MODEL, parallel=ParallelSpec(tp=4, cp=1, pp=2), profile=load_profile("h100")
    )
    length = np.array([131072])
    shared = WORKLOADS["h100-cp8"].attention_ns(length)[0]
    assert shared == pytest.approx(whole.attention_ns(length)[0] / cp, rel=0.05)


def test_per_document_shards_of_a_long_piece_match_its_price():
    """The two true chunks of a rank, r and 2 * cp - 1 - r, are compared with the mean-key price."""
    work, cp, length = WORKLOADS["h100-cp8"], 8, 131072
    chunk = length // (2 * cp)
    for rank in range(cp):
        ends = np.array([rank + 1, 2 * cp - rank]) * chunk
        true = int(segments_ns(work, [chunk, chunk], ends).sum())
        assert true == pytest.approx(work.attention_ns(np.array([length]))[0], rel=0.03)


def test_short_pieces_do_not_pay_for_tiny_shards():
    """Below a tile per chunk a piece is priced whole on one rank of cp, as a tile / cp."""
    work = WORKLOADS["h100-cp8"]
    whole = segments_ns(work, [64], [64])[0]
    assert work.attention_ns([64])[0] == pytest.approx(whole / 8, rel=0.01)


def test_segments_pay_whole_tiles():
    work = WORKLOADS["h100-cp2"]
    plateau = segments_ns(work, [1, 16, 128], [4096, 4096, 4096])
    assert len(set(plateau.tolist())) == 1
    assert segments_ns(work, [256], [4096])[0] > 1.5 * plateau[0]
    assert segments_ns(work, [0], [0]).tolist() == [0]


def test_attention_overtakes_linear_work_as_figure_7_shows():
    work = WORKLOADS["h100-cp2"]
    ratio = work.attention_ns([1024, 131072]) / work.linear_ns([1024, 131072])
    assert ratio[0] < 0.1
    assert 1.0 < ratio[1] < 5.0


def test_more_tensor_parallelism_makes_a_rank_faster():
    profile = load_profile("h100")
    times = [
        ProfiledWorkload(
            model=MODEL, parallel=ParallelSpec(tp=tp, cp=1, pp=1), profile=profile
        ).workload_ns([8192])[0]
        for tp in (1, 2, 4, 8)
    ]
    assert times == sorted(times, reverse=True)


def test_times_of_another_dtype_are_told():
    spec = load("demo")
    assert spec.training.dtype == "float32"
    told = [mismatches(workload_of(spec, load_profile(name))) for name in ("h100", "cpu")]
    assert "the run computes in float32, but is priced with times measured in bfloat16" in told[0]
    assert not any("is priced with times measured in" in note for note in told[1])


def test_what_is_outside_the_profile_is_told():
    work = WORKLOADS["h100-cp2"]
    assert extrapolated(work, [1024, 131072, 1 << 20]).tolist() == [False, False, True]
    assert any("query heads per rank, but only" in note for note in mismatches(work))
    assert any("per KV head" in note for note in mismatches(work))


def test_the_ends_of_the_model_are_priced_literally():
    """Embedding moves two values per channel forward and three backward, for a CP rank's tokens.

    The head has three products of 2 FLOPs per weight, over all ranks that share them.
    """
    work = WORKLOADS["h100-cp2"]
    model, parallel = work.model, work.parallel
    rate = work.profile.elementwise_of(Elementwise.EMBEDDING).forward_bytes_per_s
    forward, backward = work.linear.embedding_ns_per_token
    assert forward == pytest.approx(2 * model.hidden_size * 2 / parallel.cp / rate * 1e9)
    assert backward == pytest.approx(1.5 * forward)
    flops = 6 * model.hidden_size * model.vocab_size / (parallel.tp * parallel.cp)
    assert work.linear.head_ns_per_token == pytest.approx(flops / 600e12 * 1e9)
    scaled = 3 * model.hidden_size * model.vocab_size / parallel.tp * 4
    assert work.linear.head_backward_ns == pytest.approx(scaled / 3.0e12 * 1e9)


def test_prices_beyond_64_bits_are_refused():
    table = WORKLOADS["h100-cp1"].table
    slow = replace(table.forward, values=table.forward.values * 1e-13)
    profile = replace(load_profile("h100"), attention=(replace(table, forward=slow),))
    with pytest.raises(ValueError, match=r"predicts .* ns for a piece of \d+ tokens"):
        replace(WORKLOADS["h100-cp1"], profile=profile).attention_ns([1 << 26])


def test_per_micro_batch_costs_stay_out_of_the_workload():
    one, many = WORKLOADS["h100-cp1"], WORKLOADS["h100-cp2"]
    assert one.linear.call_ns == (32 * 7 * 4000, 32 * 7 * 4000)
    assert sum(many.linear.call_ns) > 8 * 10 * 50_000  # ten TP collectives a layer, 8 layers


def test_what_runs_again_is_priced_as_forward_literally():
    """Selective recompute runs gate, up, a norm, SwiGLU and one gather again.

    Full recompute runs everything but the down projection (as large as gate), its reduce-scatter
    and one of two residual additions.
    """
    none = WORKLOADS["h100-cp2"]
    more: list[dict[str, float]] = []
    for how in (Recompute.SELECTIVE, Recompute.FULL):
        terms = replace(none, recompute=how).ns_per_token
        assert list(terms) == list(none.ns_per_token)
        assert all(terms[n] == none.ns_per_token[n] for n in terms if n.endswith("_forward"))
        more.append({n: terms[f"{n}_backward"] - none.ns_per_token[f"{n}_backward"] for n in TERMS})
    half, full = more
    forward = {name: none.ns_per_token[f"{name}_forward"] for name in TERMS}
    assert full["gemm"] == pytest.approx(forward["gemm"] - half["gemm"] / 2)
    layers, hidden, ranks = 8, 4096, 16
    byte_ns = 2 * layers / ranks / 3e12 * 1e9  # of a value, at the profile's bytes a second
    assert half["elementwise"] == pytest.approx((2 * hidden + 3 * 11008) * byte_ns)
    assert full["elementwise"] == pytest.approx(forward["elementwise"] - 3 * hidden * byte_ns)
    gather, scatter = (
        none.profile.collective(op, span_ranks=8).wire_ns(hidden * 2 / 2, num_ranks=8) * layers
        for op in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    )
    assert half["tp_comm"] == pytest.approx(gather)
    assert full["tp_comm"] == pytest.approx(2 * gather + scatter)
    # Attention that runs again keeps its gather, so that its backward needs none.
    assert (half["cp_comm"], full["cp_comm"]) == (0.0, 0.0)


def test_calls_that_run_again_are_paid_literally():
    """An element-wise call costs 4,000 ns: a norm and SwiGLU, or six of seven calls."""
    work = WORKLOADS["h100-cp1"]
    calls = [replace(work, recompute=how).linear.call_ns for how in Recompute]
    assert calls == [(32 * 28_000, 32 * (28_000 + 4_000 * n)) for n in (0, 2, 6)]
    many = WORKLOADS["h100-cp2"]
    backward = [replace(many, recompute=how).linear.call_ns[1] for how in Recompute]
    alpha = many.profile.collective(Collective.ALL_GATHER, span_ranks=8).alpha_ns
    assert backward[1] - backward[0] == 8 * (2 * 4_000 + alpha)


@pytest.mark.parametrize("bad", [[-1], [1.5], [True]])
def test_lengths_must_be_token_counts(bad):
    with pytest.raises(ValueError, match="must be whole numbers of tokens"):
        WORKLOADS["cpu-cp1"].workload_ns(bad)


def test_segments_need_their_own_rows_as_keys():
    with pytest.raises(ValueError, match=r"segment 1 has 5 query rows \(q\) but only 4 keys"):
        FlopsWorkload().segment_times_ns([1, 5], [4, 4])


def test_layout_must_divide():
    with pytest.raises(ValueError, match=r"must be a multiple of parallel\.tp = 3"):
        ProfiledWorkload(model=SMALL, parallel=ParallelSpec(tp=3), profile=load_profile("cpu"))
    with pytest.raises(ValueError, match="at least 0"):
        FlopsWorkload(quadratic_ns=-1)


def test_workload_for_picks_the_profile_by_device():
    spec = load("demo")
    assert workload_for(spec, "cpu").profile.name == "cpu"
    assert workload_for(spec, "cuda").profile.name == "h100_runs"
    named = replace(spec, cost=replace(spec.cost, profile="h100"))
    assert workload_for(named, "cpu").profile.name == "h100"
    unknown = replace(spec, cost=replace(spec.cost, profile="b200"))
    with pytest.raises(ValueError, match="b200"):
        workload_for(unknown, "cpu")


def test_workload_for_prices_the_runs_recompute():
    spec = load("demo")
    for how in Recompute:
        run = replace(spec, training=replace(spec.training, recompute=how))
        assert workload_for(run, "cpu").recompute == how


def test_workload_for_takes_the_first_kernel_where_the_named_one_is_missing():
    spec = RunSpec(model=MODEL)
    sdpa = replace(spec, kernels=replace(spec.kernels, attention=AttentionBackend.SDPA))
    cost = workload_for(sdpa, "cuda")
    assert cost.table.backends[0] == cost.profile.attention[0].backends[0] == "flash_attention_3"


@pytest.mark.parametrize("quadratic", [float("inf"), 1e30])
def test_costs_that_are_no_times_are_refused(quadratic):
    with pytest.raises(ValueError, match="correct the speeds in the kernel profile"):
        FlopsWorkload(quadratic_ns=quadratic).workload_ns([10_000])


def test_work_of_other_layers_becomes_linear():
    """W_a of a model that slides everywhere grows by a token's window; where every other layer
    slides, by the mean of both kinds; and pieces within the window cost the same.
    """
    parallel = ParallelSpec(tp=8, cp=1, pp=4)
    profile = load_profile("h100")
    models = [MODEL, *(replace(MODEL, sliding_window=4096, full_every=n) for n in (0, 2))]
    full, slides, mixed = (
        ProfiledWorkload(model=m, parallel=parallel, profile=profile) for m in models
    )
    short, long = np.array([1, 500, 4000]), np.array([16384, 32768, 65536, 131072])
    assert np.array_equal(slides.attention_ns(short), full.attention_ns(short))
    growth = np.diff(slides.attention_ns(long)) / np.diff(long)
    np.testing.assert_allclose(growth, growth[0], rtol=0.02)
    assert full.attention_ns(long)[-1] > 12 * slides.attention_ns(long)[-1]
    mean = (full.attention_ns(long) + slides.attention_ns(long)) / 2
    np.testing.assert_allclose(mixed.attention_ns(long), mean, rtol=1e-3)
    # A segment with a long prefix costs what its rows see.
    q, kv = np.array([8192, 8192]), np.array([16384, 131072])
    assert len(set(segments_ns(slides, q, kv).tolist())) == 1


def test_layers_exchange_the_rows_of_their_windows():
    plan = replace(per_sequence([16384], cp=4), exchange=KeyExchange.NEEDED)
    parallel = ParallelSpec(tp=1, cp=4, pp=1)
    full, mixed = (
        ProfiledWorkload(model=m, parallel=parallel, profile=load_profile("h100"))
        for m in (MODEL, replace(MODEL, sliding_window=1024, full_every=2))
    )
    assert np.array_equal(rows_of_layer(plan, full), rows_moved(plan))
    mean = (rows_moved(plan) + rows_moved(plan, sliding=1024)) / 2
    np.testing.assert_allclose(rows_of_layer(plan, mixed), mean)
    assert exchange_ns(plan, mixed) < exchange_ns(plan, full)
    assert np.array_equal(rows_of_layer(plan, FlopsWorkload()), rows_moved(plan))


@pytest.mark.parametrize("cp", [1, 2])
def test_copies_of_kv_heads_cost_what_as_many_heads_do(cp: int) -> None:
    """A TP rank computes and exchanges the same with a copy of a KV head as with a head of its own;
    the model's FLOPs are those of the heads that it has.
    """
    own, copied = (
        ProfiledWorkload(
            model=replace(MODEL, num_kv_heads=num),
            parallel=ParallelSpec(tp=8, cp=cp),
            profile=load_profile("h100"),
            micro_batch_tokens=16384,
        )
        for num in (8, 2)
    )
    lengths = np.array([100, 5000, 16384])
    assert copied.terms(lengths).keys() == own.terms(lengths).keys()
    for name, ns in copied.terms(lengths).items():
        assert np.array_equal(ns, own.terms(lengths)[name]), name
    assert copied.linear.call_ns == own.linear.call_ns
    assert copied.kv_exchange_ns(16384, cp=8) == own.kv_exchange_ns(16384, cp=8)
    moved = np.full((2, 2), 1000)
    assert copied.needed_exchange_ns(moved) == own.needed_exchange_ns(moved)
    assert rank_model(copied.model, 8) == rank_model(own.model, 8)
    assert linear_flops_per_token(copied.model) < linear_flops_per_token(own.model)

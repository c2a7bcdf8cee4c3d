"""Tests memory estimates: literal terms, schedules, and a known configuration."""

from dataclasses import replace

import pytest

from tests.models import LLAMA2_7B
from wlb.cost.key_bytes import key_bytes
from wlb.memory import AttentionCall, in_flight, memory_estimate, memory_of_rank, token_caps
from wlb.memory import estimate as estimates
from wlb.memory.estimate import (
    layer_activation_bytes,
    layer_parameters,
    stage_parameters,
    workspaces_bytes,
)
from wlb.plan import KeyExchange
from wlb.sharding.paper import per_document
from wlb.spec import (
    AttentionBackend,
    Dtype,
    ExchangeChoice,
    FsdpSection,
    ModelSpec,
    ParallelSpec,
    Policy,
    Recompute,
    RunSpec,
    Schedule,
)

DEFAULT = RunSpec()
SEVEN_B = RunSpec(
    model=LLAMA2_7B,
    parallel=ParallelSpec(tp=8, cp=2, pp=4, dp=1),
    data=replace(DEFAULT.data, context_window=131072),
    training=replace(DEFAULT.training, dtype=Dtype.BFLOAT16),
)


def with_schedule(schedule: Schedule, *, v: int, n: int, pp: int = 4) -> RunSpec:
    return replace(
        SEVEN_B,
        parallel=replace(SEVEN_B.parallel, pp=pp),
        pp=replace(SEVEN_B.pp, schedule=schedule, virtual_stages=v),
        data=replace(SEVEN_B.data, num_windows=n),
    )


TINY = replace(
    DEFAULT,
    model=ModelSpec(hidden_size=8, num_layers=4, num_heads=4, num_kv_heads=2, ffn_hidden_size=12),
)


def tiny(*, cp: int, recompute: Recompute = Recompute.NONE) -> RunSpec:
    return replace(
        TINY,
        parallel=ParallelSpec(tp=2, cp=cp, pp=2, dp=1),
        training=replace(TINY.training, recompute=recompute),
    )


def test_layer_activations_literal():
    # 4 * 8 + 2 * 8 + 3 * 12 = 84 float32 values a token, 4 log-sum-exps, 2 * 4 of K and V.
    one, two = tiny(cp=1), tiny(cp=2)
    assert layer_activation_bytes(one, micro_batch_tokens=100) == 100 * (84 + 4 + 8) * 4 // 2
    assert layer_activation_bytes(two, micro_batch_tokens=100) == 50 * (84 + 4 + 8) * 4 // 2


def test_parts_of_other_families_are_counted():
    """Norms of heads keep Q and K before them (8 and 4 values) and two numbers a head; a rank has
    half of the biases and whole norms; a head that is a copy counts, and one that is none does not.
    """
    one = tiny(cp=1)
    normed = replace(one, model=replace(one.model, qk_norm=True))
    more = layer_activation_bytes(normed, micro_batch_tokens=100)
    heads = one.model.num_heads + one.model.num_kv_heads
    widths = one.model.q_dim + one.model.kv_dim
    plain = layer_activation_bytes(one, micro_batch_tokens=100)
    assert more - plain == 100 * (widths + heads) * 4 // 2
    assert layer_parameters(normed) - layer_parameters(one) == 2 * one.model.head_size
    biased = replace(one, model=replace(one.model, qkv_bias=True))
    biases = one.model.q_dim + 2 * one.model.kv_dim
    assert layer_parameters(biased) - layer_parameters(one) == biases // 2
    tied = replace(one, model=replace(one.model, tied_embeddings=True))
    last = one.num_stages - 1
    assert stage_parameters(tied, stage=last) == stage_parameters(one, stage=last)
    alone = replace(one, parallel=replace(one.parallel, pp=1), pp=replace(one.pp, virtual_stages=1))
    tied = replace(alone, model=replace(one.model, tied_embeddings=True))
    vocabulary = one.model.padded_vocab_size * one.model.hidden_size // 2
    assert stage_parameters(alone, stage=0) - stage_parameters(tied, stage=0) == vocabulary


def tensors_of(spec: RunSpec) -> int:
    """Returns the workspace of a micro-batch of 100 tokens without what the kernel allocates."""
    return workspaces_bytes(spec, micro_batch_tokens=100)[0]


def test_workspace_literal():
    # One rank: the MLP's, 2 * 8 values of gathered rows and 3 * 12 / 2 of gradients.
    assert tensors_of(tiny(cp=1)) == 100 * (16 + 18) * 4
    # Two ranks: gradients of 50 outputs and queries of 4 values; K and V of 4 values: 100 gathered
    # rows and 125 copied, the copy's gradients, a half of both once more.
    # The gathered rows live on meanwhile.
    attention = 50 * 2 * 4 + max((100 + 2 * 125) * 4, (100 + 125 + 100) * 4 + (125 + 100) * 4 // 2)
    mlp = 50 * (16 + 18) + 100 * 4  # while backward's gather of K and V arrives
    assert attention == 400 + 1750
    assert tensors_of(tiny(cp=2)) == max(attention, mlp) * 4


def test_rows_on_their_way_by_need_are_workspace_literal():
    """At most 100 rows leave in a buffer of their own: K and V beside the MLP's backward, and
    float32 gradients when attention's is done, which take less here than half of the copies.
    """
    spec = tiny(cp=2)
    spec = replace(spec, sharding=replace(spec.sharding, exchange=ExchangeChoice.NEEDED))
    in_kernel, summing = (100 + 2 * 125) * 4, (100 + 125 + 100) * 4 + max((125 + 100) * 2, 100 * 4)
    attention = 50 * 2 * 4 + max(in_kernel, summing)
    mlp = 50 * (16 + 18) + 100 * 4 + 100 * 4
    assert tensors_of(spec) == max(attention, mlp) * 4 == 2500 * 4


def test_keys_of_a_plan_to_the_byte():
    """Of 16 tokens in one document, 4 spans of 4 by 2 ranks, rank 0 reads 8 rows of the other and
    is read 4; a row of K and V has 4 float32 values on a TP rank, and a rank 1 row of padding.
    """
    spec, plan = tiny(cp=2), per_document([16], cp=2)
    both = [key_bytes(spec, plan, rank=r, local_tokens=9) for r in range(2)]
    assert both == [(18 * 16, 9 * 16)] * 2
    needed = replace(plan, exchange=KeyExchange.NEEDED)
    both = [key_bytes(spec, needed, rank=r, local_tokens=9) for r in range(2)]
    assert both == [((9 + 8) * 16, (9 + 4) * 16), ((9 + 4) * 16, (9 + 8) * 16)]
    assert key_bytes(tiny(cp=1), per_document([16], cp=1), rank=0, local_tokens=16) == (0, 0)


def test_calls_without_a_mask_pad_segments_to_80_rows():
    """Of heads of 97 to 128 in FlashAttention-3 and -4 on Hopper; causal calls pad to 64."""
    asked: list[AttentionCall] = []
    real = estimates.most_attention_workspace_bytes

    def keep(backend: AttentionBackend, call: AttentionCall, *, deterministic: bool) -> int:
        asked.append(call)
        return real(backend, call, deterministic=deterministic)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimates, "most_attention_workspace_bytes", keep)
        for overlap in (False, True):
            spec = replace(SEVEN_B, cp=replace(SEVEN_B.cp, overlap_stages=int(overlap)))
            workspaces_bytes(spec, micro_batch_tokens=131072)
    causal, own_and_others = asked
    assert (causal.is_causal, own_and_others) == (True, replace(causal, is_causal=False))
    flash3 = AttentionBackend.FLASH_ATTENTION_3
    assert causal.num_segments == 512
    for call, rows in zip(asked, (64, 80), strict=True):
        padded = -(-(65536 + 512 * rows) // rows) * rows
        semaphores = 512 * -(-65536 // rows)
        # softmax_d, softmax_lse_log2 and dQ of four heads of 128, in float32
        assert real(flash3, call, deterministic=False) == 4 * 4 * (padded * 130 + semaphores)


def test_recompute_keeps_less_literal():
    # Without the second norm's output and the MLP's: 3 * 8 + 2 * 8 values, 4 log-sum-exps, 2 * 4.
    half = tiny(cp=2, recompute=Recompute.SELECTIVE)
    assert layer_activation_bytes(half, micro_batch_tokens=100) == 50 * (40 + 4 + 8) * 4 // 2
    full = tiny(cp=2, recompute=Recompute.FULL)
    assert layer_activation_bytes(full, micro_batch_tokens=100) == 50 * 8 * 4 // 2


def test_what_recompute_makes_again_is_workspace_literal():
    # MLP: 34 values a token; made again are 8 + 3 * 12 = 44 or all but the input, 88, over tp 2.
    half, full = (tiny(cp=1, recompute=h) for h in (Recompute.SELECTIVE, Recompute.FULL))
    assert tensors_of(half) == 100 * (34 + 44 // 2) * 4
    assert tensors_of(full) == 100 * (34 + 88 // 2) * 4
    # Two ranks: attention needs 2,150 values, the MLP 1,700 (34 * 50) and 400 gathered beside it.
    # Attention's comes after the MLP's is gone: on top of it 88 - 44 of its own values a token.
    half, full = (tiny(cp=2, recompute=h) for h in (Recompute.SELECTIVE, Recompute.FULL))
    assert tensors_of(half) == max(2150, 2100 + 50 * 22) * 4
    assert tensors_of(full) == max(2150 + 50 * 22, 2100 + 50 * 44) * 4


def test_recompute_fits_longer_micro_batches():
    specs = [
        replace(SEVEN_B, training=replace(SEVEN_B.training, recompute=how)) for how in Recompute
    ]
    totals = [memory_estimate(spec).total_bytes for spec in specs]
    assert totals == sorted(totals, reverse=True)
    caps = [token_caps(spec, memory_bytes=8 << 30).s_max for spec in specs]
    assert caps[0] < caps[1] < caps[2] < SEVEN_B.s_max


def test_micro_batches_in_flight():
    plain = with_schedule(Schedule.ONE_F_ONE_B, v=1, n=8)
    assert [in_flight(plain, pp_rank=r) for r in range(4)] == [4, 3, 2, 1]
    few = with_schedule(Schedule.ONE_F_ONE_B, v=1, n=2)
    assert [in_flight(few, pp_rank=r) for r in range(4)] == [2, 2, 2, 1]
    interleaved = with_schedule(Schedule.INTERLEAVED_1F1B, v=2, n=8)
    assert [in_flight(interleaved, pp_rank=r) for r in range(4)] == [11, 9, 7, 5]
    whole_step = with_schedule(Schedule.INTERLEAVED_1F1B, v=2, n=4)
    assert in_flight(whole_step, pp_rank=0) == 8
    alone = with_schedule(Schedule.INTERLEAVED_1F1B, v=1, n=4, pp=1)
    assert in_flight(alone, pp_rank=0) == 1
    with pytest.raises(ValueError, match="pp_rank = 4 must be from 0 to 3"):
        in_flight(plain, pp_rank=4)


def test_seven_billion_at_128k_lands_in_tens_of_gigabytes():
    estimate = memory_estimate(SEVEN_B, micro_batch_tokens=int(1.1 * 131072))
    assert estimate.pp_rank == 0
    assert 35e9 < estimate.activations_bytes < 40e9
    assert 40e9 < estimate.total_bytes < 50e9
    assert estimate.total_bytes == sum(estimate.terms.values())


def test_parameters_cover_the_model_once():
    spec = replace(SEVEN_B, parallel=ParallelSpec(tp=1, cp=1, pp=4, dp=2))
    ranks = [memory_of_rank(spec, pp_rank=r, micro_batch_tokens=1) for r in range(4)]
    assert sum(r.parameters_bytes for r in ranks) == 2 * spec.model.num_parameters
    first = ranks[0]
    count = first.parameters_bytes // 2
    assert first.optimizer_bytes == 12 * count // 2
    assert first.gradients_bytes == 4 * (count + count // 2)


def test_without_fsdp_parameters_are_the_master_weights():
    spec = replace(TINY, parallel=ParallelSpec(tp=2, pp=2, dp=1))
    one = memory_of_rank(spec, pp_rank=0, micro_batch_tokens=1)
    count = one.parameters_bytes // 4
    assert (one.optimizer_bytes, one.gradients_bytes) == (8 * count, 4 * count)


def test_optimizer_and_reduced_gradients_are_sharded_within_a_group():
    spec = replace(SEVEN_B, parallel=ParallelSpec(tp=8, cp=2, pp=1, dp=4))
    whole, groups = (
        memory_of_rank(
            replace(spec, fsdp=FsdpSection(shard_size=size)), pp_rank=0, micro_batch_tokens=1
        )
        for size in (0, 2)
    )
    count = whole.parameters_bytes // 2
    assert groups.parameters_bytes == whole.parameters_bytes
    assert whole.optimizer_bytes == 12 * -(-count // 8)
    assert groups.optimizer_bytes == 12 * -(-count // 2)
    assert groups.gradients_bytes == 4 * (count + -(-count // 2))


def test_resharding_leaves_the_layers_at_work():
    fsdp, at_once = FsdpSection(reshard_after_forward=True), 2
    spec = replace(SEVEN_B, parallel=ParallelSpec(tp=1, cp=1, pp=4, dp=2), fsdp=fsdp)
    layer = 4096 * (4 * 4096 + 3 * 11008) + 2 * 4096
    first, middle = (memory_of_rank(spec, pp_rank=r, micro_batch_tokens=1) for r in (0, 1))
    assert middle.parameters_bytes == 2 * at_once * layer
    assert first.parameters_bytes == 2 * (at_once * layer + 32000 * 4096)
    assert middle.optimizer_bytes == 12 * 8 * layer // 2


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize(
    "schedule", [Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED_1F1B, Schedule.INTERLEAVED_ZERO_BUBBLE]
)
@pytest.mark.parametrize("gib", [9, 16, 24, 40])
@pytest.mark.parametrize("how", Recompute)
def test_what_caps_allow_fits(dp: int, schedule: Schedule, gib: int, how: Recompute):
    v = 1 if schedule == Schedule.ONE_F_ONE_B else 2
    spec = with_schedule(schedule, v=v, n=8 * dp)
    spec = replace(spec, parallel=replace(spec.parallel, dp=dp))
    spec = replace(spec, training=replace(spec.training, recompute=how))
    caps = token_caps(spec, memory_bytes=gib << 30)
    estimate = memory_estimate(spec, micro_batch_tokens=caps.s_max, step_tokens=caps.step_tokens)
    assert estimate.total_bytes <= (gib << 30) * 1.0001  # CP ranks round tokens up


def test_only_the_last_rank_holds_logits():
    """Logits count as far as they exceed what a layer needs, which never exists beside them."""
    chunk = 65536
    model = replace(SEVEN_B.model, vocab_size=128000)
    training = replace(SEVEN_B.training, loss_chunk=chunk)
    spec = replace(SEVEN_B, model=model, training=training)
    ranks = [memory_of_rank(spec, pp_rank=r) for r in range(4)]
    assert [r.logits_bytes > 0 for r in ranks] == [False, False, False, True]
    local = -(-ranks[3].micro_batch_tokens // spec.parallel.cp)
    vocabulary, width = 128000 // spec.parallel.tp, spec.model.hidden_size
    logits = min(chunk, local) * vocabulary * (2 + 4)
    logits += 2 * local * width * 2 + vocabulary * width * (2 + 4)
    assert ranks[3].logits_bytes + ranks[3].workspace_bytes + ranks[3].kernel_bytes == logits
    few = memory_of_rank(replace(spec, training=replace(training, loss_chunk=1)), pp_rank=3)
    assert few.logits_bytes == 0
    assert few.total_bytes == ranks[3].total_bytes - ranks[3].logits_bytes


def test_longest_micro_batch_follows_the_packing_policy():
    assert memory_estimate(SEVEN_B).micro_batch_tokens == SEVEN_B.s_max
    packing = replace(SEVEN_B.packing, policy=Policy.ORIGINAL)
    assert memory_estimate(replace(SEVEN_B, packing=packing)).micro_batch_tokens == 131072


def test_memory_grows_with_the_micro_batch_and_shrinks_with_sharding():
    short = memory_estimate(SEVEN_B, micro_batch_tokens=1000).total_bytes
    assert short < memory_estimate(SEVEN_B, micro_batch_tokens=2000).total_bytes
    wide = replace(SEVEN_B, parallel=ParallelSpec(tp=8, cp=4, pp=4, dp=2))
    assert memory_estimate(wide).total_bytes < memory_estimate(SEVEN_B).total_bytes


def test_a_rank_has_the_memory_of_one_kv_head_however_many_ranks_copy_it():
    """Four TP ranks and one KV head, or four: a rank's weights, activations and keys are equal."""
    spec = replace(tiny(cp=2), parallel=ParallelSpec(tp=4, cp=2, pp=2, dp=2))
    copied, own = (
        replace(spec, model=replace(TINY.model, num_kv_heads=num, vocab_size=256)) for num in (1, 4)
    )
    assert copied.model.num_parameters < own.model.num_parameters
    assert memory_estimate(copied) == memory_estimate(own)
    plan = per_document([16], cp=2)
    both = [key_bytes(s, plan, rank=0, local_tokens=9) for s in (copied, own)]
    assert both[0] == both[1] == (18 * 16, 9 * 16)

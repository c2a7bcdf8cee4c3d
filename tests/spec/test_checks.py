"""Tests every refusal before a run starts by the message that a user gets."""

from typing import Any

import pytest

from wlb.spec import RopeKind, RunSpec, apply, check, list_keys, load, resolve_dp
from wlb.spec.keys import nest

# One pipeline rank and one stage: the smallest layout that is accepted.
PLAIN = apply(RunSpec(), {"pp": {"virtual_stages": 1}}, source="plain")


def changed(**values: Any) -> RunSpec:
    """Returns PLAIN with dotted keys set; `__` stands for the dot."""
    spec = PLAIN
    for name, value in values.items():
        spec = apply(spec, nest(name.replace("__", "."), value), source="test")
    return spec


def refusal(spec: RunSpec) -> str:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        check(spec)
    return str(refused.value)


def test_what_is_right_is_returned_as_it_is() -> None:
    assert check(PLAIN) is PLAIN
    four_d = changed(
        parallel__tp=4, parallel__cp=2, parallel__pp=4, parallel__dp=3, pp__virtual_stages=2
    )
    assert check(four_d) is four_d
    assert four_d.parallel.world_size == 96


@pytest.mark.parametrize(
    ("values", "message"),
    [
        # FSDP.
        ({"fsdp__shard_size": -1}, "fsdp.shard_size = -1 must be at least 0"),
        (
            {"fsdp__shard_size": 4, "parallel__dp": 3, "parallel__cp": 2},
            "fsdp.shard_size = 4 does not divide the dp 3 x cp 2 = 6 ranks that share parameters; "
            "use one of [1, 2, 3, 6], or 0 for all of them",
        ),
        # The model.
        ({"model__hidden_size": 0}, "model.hidden_size = 0 must be at least 1"),
        ({"model__num_layers": 0}, "model.num_layers = 0 must be at least 1"),
        ({"model__num_heads": 0}, "model.num_heads = 0 must be at least 1"),
        ({"model__num_kv_heads": 0}, "model.num_kv_heads = 0 must be at least 1"),
        ({"model__ffn_hidden_size": 0}, "model.ffn_hidden_size = 0 must be at least 1"),
        ({"model__vocab_size": -1}, "model.vocab_size = -1 must be at least 0"),
        ({"model__head_dim": -2}, "model.head_dim = -2 must be at least 0"),
        ({"model__init_std": -0.1}, "model.init_std = -0.1 must be at least 0"),
        ({"model__norm_eps": 0}, "model.norm_eps = 0.0 must be above 0"),
        ({"model__rope_theta": 0}, "model.rope_theta = 0.0 must be above 0"),
        (
            {"model__num_heads": 6, "model__num_kv_heads": 6},
            "model.hidden_size = 512 is not a multiple of model.num_heads = 6; change one of them "
            "or set model.head_dim",
        ),
        ({"model__head_dim": 7}, "head size 7 is odd"),
        (
            {"model__num_kv_heads": 3},
            "model.num_heads = 8 is not a multiple of model.num_kv_heads = 3",
        ),
        ({"model__rope_scaling__factor": 0}, "model.rope_scaling.factor = 0.0 must be above 0"),
        (
            {"model__rope_scaling__original_context": 0},
            "model.rope_scaling.original_context = 0 must be at least 1",
        ),
        (
            {"model__rope_scaling__turns": [32, 1]},
            "model.rope_scaling.turns = [32.0, 1.0] must be two numbers above 0, the smaller",
        ),
        ({"model__full_every": 2}, "model.full_every = 2 and model.full_first = 0 select layers"),
        (
            {"model__sliding_window": 64, "model__full_first": 1000},
            "model.sliding_window = 64, but model.full_every = 0 and model.full_first = 1000 leave",
        ),
        ({"model__attention_softcap": -1}, "model.attention_softcap = -1.0 must be at least 0"),
        (
            {"model__rope_scaling__kind": RopeKind.YARN, "model__rope_theta": 1},
            "model.rope_theta = 1.0 must be above 1 for model.rope_scaling.kind = yarn",
        ),
        (
            {"model__rope_scaling__turns": [4]},
            "model.rope_scaling.turns = [4.0] must be two numbers above 0, the smaller one first",
        ),
        # Ranges.
        ({"run__seed": -1}, "run.seed = -1 must be at least 0"),
        ({"data__context_window": 1}, "data.context_window = 1 must be at least 2"),
        ({"data__row_multiple": 0}, "data.row_multiple = 0 must be at least 1"),
        ({"data__num_windows": -1}, "data.num_windows = -1 must be at least 0"),
        ({"data__epochs": -1}, "data.epochs = -1 must be at least 0"),
        ({"telemetry__warmup_steps": -1}, "telemetry.warmup_steps = -1 must be at least 0"),
        ({"data__bpe_vocab_size": 299}, "data.bpe_vocab_size = 299 must be at least 300"),
        ({"data__heldout_fraction": 0.5}, "data.heldout_fraction = 0.5 must be in [0, 0.5)"),
        ({"data__heldout_fraction": -0.1}, "data.heldout_fraction = -0.1 must be in [0, 0.5)"),
        ({"pp__virtual_stages": 0}, "pp.virtual_stages = 0 must be at least 1"),
        ({"training__steps": 0}, "training.steps = 0 must be at least 1"),
        ({"training__warmup_steps": -1}, "training.warmup_steps = -1 must be at least 0"),
        ({"training__loss_chunk": 0}, "training.loss_chunk = 0 must be at least 1"),
        ({"training__loss_chunk": 8193}, "training.loss_chunk = 8193 must be at most 8192 rows"),
        ({"training__clip_norm": -1}, "training.clip_norm = -1.0 must be at least 0"),
        ({"training__learning_rate": 0}, "training.learning_rate = 0.0 must be above 0"),
        (
            {"training__min_learning_rate": -1e-5},
            "training.min_learning_rate = -1e-05 must be at least 0",
        ),
        (
            {"training__learning_rate": 2e-5},
            "training.min_learning_rate = 3e-05 is above training.learning_rate = 2e-05, so that "
            "training.schedule = cosine would raise the rate after warm-up; lower "
            "training.min_learning_rate, usually to a tenth of training.learning_rate (2e-06)",
        ),
        ({"cluster__peak_tflops": -1}, "cluster.peak_tflops = -1.0 must be at least 0"),
        (
            {"training__schedule": "wsd"},
            "training.decay_steps = 0 must be at least 2 with training.schedule = wsd; set it to "
            "10% to 20% of training.steps, such as 100",
        ),
        (
            {"training__schedule": "wsd", "training__decay_steps": -1},
            "training.decay_steps = -1 must be at least 0",
        ),
        (
            {"training__schedule": "wsd", "training__decay_steps": 901},
            "training.decay_steps = 901 is longer than the 900 steps after the warm-up",
        ),
        (
            {"training__decay_steps": 10},
            "training.decay_steps = 10 has an effect only with training.schedule = wsd, but "
            "training.schedule = cosine; remove training.decay_steps",
        ),
        ({"training__timeout_s": 0}, "training.timeout_s = 0.0 must be above 0"),
        ({"training__beta1": 1}, "training.beta1 = 1.0 must be in [0, 1)"),
        ({"training__beta2": -0.1}, "training.beta2 = -0.1 must be in [0, 1)"),
        ({"training__weight_decay": -1}, "training.weight_decay = -1.0 must be at least 0"),
        ({"eval__interval": -1}, "eval.interval = -1 must be at least 0"),
        ({"eval__interval_tokens": -1}, "eval.interval_tokens = -1 must be at least 0"),
        (
            {"eval__interval": 5, "eval__interval_tokens": 100},
            "eval.interval = 5 and eval.interval_tokens = 100 are both set, but a run can use only",
        ),
        ({"eval__steps": -1}, "eval.steps = -1 must be at least 0"),
        ({"checkpoint__interval": -1}, "checkpoint.interval = -1 must be at least 0"),
        ({"checkpoint__keep": 0}, "checkpoint.keep = 0 must be at least 1"),
        # Compiling.
        (
            {"training__compile_backend": "aot_eager"},
            "training.compile_backend = 'aot_eager' has no effect with training.compile = false; "
            "set training.compile = true, or remove training.compile_backend",
        ),
        (
            {
                "training__compile": True,
                "pp__schedule": "interleaved_zero_bubble",
                "parallel__pp": 2,
            },
            "training.compile = true with pp.schedule = interleaved_zero_bubble: ",
        ),
        # The layout.
        ({"parallel__tp": 0}, "parallel.tp = 0 must be at least 1"),
        ({"parallel__cp": 0}, "parallel.cp = 0 must be at least 1"),
        ({"parallel__pp": 0}, "parallel.pp = 0 must be at least 1"),
        ({"parallel__dp": -1}, "parallel.dp = -1 must be at least 0"),
        (
            {
                "parallel__tp": 8,
                "model__num_heads": 24,
                "model__num_kv_heads": 3,
                "model__head_dim": 64,
            },
            "parallel.tp = 8 is above model.num_kv_heads = 3 and not a multiple of it, so TP ranks "
            "cannot have equal numbers of copies of each KV head; set parallel.tp to at most 3",
        ),
        (
            {"parallel__tp": 16, "model__num_kv_heads": 4},
            "model.num_heads = 8 is not a multiple of parallel.tp = 16",
        ),
        ({"parallel__tp": 3}, "model.num_heads = 8 is not a multiple of parallel.tp = 3"),
        (
            {
                "parallel__tp": 4,
                "model__num_heads": 12,
                "model__num_kv_heads": 6,
                "model__head_dim": 64,
            },
            "model.num_kv_heads = 6 is not a multiple of parallel.tp = 4",
        ),
        (
            {"parallel__tp": 4, "model__ffn_hidden_size": 1410},
            "model.ffn_hidden_size = 1410 is not a multiple of parallel.tp = 4",
        ),
        (
            {
                "parallel__tp": 3,
                "model__num_heads": 6,
                "model__num_kv_heads": 6,
                "model__head_dim": 64,
                "model__ffn_hidden_size": 1410,
            },
            "the padded vocabulary = 256 is not a multiple of parallel.tp = 3",
        ),
        # The pipeline.
        (
            {"pp__virtual_stages": 2},
            "pp.virtual_stages = 2 with parallel.pp = 1: virtual stages need more than one "
            "pipeline rank; set pp.virtual_stages = 1",
        ),
        (
            {"parallel__pp": 2, "pp__schedule": "1f1b", "pp__virtual_stages": 2},
            "pp.schedule = 1f1b has one stage per pipeline rank, but pp.virtual_stages = 2; set "
            "pp.virtual_stages = 1 or pp.schedule = interleaved_1f1b",
        ),
        (
            {"parallel__pp": 4, "pp__virtual_stages": 4},
            "model.num_layers = 8 must be at least pp 4 x virtual stages 4 = 16 stages",
        ),
        (
            {"parallel__pp": 3},
            "model.num_layers = 8 is not a multiple of pp 3 x virtual stages 1 = 3 stages; set "
            "pp.stage_layers to the number of layers of each stage",
        ),
        (
            {"parallel__pp": 3, "pp__stage_layers": [4, 4]},
            "pp.stage_layers = [4, 4] has 2 entries, but there are pp 3 x virtual stages 1 = 3 "
            "stages",
        ),
        (
            {"parallel__pp": 3, "pp__stage_layers": [3, 3, 3]},
            "pp.stage_layers = [3, 3, 3] adds up to 9, but model.num_layers = 8; change one",
        ),
        (
            {"parallel__pp": 3, "pp__stage_layers": [4, 0, 4]},
            "pp.stage_layers = [4, 0, 4]: only the first and the last stage",
        ),
        (
            {"parallel__pp": 2, "pp__stage_layers": [9, -1]},
            "pp.stage_layers = [9, -1]: only the first and the last stage",
        ),
        (
            {"parallel__dp": 2, "packing__num_micro_batches": 3},
            "3 micro-batches per step are not a multiple of parallel.dp = 2; set "
            "packing.num_micro_batches to a multiple of 2",
        ),
        (
            {"parallel__pp": 4, "packing__num_micro_batches": 9},
            "each pipeline has 9 micro-batches per step, but pp.schedule = interleaved_1f1b with "
            "parallel.pp = 4 processes them in 2 rounds, which must have equal numbers of "
            "micro-batches; set packing.num_micro_batches to one of [5, 6, 7, 8, 10, 12]",
        ),
        (
            {"parallel__dp": 2, "data__num_windows": 3},
            "3 micro-batches per step are not a multiple of parallel.dp = 2; set "
            "data.num_windows to a multiple of 2",
        ),
        (
            {"parallel__pp": 2, "parallel__dp": 2, "data__num_windows": 10},
            "each pipeline has 5 micro-batches per step, but pp.schedule = interleaved_1f1b with "
            "parallel.pp = 2 processes them in 2 rounds, which must have equal "
            "numbers of micro-batches; set data.num_windows to one of [6, 8, 12]",
        ),
        (
            {"parallel__pp": 4, "parallel__dp": 2, "pp__schedule": "1f1b"}
            | {"data__num_windows": 6},
            "pp.schedule = 1f1b needs at least parallel.pp = 4 micro-batches per pipeline, but "
            "there are 3; set data.num_windows to at least 8, or pp.schedule = interleaved_1f1b",
        ),
        (
            {"parallel__pp": 2, "pp__weight_delay": 2},
            "pp.weight_delay = 2 with pp.schedule = interleaved_1f1b: only interleaved_zero_bubble",
        ),
        (
            {"parallel__pp": 4, "pp__schedule": "1f1b", "packing__num_micro_batches": 3},
            "set packing.num_micro_batches to at least 4",
        ),
        # Packing.
        (
            {"packing__s_max": 0.99},
            "packing.s_max = 0.99 must be at least 1 context window, so that a document of 4096 "
            "tokens fits",
        ),
        ({"packing__hold": -1}, "packing.hold = -1 must be at least 0"),
        ({"packing__hold": 3, "packing__queue_thresholds": []}, "packing.hold = 3 must be 0"),
        (
            {"packing__queue_thresholds": [0.5, 0.5]},
            "packing.queue_thresholds = [0.5, 0.5]: entry 1 must be above 0.5 and at most 1",
        ),
        ({"packing__queue_thresholds": [0.7, 0.2]}, "entry 1 must be above 0.7"),
        ({"packing__queue_thresholds": [0]}, "entry 0 must be above 0.0"),
        ({"packing__queue_thresholds": [0.5, 1.01]}, "entry 1 must be above 0.5 and at most 1"),
        ({"packing__queue_thresholds": [0.20001, 0.2, 0.3]}, "entry 1 must be above 0.20001"),
        (
            {"packing__queue_thresholds": [0.3, 0.50001, 0.50002]},
            "packing.queue_thresholds = [0.3, 0.50001, 0.50002]: with data.context_window = 4096, "
            "0.50001 and 0.50002 are both rounded up to 2049 tokens; remove one",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_refusals(values: dict[str, Any], message: str) -> None:
    assert message in refusal(changed(**values))


FLOATS = [key.name for key in list_keys(RunSpec) if key.type == "float"]


def test_there_are_float_keys_to_try() -> None:
    assert {"packing.s_max", "model.rope_scaling.factor", "training.beta1"} <= set(FLOATS)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("key", FLOATS)
def test_no_float_may_be_anything_but_finite(key: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"{key} = {value} must be a finite number"):
        load("demo", [f"{key}={value}"])


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_thresholds_must_be_finite(value: str) -> None:
    with pytest.raises(ValueError, match=r"entry 1 must be above 0\.5 and at most 1"):
        load("demo", [f"packing.queue_thresholds=[0.5, {value}]"])


@pytest.mark.parametrize("each", range(1, 13))
def test_numbers_of_micro_batches_that_can_be_scheduled(each: int) -> None:
    """N % max(1, N // pp) == 0 must hold per pipeline, as interleaved schedules need."""
    spec = changed(parallel__pp=4, parallel__dp=2, data__num_windows=2 * each)
    others = {9: "[10, 12, 14, 16, 20, 24]", 11: "[14, 16, 20, 24, 30]"}
    if each in others:
        message = refusal(spec)
        assert f"each pipeline has {each} micro-batches per step, but" in message
        assert "in 2 rounds, which must have equal numbers of micro-batches" in message
        assert f"set data.num_windows to one of {others[each]}" in message
    else:
        assert check(spec).micro_batches_per_pipeline == each


@pytest.mark.parametrize("each", [4, 5, 9, 11])
def test_1f1b_takes_any_number_from_pp_on(each: int) -> None:
    keys: dict[str, Any] = {"parallel__pp": 4, "parallel__dp": 2, "pp__schedule": "1f1b"}
    spec = changed(**keys, data__num_windows=2 * each)
    assert check(spec).micro_batches_per_pipeline == each


def test_stages_may_have_different_numbers_of_layers() -> None:
    even = check(changed(parallel__pp=2, pp__virtual_stages=2))
    assert even.stage_layers == (2, 2, 2, 2)
    assert [even.layers_of(s) for s in range(4)] == [range(i, i + 2) for i in (0, 2, 4, 6)]
    uneven = check(changed(parallel__pp=3, pp__stage_layers=[3, 5, 0]))
    assert [uneven.layers_of(s) for s in range(3)] == [range(3), range(3, 8), range(8, 8)]


def test_bounds_themselves_are_accepted() -> None:
    check(changed(packing__s_max=1, packing__queue_thresholds=[1.0]))
    check(changed(training__schedule="wsd", training__decay_steps=900))
    check(changed(training__schedule="wsd", training__decay_steps=2))
    check(changed(data__heldout_fraction=0, training__warmup_steps=0, training__clip_norm=0))
    check(changed(data__context_window=2, training__loss_chunk=8192))
    check(changed(parallel__tp=8, model__head_dim=6, training__beta1=0))


def test_dp_is_filled_in_from_the_ranks_there_are() -> None:
    spec = changed(parallel__tp=2, parallel__cp=2)
    assert resolve_dp(spec, 12).parallel.dp == 3
    assert resolve_dp(spec, 4).parallel.dp == 1
    said = changed(parallel__tp=2, parallel__cp=2, parallel__dp=3)
    assert resolve_dp(said, 12) == said


@pytest.mark.parametrize(
    ("dp", "ranks", "message"),
    [
        (0, 3, "too few ranks: tp 2 x cp 2 x pp 1 needs 4 ranks per pipeline, but there are 3;"),
        (0, 6, "6 ranks are not a multiple of tp 2 x cp 2 x pp 1 = 4; start a multiple of 4 ranks"),
        (2, 12, "parallel.dp = 2 needs 8 ranks, but there are 12; set parallel.dp = 3, or 0"),
        (4, 12, "parallel.dp = 4 needs 16 ranks, but there are 12; set parallel.dp = 3, or 0"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(dp: int, ranks: int, message: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        resolve_dp(changed(parallel__tp=2, parallel__cp=2, parallel__dp=dp), ranks)
    assert message in str(refused.value)


def test_a_dp_that_is_filled_in_is_checked_too() -> None:
    spec = changed(data__num_windows=4)
    assert resolve_dp(spec, 2).micro_batches_per_pipeline == 2
    with pytest.raises(ValueError, match=r"4 micro-batches per step .*dp = 3"):
        resolve_dp(spec, 3)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.name=", "run.name = ''"),
        ("run.name=../elsewhere", "without slashes"),
        ("run.name=stores", "keeps token stores"),
        ("run.seed=18446744073709551616", "must be at most 18446744073709551615"),
    ],
)
def test_names_and_seeds_that_would_go_wrong_later(override, message):
    with pytest.raises(ValueError, match=message):
        load("demo", [override])


def test_windows_round_to_the_nearest_token():
    spec = load(
        "demo",
        ["data.context_window=100", "packing.s_max=1.15", "packing.queue_thresholds=[0.14, 0.29]"],
    )
    assert spec.s_max == 115
    assert spec.queue_thresholds == (14, 29)

"""Tests configuration keys: the frozen list, help, reading and refusing one value at a time."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

import pytest

from wlb.spec import RunSpec, Schedule, apply, list_keys, to_dict
from wlb.spec.keys import (
    REMOVED,
    REMOVED_VALUES,
    RENAMED,
    Bounds,
    RemovedKeyWarning,
    RenamedKeyWarning,
    nest,
)

# Adding, removing or renaming a key is a decision: it is made here as well.
KEYS = [
    "checkpoint.init_from",
    "checkpoint.interval",
    "checkpoint.keep",
    "cluster.memory_gib",
    "cluster.overhead",
    "cluster.peak_tflops",
    "cluster.tp_overlap",
    "cost.expert_load",
    "cost.profile",
    "cp.overlap_stages",
    "data.blend",
    "data.bpe_vocab_size",
    "data.context_window",
    "data.corpus",
    "data.epochs",
    "data.heldout_fraction",
    "data.heldout_store",
    "data.num_windows",
    "data.row_multiple",
    "data.store",
    "ep.stages",
    "eval.interval",
    "eval.interval_tokens",
    "eval.steps",
    "fsdp.reshard_after_forward",
    "fsdp.shard_size",
    "kernels.attention",
    "kernels.deterministic",
    "kernels.fused",
    "kernels.linear",
    "model.activation",
    "model.attention_gate",
    "model.attention_softcap",
    "model.branch_norms",
    "model.experts.aux_coefficient",
    "model.experts.balance",
    "model.experts.dense_layers",
    "model.experts.every",
    "model.experts.hidden_size",
    "model.experts.normalised",
    "model.experts.num",
    "model.experts.per_token",
    "model.experts.scoring",
    "model.experts.shared",
    "model.experts.shared_gate",
    "model.experts.z_loss",
    "model.ffn_hidden_size",
    "model.full_every",
    "model.full_first",
    "model.head_dim",
    "model.hidden_size",
    "model.init_std",
    "model.linear.conv_kernel_dim",
    "model.linear.key_head_dim",
    "model.linear.num_key_heads",
    "model.linear.num_value_heads",
    "model.linear.value_head_dim",
    "model.logit_softcap",
    "model.norm_eps",
    "model.num_heads",
    "model.num_kv_heads",
    "model.num_layers",
    "model.qk_norm",
    "model.qk_norm_rows",
    "model.qkv_bias",
    "model.query_scale_size",
    "model.rope_scaling.attention_factor",
    "model.rope_scaling.factor",
    "model.rope_scaling.kind",
    "model.rope_scaling.original_context",
    "model.rope_scaling.turns",
    "model.rope_theta",
    "model.rotary_share",
    "model.scaled_embeddings",
    "model.sliding_rope_theta",
    "model.sliding_window",
    "model.tied_embeddings",
    "model.vocab_size",
    "model.zero_centred_norms",
    "packing.bin_windows",
    "packing.delay_price",
    "packing.examples",
    "packing.hold",
    "packing.layout",
    "packing.max_delay",
    "packing.memory_gib",
    "packing.method",
    "packing.num_micro_batches",
    "packing.packs",
    "packing.policy",
    "packing.price_range",
    "packing.queue_thresholds",
    "packing.s_max",
    "packing.step_tokens",
    "packing.window_batches",
    "packing.window_cut",
    "parallel.cp",
    "parallel.dp",
    "parallel.ep",
    "parallel.pp",
    "parallel.tp",
    "planner.baseline",
    "pp.schedule",
    "pp.stage_layers",
    "pp.virtual_stages",
    "pp.weight_delay",
    "run.device",
    "run.name",
    "run.output_dir",
    "run.seed",
    "run.stop_file",
    "sharding.exchange",
    "sharding.remainder",
    "sharding.strategy",
    "telemetry.ledger",
    "telemetry.snapshot_steps",
    "telemetry.tensorboard",
    "telemetry.trace_steps",
    "telemetry.wandb",
    "telemetry.warmup_steps",
    "training.adam_eps",
    "training.beta1",
    "training.beta2",
    "training.clip_norm",
    "training.compile",
    "training.compile_backend",
    "training.decay_steps",
    "training.dtype",
    "training.learning_rate",
    "training.loss_chunk",
    "training.loss_normalizer",
    "training.min_learning_rate",
    "training.on_nonfinite",
    "training.recompute",
    "training.schedule",
    "training.steps",
    "training.timeout_s",
    "training.warmup_steps",
    "training.weight_decay",
]


def test_the_list_of_keys_is_frozen() -> None:
    assert sorted(k.name for k in list_keys(RunSpec)) == KEYS


def _declared(section: type[Any], prefix: str = "") -> Iterator[tuple[str, Any, Bounds]]:
    hints = get_type_hints(section)
    for field in fields(section):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        if is_dataclass(hint):
            yield from _declared(hint, f"{name}.")
        else:
            yield name, hint, field.metadata["bounds"]


def test_every_number_has_a_lower_and_an_upper_bound() -> None:
    """Numbers without one made runs hang: a thousand million layers, a window of 2^62."""
    numbers = [
        (name, bounds)
        for name, hint, bounds in _declared(RunSpec)
        if {int, float} & {hint, *get_args(hint)}
    ]
    assert len(numbers) > 60
    assert [name for name, bounds in numbers if not bounds.are_given] == []


def test_every_key_has_help() -> None:
    for key in list_keys(RunSpec):
        assert len(key.doc.split()) >= 2, key.name
        assert key.type, key.name


def test_help_of_each_kind_of_value() -> None:
    shown = {k.name: (k.type, k.default, k.unit) for k in list_keys(RunSpec)}
    assert shown["parallel.tp"] == ("int", "1", "ranks")
    assert shown["packing.s_max"] == ("float", "1.5", "context windows")
    assert shown["packing.queue_thresholds"] == ("list of float", "[0.2, 0.63]", "context windows")
    assert shown["planner.baseline"] == ("bool", "true", "")
    assert shown["data.store"] == ("str", "''", "")
    policies = "original|fixed|var_len|bounded|capacity|examples"
    assert shown["packing.policy"] == (policies, "'var_len'", "")


def set_one(dotted: str, value: Any) -> RunSpec:
    return apply(RunSpec(), nest(dotted, value), source="test.toml")


@pytest.mark.parametrize(
    ("dotted", "value", "kept"),
    [
        ("parallel.tp", 4, 4),
        ("training.learning_rate", 1, 1.0),
        ("planner.baseline", False, False),
        ("data.store", "", ""),
        ("packing.queue_thresholds", [], []),
        ("packing.queue_thresholds", [1, 0.5], [1.0, 0.5]),
        ("model.rope_scaling.factor", 8, 8.0),
        ("pp.schedule", "1f1b", "1f1b"),
    ],
)
def test_values_that_are_taken(dotted: str, value: Any, kept: Any) -> None:
    at: Any = to_dict(set_one(dotted, value))
    for part in dotted.split("."):
        at = at[part]
    assert at == kept
    assert type(at) is type(kept)


def test_names_become_enumerations_and_lists_become_tuples() -> None:
    assert set_one("pp.schedule", "1f1b").pp.schedule is Schedule.ONE_F_ONE_B
    assert set_one("packing.queue_thresholds", [0.5]).packing.queue_thresholds == (0.5,)


@pytest.mark.parametrize(
    ("dotted", "value", "message"),
    [
        ("parallel.tp", 1.0, "test.toml: parallel.tp must be int, got 1.0"),
        ("parallel.tp", True, "test.toml: parallel.tp must be int, got True"),
        ("parallel.tp", "2", "parallel.tp must be int, got '2'"),
        ("training.learning_rate", True, "training.learning_rate must be float, got True"),
        ("training.learning_rate", "fast", "training.learning_rate must be float, got 'fast'"),
        ("planner.baseline", 1, "planner.baseline must be bool, got 1"),
        ("data.store", 7, "data.store must be str, got 7"),
        ("packing.queue_thresholds", 0.5, "packing.queue_thresholds must be a list, got 0.5"),
        ("packing.queue_thresholds", "0.5", "packing.queue_thresholds must be a list, got '0.5'"),
        ("packing.queue_thresholds", [0.5, "x"], r"queue_thresholds\[1\] must be float, got 'x'"),
        ("packing.policy", "best", "packing.policy = 'best': choose one of 'original', 'fixed'"),
        ("packing.policy", ["original"], r"packing.policy = \['original'\]: choose one of"),
        ("parallel", 4, "test.toml: parallel is a section, so it cannot be set to 4"),
        ("parallel.tp.size", 4, "parallel.tp must be int, got {'size': 4}"),
    ],
)
def test_values_that_are_refused(dotted: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        set_one(dotted, value)


@pytest.mark.parametrize(
    ("dotted", "message"),
    [
        ("training.step", "test.toml: unknown key 'training.step'; did you mean 'training.steps'?"),
        ("trainin.steps", "unknown key 'trainin'; did you mean 'training'?"),
        ("model.context_window", "'model.context_window'; did you mean 'data.context_window'?"),
        ("steps", "unknown key 'steps'; did you mean 'training.steps' or 'eval.steps'?"),
        ("lerning_rate", "'lerning_rate'; did you mean 'training.learning_rate'?"),
        (
            "model.rope_scaling.factr",
            "unknown key 'model.rope_scaling.factr'; did you mean 'model.rope_scaling.factor'?",
        ),
        (
            "parallel.zzz",
            "unknown key 'parallel.zzz'; use one of parallel.tp, parallel.cp, parallel.pp",
        ),
    ],
)
def test_unknown_keys_name_the_nearest(dotted: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        set_one(dotted, 1)
    assert message in str(refused.value)


def test_apply_leaves_the_given_spec_and_other_keys_alone() -> None:
    before = RunSpec()
    after = apply(before, {"training": {"steps": 7}}, source="x")
    assert before == RunSpec()
    assert after == replace(before, training=replace(before.training, steps=7))


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_renamed_key_works_with_a_warning(old: str, new: str) -> None:
    with pytest.warns(RenamedKeyWarning, match=f"{old} is now called {new}"):
        spec = apply(RunSpec(), nest(old, 6), source="run.toml")
    assert spec == apply(RunSpec(), nest(new, 6), source="run.toml")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_stored_spec_with_an_old_name_is_read_without_a_warning(old: str, new: str) -> None:
    spec = apply(RunSpec(), nest(old, 6), source="run.json", is_stored=True)
    assert spec == apply(RunSpec(), nest(new, 6), source="run.toml")


def rope(kind: str, **keys: Any) -> dict[str, Any]:
    return {"model": {"rope_scaling": {"kind": kind, **keys}}}


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_key_is_refused_by_name_and_left_out_of_stored_specs(name: str) -> None:
    assert name not in KEYS
    with pytest.raises(ValueError, match=f"run.toml: {name} was removed, because .*; remove the k"):
        apply(RunSpec(), nest(name, 1), source="run.toml")
    value = REMOVED[name].value
    if name in MERGED:
        return  # read as another key: the tests of these follow
    stored = nest(name, 1 if value is None else value)
    assert apply(RunSpec(), stored, source="run.json", is_stored=True) == RunSpec()


MERGED = ("run.memory_gib", "telemetry.peak_tflops", "cp.overlap", "cp.stages")
SAID = [n for n, key in REMOVED.items() if key.value is not None and n not in MERGED]


@pytest.mark.parametrize("name", SAID)
def test_a_stored_value_that_has_no_effect_any_more_is_said(name: str) -> None:
    with pytest.warns(RemovedKeyWarning, match=f"run.json: {name} = 'odd' has no effect any more"):
        spec = apply(RunSpec(), nest(name, "odd"), source="run.json", is_stored=True)
    assert spec == RunSpec()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("stored", "now"),
    [
        ({"cp": {"overlap": True, "stages": 2}}, {"cp": {"overlap_stages": 2}}),
        ({"cp": {"overlap": False, "stages": 2}}, {}),
        (
            {"run": {"memory_gib": 40.0}, "cluster": {"memory_gib": 80.0, "overhead": 0.1}},
            {"cluster": {"memory_gib": 40.0, "overhead": 0.1}},
        ),
        ({"telemetry": {"peak_tflops": 500.0}}, {"cluster": {"peak_tflops": 500.0}}),
        (
            rope("llama3", low_freq_factor=2.0, high_freq_factor=8.0, beta_fast=32.0),
            rope("llama3", turns=[2.0, 8.0]),
        ),
        (
            rope("yarn", beta_slow=1.0, beta_fast=64.0, low_freq_factor=7.0),
            rope("yarn", turns=[1.0, 64.0]),
        ),
        (rope("linear", low_freq_factor=7.0, beta_slow=3.0), rope("linear")),
        (
            {"packing": {"method": "multipack_posid", "bin_method": "next_fit"}},
            {"packing": {"method": "multipack_posid"}},
        ),
    ],
)
def test_stored_values_of_merged_keys_keep_their_meaning(
    stored: dict[str, Any], now: dict[str, Any]
) -> None:
    spec = apply(RunSpec(), stored, source="run.json", is_stored=True)
    assert spec == apply(RunSpec(), now, source="run.toml")


@pytest.mark.parametrize(("name", "value"), REMOVED_VALUES)
def test_a_removed_value_is_refused_by_name_and_stored_ones_are_read(name: str, value: str) -> None:
    instead = REMOVED_VALUES[name, value].instead
    said = f"run.toml: {name} = '{value}' was removed, because .*; set {name} = '{instead}'"
    with pytest.raises(ValueError, match=said):
        apply(RunSpec(), nest(name, value), source="run.toml")
    with pytest.warns(RemovedKeyWarning, match=f"run.json: {name} = '{value}' is read as"):
        spec = apply(RunSpec(), nest(name, value), source="run.json", is_stored=True)
    assert spec == apply(RunSpec(), nest(name, instead), source="run.toml")


def test_a_key_given_by_both_names_is_refused() -> None:
    both = {"data": {"num_windows": 4, "num_micro_batches": 4}}
    with (
        pytest.warns(RenamedKeyWarning),
        pytest.raises(ValueError, match=r"data\.num_windows is given twice, .* remove the old"),
    ):
        apply(RunSpec(), both, source="run.toml")

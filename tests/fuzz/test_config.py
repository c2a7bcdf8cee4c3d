"""Fuzzes what configures a run: TOML files, values of --set, profiles, config.json files."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.harness import NUMBERS, VALUES, Refused, damaged, fuzzed, misshapen, outcome
from wlb.cost import load_profile
from wlb.cost.profile_file import profile_to_json
from wlb.spec import RunSpec, check, list_keys, load, to_toml
from wlb.spec.write import to_commented_toml
from wlb.weights.config import config_json, read_config, read_generation

TOML = to_toml(load("demo"), whole=[*RunSpec().to_dict()]).encode()
KEYS = [key.name for key in list_keys(RunSpec)]
PROFILE = json.loads(json.dumps(profile_to_json(load_profile("cpu"))))
CONFIG = config_json(
    load("7b_128k", ["model.vocab_size=320"]).model,
    max_positions=512,
    bos_id=None,
    eos_ids=(3, 4),
    dtype="float32",
)
DEEP = ["[" * 3000 + "]" * 3000, "{a=" * 3000 + "1" + "}" * 3000, "0x" + "f" * 9000, "9" * 5000]
MORE = ["", "nan", "inf", "1\n[run]\nseed = 7", '"a"\nb = 1', "1979-05-27", "'''x", "[1, [2, [3]]]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config")


def values() -> st.SearchStrategy[str]:
    texts = [json.dumps(value) if isinstance(value, list | str) else str(value) for value in VALUES]
    numbers = st.one_of(st.integers(), st.floats()).map(str)
    return st.one_of(
        st.sampled_from([*texts, *map(str, NUMBERS), *DEEP, *MORE]), numbers, st.text()
    )


def checked(made: Any) -> None:
    if not isinstance(made, Refused):
        assert check(made) is made


@fuzzed()
@given(st.data())
def test_a_damaged_toml_is_a_run_or_refused(folder: Path, data: st.DataObject) -> None:
    path = folder / "run.toml"
    path.write_bytes(data.draw(damaged(TOML)))
    checked(outcome(lambda: load(str(path))))


@fuzzed()
@given(st.lists(st.tuples(st.sampled_from(KEYS), values()), min_size=1, max_size=3))
def test_any_value_of_set_is_a_run_or_refused(given_values: list[tuple[str, str]]) -> None:
    made = outcome(lambda: load("demo", [f"{key}={value}" for key, value in given_values]))
    checked(made)
    if not isinstance(made, Refused):
        # Keys that were not named have the values that they had.
        named = {key for key, _ in given_values} | {"packing.method"}
        is_method = any(key == "packing.method" for key, _ in given_values)
        before, after = load("demo").to_dict(), made.to_dict()
        for key in KEYS:
            if key not in named and not (is_method and key.startswith("packing.")):
                assert _at(before, key) == _at(after, key), key


def _at(tree: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        tree = tree[part]
    return tree


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# only a comment\n",
        "a." * 100_000 + "b = 1",
        "[" + "a." * 100_000 + "b]",
        "x = " + "[" * 100_000,
        "x = " + "{a=" * 5000,
        "[run]\nseed = 0x" + "f" * 100_000,
        "[run]\nseed = " + "9" * 100_000,
        "[training]\nlearning_rate = " + "9" * 400,
        '[data]\nstore = "a\\u0000b"',
        '[run]\nname = "' + "x" * 300_000 + '"',
        "x" * 2_000_000,
        "\ufeff[run]\n",
    ],
    ids=lambda text: repr(text[:12]),
)
def test_toml_that_held_a_command_for_ever_or_ended_in_a_traceback(folder: Path, text: str) -> None:
    path = folder / "odd.toml"
    path.write_text(text, "utf-8")
    assert isinstance(outcome(lambda: load(str(path))), Refused)


@pytest.mark.parametrize("key", ["training.steps", "run.name", "model.num_layers", "data.blend"])
@pytest.mark.parametrize("rest", ["\n[training]\nsteps = 7", "\nw = 1"])
def test_a_value_of_set_cannot_bring_further_keys(key: str, rest: str) -> None:
    value = "['a:1']" if key == "data.blend" else "'x'" if key == "run.name" else "8"
    made = outcome(lambda: load("demo", [f"{key}={value}{rest}"]))
    assert isinstance(made, Refused)
    assert "sets more than one key" in made.message


def test_the_key_of_set_may_not_have_thousands_of_parts() -> None:
    made = outcome(lambda: load("demo", ["training.steps" + ".a" * 100_000 + "=1"]))
    assert isinstance(made, Refused)
    assert "100001 dots, which no key has; write section.key=value" in made.message


@fuzzed(0.3)
@given(st.data())
def test_specs_that_are_accepted_read_back_from_what_is_written(
    folder: Path, data: st.DataObject
) -> None:
    pairs = data.draw(st.lists(st.tuples(st.sampled_from(KEYS), values()), max_size=4))
    made = outcome(lambda: load("demo", [f"{key}={value}" for key, value in pairs]))
    if isinstance(made, Refused):
        return
    for write in (to_toml, to_commented_toml):
        path = folder / "written.toml"
        path.write_text(write(made), "utf-8")
        assert load(str(path)) == made


@fuzzed(0.5)
@given(st.data())
def test_a_misshapen_profile_is_usable_or_refused(folder: Path, data: st.DataObject) -> None:
    path = folder / "profile.json"
    path.write_text(data.draw(misshapen(PROFILE)), "utf-8")
    made = outcome(lambda: load_profile(str(path)))
    if not isinstance(made, Refused):
        again = outcome(lambda: json.dumps(profile_to_json(made)))
        assert not isinstance(again, Refused)


@fuzzed(0.3)
@given(st.data())
def test_a_damaged_profile_is_usable_or_refused(folder: Path, data: st.DataObject) -> None:
    path = folder / "bytes.json"
    path.write_bytes(data.draw(damaged(json.dumps(PROFILE).encode())))
    outcome(lambda: load_profile(str(path)))


@pytest.mark.parametrize("name", ["tflops", "bytes_per_s", "forward_call_ns", "forward_factor"])
@pytest.mark.parametrize("value", [1e300, 1e-300, 10**19])
def test_a_profile_of_impossible_numbers_is_refused(folder: Path, name: str, value: float) -> None:
    path = folder / "far.json"
    changed = json.loads(json.dumps(PROFILE))
    block = {"tflops": changed["head"], "bytes_per_s": changed["collectives"][0]}
    block.get(name, changed["layer"])[name] = value
    path.write_text(json.dumps(changed))
    made = outcome(lambda: load_profile(str(path)))
    assert isinstance(made, Refused)
    assert f"{name} = {value}" in made.message


@fuzzed()
@given(st.data())
def test_a_misshapen_config_json_is_a_model_or_refused(folder: Path, data: st.DataObject) -> None:
    path = folder / "config.json"
    path.write_text(data.draw(misshapen(CONFIG)), "utf-8")
    made = outcome(lambda: read_config(path))
    if not isinstance(made, Refused):
        made.spec.check()
        assert all(0 <= i < made.spec.vocab_size for i in made.eos_ids)
    outcome(lambda: read_generation(path))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pretraining_tp", 2),
        ("sliding_window", 4096),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("logit_scale", 0.5),
        ("embedding_multiplier", 12.0),
        ("clip_qkv", 8.0),
        ("is_encoder_decoder", True),
        ("add_cross_attention", True),
        ("pruned_heads", {"1": [2]}),
        ("auto_map", {"AutoModelForCausalLM": "modeling.Other"}),
        ("tie_word_embeddings", "false"),
        ("attention_bias", "no"),
        ("rope_scaling", {"rope_type": "default", "mrope_section": [1, 2]}),
        ("eos_token_id", 320),
        ("bos_token_id", -1),
    ],
)
def test_fields_that_change_logits_are_refused_by_name(folder: Path, name: str, value: Any) -> None:
    path = folder / "other.json"
    path.write_text(json.dumps({**CONFIG, name: value}))
    made = outcome(lambda: read_config(path))
    assert isinstance(made, Refused)
    assert name in made.message or "mrope_section" in made.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pretraining_tp", 1),
        ("sliding_window", None),
        ("transformers_version", "5.0.0"),
        ("attention_dropout", 0.1),
        ("layer_types", ["full_attention"] * 32),
        ("unknown_switch", False),
        ("pruned_heads", {}),
        ("use_sliding_window", False),
    ],
)
def test_fields_that_change_no_logit_are_read_over(folder: Path, name: str, value: Any) -> None:
    path = folder / "same.json"
    path.write_text(json.dumps(CONFIG))
    expected = read_config(path)
    path.write_text(json.dumps({**CONFIG, name: value}))
    assert read_config(path) == expected

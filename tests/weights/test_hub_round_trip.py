"""Tests that import and export undo each other to the bit; shards, dtypes, padding, other files."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models

from tests.weights.case import SPEC, hub_tensors, model_of, write_hub
from wlb.data import TokenStoreWriter
from wlb.spec import Dtype, load
from wlb.train.checkpoint.folder import write_manifest
from wlb.weights import export, import_folder
from wlb.weights.config import read_config
from wlb.weights.names import Parameter, parameters_of, shards_of
from wlb.weights.saved import SavedModel


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_round_trip_keeps_every_bit_and_the_model(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = hub_tensors(SPEC, dtype)
    hub = write_hub(tmp_path / "hub", tensors=tensors, bos_token_id=1, eos_token_id=[2, 5])
    made = import_folder(hub, tmp_path / "imported")
    back = export(made.checkpoint, tmp_path / "back")
    found = load_file(back.folder / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], value), name
    assert read_config(back.folder / "config.json") == read_config(hub / "config.json")
    modes = {path.stat().st_mode for path in back.folder.iterdir()}
    assert len(modes) == 1  # who may read the configuration may read the weights
    config = json.loads((back.folder / "config.json").read_text("utf-8"))
    assert config["torch_dtype"] == back.dtype == str(dtype).removeprefix("torch.")
    tokens = json.loads((back.folder / "generation_config.json").read_text("utf-8"))
    assert tokens == {"bos_token_id": 1, "eos_token_id": [2, 5]}
    assert sorted(p.name for p in back.folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_rows_after_the_vocabulary_are_zero_and_stay_here(tmp_path: Path) -> None:
    made = import_folder(write_hub(tmp_path / "hub"), tmp_path / "imported")
    assert made.num_padding_rows == 512 - 301
    held = dict(model_of(made.checkpoint).named_parameters())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert held[name].shape == (512, 32)
        assert not held[name][301:].any()
        assert held[name][:301].all(1).any()
    export(made.checkpoint, tmp_path / "back")
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found["lm_head.weight"].shape == (301, 32)


def test_a_tied_head_stays_the_embedding(tmp_path: Path) -> None:
    tensors = hub_tensors(SPEC)
    head = tensors.pop("lm_head.weight")
    hub = write_hub(tmp_path / "hub", tensors=tensors, tie_word_embeddings=True)
    model = model_of(import_folder(hub, tmp_path / "a").checkpoint)
    embedding = tensors["model.embed_tokens.weight"]
    assert model.lm_head is None
    assert torch.equal(model.head.weight[:301], embedding)
    export(tmp_path / "a", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["tie_word_embeddings"]
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == tensors.keys()
    # A head that is there too may only say the same.
    both = write_hub(
        tmp_path / "both",
        tensors=tensors | {"lm_head.weight": embedding.clone()},
        tie_word_embeddings=True,
    )
    import_folder(both, tmp_path / "b")
    other = write_hub(
        tmp_path / "other", tensors=tensors | {"lm_head.weight": head}, tie_word_embeddings=True
    )
    with pytest.raises(ValueError, match=r"tie_word_embeddings = true, but lm_head.weight in"):
        import_folder(other, tmp_path / "c")


def test_shards_are_filled_in_order_and_a_large_tensor_is_alone() -> None:
    spec = replace(SPEC, num_layers=1, vocab_size=100)
    parameters = parameters_of(spec).values()

    def size(parameter: Parameter) -> int:
        return 2 * prod(parameter.unpadded)

    shards = list(shards_of(parameters, size, 6400))
    assert [[p.name.removeprefix("model.layers.0.") for p in shard] for shard in shards] == [
        ["model.embed_tokens.weight"],  # 100 * 32 * 2 bytes
        ["input_layernorm.weight", *(f"self_attn.{name}_proj.weight" for name in "qkv")],
        ["self_attn.o_proj.weight", "post_attention_layernorm.weight", "mlp.gate_proj.weight"],
        ["mlp.up_proj.weight", "mlp.down_proj.weight", "model.norm.weight"],
        ["lm_head.weight"],
    ]
    assert [len(shard) for shard in shards_of(parameters, size, 1)] == [1] * 12
    assert [len(shard) for shard in shards_of(parameters, size, 10**9)] == [12]


def test_shards_have_an_index_and_are_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = hub_tensors(SPEC)
    made = import_folder(write_hub(tmp_path / "hub", tensors=tensors), tmp_path / "imported")
    reads: list[int] = []
    read = SavedModel.read

    def counted(self: SavedModel, names: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        found = read(self, names, dtype)
        reads.append(sum(value.nbytes for value in found.values()))
        return found

    monkeypatch.setattr(SavedModel, "read", counted)
    most = 50_000
    back = export(made.checkpoint, tmp_path / "back", shard_bytes=most)
    assert len(reads) == back.num_shards == 4
    assert max(reads) <= most  # what memory holds at a time
    index = index_of(back.folder)
    assert index["metadata"]["total_size"] == sum(reads) == back.num_bytes
    assert set(index["weight_map"].values()) == {
        f"model-{i:05d}-of-00004.safetensors" for i in (1, 2, 3, 4)
    }
    found: dict[str, torch.Tensor] = {}
    for file in set(index["weight_map"].values()):
        held = load_file(back.folder / file)
        assert all(index["weight_map"][name] == file for name in held)
        found |= held
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    again = import_folder(back.folder, tmp_path / "again")
    one = export(again.checkpoint, tmp_path / "one")
    whole = load_file(one.folder / "model.safetensors")
    assert all(torch.equal(whole[name], value) for name, value in tensors.items())


def test_an_export_converts_and_mixed_dtypes_become_float32(tmp_path: Path) -> None:
    tensors = hub_tensors(SPEC, torch.bfloat16)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    made = import_folder(write_hub(tmp_path / "hub", tensors=tensors), tmp_path / "imported")
    assert made.dtypes == ("bfloat16", "float32")
    assert export(made.checkpoint, tmp_path / "a").dtype == "float32"
    export(made.checkpoint, tmp_path / "b", dtype=Dtype.BFLOAT16)
    found = load_file(tmp_path / "b" / "model.safetensors")
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    assert torch.equal(found["lm_head.weight"], tensors["lm_head.weight"])


def test_model_toml_is_a_run_that_begins_with_the_import(tmp_path: Path) -> None:
    made = import_folder(write_hub(tmp_path / "hub"), tmp_path / "imported")
    path = made.checkpoint / "model.toml"
    assert path.read_text("utf-8") == made.toml
    spec = load(str(path), ["parallel.tp=2", "training.steps=3"])
    assert spec.model == SPEC
    assert spec.checkpoint.init_from == str(made.checkpoint.resolve())
    assert (spec.parallel.tp, spec.training.steps) == (2, 3)


def _store(folder: Path, *, vocab_size: int, tokenizer: str | None) -> Path:
    """Returns a store, and the file of its tokenizer, whose words are w0, w1, ..."""
    folder.mkdir()
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    made.save(str(folder / "words.json"))
    with TokenStoreWriter(
        folder / "store", vocab_size=vocab_size, eos_id=7, tokenizer=tokenizer
    ) as writer:
        writer.add([1, 2, 7])
    return folder / "store"


def _trained(tmp_path: Path, imported: dict[str, Any] | None = None, **data: Any) -> Path:
    """Returns an imported checkpoint that says it was trained on `data`, and where it came from."""
    made = import_folder(write_hub(tmp_path / "hub", spec=SPEC), tmp_path / "imported")
    run = json.loads((made.checkpoint / "run.json").read_text("utf-8"))
    run["imported"] = imported or {}
    run["spec"]["training"] = {}
    run["spec"]["data"] = {"context_window": 640, **data}
    (made.checkpoint / "run.json").write_text(json.dumps(run), "utf-8")
    (made.checkpoint / "manifest.json").unlink()
    write_manifest(made.checkpoint)
    return made.checkpoint


@pytest.mark.parametrize("key", ["store", "blend"])
def test_the_tokenizer_of_the_store_goes_along(tmp_path: Path, key: str) -> None:
    store = _store(tmp_path / "stores", vocab_size=301, tokenizer="words.json")
    saved = _trained(tmp_path, **{key: str(store) if key == "store" else [f"{store}:1"]})
    made = export(saved, tmp_path / "out")
    assert made.tokenizer == f"named by the token store {store}"
    copied = (made.folder / "tokenizer.json").read_bytes()
    assert copied == (store.parent / "words.json").read_bytes()
    beside = json.loads((made.folder / "tokenizer_config.json").read_text("utf-8"))
    assert beside == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w7"}
    config = json.loads((made.folder / "config.json").read_text("utf-8"))
    assert (config["eos_token_id"], config["max_position_embeddings"]) == (7, 640)


@pytest.mark.parametrize(
    ("window", "eos_ids", "positions", "expected"),
    [(640, [5, 7], 8192, [5, 7]), (16384, [5], 16384, 7)],
)
def test_a_trained_import_keeps_what_the_model_was_made_for(
    tmp_path: Path, window: int, eos_ids: list[int], positions: int, expected: list[int] | int
) -> None:
    """The store's end of text is 7; other ends that the model had stay beside it."""
    store = _store(tmp_path / "stores", vocab_size=301, tokenizer="words.json")
    imported = {"max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_ids": eos_ids}
    saved = _trained(tmp_path, imported=imported, store=str(store), context_window=window)
    config = json.loads((export(saved, tmp_path / "out").folder / "config.json").read_text("utf-8"))
    told = (config["max_position_embeddings"], config["bos_token_id"], config["eos_token_id"])
    assert told == (positions, 1, expected)


def test_a_tokenizer_is_never_guessed(tmp_path: Path) -> None:
    store = _store(tmp_path / "stores", vocab_size=301, tokenizer=None)
    saved = _trained(tmp_path, store=str(store))
    made = export(saved, tmp_path / "a")
    assert made.tokenizer == f"the token store {store} names no tokenizer"
    assert not (made.folder / "tokenizer.json").exists()
    given = export(saved, tmp_path / "b", tokenizer=store.parent / "words.json")
    assert (given.folder / "tokenizer.json").is_file()
    for file in tmp_path.glob("stores/store.*"):
        file.unlink()
    assert export(saved, tmp_path / "c").tokenizer.startswith(
        "the run's token store cannot be opened: "
    )


@pytest.mark.parametrize("named", ["../words.json", "/etc/hostname", 7, ["words.json"], {}])
def test_a_store_that_names_no_tokenizer_beside_it_is_refused(tmp_path: Path, named: Any) -> None:
    store = _store(tmp_path / "stores", vocab_size=301, tokenizer="words.json")
    saved = _trained(tmp_path, store=str(store))
    described = json.loads((tmp_path / "stores" / "store.json").read_text("utf-8"))
    changed = {**described, "tokenizer": named}
    (tmp_path / "stores" / "store.json").write_text(json.dumps(changed), "utf-8")
    with pytest.raises(ValueError, match=r"store\.json is not the description .*tokenizer"):
        export(saved, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_config_beside_a_given_tokenizer_goes_along(tmp_path: Path) -> None:
    folder = _store(tmp_path / "stores", vocab_size=301, tokenizer=None).parent
    (folder / "words.json").rename(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}', "utf-8")
    made = import_folder(write_hub(tmp_path / "hub"), tmp_path / "imported")
    export(made.checkpoint, tmp_path / "out", tokenizer=folder / "tokenizer.json")
    beside = (tmp_path / "out" / "tokenizer_config.json").read_text("utf-8")
    assert beside == '{"chat_template": "x"}'

"""Fuzzes weights: safetensors files and their index for `wlb import`, and checkpoints' shards.

A checkpoint's manifest is written again here, so that its checksums do not refuse what is damaged.
"""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from tests.fuzz.harness import NUMBERS, Refused, damaged, fuzzed, misshapen, outcome
from tests.weights.case import hub_tensors, model_of, write_hub
from wlb.model import Llama
from wlb.spec import ModelSpec
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.checkpoint import saver
from wlb.weights.config import read_config
from wlb.weights.hub import HubTensors, open_tensors
from wlb.weights.hub_import import import_folder
from wlb.weights.names import parameters_of
from wlb.weights.saved import open_saved

SPEC = ModelSpec(
    vocab_size=20,
    hidden_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    ffn_hidden_size=8,
)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def hub(folder: Path) -> Path:
    return write_hub(folder / "hub", spec=SPEC)


@pytest.fixture(scope="module")
def shards(folder: Path) -> Path:
    """The same model in two files and their index."""
    made = write_hub(folder / "shards", spec=SPEC)
    (made / SINGLE).unlink()
    tensors = hub_tensors(SPEC)
    where = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({n: t for n, t in tensors.items() if where[n] == file}, made / file)
    (made / INDEX).write_text(json.dumps({"metadata": {"total_size": 9}, "weight_map": where}))
    return made


@pytest.fixture(scope="module")
def saved(folder: Path, hub: Path) -> Path:
    """A checkpoint, in a folder of its own."""
    return import_folder(hub, folder / "saved" / "step-00000000").checkpoint


def changed(data: st.DataObject, text: bytes) -> bytes:
    """A safetensors file with its header misshapen, or damaged anywhere."""
    size = int.from_bytes(text[:8], "little")
    if data.draw(st.booleans()):
        return data.draw(damaged(text))
    header = data.draw(misshapen(json.loads(text[8 : 8 + size])))
    value = header.encode("utf-8", "surrogatepass")
    said = data.draw(st.sampled_from([len(value), size, *(abs(int(n)) for n in NUMBERS)]))
    return min(said, 2**64 - 1).to_bytes(8, "little") + value + text[8 + size :]


def read(folder: Path) -> dict[str, Tensor]:
    config = folder / "config.json"
    model = read_config(config)
    parameters = parameters_of(model.spec)
    found: HubTensors = open_tensors(
        folder, parameters.values(), is_tied=model.spec.tied_embeddings, config=config
    )
    return {name: found.read(name) for name in parameters}


def check(found: Any) -> None:
    """What is read has the model's names and shapes."""
    if not isinstance(found, Refused):
        wanted = {p.name: p.unpadded for p in parameters_of(SPEC).values()}
        assert {name: tuple(t.shape) for name, t in found.items()} == wanted


@fuzzed()
@given(st.data())
def test_damaged_weights_are_tensors_or_refused(hub: Path, data: st.DataObject) -> None:
    file, kept = hub / SINGLE, hub.parent / "kept.safetensors"
    if not kept.exists():
        shutil.copy(file, kept)
    file.write_bytes(changed(data, kept.read_bytes()))
    check(outcome(lambda: read(hub)))
    shutil.copy(kept, file)


@fuzzed()
@given(st.data())
def test_a_misshapen_index_is_read_or_refused(shards: Path, data: st.DataObject) -> None:
    index, kept = shards / INDEX, shards.parent / "kept.json"
    if not kept.exists():
        shutil.copy(index, kept)
    text = kept.read_bytes()
    if data.draw(st.booleans()):
        value = data.draw(misshapen(json.loads(text))).encode("utf-8", "surrogatepass")
    else:
        value = data.draw(damaged(text))
    index.write_bytes(value)
    check(outcome(lambda: read(shards)))
    shutil.copy(kept, index)


@fuzzed(0.1, nightly=500)
@given(st.data())
def test_a_damaged_folder_is_imported_or_refused(
    folder: Path, hub: Path, data: st.DataObject
) -> None:
    """Nightly 500, each from the folder to a whole checkpoint."""
    source, out = folder / "source", folder / "out" / "step-00000000"
    for made in (source, out.parent):
        shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(hub, source)
    out.parent.mkdir()
    (source / SINGLE).write_bytes(changed(data, (hub / SINGLE).read_bytes()))
    made = outcome(lambda: import_folder(source, out))
    if isinstance(made, Refused):
        assert not list(out.parent.iterdir())
    else:
        assert open_saved(out).spec == SPEC


def resigned(folder: Path, saved: Path, data: st.DataObject) -> Path:
    """A copy of a checkpoint with a damaged shard and the manifest that belongs to it."""
    made = folder / "copy" / "step-00000000"
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(saved, made)
    (shard,) = made.glob("*.safetensors")
    shard.write_bytes(changed(data, shard.read_bytes()))
    (made / checkpoint.MANIFEST).unlink()
    checkpoint.write_manifest(made)
    return made


def whole(folder: Path) -> dict[str, Tensor]:
    found = open_saved(folder)
    return found.read(found.parameters, torch.float32)


@fuzzed(0.5)
@given(st.data())
def test_a_checkpoint_with_a_damaged_shard_is_read_or_refused(
    folder: Path, saved: Path, data: st.DataObject
) -> None:
    made = resigned(folder, saved, data)
    check(outcome(lambda: whole(made)))


@fuzzed(0.2, nightly=2000)
@given(st.data())
def test_a_run_loads_a_damaged_shard_or_refuses_it(
    folder: Path, saved: Path, data: st.DataObject
) -> None:
    """As `checkpoint.init_from` and a run that resumes load it; nightly 2,000."""
    made = resigned(folder, saved, data)

    def load() -> dict[str, Tensor]:
        model = Llama(SPEC)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")
            saver.load_weights(made, None, stages={0: model})
        return dict(model.named_parameters())

    outcome(load)


def test_a_whole_checkpoint_is_loaded(saved: Path) -> None:
    values = dict(model_of(saved).named_parameters())
    assert {name: tuple(t.shape) for name, t in values.items()} == {
        p.name: p.shape for p in parameters_of(SPEC).values()
    }

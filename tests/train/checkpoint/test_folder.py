"""Tests which checkpoint a run goes on from, and that damaged or foreign files are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.sets import full
from tests.train.case import Run, train
from tests.train.checkpoint.case import SHARD, at, copied, spec_of
from wlb.plan import UserError
from wlb.train.checkpoint import folder as checkpoint

pytestmark = pytest.mark.process


def damaged(path: Path, how: str) -> None:
    if how == "a copy":  # of a shard of another step, as a wrong copy leaves it behind
        shutil.copy(next(path.parent.with_name("step-00000002").glob("*.safetensors")), path)
        return
    data = bytearray(path.read_bytes())
    if how == "a bit":
        data[len(data) // 2] ^= 4
    elif how == "the end":
        del data[-10:]
    if how == "all":
        path.unlink()
    else:
        path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("name", "how", "said"),
    [
        (SHARD, "a bit", "is corrupt: its SHA-256"),
        ("manifest.json", "the end", "cannot be read"),
        *full(
            (SHARD, "the end", "bytes when it was saved"),
            (SHARD, "all", "is missing"),
            (SHARD.replace("1", "2", 1), "a copy", "is not listed in manifest.json"),
            (".left.safetensors", "a copy", "is not listed in manifest.json"),
            ("planner.json", "a bit", "is corrupt: its SHA-256"),
            ("run.json", "a bit", "is corrupt: its SHA-256"),
            ("manifest.json", "all", "cannot be read"),
        ),
    ],
)
def test_damage_is_refused_and_the_one_before_is_offered(
    whole: Run, corpus: Path, tmp_path: Path, name: str, how: str, said: str
) -> None:
    spec = copied(whole, tmp_path, corpus, training={"steps": 7})
    damaged(at(tmp_path, 6) / name, how)
    with pytest.raises(ValueError, match=f"step-00000006/{name} .*{said}.*--resume 4"):
        train(spec, resume=True)
    # What was offered works, and what was damaged is out of the way.
    run, shown = train(spec, resume="4")
    assert f"resuming from {at(tmp_path, 4)}" in shown
    assert "a checkpoint later than the resumed one was renamed to" in shown
    assert [line["steps_done"] for line in run.steps][-3:] == [5, 6, 7]
    assert run.losses[-3:-1] == whole.losses[4:]
    aside = at(tmp_path, 6).parent / "aside-1-step-00000006"
    assert aside.is_dir()
    checkpoint.check_files(at(tmp_path, 6))


def of(checkpoint_folder: Path) -> dict[str, Any]:
    return json.loads((checkpoint_folder / "manifest.json").read_text())


def without_files(found: dict[str, Any]) -> dict[str, Any]:
    return {"files": {}}


def without_shards(found: dict[str, Any]) -> dict[str, Any]:
    return {"files": {n: about for n, about in found["files"].items() if n.endswith(".json")}}


def with_another_size(found: dict[str, Any]) -> dict[str, Any]:
    name, about = next(iter(found["files"].items()))
    return found | {"files": found["files"] | {name: about | {"bytes": about["bytes"] + 1}}}


def with_a_path(found: dict[str, Any]) -> dict[str, Any]:
    return {"files": found["files"] | {"../run.json": found["files"]["run.json"]}}


def with_a_word_for_a_size(found: dict[str, Any]) -> dict[str, Any]:
    return {"files": found["files"] | {"run.json": found["files"]["run.json"] | {"bytes": "9"}}}


def with_another_key(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "keep": True}


def a_list(found: dict[str, Any]) -> list[Any]:
    return [found]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (without_files, "does not list all files of a checkpoint"),
        (without_shards, "does not list all files of a checkpoint"),
        (with_another_size, "is corrupt: the checksum of its entries is wrong"),
        (with_a_path, 'has an entry in a wrong format; each entry must be "NAME"'),
        (with_a_word_for_a_size, 'has an entry in a wrong format; each entry must be "NAME"'),
        (with_another_key, 'has an entry in a wrong format; each entry must be "NAME"'),
        (a_list, "cannot be read"),
    ],
)
def test_a_manifest_that_does_not_list_a_whole_checkpoint_is_refused(
    whole: Run, tmp_path: Path, changed: Any, said: str
) -> None:
    shutil.copytree(whole.folder, tmp_path / "runs" / "small")
    folder = at(tmp_path, 6)
    checkpoint.check_files(folder)
    (folder / "manifest.json").write_text(json.dumps(changed(of(folder))))
    with pytest.raises(checkpoint.DamagedCheckpoint, match=said):
        checkpoint.check_files(folder)


def test_a_manifest_of_an_earlier_version_is_read(whole: Run, tmp_path: Path) -> None:
    """It has no digest of its own."""
    shutil.copytree(whole.folder, tmp_path / "runs" / "small")
    folder = at(tmp_path, 6)
    (folder / "manifest.json").write_text(json.dumps({"files": of(folder)["files"]}))
    checkpoint.check_files(folder)


def test_a_checkpoint_without_versions_is_gone_on_from(
    whole: Run, corpus: Path, tmp_path: Path
) -> None:
    spec = copied(whole, tmp_path, corpus, training={"steps": 7})
    folder = at(tmp_path, 6)
    about = checkpoint.read_run(folder)
    del about["written_by"]
    checkpoint.write_json(folder / "run.json", about)
    (folder / "manifest.json").unlink()
    checkpoint.write_manifest(folder)
    run, _ = train(spec, resume=True)
    assert len(run.steps) == 7
    assert "written_by" in checkpoint.read_run(at(tmp_path, 7))


@pytest.mark.parametrize("changes", [[], [{"step": 8, "prices": {}}]])
def test_a_checkpoint_with_prices_is_gone_on_from_unless_they_were_learned(
    whole: Run, corpus: Path, tmp_path: Path, changes: list[dict[str, Any]]
) -> None:
    """As versions with `cost.online` wrote it."""
    spec = copied(whole, tmp_path, corpus, training={"steps": 7})
    folder = at(tmp_path, 6)
    about = checkpoint.read_run(folder)
    about["spec"]["cost"] |= {"online": bool(changes), "online_interval": 5}
    checkpoint.write_json(folder / "run.json", about)
    planner = json.loads((folder / "planner.json").read_text())
    planner["prices"] = {"base": "cpu sdpa" if changes else "", "changes": changes}
    checkpoint.write_json(folder / "planner.json", planner)
    (folder / "manifest.json").unlink()
    checkpoint.write_manifest(folder)
    if not changes:
        run, _ = train(spec, resume=True)
        assert len(run.steps) == 7
        return
    said = r"planner\.json: .* to measured times from step 9 on"
    with pytest.raises(UserError, match=said):
        train(spec, resume=True)


@pytest.mark.parametrize(
    ("name", "key", "said"),
    [
        ("planner.json", "carry", "contradicts itself: .* tokens were read"),
        ("run.json", "step", "its weights have 60 updates, but its planner state has only 6 steps"),
        ("planner.json", "next_step", "records .*'next_step': 6.* has .*'next_step': 100"),
        ("planner.json", "policy", "records .*'policy': 'var_len'.* has .*'policy': 'original'"),
        ("planner.json", "exhausted", "contradicts itself: .*exhausted = true"),
        ("planner.json", "surplus", "contradicts itself: the state of the corpus has surplus"),
        ("planner.json", "arrival", "contradicts itself: .* must have arrived in a step from 0 to"),
        ("planner.json", "more", "has the unknown key 'more'"),
        ("run.json", "more", r"run\.json: it has the unknown key 'more'"),
        ("run.json", "training", r"run\.json: spec lacks the key 'training'"),
        ("run.json", "spec", r"run\.json: spec = \[1\] must be an object"),
        ("run.json", "experts", r"run\.json: spec\.model\.experts = \[1\] must be an object"),
    ],
)
def test_a_state_that_was_edited_and_signed_again_is_refused(
    whole: Run, corpus: Path, tmp_path: Path, name: str, key: str, said: str
) -> None:
    spec = copied(whole, tmp_path, corpus, training={"steps": 7})
    data = json.loads((at(tmp_path, 6) / name).read_text())
    EDITS[key](data)
    (at(tmp_path, 6) / name).write_text(json.dumps(data))
    (at(tmp_path, 6) / "manifest.json").unlink()
    checkpoint.write_manifest(at(tmp_path, 6))
    with pytest.raises(UserError, match=said):
        train(spec, resume=True)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            b'"dtype":"F32"',
            b'"dtype":"I32"',
            r"torch\.int32, but a run saves this tensor in torch\.float32",
        ),
        (b"DCP_SHARDING_INFO", b"DCP_SHARDING_INFX", "lacks the metadata"),
        (b"model.model.norm.weight", b"model.mod\\u0065l.norm.weight", "is damaged or incomplete"),
    ],
)
def test_a_header_that_was_edited_and_signed_again_is_refused(
    whole: Run, corpus: Path, tmp_path: Path, before: bytes, after: bytes, said: str
) -> None:
    spec = copied(whole, tmp_path, corpus, training={"steps": 7})
    shard = at(tmp_path, 6) / "shard-00001-model-00001-of-00001.safetensors"
    data = shard.read_bytes()
    assert before in data
    shard.write_bytes(data.replace(before, after, 1))
    (at(tmp_path, 6) / "manifest.json").unlink()
    checkpoint.write_manifest(at(tmp_path, 6))
    with pytest.raises(UserError, match=said):
        train(spec, resume=True)


def _without_a_piece(planner: dict[str, Any]) -> None:
    for column in (planner["carry"]["slot"], *planner["carry"]["pieces"].values()):
        column.pop()


EDITS: dict[str, Any] = {
    "carry": _without_a_piece,
    "step": lambda run: run.update(step=60),
    "next_step": lambda planner: planner["carry"].update(next_step=100),
    "policy": lambda planner: planner["carry"].update(
        policy="original", slot=[0] * len(planner["carry"]["slot"])
    ),
    "exhausted": lambda planner: planner.update(exhausted=True),
    "surplus": lambda planner: planner["corpus"].update(surplus=planner["corpus"]["surplus"] + 1),
    "arrival": lambda planner: planner["carry"]["pieces"]["arrival"].__setitem__(0, 7),
    "more": lambda data: data.update(more=1),
    "training": lambda run: run["spec"].pop("training"),
    "spec": lambda run: run.update(spec=[1]),
    "experts": lambda run: run["spec"]["model"].update(experts=[1]),
}


@pytest.mark.parametrize("name", ["planner.json", "shard-00001-model-00001-of-00001.safetensors"])
def test_auto_goes_on_from_the_one_before_a_damaged_one(
    whole: Run, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """JSON files are read before ranks start, others while they load."""
    spec = copied(whole, tmp_path, corpus, training={"steps": 7})
    damaged(at(tmp_path, 6) / name, "a bit")
    damaged(at(tmp_path, 4) / "run.json", "the end")
    run, shown = train(spec, resume="auto")
    told = shown + capsys.readouterr().err
    assert f"step-00000006/{name} is corrupt" in told
    assert f"resuming from {at(tmp_path, 2)}" in told
    starts = [line for line in run.lines if line["kind"] == "start"]
    assert starts[-1]["resumed_from"] == str(at(tmp_path, 2))
    assert [line["steps_done"] for line in run.steps][-5:] == [3, 4, 5, 6, 7]
    assert run.losses[-5:-1] == whole.losses[2:]
    assert (at(tmp_path, 6).parent / "aside-1-step-00000006").is_dir()


def test_a_stray_that_nothing_reads_costs_no_checkpoint(
    whole: Run, corpus: Path, tmp_path: Path
) -> None:
    spec = copied(whole, tmp_path, corpus, training={"steps": 7})
    for name in ("NOTES.txt", "notes.json", ".nfs0001"):
        (at(tmp_path, 6) / name).write_text("the best one")
    (at(tmp_path, 6) / "evaluations").mkdir()
    (at(tmp_path, 6).parent / "aside-1-step-00000009").mkdir()
    (at(tmp_path, 6).parent / "aside-1-step-00000009" / "shard").write_bytes(bytes(3 << 20))
    run, shown = train(spec, resume="auto")
    shown = " ".join(shown.split())
    assert f"resuming from {at(tmp_path, 6)}" in shown
    said = "step-00000006 has files that were not saved with it: NOTES.txt, evaluations, notes.json"
    assert said in shown
    assert "aside-1-step-00000009 (3 MiB). No run removes these; remove" in shown
    assert len(run.steps) == 7


@pytest.mark.parametrize("name", ["planner.json", "a.safetensors", ".a.safetensors"])
def test_a_stray_that_a_load_could_read_is_refused(tmp_path: Path, name: str) -> None:
    """An imported checkpoint has no planner.json, so that one of another run would be read."""
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "b.safetensors").write_bytes(bytes(8))
    checkpoint.write_manifest(tmp_path)
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(
        checkpoint.DamagedCheckpoint, match=rf"{name} is not listed in manifest\.json"
    ):
        checkpoint.check_files(tmp_path)


def test_auto_does_not_start_anew_where_all_are_damaged(
    whole: Run, corpus: Path, tmp_path: Path
) -> None:
    spec = copied(whole, tmp_path, corpus)
    for step in (2, 4, 6):
        damaged(at(tmp_path, step) / "run.json", "the end")
    with pytest.raises(ValueError, match=r"step-00000006.*step-00000004.*step-00000002"):
        train(spec, resume="auto")


def test_the_first_checkpoint_has_none_before_it(whole: Run, corpus: Path, tmp_path: Path) -> None:
    spec = copied(whole, tmp_path, corpus)
    damaged(at(tmp_path, 2) / "run.json", "the end")
    with pytest.raises(ValueError, match="there is no older checkpoint"):
        train(spec, resume="2")


def test_where_a_run_goes_on(whole: Run, corpus: Path, tmp_path: Path) -> None:
    spec = copied(whole, tmp_path, corpus, training={"steps": 6})
    folder = at(tmp_path, 6).parent
    partial = folder / "partial-00000007"
    partial.mkdir()  # of a crash
    run, shown = train(spec, resume=str(at(tmp_path, 4)))
    assert f"resuming from {at(tmp_path, 4)}" in shown
    assert run.losses[-2:] == whole.losses[-2:]
    assert not partial.exists()
    with pytest.raises(
        ValueError, match=r"--resume 5: .* is not a checkpoint of this run; .*step-0"
    ):
        train(spec, resume="5")
    with pytest.raises(ValueError, match=r"set checkpoint\.init_from"):
        train(spec, resume=str(whole.folder / "checkpoints" / "step-00000004"))


@pytest.mark.parametrize("asked", ["²", "١", "1_0", "9" * 5000])
def test_a_step_to_resume_is_a_number_in_digits(tmp_path: Path, asked: str) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-²").mkdir()  # of somebody else
    with pytest.raises(
        UserError,
        match=r"is not a checkpoint of this run; .* has these checkpoints: step-00000001\.",
    ):
        checkpoint.resolve_resume(tmp_path, asked)


@pytest.mark.full
def test_auto_goes_on_or_begins(corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, corpus, training={"steps": 2})
    first, shown = train(spec, resume="auto")
    assert "resuming from" not in shown
    assert first.lines[0]["resumed_from"] is None
    longer = spec_of(tmp_path, corpus, training={"steps": 3})
    second, shown = train(longer, resume="auto")
    assert f"resuming from {at(tmp_path, 2)}" in shown
    assert [line["steps_done"] for line in second.steps] == [1, 2, 3]

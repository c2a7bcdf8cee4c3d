"""Tests checkpoints: content, saving behind training, failed saves, weights to begin with."""

import json
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.sets import full, nightly
from tests.train.case import Run, job_of, relaid, small_spec, train
from tests.train.checkpoint.case import SHARD, copied, spec_of
from tests.words import lacks
from wlb import __version__
from wlb.cost.machine import program_version
from wlb.model import Llama
from wlb.parallel import build
from wlb.parallel import world as worlds
from wlb.parallel.mesh import build_mesh
from wlb.parallel.tensor import local_tensor
from wlb.parallel.world import World
from wlb.plan import PlannerState
from wlb.spec import RunSpec
from wlb.train import refuse
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.checkpoint import saver, saves
from wlb.train.loop import Trainer

pytestmark = pytest.mark.process


def test_nothing_in_it_is_pickled(whole: Run) -> None:
    saved = whole.folder / "checkpoints" / "step-00000004"
    names = {path.name for path in saved.iterdir()}
    assert names == {SHARD, "manifest.json", "planner.json", "run.json"}
    with safe_open(saved / SHARD, framework="pt") as file:
        kept = set(file.keys())
    weights = {name.removeprefix("model.") for name in kept if name.startswith("model.")}
    assert "layers.0.mlp.gate.weight" in weights or any("layers.0" in name for name in weights)
    moments = {f"optimizer.state.{n}.{m}" for n in weights for m in ("exp_avg", "exp_avg_sq")}
    assert moments <= kept
    assert "rng.0.cpu" in kept
    about = checkpoint.read_run(saved)
    assert about["step"] == 4
    assert about["profile"]
    assert about["spec"]["training"]["steps"] == 6
    versions = {"wlb": __version__, "source": program_version(), "torch": torch.__version__}
    assert about["written_by"] == versions
    # As sha256sum has it.
    found = json.loads((saved / "manifest.json").read_text())["files"]
    assert set(found) == names - {"manifest.json"}
    said = subprocess.run(["sha256sum", saved / SHARD], capture_output=True, text=True, check=True)
    assert said.stdout.split()[0] == found[SHARD]["sha256"]


def test_loading_unpickles_nothing(
    whole: Run, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = copied(whole, tmp_path, corpus, training={"steps": 7})

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.pickle.load", refuse)
    run, _ = train(spec, resume=True)
    assert len(run.steps) == 7


def one_rank(spec: RunSpec) -> tuple[Trainer, Any]:
    """Returns a trainer in this process that has not begun."""
    job = job_of(spec)
    device = torch.device("cpu")
    worlds.init(World(), device, timeout_s=600)
    return Trainer(job, World(), build_mesh(job.spec.parallel, device)), job


def test_training_goes_on_while_a_copy_is_written(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, job = one_rank(spec_of(tmp_path, corpus))
    may_write, write = threading.Event(), saver.state_dict_saver.save

    def later(*arguments: Any, **named: Any) -> Any:
        assert may_write.wait(30)
        return write(*arguments, **named)

    monkeypatch.setattr(saver.state_dict_saver, "save", later)
    try:
        before = {n: p.detach().clone() for n, p in trainer.executor.named_parameters().items()}
        torch.manual_seed(5)
        state = PlannerState.from_json(
            json.loads(json.dumps(trainer.context.feed.peek(1)[0][0].state.to_json()))
        )
        assert trainer.saves.saver.save(3, state) == []
        assert trainer.saves.saver.poll() == []
        drawn = torch.rand(3)
        with torch.no_grad():
            for parameter in trainer.executor.named_parameters().values():
                parameter.add_(1.0)  # a step, while the copy waits to be written
        trainer.saves.saver._about["spec"]["training"]["steps"] = 99
        may_write.set()
        (saved,) = trainer.saves.saver.wait()
        assert saved.error == ""
        assert saved.step == 3

        assert saved.num_bytes > 1000
        folder = checkpoint.folder_of(job.checkpoints, 3)
        assert checkpoint.read_run(folder)["spec"]["training"]["steps"] == job.spec.training.steps
        load = saver.load(
            folder, trainer.mesh, stages=trainer.executor.stages, optimizers=trainer.optimizers
        )
        assert load == 3
        for name, parameter in trainer.executor.named_parameters().items():
            assert torch.equal(parameter, before[name])
        assert torch.equal(torch.rand(3), drawn)  # the generator went back as well
    finally:
        trainer.context.inputs.close()
        trainer.context.feed.close()
        trainer.saves.saver.close()
        worlds.shutdown()


def test_what_training_waits_for_is_counted(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also waits for the save before."""
    waiting, hours = threading.Event(), [0.0]
    write, wait = saver.state_dict_saver.save, saver.CheckpointSaver.wait

    def slow(*arguments: Any, **named: Any) -> Any:
        assert waiting.wait(30)  # training has come to wait for it
        waiting.clear()
        hours[0] += 3600.0
        return write(*arguments, **named)

    def noted(self: saver.CheckpointSaver) -> list[saver.Saved]:
        if self._pending is not None:
            waiting.set()
        return wait(self)

    clock = SimpleNamespace(**vars(time))
    clock.perf_counter = lambda: time.perf_counter() + hours[0]
    monkeypatch.setattr(saver.state_dict_saver, "save", slow)
    monkeypatch.setattr(saver.CheckpointSaver, "wait", noted)
    for module in (saver, saves):
        monkeypatch.setattr(module, "time", clock)
    options = {"interval": 1}
    run, _ = train(spec_of(tmp_path, corpus, training={"steps": 3}, checkpoint=options))
    lines = [line for line in run.lines if line["kind"] == "checkpoint"]
    waited = [line["stall_s"] for line in lines]
    assert [round(s / 3600) for s in waited] == [0, 1, 1]
    assert all(line["write_s"] >= line["stall_s"] for line in lines)


def test_an_old_checkpoint_that_cannot_be_removed_leaves_the_new_one_whole(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is half removed is no checkpoint."""
    remove = shutil.rmtree

    def busy(path: Path, **options: Any) -> None:
        if "old" in Path(path).name:
            (Path(path) / checkpoint.MANIFEST).unlink()
            raise OSError(39, "Directory not empty", str(path))
        remove(path, **options)

    monkeypatch.setattr(saver.shutil, "rmtree", busy)
    options = {"keep": 1, "interval": 1}
    run, _ = train(spec_of(tmp_path, corpus, training={"steps": 3}, checkpoint=options))
    found = checkpoint.list_complete(run.folder / "checkpoints")
    assert [path.name for path in found] == ["step-00000003"]
    assert all(not line["error"] for line in run.lines if line["kind"] == "checkpoint")


def test_a_save_that_fails_leaves_those_before_it(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hash_file, calls = checkpoint.file_digest, []

    def full(path: Path) -> str:
        if path.suffix == ".safetensors":
            calls.append(path)
            if "00000004" in path.parent.name:
                raise OSError(28, "No space left on device", str(path))
        return hash_file(path)

    monkeypatch.setattr(checkpoint, "file_digest", full)
    run, _ = train(spec_of(tmp_path, corpus))
    assert len(calls) == 3
    assert len(run.steps) == 6  # training went on
    assert run.checkpoints == ["step-00000002", "step-00000006"]  # nothing half-written
    said = capsys.readouterr().out
    for figure in ("after step 4 ", "rank 0: [Errno 28]"):
        assert figure in said
    saves = [line for line in run.lines if line["kind"] == "checkpoint"]
    assert ["No space" in line["error"] for line in saves] == [False, True, False]


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"dp": 1}, id="one"),
        pytest.param({"dp": 2}, id="dp2", marks=pytest.mark.nightly),
    ],
)
def test_a_disk_that_is_full_at_the_end_is_an_error(
    corpus: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    """Files may have 20 KiB, as on a disk without room, which is a real error of the system."""
    from wlb.spec import to_toml

    spec = spec_of(tmp_path, corpus, parallel=layout, training={"steps": 3})
    toml = tmp_path / "full.toml"
    toml.write_text(to_toml(spec))
    train(spec_of(tmp_path, corpus, training={"steps": 1}, eval={"steps": 0}))  # makes the store
    shutil.rmtree(tmp_path / "runs" / "small")
    command = f"ulimit -f 20; exec {sys.executable} -m wlb train {toml}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the checkpoint after step 2 could not be written" in done.stdout
    assert "the last checkpoint, after step 3, could not be written" in done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    (told,) = [line for line in done.stderr.splitlines() if "could not be written" in line]
    assert "free space on the disk or correct run.output_dir, then continue with --resume" in told
    assert not list((tmp_path / "runs" / "small" / "checkpoints").iterdir())
    assert len(Run(spec).steps) == 3


@pytest.mark.dist
@pytest.mark.parametrize("layout", [*full("one"), *nightly("tp2-pp2-v2")])
def test_a_run_begins_with_the_weights_of_another(
    corpus: Path, tmp_path: Path, layout: str
) -> None:
    first, _ = train(small_spec(tmp_path, corpus, training={"steps": 3}))
    spec = small_spec(
        tmp_path,
        corpus,
        run={"name": "second"},
        training={"steps": 2},
        checkpoint={"init_from": str(first.folder)},
    )
    second, said = train(relaid(spec, layout))
    assert f"weights of {first.folder / 'checkpoints' / 'step-00000003'}" in said
    assert second.evaluations[0][0] == 0
    assert second.evaluations[0][1] == pytest.approx(first.evaluations[-1][1], rel=1e-6)
    assert [line["measured"]["step"] for line in second.steps] == [0, 1]  # data begin anew
    # A resumed run goes on from its own.
    longer = replace(spec, training=replace(spec.training, steps=3))
    third, said = train(relaid(longer, layout), resume=True)
    assert "weights of" not in said
    assert len(third.steps) == 3


@pytest.fixture
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuses initial weights; storage begins as NaN, so that a weight left unread is seen."""

    def refuse(name: str, *_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError(f"{name} was drawn")

    make = build.Llama.to_empty

    def as_nan(stage: Llama, **options: Any) -> Llama:
        made = make(stage, **options)
        with torch.no_grad():
            for parameter in made.parameters():
                local_tensor(parameter).fill_(torch.nan)
        return made

    monkeypatch.setattr(build, "initial_weight", refuse)
    monkeypatch.setattr(build.Llama, "to_empty", as_nan)


@pytest.mark.usefixtures("no_drawing")
def test_a_resumed_run_draws_no_initial_weight_and_ends_with_the_same_bits(
    whole: Run, corpus: Path, tmp_path: Path
) -> None:
    run, _ = train(copied(whole, tmp_path, corpus), resume="4")
    assert [line["measured"]["step"] for line in run.steps][-2:] == [4, 5]
    made, expected = (
        load_file(each.folder / "checkpoints" / "step-00000006" / SHARD) for each in (run, whole)
    )
    assert made.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(made[name], expected[name])] == []


@pytest.mark.usefixtures("no_drawing")
def test_a_run_that_begins_with_weights_draws_none(
    whole: Run, corpus: Path, tmp_path: Path
) -> None:
    init = {"init_from": str(whole.folder)}
    run, _ = train(spec_of(tmp_path, corpus, checkpoint=init, training={"steps": 1}))
    assert run.evaluations[0] == (0, whole.evaluations[-1][1])


@pytest.mark.full
def test_what_is_known_of_an_imported_model_is_handed_on(corpus: Path, tmp_path: Path) -> None:
    first, _ = train(small_spec(tmp_path, corpus, training={"steps": 1}, eval={"steps": 0}))
    saved = first.folder / "checkpoints" / "step-00000001"
    imported = {"max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_ids": [2]}
    checkpoint.write_json(saved / "run.json", {**checkpoint.read_run(saved), "imported": imported})
    (saved / "manifest.json").unlink()
    checkpoint.write_manifest(saved)
    spec = small_spec(
        tmp_path,
        corpus,
        run={"name": "second"},
        training={"steps": 1},
        eval={"steps": 0},
        checkpoint={"init_from": str(saved)},
    )
    for steps in (1, 2):  # also of a run that goes on
        longer = replace(spec, training=replace(spec.training, steps=steps))
        second, _ = train(longer, resume="auto")
        made = second.folder / "checkpoints" / f"step-{steps:08d}"
        assert checkpoint.read_run(made)["imported"] == imported


def test_files_that_another_node_has_just_written_are_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    with pytest.raises(ValueError, match=r"manifest\.json cannot be read"):
        checkpoint.await_files(folder, within_s=0.1)
    (folder / "shard-1.safetensors").write_bytes(bytes(8))
    files = {path.name: checkpoint.manifest_entry(path) for path in folder.iterdir()}
    (folder / checkpoint.MANIFEST).write_text('{"files": {')  # as much as has arrived
    with pytest.raises(ValueError, match=r"manifest\.json cannot be read"):
        checkpoint.await_files(folder, within_s=0.1)
    threading.Timer(0.3, checkpoint.write_manifest, [folder, files]).start()
    checkpoint.await_files(folder, within_s=30.0)
    (folder / "run.json").unlink()
    with pytest.raises(ValueError, match=r"run\.json is missing on this node"):
        checkpoint.await_files(folder, within_s=0.1)


def test_weights_to_begin_with_that_do_not_fit_are_refused(corpus: Path, tmp_path: Path) -> None:
    first, _ = train(small_spec(tmp_path, corpus, training={"steps": 1}))
    saved = first.folder / "checkpoints" / "step-00000001"

    def spec(given: Path, **sections: Any) -> RunSpec:
        init = {"init_from": str(given)}
        name = {"name": "second"}
        return small_spec(tmp_path, corpus, **{"run": name, "checkpoint": init, **sections})

    with pytest.raises(
        ValueError,
        match=r"init_from: .*has model.num_layers = 4, but this run has model.num_layers = 2",
    ):
        train(spec(saved, model={"num_layers": 2}))
    with pytest.raises(ValueError, match="must be a checkpoint"):
        train(spec(tmp_path / "nothing"))
    scaling = {"factor": 2.0}
    rotated = spec(saved, model={"num_layers": 2, "rope_theta": 5e5, "rope_scaling": scaling})
    told = refuse.model_change(rotated.model, saved)
    assert lacks(told, saved, "model.rope_theta = 500000.0", "10000.0") == []
    assert lacks(told, "model.rope_scaling.factor = 2.0", "1.0") == []
    assert refuse.model_change(spec(saved).model, saved) == ""
    with pytest.raises(ValueError, match=r"init_from = .* this folder is renamed before training"):
        train(spec(saved, run={"name": "small"}))
    assert not (tmp_path / "runs" / "second").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_a_rank_starts(
    corpus: Path, tmp_path: Path
) -> None:
    spec = small_spec(tmp_path, corpus)
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ValueError, match="runs is a file, not a folder; move it away"):
        train(spec)
    full = replace(spec, run=replace(spec.run, output_dir="/dev/full"))
    with pytest.raises(ValueError, match="/dev/full is a file, not a folder; move it away"):
        train(full)

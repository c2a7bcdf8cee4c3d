"""Tests whole runs through `wlb.train.start.train`: one rank, several, resuming, end of data."""

import math
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from tests.sets import full, nightly
from tests.train.case import Run, job_of, relaid, small_spec, train, write_corpus, write_store
from wlb.data import TokenStore
from wlb.data.reader import StoreReader
from wlb.launch.local import run_local
from wlb.parallel import world as worlds
from wlb.parallel.mesh import build_mesh
from wlb.parallel.world import World
from wlb.spec import AttentionBackend, RunSpec, apply
from wlb.train.job import Job
from wlb.train.loop import Trainer
from wlb.train.optimizer import Optimizers
from wlb.train.reduce import PlanMismatch
from wlb.train.stores import open_stores

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("loop") / "corpus")


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Returns runs of 6 steps without a break, by layout, trained when asked for.

    They have checkpoints after steps 3 and 6.
    """
    folder = tmp_path_factory.mktemp("straight")

    class Runs(dict[str, Run]):
        def __missing__(self, layout: str) -> Run:
            spec = small_spec(folder, corpus, run={"name": layout}, checkpoint={"interval": 3})
            self[layout] = train(relaid(spec, layout))[0]
            return self[layout]

    return Runs()


def test_a_run_learns_and_leaves_metrics_and_a_checkpoint(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = small_spec(tmp_path, corpus)
    run, said = train(spec)
    assert "1 rank " in said
    assert "TP 1 x CP 1" in said
    assert "corpus: 52 documents, " in said
    assert "training.warmup_steps" not in said
    assert [line["steps_done"] for line in run.steps] == [1, 2, 3, 4, 5, 6]
    # A table of ranks and a timeline come with the last step.
    kinds = ["start", "evaluation", *["step"] * 6, "ranks", "timeline", "evaluation"]
    kinds += ["checkpoint", "wall"]
    assert [line["kind"] for line in run.lines] == kinds
    assert run.lines[0]["resumed_from"] is None
    # An untrained model is about as good as a guess among the 301 tokens; then it learns.
    assert run.losses[0] == pytest.approx(math.log(301), abs=0.1)
    assert run.losses[-1] < run.losses[0] - 1.0
    (_, before), (_, after) = run.evaluations
    assert after < before - 1.0
    assert run.checkpoints == ["step-00000006"]
    assert not dist.is_initialized()
    shown = capsys.readouterr().out
    assert "6/6" in shown
    assert "imbalance, usual loader" in shown
    assert f"metrics: {run.folder / 'metrics.jsonl'}\n" in shown
    assert f"checkpoint: {run.folder / 'checkpoints' / 'step-00000006'}\n" in shown


def test_a_metrics_line_is_complete(straight: dict[str, Run]) -> None:
    for line in straight["cp2-pp2"].steps:
        measured, predicted, plain = line["measured"], line["predicted"], line["plain_4d"]
        assert measured["origin"] == "measured"
        assert predicted["origin"] == plain["origin"] == "predicted"
        assert measured["step"] == predicted["step"] == plain["step"] == line["steps_done"] - 1
        assert 0 < measured["num_targets"] < measured["num_tokens"]
        assert sum(measured["sharding_counts"].values()) == 4
        assert predicted["imbalance"] >= 1.0
        assert measured["imbalance"] == measured["telemetry"]["imbalance"] >= 1.0
        assert predicted["telemetry"] is None
        assert measured["grad_norm"] > 0
        assert measured["step_time_s"] > 0
        assert predicted["loss"] is None
    rates = [line["learning_rate"] for line in straight["cp2-pp2"].steps]
    assert rates[:3] == pytest.approx([0.01, 0.02, 0.02])
    assert rates[3:] == sorted(rates[3:], reverse=True)


@pytest.mark.parametrize(
    "layout", ["cp2-pp2", *full("tp2-pp2-v2"), *nightly("cp4-needed", "tp2-cp2-needed")]
)
def test_losses_do_not_depend_on_the_layout(straight: dict[str, Run], layout: str) -> None:
    one, other = straight["one"], straight[layout]
    assert other.losses == pytest.approx(one.losses, rel=1e-4)
    for mine, theirs in zip(other.evaluations, one.evaluations, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    norms = [[line["measured"]["grad_norm"] for line in run.steps] for run in (one, other)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


def resume_from(run: Run, folder: Path, corpus: Path, layout: str) -> Run:
    """Resumes from a copy of the run's checkpoint after step 3, on `layout`, and returns the
    run.
    """
    spec = small_spec(folder, corpus, run={"name": "again"}, checkpoint={"interval": 3})
    target = folder / "runs" / "again" / "checkpoints" / "step-00000003"
    shutil.copytree(run.folder / "checkpoints" / "step-00000003", target)
    again, said = train(relaid(spec, layout), resume=True)
    assert f"resuming from {target}" in said
    first = again.lines[0]
    assert (first["kind"], first["resumed_from"], first["steps_done"]) == ("start", str(target), 3)
    assert apply(RunSpec(), first["spec"], source="start").parallel == relaid(spec, layout).parallel
    assert [line["steps_done"] for line in again.steps] == [4, 5, 6]
    return again


@pytest.mark.parametrize("layout", ["one", *full("cp2-pp2", "tp4-dp2")])
def test_resuming_on_the_same_layout_is_bit_equal(
    straight: dict[str, Run], tmp_path: Path, corpus: Path, layout: str
) -> None:
    before = straight[layout]
    assert before.state(3).carry.num_tokens > 0  # something waits in a queue across the break
    again = resume_from(before, tmp_path, corpus, layout)
    assert again.losses == before.losses[3:]
    assert again.evaluations == before.evaluations[1:]
    assert again.state(6).to_json() == before.state(6).to_json()


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "then"),
    [
        *(("one", "tp2-pp2-v2"), ("cp2-pp2", "one")),
        # From and to copies of KV heads, of which a checkpoint has one.
        *(("tp4-dp2", "one"), ("cp2-pp2", "tp4-dp2")),
        *nightly(("tp2-pp2-v2", "pp2-layers-3-1"), ("tp2-pp2-v2", "cp2-pp2")),
        *nightly(("cp2-pp2", "dp2-tp2")),
    ],
)
def test_resuming_on_another_layout_goes_on_the_same_way(
    straight: dict[str, Run], tmp_path: Path, corpus: Path, first: str, then: str
) -> None:
    before = straight[first]
    again = resume_from(before, tmp_path, corpus, then)
    assert again.losses == pytest.approx(before.losses[3:], rel=1e-4)
    tokens = [line["measured"]["num_tokens"] for line in again.steps]
    assert tokens == [line["measured"]["num_tokens"] for line in before.steps[3:]]


def store_spec(folder: Path, lengths: list[int], *, window: int, **sections: Any) -> RunSpec:
    """Returns the spec of a run over such a store: once, to its end."""
    store = write_store(folder / "store", lengths)
    spec = small_spec(folder, folder / "no-corpus", **sections)
    return replace(spec, data=replace(spec.data, store=store, context_window=window, epochs=1))


@pytest.mark.full
def test_the_end_of_data_flushes_every_token(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = small_spec(tmp_path, corpus, data={"epochs": 1}, training={"steps": 100})
    run, _ = train(spec)
    store = TokenStore(open_stores(spec, Console(file=StringIO())).train)
    measured = [line["measured"] for line in run.steps]
    assert len(measured) < 20
    assert sum(m["num_tokens"] for m in measured) == store.num_tokens
    assert sum(m["num_targets"] for m in measured) == store.num_tokens - store.num_documents
    assert measured[-1]["num_held_tokens"] == 0
    last = len(measured)
    state = run.state(last)
    assert state.exhausted
    assert state.carry.num_tokens == 0
    assert run.evaluations[-1][0] == last
    # There is nothing to go on with; the run says so by ending with its summary.
    capsys.readouterr()
    again, _ = train(spec, resume=True)
    assert len(again.steps) == last
    assert again.evaluations[-1] == again.evaluations[-2]
    assert " 0 wait for a later step" in capsys.readouterr().out
    # With another epoch there is.
    more, _ = train(replace(spec, data=replace(spec.data, epochs=2)), resume=True)
    added = [line["measured"] for line in more.steps[last:]]
    assert sum(m["num_tokens"] for m in added) == store.num_tokens
    assert [m["step"] for m in added] == list(range(last, last + len(added)))


@pytest.mark.full
@pytest.mark.parametrize(
    ("policy", "layout"),
    [("bounded", "cp2-pp2"), ("fixed", "one"), ("original", "one"), ("capacity", "one")],
)
def test_every_policy_trains_each_token_once(tmp_path: Path, policy: str, layout: str) -> None:
    """The executor takes several plans per push, none, held documents and short windows."""
    packing = {"policy": policy, "s_max": 2.0, "step_tokens": 1.5, "window_batches": 2}
    lengths = [60, 64, 200, 5, 64, 30, 30, 12, 90, 1, 64, 33, 7, 48, 64, 21, 128]
    spec = store_spec(tmp_path, lengths, window=64, packing=packing, training={"steps": 40})
    run, _ = train(relaid(spec, layout))
    measured = [line["measured"] for line in run.steps]
    assert sum(m["num_tokens"] for m in measured) == sum(lengths)
    assert sum(m["num_targets"] for m in measured) == sum(lengths) - len(lengths)
    assert measured[-1]["num_held_tokens"] == 0
    state = run.state(len(measured))
    assert (state.carry.policy, state.carry.num_tokens) == (policy, 0)


@pytest.mark.nightly
def test_global_batches_can_be_packed_into_more_micro_batches(corpus: Path, tmp_path: Path) -> None:
    """4 windows become 6: losses are the same on every layout, and held-out windows stay 4 per
    step.
    """
    runs: list[Run] = []
    for layout in ("one", "cp2-pp2"):
        packing = {"policy": "bounded", "num_micro_batches": 6, "s_max": 2.0}
        spec = relaid(small_spec(tmp_path, corpus, run={"name": layout}, packing=packing), layout)
        runs.append(train(spec)[0])
        assert spec.tokens_per_step == 4 * 128
    one, other = runs
    assert other.losses == pytest.approx(one.losses, rel=1e-4)
    assert other.evaluations[0] == pytest.approx(one.evaluations[0], rel=1e-4)
    tokens = sum(line["measured"]["num_tokens"] for line in one.steps)
    held = one.steps[-1]["measured"]["num_held_tokens"]
    assert tokens + held == pytest.approx(6 * 4 * 128, rel=0.1)  # six global batches of 4 windows


@pytest.mark.parametrize("layout", ["one", *full("cp2-pp2"), *nightly("tp2-pp2-v2")])
def test_fewer_documents_than_micro_batches(tmp_path: Path, layout: str) -> None:
    """With three documents in four micro-batches one stays empty, and every layout agrees."""
    spec = store_spec(
        tmp_path, [30, 20, 7], window=32, packing={"queue_thresholds": []}, eval={"steps": 0}
    )
    run, _ = train(relaid(spec, layout))
    assert [line["measured"]["num_documents"] for line in run.steps] == [3]
    assert [line["measured"]["num_targets"] for line in run.steps] == [57 - 3]
    assert run.losses[0] == pytest.approx(math.log(320), abs=0.1)


@pytest.mark.parametrize("layout", ["one", *full("cp2-pp2")])
def test_a_step_without_a_label_moves_nothing_and_the_run_goes_on(
    tmp_path: Path, layout: str
) -> None:
    """Documents of one token have no label; those of a whole window wait for three others.

    Only the step that releases all four of these thus has something to learn from.
    """
    spec = store_spec(
        tmp_path,
        [1] * 40 + [4] * 4,
        window=4,
        run={"seed": 1},
        packing={"queue_thresholds": [1.0]},
        checkpoint={"interval": 1, "keep": 9},
        eval={"steps": 0},
    )
    run, _ = train(relaid(spec, layout))
    targets = [line["measured"]["num_targets"] for line in run.steps]
    assert 0 in targets
    assert sum(targets) == 4 * 3
    assert sum(line["measured"]["num_tokens"] for line in run.steps) == 40 + 16
    done = 0
    for line, count in zip(run.steps, targets, strict=True):
        done += count > 0
        assert line["steps_done"] == done
        assert (line["measured"]["loss"] is None) == (count == 0)
        assert (line["measured"]["grad_norm"] is None) == (count == 0)
    # Only steps with a label are counted towards an interval, and the last checkpoint knows of
    # the step without one that came after them.
    assert targets[-1] == 0
    assert run.checkpoints == ["step-00000001"]
    assert run.state(1).next_step == len(targets)


def test_a_constant_loss_divisor_scales_gradients_and_not_the_loss(
    corpus: Path, tmp_path: Path
) -> None:
    """It is N * C = 4 * 128 instead of the step's labels; the loss shown is a mean per label
    anyway.
    """
    first: list[dict[str, Any]] = []
    for name in ("valid_tokens", "constant"):
        training = {"steps": 1, "loss_normalizer": name}
        spec = small_spec(tmp_path, corpus, training=training, eval={"steps": 0})
        first.append(train(spec)[0].steps[0]["measured"])
    valid, constant = first
    assert constant["loss"] == pytest.approx(valid["loss"], rel=1e-6)
    scaled = valid["grad_norm"] * valid["num_targets"] / (4 * 128)
    assert constant["grad_norm"] == pytest.approx(scaled, rel=1e-5)


@pytest.mark.parametrize("interval", [1, 2])
def test_evaluations_and_checkpoints_come_at_their_intervals(
    corpus: Path, tmp_path: Path, interval: int
) -> None:
    spec = small_spec(
        tmp_path,
        corpus,
        training={"steps": 5},
        eval={"interval": 2},
        checkpoint={"interval": interval, "keep": 3},
    )
    run, _ = train(spec)
    assert [step for step, _ in run.evaluations] == [0, 2, 4, 5]
    kept = {1: [3, 4, 5], 2: [2, 4, 5]}[interval]
    assert run.checkpoints == [f"step-{step:08d}" for step in kept]
    assert [run.state(step).next_step for step in kept] == kept
    saved = [line["step"] for line in run.lines if line["kind"] == "checkpoint"]
    assert saved == sorted({*range(interval, 5, interval), 5})
    kinds = "".join(line["kind"][0] for line in run.lines[1:] if line["kind"] != "checkpoint")
    # Ranks, timeline and where the wall time went: at the end.
    assert kinds == "e" + "ss" + "e" + "ss" + "e" + "s" + "rt" + "e" + "w"


@pytest.mark.full
def test_evaluations_come_at_equal_tokens(corpus: Path, tmp_path: Path) -> None:
    """They come after the first step that reaches each multiple; a resumed run goes on counting."""
    training = {"steps": 6, "schedule": "constant"}
    spec = small_spec(tmp_path, corpus, training=training, eval={"interval_tokens": 700})
    whole, _ = train(spec)
    done = np.cumsum([0] + [line["measured"]["num_tokens"] for line in whole.steps])
    due = [i for i in range(1, 6) if done[i] // 700 > done[i - 1] // 700]
    assert [step for step, _ in whole.evaluations] == [0, *due, 6]
    assert 0 < len(due) < 5
    found = [line["num_tokens"] for line in whole.lines if line["kind"] == "evaluation"]
    assert found == [int(done[i]) for i in (0, *due, 6)]

    half = replace(spec, run=replace(spec.run, name="half"))
    train(replace(half, training=replace(half.training, steps=3)))
    again, _ = train(half, resume=True)
    assert {e for e in again.evaluations if e[0] > 3} == {e for e in whole.evaluations if e[0] > 3}


@pytest.mark.full
def test_an_older_run_of_the_name_is_moved_aside(corpus: Path, tmp_path: Path) -> None:
    spec = small_spec(tmp_path, corpus, training={"steps": 1}, eval={"steps": 0})
    first, said = train(spec)
    assert "older run" not in said
    for figure in ("training.warmup_steps = 2", "training.steps = 1", "0.01"):
        assert figure in said
    note = first.folder / "note.txt"
    note.write_text("mine")
    for number in (1, 2):
        run, said = train(spec)
        aside = first.folder.with_name(f"small.{number}")
        assert f"the folder of an older run of the same name was renamed to {aside}" in said
        assert len(run.steps) == 1
    assert (tmp_path / "runs" / "small.1" / "note.txt").read_text() == "mine"
    assert not note.exists()


def test_resuming_without_a_checkpoint_is_refused(corpus: Path, tmp_path: Path) -> None:
    spec = small_spec(tmp_path, corpus)
    folder = tmp_path / "runs" / "small" / "checkpoints"
    with pytest.raises(
        ValueError, match=f"--resume: {folder} has no complete checkpoint. Start without"
    ):
        train(spec, resume=True)
    (folder / "partial-00000004").mkdir(parents=True)  # a crash while saving
    with pytest.raises(ValueError, match="has no complete checkpoint"):
        train(spec, resume=True)
    assert not (folder.parent / "metrics.jsonl").exists()


def test_a_loss_that_is_not_finite_stops_the_run(corpus: Path, tmp_path: Path) -> None:
    spec = small_spec(
        tmp_path,
        corpus,
        training={"learning_rate": 1e30, "warmup_steps": 0, "clip_norm": 0.0},
        checkpoint={"interval": 1},
    )
    with pytest.raises(
        FloatingPointError, match=r"step [12]: loss .*nan.*Lower training.learning_rate"
    ):
        train(spec)
    run = Run(spec)
    assert 1 <= len(run.steps) <= 2
    assert all(math.isfinite(loss) for loss in run.losses)
    assert not dist.is_initialized()


def on_separate_nodes(world: World, *jobs: Job) -> str:
    """Runs a trainer on a rank that plans for itself, as a node does: rank i runs jobs[i]."""
    world = replace(world, local_rank=0, local_world_size=1, node_rank=world.rank)
    job = jobs[world.rank]
    worlds.init(world, torch.device("cpu"), timeout_s=600)
    layout = build_mesh(job.spec.parallel, torch.device("cpu"))
    try:
        trainer = Trainer(job, world, layout)
    except ValueError as error:
        worlds.shutdown()
        return f"not started: {error}"
    try:
        trainer.run()
    except PlanMismatch as error:
        return f"after {trainer.context.steps_done} steps: {error}"
    finally:
        worlds.shutdown()
    return f"{trainer.context.steps_done} steps"


def separate(
    corpus: Path,
    folder: Path,
    *,
    epochs: int = 0,
    seed: int = 0,
    heldout: int = 1,
    attention: AttentionBackend = AttentionBackend.AUTO,
) -> list[str]:
    """Returns how two nodes end: node 0 with the small run, node 1 with other settings.

    heldout: held-out documents of node 1; node 0 has one of 40 tokens
    """
    spec = small_spec(folder, corpus, parallel={"dp": 2}, training={"steps": 9})
    job = replace(job_of(spec), heldout_store=write_store(folder / "heldout-0", [40]))
    other = replace(
        job,
        spec=replace(
            job.spec,
            data=replace(job.spec.data, epochs=epochs),
            run=replace(job.spec.run, seed=seed),
            kernels=replace(job.spec.kernels, attention=attention),
        ),
        heldout_store=write_store(folder / "heldout-1", [40] * heldout),
    )
    return run_local(on_separate_nodes, 2, job, other, timeout_s=600)


@pytest.mark.full
def test_nodes_that_plan_alike_train_together(corpus: Path, tmp_path: Path) -> None:
    assert separate(corpus, tmp_path) == ["9 steps", "9 steps"]


@pytest.mark.full
def test_nodes_that_plan_differently_stop_before_the_first_step(
    corpus: Path, tmp_path: Path
) -> None:
    for rank, message in enumerate(separate(corpus, tmp_path, seed=1)):
        assert message.startswith("after 0 steps: ranks planned the packing of the coming steps")
        assert "(steps: 0, 1" in message
        assert f"; digests on rank {rank}: " in message
    assert Run(small_spec(tmp_path, corpus)).steps == []


@pytest.mark.full
def test_nodes_with_other_held_out_data_stop_before_they_evaluate(
    corpus: Path, tmp_path: Path
) -> None:
    for message in separate(corpus, tmp_path, heldout=2):
        assert message.startswith("after 0 steps: ranks planned the packing of the coming steps")
    assert Run(small_spec(tmp_path, corpus)).evaluations == []


@pytest.mark.full
def test_a_node_without_the_kernel_of_the_others_stops_all(corpus: Path, tmp_path: Path) -> None:
    for message in separate(corpus, tmp_path, attention=AttentionBackend.TORCH_VARLEN):
        assert message.startswith("not started: rank 1: kernels.attention = torch_varlen ")


@pytest.mark.full
def test_nodes_whose_plans_part_later_stop_two_steps_before(corpus: Path, tmp_path: Path) -> None:
    """Rank 1 takes its data once and flushes its queues in step 5, rank 0 goes on."""
    for message in separate(corpus, tmp_path, epochs=1):
        assert message.startswith("after 3 steps: ranks planned the packing of the coming steps")
        assert "(steps: 5;" in message
    run = Run(small_spec(tmp_path, corpus))
    assert [line["steps_done"] for line in run.steps] == [1, 2, 3]


def test_resuming_honours_changed_adamw_settings(
    straight: dict[str, Run], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[tuple[Any, ...]]] = []
    whole, step = straight["one"], Optimizers.step  # trains if this is the first test to ask

    def look(self: Optimizers, *arguments: Any, **options: Any) -> None:
        groups = [g for o in self.by_stage.values() for g in o.param_groups]
        seen.append([(g["weight_decay"], g["betas"], g["eps"]) for g in groups])
        step(self, *arguments, **options)

    monkeypatch.setattr(Optimizers, "step", look)
    changed = {"weight_decay": 0.5, "beta2": 0.5}
    spec = small_spec(tmp_path, corpus, run={"name": "again"}, training=changed)
    saved = Path("checkpoints", "step-00000003")
    shutil.copytree(whole.folder / saved, tmp_path / "runs" / "again" / saved)
    train(spec, resume=True)
    assert len(seen) == 3
    assert seen[0] == [(0.5, (0.9, 0.5), 1e-8), (0.0, (0.9, 0.5), 1e-8)]


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    prefix = write_store(tmp_path / "store", [40])
    assert StoreReader(prefix, 320).read(0, 0, 40).size == 40
    with pytest.raises(
        ValueError,
        match=r"document 0 of the store .* token ids from 0 to 291, but they must be from 0 to 8",
    ):
        StoreReader(prefix, 9).read(0, 0, 40)

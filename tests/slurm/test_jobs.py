"""Tests jobs of `slurm/7b_128k.sh` on a real Slurm: trained, preempted, cancelled, refused.

Others run out of time. Each virtual node runs two ranks on the CPU. The job is the README's trial;
what else Slurm does to a job is tried with a stand-in for Python, which starts at once.
"""

import json
import re
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.train.case import write_corpus
from wlb.spec import load, to_toml

pytestmark = [pytest.mark.slurm, pytest.mark.full]

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).with_name("stand_in.sh")
STEPS = 40
WITHIN_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """Holds a cluster with a folder for logs, runs and the corpus."""

    cluster: Cluster
    folder: Path

    def submit(
        self, *options: str, script: str, words: tuple[str, ...] = (), **environment: str
    ) -> int:
        given = {"WLB_PYTHON": sys.executable, "OUTPUT": str(self.folder / "runs"), **environment}
        logs = f"--output={self.folder}/%x-%j.log"
        return self.cluster.submit(
            logs, *options, f"slurm/{script}.sh", *words, cwd=ROOT, environment=given
        )

    def trial(self, name: str, nodes: str) -> int:
        """Submits the README's trial as a run of that name, on these two nodes; returns its
        number.
        """
        variables, options, script = documented_trial()
        assert script == "slurm/7b_128k.sh"
        more = f" data.corpus={self.folder}/corpus"
        variables["EXTRA"] += f"{more} training.steps={STEPS}"
        options = [*options, f"--nodelist={nodes}"]
        # One trial shows that ranks are examined first.
        doctor = "quick" if name == "whole" else "no"
        given = {**variables, "RUN_NAME": name, "DOCTOR": doctor}
        return self.submit(*options, script="7b_128k", **given)

    def stand_in(self, *options: str, name: str, **environment: str) -> int:
        size = ("--nodes=2", "--ntasks-per-node=2")
        given = {"WLB_PYTHON": str(STAND_IN), "RUN_NAME": name, **environment}
        return self.submit(*size, *options, script="7b_128k", **given)

    def log(self, job: int, script: str = "7b_128k") -> str:
        path = self.folder / f"{script}-{job}.log"
        return path.read_text("utf-8") if path.exists() else ""

    def losses(self, name: str) -> list[tuple[int, float]]:
        """Returns (step, loss) of every trained step, as they were written."""
        path = self.folder / "runs" / name / "metrics.jsonl"
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        steps = [line for line in map(json.loads, lines) if line["kind"] == "step"]
        return [(line["step"], line["measured"]["loss"]) for line in steps]

    def until_step(self, job: int, name: str, count: int) -> None:
        until = time.monotonic() + WITHIN_S
        while len(self.losses(name)) < count:
            assert time.monotonic() < until, self.log(job)
            assert self.cluster.job(job)["JobState"] in ("PENDING", "RUNNING"), self.log(job)
            time.sleep(0.1)

    def until(self, job: int, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + WITHIN_S
        while not is_so():
            assert time.monotonic() < until, self.log(job)
            time.sleep(0.1)

    def until_said(self, job: int, words: str) -> None:
        self.until(job, lambda: words in self.log(job))

    def checkpoints(self, name: str) -> list[str]:
        return sorted(p.name for p in (self.folder / "runs" / name / "checkpoints").iterdir())


def documented_trial() -> tuple[dict[str, str], list[str], str]:
    """Returns variables, options and script of the trial in slurm/README.md."""
    text = (ROOT / "slurm" / "README.md").read_text("utf-8")
    found = re.search(r"<!-- trial -->\n```\n(.+?)\n```", text, re.DOTALL)
    assert found
    words = shlex.split(found[1].replace("\\\n", " "))
    at = words.index("sbatch")
    variables = dict(word.split("=", 1) for word in words[:at])
    return variables, words[at + 1 : -1], words[-1]


@pytest.fixture(scope="module")
def lab(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    folder = tmp_path_factory.mktemp("jobs")
    write_corpus(folder / "corpus", num_files=300)
    return Lab(cluster=cluster, folder=folder)


@pytest.fixture(scope="module")
def out_of_time(lab: Lab) -> int:
    """Submits a job of two minutes, which is told two minutes before its end.

    Slurm looks every 30 s.
    """
    return lab.stand_in("--time=2", "--nodelist=n31,n32", name="out-of-time")


@pytest.fixture(scope="module")
def whole(lab: Lab, out_of_time: int) -> int:
    """Runs the trial undisturbed."""
    job = lab.trial("whole", "n1,n2")
    ended = lab.cluster.ended(job, within_s=WITHIN_S)
    assert ended["JobState"] == "COMPLETED", lab.log(job)
    return job


def test_both_nodes_train_and_the_loss_falls(lab: Lab, whole: int) -> None:
    log = lab.log(whole)
    for words in ("7b_128k", "system wlb", "2 x 2 ranks of n[1-2]", "data: as data.corpus="):
        assert words in log
    for words in ("0: 4 ranks given by slurm", "TP 2 x CP 1 x PP 2 x DP 1", "cpu with Gloo"):
        assert words in log
    assert log.endswith(" ended\n")
    # Before it trained, its ranks were examined.
    examined = (
        "0: wlb doctor 7b_128k",
        "every rank sees it",
        "communicator pp_even",
        "rank 2 (n2): ",
    )
    assert [words for words in examined if words not in log] == []
    assert log.index("communicator pp_even") < log.index("4 ranks given by slurm")
    steps, losses = zip(*lab.losses("whole"), strict=True)
    assert list(steps) == list(range(STEPS))
    assert losses[0] > 5.5
    assert max(losses[-5:]) < 3.0
    # Every rank wrote its part of the checkpoint: 0 and 1 are on n1, 2 and 3 on n2.
    last = lab.folder / "runs" / "whole" / "checkpoints" / f"step-{STEPS:08d}"
    assert {p.name.split("-")[1] for p in last.glob("shard-*")} == {f"{i:05}" for i in range(1, 5)}
    for node in ("n1", "n2"):
        slurmd = (lab.cluster.folder / "log" / f"slurmd.{node}.log").read_text("utf-8")
        assert f"launch task StepId={whole}.0 request" in slurmd


def test_a_preempted_job_saves_is_requeued_and_resumes_to_the_same_losses(
    lab: Lab, whole: int
) -> None:
    job = lab.trial("preempted", "n3,n4")
    lab.until_step(job, "preempted", 2)
    wanted = ("--partition=high", "--nodelist=n3,n4", "--exclusive", "--output=/dev/null")
    high = lab.cluster.submit(*wanted, "--wrap=sleep 1", cwd=lab.folder)
    ended = lab.cluster.ended(job, within_s=WITHIN_S)
    log = lab.log(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log
    assert lab.cluster.ended(high, within_s=WITHIN_S)["JobState"] == "COMPLETED"
    (stopped,) = re.findall(r"stopped after step (\d+) of \d+ by the stop file", log)
    assert 2 <= int(stopped) < STEPS
    in_order = [
        f"job {job}, start 1 at commit",
        "time limit or preemption: asking the ranks to save and end",
        f"stopped after step {stopped} of {STEPS} by the stop file",
        "saved; requeued",
        f"job {job}, start 2 at commit",
        f"0: resuming from {lab.folder}/runs/preempted/checkpoints/step-{int(stopped):08d}",
        " ended\n",
    ]
    places = [log.index(words) for words in in_order]
    assert places == sorted(places)
    # Bit for bit, and no step twice.
    assert lab.losses("preempted") == lab.losses("whole")


def test_a_cancelled_job_saves_and_leaves_its_log_and_no_half_checkpoint(lab: Lab) -> None:
    job = lab.trial("cancelled", "n5,n6")
    lab.until_step(job, "cancelled", 2)
    lab.cluster.run("scancel", str(job))
    lab.until_said(job, " ended\n")
    ended = lab.cluster.ended(job, within_s=WITHIN_S)
    log = lab.log(job)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0"), log
    assert "cancelled or out of time: asking the ranks to save and end" in log
    assert "requeued" not in log
    (stopped,) = re.findall(r"stopped after step (\d+) of \d+ by", log)
    assert lab.checkpoints("cancelled") == [f"step-{int(stopped):08d}"]
    saved = lab.folder / "runs" / "cancelled" / "checkpoints" / f"step-{int(stopped):08d}"
    assert {"manifest.json", "planner.json", "run.json"} <= {p.name for p in saved.iterdir()}
    assert len(lab.losses("cancelled")) == int(stopped)


@pytest.mark.nightly
def test_a_file_of_one_s_own_is_trained_as_it_says(lab: Lab) -> None:
    variables, options, _ = documented_trial()
    spec = load("7b_128k", [*variables["EXTRA"].split(), f"data.corpus={lab.folder}/corpus"])
    scratch = lab.folder / "scratch"
    spec = replace(spec, run=replace(spec.run, output_dir=str(scratch)))
    own = lab.folder / "my run.toml"
    own.write_text(to_toml(spec), "utf-8")
    given = {"OUTPUT": "", "DEVICE": "cpu", "DOCTOR": "no"}
    words = (str(own), "training.steps=3")
    job = lab.submit(*options, "--nodelist=n5,n6", script="train", words=words, **given)
    ended = lab.cluster.ended(job, within_s=WITHIN_S)
    log = lab.log(job, "train")
    assert ended["JobState"] == "COMPLETED", log
    assert f"data: as {own} says" in log
    text = (scratch / f"my_run-{job}" / "metrics.jsonl").read_text("utf-8")
    assert text.count('"kind": "step"') == 3
    assert json.loads(text.splitlines()[0])["spec"]["packing"]["policy"] == spec.packing.policy


def test_a_job_that_cannot_work_fails_once_and_says_why(lab: Lab) -> None:
    size = ("--nodes=2", "--ntasks-per-node=2")
    job = lab.submit(*size, script="7b_128k", EXTRA="training.stesp=3", RUN_NAME="wrong")
    ended = lab.cluster.ended(job, within_s=WITHIN_S)
    log = lab.log(job)
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "0"), log
    assert "did you mean 'training.steps'?" in log
    # srun ends the other ranks with the first: 128 + 15 where one was not as far yet.
    assert log.endswith(("srun ended with 2\n", "srun ended with 143\n"))
    assert "requeued" not in log


def test_the_settings_reach_the_ranks(lab: Lab) -> None:
    given = {"SYSTEM": "fixed_4d:2", "STORE": "stores/a", "HELDOUT": "stores/b"}
    job = lab.stand_in(name="settings", **given, EXTRA="training.steps=7 eval.steps=1")
    stop = lab.folder / "runs" / f".stop-settings@{job}"
    lab.until_said(job, "3: began")
    assert not stop.exists()
    lab.cluster.run("scancel", str(job))
    lab.until_said(job, " ended\n")
    assert not stop.exists()
    (words,) = re.findall(r"^2: began: (.+)$", lab.log(job), re.MULTILINE)
    assert words == (
        f"-m wlb train 7b_128k --system fixed_4d:2 --resume auto --set run.name=settings "
        f"run.output_dir={lab.folder}/runs run.stop_file={stop} run.device=cuda "
        f"data.store=stores/a data.heldout_store=stores/b training.steps=7 eval.steps=1"
    )
    assert "data: token store stores/a" in lab.log(job)


@pytest.mark.parametrize("when", ["early", "late"])
def test_requeueing_ends_at_its_limit(lab: Lab, when: str) -> None:
    """This also holds for a job that is signalled before it has started its ranks."""
    asked_s = "2" if when == "early" else "0"
    job = lab.stand_in(name=f"limited-{when}", MAX_RESTARTS="0", ASKED_S=asked_s)
    asked = lab.folder / "runs" / f"asked-limited-{when}"
    lab.until(job, asked.exists if when == "early" else lambda: "3: began" in lab.log(job))
    lab.cluster.run("scancel", "--batch", "--signal=USR1", str(job))
    ended = lab.cluster.ended(job, within_s=WITHIN_S)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "1:0", "0")
    assert f"saved; not requeued after MAX_RESTARTS=0: RUN_NAME=limited-{when} sbatch" in lab.log(
        job
    )


def test_a_preemption_that_only_the_ranks_are_told_of_is_one_too(
    slurm: None, tmp_path: Path
) -> None:
    (tmp_path / "cluster").mkdir()
    with Cluster(folder=tmp_path / "cluster", num_nodes=2, user_signal=False) as cluster:
        lab = Lab(cluster=cluster, folder=tmp_path)
        job = lab.stand_in(name="told")
        lab.until_said(job, "3: began")
        wanted = ("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null")
        cluster.submit(*wanted, "--wrap=true", cwd=tmp_path)
        ended = cluster.ended(job, within_s=WITHIN_S)
        log = lab.log(job)
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log
        assert log.count("SIGTERM") == 4
        assert "asking" not in log


@pytest.mark.nightly
def test_the_job_of_figure_12_trains_the_systems_and_prints_their_row(lab: Lab) -> None:
    variables, options, _ = documented_trial()
    folder = lab.folder / "measured"
    given = {**variables, "STEPS": "6", "OUTPUT": str(folder)}
    options = [*options, "--nodelist=n9,n10"]
    job = lab.submit(*options, script="fig12", **given)
    ended = lab.cluster.ended(job, within_s=WITHIN_S)
    log = lab.log(job, "fig12")
    assert ended["JobState"] == "COMPLETED", log
    assert "Figure 12, measured: 7B-128K" in log
    row = r"^│ {} +│ +(\d\.\d{{3}}) │ +(\d\.\d{{3}}) │"
    for label in ("Plain-4D", "Fixed-4D", "WLB-LLM", "ours"):
        assert re.search(row.format(label), log, re.MULTILINE), log
    assert not list(folder.glob("fig12-*/*/checkpoints"))


def test_the_simulate_job_compares_the_systems(lab: Lab) -> None:
    job = lab.submit(script="simulate", PRESET="550m_64k", EXTRA="--steps 4")
    ended = lab.cluster.ended(job, within_s=WITHIN_S)
    log = lab.log(job, "simulate")
    assert ended["JobState"] == "COMPLETED", log
    assert "550m_64k, lengths wlb_paper" in log
    for system in ("plain_4d", "fixed_4d", "paper", "wlb", "run"):
        assert re.search(rf"^ {system} +\d", log, re.MULTILINE), log


@pytest.mark.nightly
def test_the_profile_job_writes_a_profile(lab: Lab) -> None:
    out = lab.folder / "cpu.json"
    given = {"DEVICE": "cpu", "PRESET": "demo", "OUT": str(out)}
    size = ("--ntasks-per-node=2", "--gpus-per-node=0")
    job = lab.submit(*size, script="profile", **given, EXTRA="--quick --no-plots")
    ended = lab.cluster.ended(job, within_s=WITHIN_S)
    log = lab.log(job, "profile")
    assert ended["JobState"] == "COMPLETED", log
    profile = json.loads(out.read_text("utf-8"))
    assert profile["name"] == "cpu"
    kinds = {(c["op"], c["scope"]): c["provenance"]["kind"] for c in profile["collectives"]}
    assert kinds["all_gather", "intra_node"] == "measured"
    assert f"wrote {out}" in log


@pytest.mark.nightly
def test_the_doctor_s_job_examines_all_ranks_and_writes_what_it_found(lab: Lab) -> None:
    out, store = lab.folder / "found.json", lab.folder / "no-store"
    variables, options, _ = documented_trial()
    options = [*options, "--nodelist=n7,n8"]
    given = {**variables, "PRESET": "7b_128k", "OUT": str(out), "STORE": str(store)}
    job = lab.submit(*options, script="doctor", **given)
    ended = lab.cluster.ended(job, within_s=WITHIN_S)
    log = lab.log(job, "doctor")
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "3:0"), log
    found = json.loads(out.read_text("utf-8"))
    failed = [row["check"] for row in found["findings"] if row["verdict"] == "fail"]
    assert failed == ["token stores"], log
    assert "communicator tp" in {row["check"] for row in found["findings"]}
    assert "-> make the store with `wlb prepare`" in log


def test_a_job_whose_nodes_are_not_fit_does_not_train(lab: Lab) -> None:
    job = lab.stand_in(name="unfit", DOCTOR_CODE="3")
    ended = lab.cluster.ended(job, within_s=60)
    log = lab.log(job)
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "0"), log
    assert "examined: -m wlb doctor 7b_128k --system wlb --quick --set run.name=unfit" in log
    assert "not fit to train; DOCTOR=no sbatch ..." in log
    assert "began" not in log


def test_a_job_out_of_time_is_requeued(lab: Lab, out_of_time: int) -> None:
    ended = lab.cluster.ended(out_of_time, within_s=WITHIN_S)
    log = lab.log(out_of_time)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log
    assert "time limit or preemption: asking" in log
    assert "saw the stop file" in log
    assert "saved; requeued" in log

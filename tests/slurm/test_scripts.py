"""Tests that the sbatch scripts of `slurm/` are short, fit their presets, and pass Slurm."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster
from wlb.parallel.world import CUDA_DEFAULTS
from wlb.spec import load

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "slurm"
TABLE_1 = [
    f"{size}_{window}" for size in ("550m", "7b", "30b", "70b") for window in ("64k", "128k")
]
SUBMITTED = [*TABLE_1, "train", "doctor", "profile", "gpu_hour", "simulate", "fig12"]
GPUS_A_NODE = 8
CPUS_A_NODE = 96


def options_of(script: Path) -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.+))?$", script.read_text("utf-8"), re.MULTILINE)
    return dict(found)


def test_every_script_is_valid() -> None:
    scripts = sorted(FOLDER.glob("*.sh"))
    assert {p.stem for p in scripts} == {*SUBMITTED, "launch", "environment"}
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        stand_in = Path(__file__).with_name("stand_in.sh")
        subprocess.run(["shellcheck", "-x", *scripts, stand_in], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", TABLE_1)
def test_a_script_asks_for_the_gpus_of_its_layout(name: str) -> None:
    script = FOLDER / f"{name}.sh"
    parallel = load(name).parallel
    options = options_of(script)
    assert options["job-name"] == name
    assert int(options["ntasks-per-node"]) == int(options["gpus-per-node"]) == GPUS_A_NODE
    assert int(options["nodes"]) * GPUS_A_NODE == parallel.world_size
    # Ranks are numbered TP first, so the inner axes are inside a node as far as they fit.
    assert GPUS_A_NODE % parallel.tp == 0 or parallel.tp % GPUS_A_NODE == 0
    layout = f"TP {parallel.tp} x CP {parallel.cp} x PP {parallel.pp} x DP {parallel.dp}"
    text = script.read_text("utf-8")
    assert f"on {parallel.world_size} GPUs: {layout} (Table 1)" in text
    assert ("TP spans two nodes" in text) == (parallel.tp > GPUS_A_NODE)
    assert text.endswith(f'/slurm/launch.sh" {name}\n')


def test_the_scripts_of_table_1_differ_in_name_and_size_only() -> None:
    alike = {
        tuple(sorted({**options_of(FOLDER / f"{n}.sh"), "job-name": "", "nodes": ""}.items()))
        for n in TABLE_1
    }
    assert len(alike) == 1


def launched(
    folder: Path,
    *words: str,
    code: int,
    preempted: bool,
    script: str = "launch",
    also: str = "true",
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Runs launch.sh where srun writes its arguments and environment to files, does `also`, and
    ends with `code`; scontrol says whether it was preempted. words: arguments, instead of a
    preset.
    """
    job = "JobId=7 PreemptTime=" + ("2026-11-22T10:00:00" if preempted else "None")
    for name, body in {
        "srun": f'echo "srun: $*"; printf "%s\\n" "$@" >{folder}/arguments\n'
        f"env >{folder}/environment; {also}; exit {code}",
        "scontrol": f'[ "$1" = show ] && echo "{job} " || echo "scontrol $*"',
        "python": 'if [[ "$3" == report || "$2" == experiments.* ]]; then echo "python $*"; fi\n'
        '[ "$1" = -c ] || exit 0\n'
        f'exec {sys.executable} "$@"',
    }.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    sizes = {
        "SLURM_JOB_CPUS_PER_NODE": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_NUM_NODES": "1",
    }
    environment = {
        **os.environ,
        **sizes,
        **variables,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "WLB_PYTHON": str(folder / "python"),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1",
        "OUTPUT": variables.get("OUTPUT", str(folder / "runs")),
    }
    if script == "launch":
        command = ["bash", "-c", 'source slurm/launch.sh "$@"', "bash", *(words or ("7b_128k",))]
    else:
        command = ["bash", f"slurm/{script}.sh", *words]
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("code", [0, 138, 143])
def test_a_job_that_is_preempted_while_it_starts_is_requeued(tmp_path: Path, code: int) -> None:
    """Its ranks end by the signal where Python is still being loaded."""
    done = launched(tmp_path, code=code, preempted=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("requeued\nscontrol requeue 7\n")
    assert (f"srun ended with {code}" in done.stdout) == bool(code)
    assert ("saved; requeued" in done.stdout) == (not code)
    spent = launched(tmp_path, code=code, preempted=True, MAX_RESTARTS="0")
    assert spent.returncode == 1
    assert "not requeued after MAX_RESTARTS=0" in spent.stdout


@pytest.mark.parametrize("code", [0, 2, 143])
def test_a_job_that_ends_by_itself_is_not_requeued(tmp_path: Path, code: int) -> None:
    done = launched(tmp_path, code=code, preempted=False)
    assert done.returncode == code
    assert "requeue" not in done.stdout
    assert done.stdout.endswith(f"srun ended with {code}\n" if code else " ended\n")


@pytest.mark.parametrize("code", [0, 2, 143])
def test_a_job_whose_ranks_failed_says_which_failed_first(tmp_path: Path, code: int) -> None:
    """2 is a wrong command, and no rank has begun."""
    done = launched(tmp_path, code=code, preempted=False, DOCTOR="no", RUN_NAME="mine")
    told = f"python -m wlb report --failure {tmp_path}/runs/mine\n"
    assert done.stdout.endswith(told) == (told in done.stdout) == (code == 143)


@pytest.mark.parametrize("code", [2, 0])
def test_a_job_that_is_stopped_leaves_another_job_of_its_run_alone(
    tmp_path: Path, code: int
) -> None:
    """It ends with 2 where it has waited in vain for the lock that the other one holds."""
    by_hand, other = tmp_path / "runs" / ".stop-mine", tmp_path / "runs" / ".stop-mine@6"
    by_hand.parent.mkdir()
    for file in (by_hand, other, tmp_path / "runs" / ".stop-mine@7"):
        file.touch()
    # srun's parent is the job's shell; the loop ends when that has taken the signal.
    asked = f"[ -e {tmp_path}/runs/.stop-mine@7 ]"
    also = (
        f"ls -A {tmp_path}/runs | sed s/^/before:/; kill -TERM $PPID; "
        f"for _ in {{1..1000}}; do {asked} && break; sleep 0.01; done; {asked} && echo asked"
    )
    done = launched(tmp_path, code=code, preempted=False, RUN_NAME="mine", DOCTOR="no", also=also)
    said = done.stdout.splitlines()
    assert "asked" in said
    assert "cancelled or out of time: asking the ranks to save and end" in done.stdout
    assert {"before:.stop-mine", "before:.stop-mine@6"} <= set(said)
    assert "before:.stop-mine@7" not in said  # of an earlier start of this job
    assert other.exists()
    # A request by hand may be for the other job; that which trains next removes it.
    assert by_hand.exists()


def failed(folder: Path, *, code: int, saves: str, **variables: str) -> str:
    """Returns what launch.sh says of ranks that end with `code` after they saved a checkpoint, in a
    run that has one of step 5.
    """
    checkpoints = folder / "runs" / "mine" / "checkpoints"
    (checkpoints / "step-00000005").mkdir(parents=True, exist_ok=True)
    done = launched(
        folder,
        code=code,
        preempted=False,
        also=f"mkdir -p {checkpoints}/{saves}; {variables.pop('also', 'true')}",
        **{"RUN_NAME": "mine", "DOCTOR": "no", "ON_FAILURE": "requeue", **variables},
    )
    is_requeued = done.stdout.endswith("requeued\nscontrol requeue 7\n")
    is_spent = "not requeued after MAX_RESTARTS" in done.stdout
    assert done.returncode == (0 if is_requeued else 1 if is_spent else code), done.stderr
    return done.stdout if is_requeued or is_spent else "ended"


def test_a_failed_job_is_requeued_if_asked_and_if_it_has_come_further(tmp_path: Path) -> None:
    new = "step-00000010"
    said = failed(tmp_path / "a", code=1, saves=new)
    assert "failed after it had saved step-00000010; requeued" in said
    assert failed(tmp_path / "a", code=1, saves=new) == "ended"  # no further than before
    assert "requeued" in failed(tmp_path / "b", code=143, saves=new)
    assert failed(tmp_path / "c", code=1, saves="partial-00000010") == "ended"
    assert failed(tmp_path / "d", code=2, saves=new) == "ended"
    assert failed(tmp_path / "e", code=1, saves=new, ON_FAILURE="end") == "ended"
    assert failed(tmp_path / "f", code=1, saves=new, ON_FAILURE="") == "ended"
    asked = tmp_path / "g" / "runs" / ".stop-mine@7"
    cancel = f"kill -TERM $PPID; until [ -e {asked} ]; do sleep 0.01; done"
    assert failed(tmp_path / "g", code=1, saves=new, also=cancel) == "ended"
    said = failed(tmp_path / "h", code=1, saves=new, SLURM_RESTART_COUNT="3", MAX_RESTARTS="3")
    assert "not requeued after MAX_RESTARTS=3" in said


def test_another_value_of_on_failure_is_refused(tmp_path: Path) -> None:
    done = launched(tmp_path, code=0, preempted=False, ON_FAILURE="retry")
    assert done.returncode == 2
    assert "ON_FAILURE='retry'" in done.stdout


def test_the_doctor_examines_the_folder_that_a_file_names(tmp_path: Path) -> None:
    own = tmp_path / "mine.toml"
    own.write_text(f'[run]\noutput_dir = "{tmp_path}/scratch"\n', "utf-8")
    given = {"PRESET": os.path.relpath(own, ROOT), "OUTPUT": "", "code": 0, "preempted": False}
    done = launched(tmp_path, script="doctor", **given)
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "arguments").read_text("utf-8").splitlines()
    assert os.path.samefile(words[words.index("doctor") + 1], own)
    assert f"run.output_dir={tmp_path}/scratch" in words
    # In a container Python is started by srun, whose stand-in prints its arguments.
    launched(tmp_path, script="doctor", CONTAINER_IMAGE="a.sqsh", **given | {"PRESET": str(own)})
    words = (tmp_path / "arguments").read_text("utf-8").splitlines()
    assert f"--container-mounts={ROOT}:{ROOT},{tmp_path}:{tmp_path}" in words
    launched(tmp_path, script="doctor", **given | {"PRESET": "7b_64k"})
    assert "run.output_dir=runs" in (tmp_path / "arguments").read_text("utf-8").splitlines()
    done = launched(tmp_path, script="doctor", **given | {"PRESET": "absent.toml"})
    assert (done.returncode, "absent.toml does not exist" in done.stdout) == (2, True)


def trained(folder: Path, *words: str, **variables: str) -> tuple[str, list[str]]:
    """Returns what train.sh says, and the words that the last srun gets."""
    done = launched(folder, *words, code=0, preempted=False, script="train", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, (folder / "arguments").read_text("utf-8").splitlines()


def test_a_file_of_one_s_own_is_trained_as_it_says(tmp_path: Path) -> None:
    own = tmp_path / "my configs" / "mine v2.toml"
    own.parent.mkdir()
    own.write_text(f'[run]\noutput_dir = "{tmp_path}/scratch runs"\n', "utf-8")
    said, words = trained(tmp_path, str(own), "training.steps=5", OUTPUT="", EXTRA="run.seed=1")
    assert words[words.index("train") :][:4] == ["train", str(own), "--system", ""]
    settings = words[words.index("--set") + 1 :]
    assert "run.name=mine_v2-7" in settings
    assert f"run.output_dir={tmp_path}/scratch runs" in settings
    assert settings[-2:] == ["run.seed=1", "training.steps=5"]
    assert f"data: as {own} says" in said
    _, words = trained(tmp_path, str(own), SYSTEM="fixed_4d:2", OUTPUT=f"{tmp_path}/o")
    assert words[words.index("--system") + 1] == "fixed_4d:2"
    assert f"run.output_dir={tmp_path}/o" in words
    assert "run.name=mine_v2-fixed_4d-2-7" in words


def test_a_file_is_looked_for_from_where_sbatch_was_called(tmp_path: Path) -> None:
    own = tmp_path / "mine.toml"
    own.touch()
    relative = os.path.relpath(own, ROOT)
    _, words = trained(tmp_path, relative)
    assert os.path.samefile(words[words.index("train") + 1], own)
    done = launched(tmp_path, "absent.toml", code=0, preempted=False, script="train")
    assert done.returncode == 2
    assert "absent.toml does not exist" in done.stdout
    assert launched(tmp_path, code=0, preempted=False, script="train").returncode != 0


def test_a_container_sees_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").touch()
    more = {"CONTAINER_IMAGE": "a.sqsh", "CONTAINER_MOUNTS": "/data:/data"}
    _, words = trained(tmp_path, str(tmp_path / "mine.toml"), **more)
    assert f"--container-mounts={ROOT}:{ROOT},/data:/data,{tmp_path}:{tmp_path}" in words


@pytest.mark.parametrize("name", ["a/b", "../a", "-a", ".a", "a b", "a;b", "$(a)"])
def test_a_run_name_that_is_no_folder_s_name_is_refused(tmp_path: Path, name: str) -> None:
    done = launched(tmp_path, code=0, preempted=False, RUN_NAME=name)
    assert done.returncode == 2
    assert f"RUN_NAME='{name}'" in done.stdout
    assert not (tmp_path / "arguments").exists()


def test_srun_gets_more_options(tmp_path: Path) -> None:
    arguments, _ = asked_of_srun(tmp_path, SRUN_ARGS="--mpi=none --export=ALL")
    options = arguments[: arguments.index(str(tmp_path / "python"))]
    assert {"--mpi=none", "--export=ALL"} < set(options)


def asked_of_srun(folder: Path, **variables: str) -> tuple[list[str], dict[str, str]]:
    """Returns the arguments of srun, and the variables that ranks inherit."""
    done = launched(folder, code=0, preempted=False, RUN_NAME="mine", **variables)
    assert done.returncode == 0, done.stderr
    lines = (folder / "environment").read_text("utf-8").splitlines()
    names = dict(line.split("=", 1) for line in lines if "=" in line)
    return (folder / "arguments").read_text("utf-8").splitlines(), names


def test_ranks_are_placed_in_order_and_bound_to_cores(tmp_path: Path) -> None:
    arguments, _ = asked_of_srun(tmp_path)
    options = arguments[: arguments.index(str(tmp_path / "python"))]
    assert {"--distribution=block:block", "--cpu-bind=cores", "--cpus-per-task=1"} < set(options)
    assert not [option for option in options if "container" in option]
    # The node with fewest cores decides, wherever the job's shell is.
    sizes = {"SLURM_NTASKS_PER_NODE": "8", "SLURM_CPUS_ON_NODE": "192"}
    for cpus, each in {"96(x2),64": 8, "64,128": 8, "192(x16)": 24, "128(x2),96(x3)": 12}.items():
        given = asked_of_srun(tmp_path, **sizes, SLURM_JOB_CPUS_PER_NODE=cpus)[0]
        assert f"--cpus-per-task={each}" in given
    assert "--cpu-bind=map_ldom:1,0" in asked_of_srun(tmp_path, CPU_BIND="map_ldom:1,0")[0]


def test_a_container_sees_the_checkout_and_has_its_own_python(tmp_path: Path) -> None:
    image, mounts = "images/pytorch.sqsh", "/data:/data,/home"
    given = {"CONTAINER_IMAGE": image, "CONTAINER_MOUNTS": mounts}
    arguments, _ = asked_of_srun(tmp_path, **given)
    assert f"--container-image={image}" in arguments
    assert f"--container-mounts={ROOT}:{ROOT},{mounts}" in arguments
    assert f"--container-workdir={ROOT}" in arguments
    only = asked_of_srun(tmp_path, CONTAINER_IMAGE="wlb.sqsh")[0]
    assert f"--container-mounts={ROOT}:{ROOT}" in only


def test_ranks_get_the_defaults_of_cuda_that_local_ranks_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*CUDA_DEFAULTS, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    _, names = asked_of_srun(tmp_path)
    assert {name: names.get(name) for name in CUDA_DEFAULTS} == CUDA_DEFAULTS
    assert "GLOO_SOCKET_IFNAME" not in names
    assert "NCCL_SOCKET_IFNAME" not in names


def test_what_the_user_sets_for_cuda_and_the_network_stays(tmp_path: Path) -> None:
    given = {"PYTORCH_CUDA_ALLOC_CONF": "backend:native", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    _, names = asked_of_srun(tmp_path, **given, INTERFACE="ib0")
    assert "PYTORCH_ALLOC_CONF" not in names
    assert names["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert (names["GLOO_SOCKET_IFNAME"], names["NCCL_SOCKET_IFNAME"]) == ("ib0", "=ib0")
    _, names = asked_of_srun(tmp_path, INTERFACE="ib0", NCCL_SOCKET_IFNAME="^lo,docker")
    assert (names["GLOO_SOCKET_IFNAME"], names["NCCL_SOCKET_IFNAME"]) == ("ib0", "^lo,docker")


def test_ranks_get_all_variables_where_sbatch_exports_some(tmp_path: Path) -> None:
    """Sbatch --export=NAMES leaves this variable, which srun obeys."""
    _, names = asked_of_srun(tmp_path, SLURM_EXPORT_ENV="STORE", INTERFACE="ib0")
    assert (names["SLURM_EXPORT_ENV"], names["GLOO_SOCKET_IFNAME"]) == ("ALL", "ib0")


def test_ranks_are_examined_before_they_train(tmp_path: Path) -> None:
    quick, trained = "-m wlb doctor 7b_128k --system wlb --quick", "-m wlb train 7b_128k"
    done = launched(tmp_path, code=0, preempted=False)
    assert done.stdout.index(quick) < done.stdout.index(trained)
    without = launched(tmp_path, code=0, preempted=False, DOCTOR="no")
    assert "doctor" not in without.stdout
    assert trained in without.stdout
    # srun ends with 1 where it cannot start the ranks.
    absent = launched(tmp_path, code=1, preempted=False)
    assert absent.returncode == 1
    assert trained not in absent.stdout
    assert "not fit" not in absent.stdout
    sick = launched(tmp_path, code=3, preempted=False)
    assert sick.returncode == 3
    assert quick in sick.stdout
    assert trained not in sick.stdout
    assert "not fit to train; DOCTOR=no sbatch ..." in sick.stdout


def settings_of(folder: Path) -> list[str]:
    """Returns the settings of the command that srun started last."""
    words = (folder / "arguments").read_text("utf-8").splitlines()
    return words[words.index("--set") + 1 :]


TRIAL = ["training.steps=100", "training.warmup_steps=10"]


def test_a_preset_without_documents_is_a_trial_that_says_what_to_give(tmp_path: Path) -> None:
    asked = "wlb prepare --synthetic wlb_paper"
    given: dict[str, Any] = {"code": 0, "preempted": False}
    done = launched(tmp_path, **given)
    started, ended = done.stdout.split("srun: ")[0], done.stdout.splitlines()[-2:]
    assert "no STORE is given: a trial of 100 steps" in started
    assert asked in started
    assert ended[0].startswith("this was a trial; STORE=PREFIX sbatch ...")
    assert ended[1].endswith(" ended")
    assert settings_of(tmp_path)[-2:] == TRIAL
    # What the user sets comes after it.
    launched(tmp_path, **given, EXTRA="training.steps=7")
    assert settings_of(tmp_path)[-3:] == [*TRIAL, "training.steps=7"]
    for documents in ({"STORE": "stores/mine"}, {"EXTRA": "run.seed=1 data.blend=[]"}):
        done = launched(tmp_path, **given, **documents)
        assert "trial" not in done.stdout
        assert set(TRIAL).isdisjoint(settings_of(tmp_path))
    done = launched(tmp_path, "7b_64k", "data.store=stores/mine", **given)
    assert "data: as data.store=... says" in done.stdout
    assert set(TRIAL).isdisjoint(settings_of(tmp_path))


def test_the_first_line_says_whose_system_it_is(tmp_path: Path) -> None:
    given: dict[str, Any] = {"code": 0, "preempted": False}
    first = launched(tmp_path, **given).stdout.splitlines()[0]
    assert "system wlb (this project's own; SYSTEM=paper is the paper's WLB-LLM)" in first
    first = launched(tmp_path, **given, SYSTEM="paper").stdout.splitlines()[0]
    assert "system paper, on" in first


def test_a_measured_profile_reaches_every_command_that_prices(tmp_path: Path) -> None:
    given: dict[str, Any] = {"code": 0, "preempted": False}
    mine = "cost.profile=kernels_profile/mine.json"
    for script, words in {"launch": (), "train": ("7b_64k",), "doctor": (), "fig12": ()}.items():
        launched(tmp_path, *words, **given, script=script, PROFILE="kernels_profile/mine.json")
        assert mine in settings_of(tmp_path), script
        launched(tmp_path, *words, **given, script=script)
        assert not [s for s in settings_of(tmp_path) if s.startswith("cost.")], script
    # In a container Python is started by srun, whose stand-in prints its arguments.
    simulated = {**given, "script": "simulate", "CONTAINER_IMAGE": "a.sqsh"}
    launched(tmp_path, **simulated, PROFILE="kernels_profile/mine.json")
    assert settings_of(tmp_path) == [mine]
    launched(tmp_path, **simulated)
    assert "--set" not in (tmp_path / "arguments").read_text("utf-8").splitlines()


def test_a_node_is_profiled_by_a_rank_a_gpu(tmp_path: Path) -> None:
    options = options_of(FOLDER / "profile.sh")
    assert options["ntasks-per-node"] == options["gpus-per-node"] == str(GPUS_A_NODE)
    out = "kernels_profile/mine.json"
    done = launched(tmp_path, script="profile", code=0, preempted=False, OUT=out, EXTRA="--quick")
    assert done.returncode == 0, done.stderr
    assert f"PROFILE={out} sbatch" in done.stdout
    words = (tmp_path / "arguments").read_text("utf-8").splitlines()
    assert {"--distribution=block:block", "--cpu-bind=cores"} < set(words)
    assert words[words.index("-m") :] == (
        f"-m wlb.profile --device cuda --preset 7b_128k --out {out} --quick".split()
    )


def test_figure_12_trains_the_four_systems_on_the_same_documents(tmp_path: Path) -> None:
    given: dict[str, Any] = {"script": "fig12", "preempted": False, "PRESET": "550m_64k"}
    done = launched(tmp_path, code=0, **given, EXTRA="run.seed=3")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "fig12-7"
    lines = done.stdout.splitlines()
    measured = "python -m experiments.paper.fig12.measured"
    made = f"{measured} documents 550m_64k --steps 40 --out {folder}/documents --set run.seed=3"
    trained = [line for line in lines if " -m wlb train " in line]
    systems = ["plain_4d", "fixed_4d", "paper", "wlb"]
    for system, line in zip(systems, trained, strict=True):
        assert f"-m wlb train 550m_64k --system {system} --set" in line
        assert f"data.store={folder}/documents" in line
        assert f"run.output_dir={folder} run.seed=3 run.name={system}" in line
        assert "training.steps=40" in line
    row = f"{measured} row 550m_64k " + " ".join(f"{folder}/{system}" for system in systems)
    assert lines[-1] == row
    assert lines.index(made) < lines.index(trained[0])
    # A store of one's own is trained as it is, and a system that fails ends the job.
    done = launched(tmp_path, code=1, **given, STORE="stores/mine", DOCTOR="no", SYSTEM="paper wlb")
    assert done.returncode == 1
    assert measured not in done.stdout
    assert done.stdout.count("srun: ") == done.stdout.count("data.store=stores/mine") == 1


def test_figure_12_leaves_no_checkpoints(tmp_path: Path) -> None:
    saved = tmp_path / "runs" / "fig12-7" / "paper" / "checkpoints"
    kept = tmp_path / "runs" / "other" / "checkpoints"
    kept.mkdir(parents=True)
    also = f'[[ "$*" != *run.name=paper* ]] || mkdir -p {saved}/step-00000040'
    given = {"SYSTEM": "paper fixed_4d:2", "DOCTOR": "no", "STORE": "stores/mine", "also": also}
    done = launched(tmp_path, script="fig12", code=0, preempted=False, **given)
    assert done.returncode == 0, done.stderr
    folders = f"{saved.parent} {saved.parent.parent}/fixed_4d-2"
    assert done.stdout.endswith(f"fig12.measured row 7b_128k {folders}\n")
    assert saved.parent.exists()
    assert not saved.exists()
    assert kept.exists()


@pytest.mark.slurm
@pytest.mark.parametrize("name", SUBMITTED)
def test_slurm_would_start_every_script_on_32_nodes(cluster: Cluster, name: str) -> None:
    said = cluster.run("sbatch", "--test-only", f"slurm/{name}.sh", cwd=ROOT).stdout
    found = re.search(r"using (\d+) processors on nodes? (\S+) in partition main", said)
    assert found, said
    num_nodes = int(options_of(FOLDER / f"{name}.sh")["nodes"])
    if name in TABLE_1:
        assert int(found[1]) == num_nodes * CPUS_A_NODE  # whole nodes
    hosts = cluster.run("scontrol", "show", "hostnames", found[2]).stdout.split()
    assert len(hosts) == num_nodes


@pytest.mark.slurm
def test_slurm_refuses_more_than_there_is(cluster: Cluster) -> None:
    for more in ("--nodes=33", "--gpus-per-node=9"):
        command = ("sbatch", "--test-only", more, "slurm/70b_128k.sh")
        done = cluster.run(*command, cwd=ROOT, check=False)
        assert (done.returncode, "allocation failure" in done.stdout) == (1, True), done.stdout

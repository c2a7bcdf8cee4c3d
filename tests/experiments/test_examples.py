"""Tests the examples as a reader would start them: each runs, and says what it should."""

import importlib.util
import json
import os
import random
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.test_store import index_bytes
from tests.train.case import WORDS, write_store
from tests.weights.test_hub_export_chat import chats, model_folder
from wlb import weights
from wlb.spec import load

pytestmark = [pytest.mark.full, pytest.mark.process]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "experiments" / "examples"
MOST_LINES = 60


def shell(folder: Path) -> dict[str, str]:
    """Returns an environment in which `wlb` and `python` are those of this checkout."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    for name, words in (("wlb", "-m wlb"), ("python", "")):
        path = tools / name
        path.write_text(f'#!/bin/bash\nexec "{sys.executable}" {words} "$@"\n', "utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "huggingface"),
    }


def run(folder: Path, *command: str, **variables: str) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=shell(folder) | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def texts(path: Path, num: int = 120) -> Path:
    """Writes JSONL of random words, a few documents much longer than the others."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(num):
            words = draw.choices(WORDS, k=int(draw.lognormvariate(4.0, 1.0)) + 1)
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    return path


def host_model(folder: Path) -> Path:
    """Writes a model that transformers loads with its tokenizer."""
    made = model_folder(folder)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    (made / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return made


def test_examples_are_short() -> None:
    for path in EXAMPLES.iterdir():
        if path.suffix in (".py", ".sh", ".toml", ".md"):
            assert len(path.read_text("utf-8").splitlines()) <= MOST_LINES, path.name


@pytest.mark.nightly
@pytest.mark.dist
def test_pretraining_from_jsonl_to_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    data, out = texts(tmp_path / "data.jsonl"), tmp_path / "out"
    said = run(tmp_path, "bash", str(EXAMPLES / "pretrain.sh"), str(out), str(data))
    steps = [
        json.loads(line)["steps_done"]
        for line in (out / "pretrain" / "metrics.jsonl").read_text("utf-8").splitlines()
        if json.loads(line)["kind"] == "evaluation"
    ]
    assert max(steps) == 30
    assert {p.name for p in (out / "pretrain" / "checkpoints").iterdir()} >= {"step-00000030"}
    # Both are greedy from the same tokens.
    (theirs,) = re.findall(r"^transformers: (.*)$", said, re.MULTILINE)
    model = weights.load(out / "pretrain")
    asked = model.encode("The ")
    assert theirs == model.decode([*asked, *model.greedy(asked, most=16)])


@pytest.mark.nightly  # the same steps are in tests/weights/test_hub_export_chat.py
@pytest.mark.dist
def test_a_chat_model_is_fine_tuned_and_stops(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = model_folder(tmp_path / "model")
    talks = chats(tmp_path / "chats.jsonl")
    keys = ["training.learning_rate=1e-2", "data.context_window=128", "training.steps=60"]
    said = run(
        tmp_path,
        *("bash", str(EXAMPLES / "chat.sh"), str(tmp_path / "out"), str(model), str(talks)),
        *(*keys, "run.device=cpu"),
    )
    assert "transformers: Hi (ended its turn)" in said


@pytest.mark.nightly
def test_the_trainer_of_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    model = host_model(tmp_path / "model")
    data, out = texts(tmp_path / "data.jsonl", 60), tmp_path / "out"
    module = ("python", "-m", "experiments.examples.hugging_face")
    said = run(tmp_path, *module, str(model), str(data), str(out), "--cpu")
    assert "slowest over mean rank of a step, predicted: 1.000" in said
    assert (out / "model.safetensors").is_file()


@pytest.mark.nightly
@pytest.mark.dist
def test_the_trainer_of_trl_on_packed_documents_over_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    model = host_model(tmp_path / "model")
    data, out = texts(tmp_path / "data.jsonl", 60), tmp_path / "out"
    torchrun = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    module = ("-m", "experiments.examples.hugging_face_cp")
    said = run(tmp_path, *torchrun, *module, str(model), str(data), str(out), "--cpu")
    assert len(re.findall(r"'loss': '\d", said)) >= 2  # the first rank's log, a line a step
    assert (out / "model.safetensors").is_file()
    source = EXAMPLES / "hugging_face_cp.py"
    assert len(source.read_text("utf-8").splitlines()) <= 40


@pytest.mark.nightly
@pytest.mark.skipif(not importlib.util.find_spec("torchtitan"), reason="needs torchtitan")
def test_the_loader_of_torchtitan(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", [random.Random(i).randint(5, 900) for i in range(200)])
    said = run(tmp_path, "python", "-m", "experiments.examples.torchtitan", store)
    found = re.findall(r"step (\d) rank (\d) micro-batch (\d): (\d+) tokens", said)
    assert [f[:3] for f in found] == [
        (str(step), str(rank), str(i)) for rank in range(2) for step in range(3) for i in range(4)
    ]
    assert all(0 < int(tokens) <= 512 * 3 // 2 for *_, tokens in found)


@pytest.mark.nightly
@pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="needs megatron-core")
def test_micro_batches_of_megatron(tmp_path: Path) -> None:
    """The store is Megatron's, with an empty document, as its tools write for a line of no text."""
    lengths = [random.Random(i).randint(5, 500) for i in range(100)]
    lengths[3] = 0
    offsets = [2 * sum(lengths[:i]) for i in range(len(lengths))]
    index = index_bytes(lengths, offsets, list(range(len(lengths) + 1)))
    (tmp_path / "store.idx").write_bytes(index)
    (tmp_path / "store.bin").write_bytes(b"\x07\x00" * sum(lengths))
    said = run(tmp_path, "python", "-m", "experiments.examples.megatron", str(tmp_path / "store"))
    assert f"99 documents, {sum(lengths):,} tokens, 1 empty document left out" in said
    assert len(re.findall(r"rank [01] micro-batch [0-3]: \d+ tokens of \d+ documents", said)) == 24


def test_the_toml_of_a_cluster_fits_its_nodes(tmp_path: Path) -> None:
    store = write_store(tmp_path / "mine", [60000, 30000, 500, 4000] * 20)
    spec = load(str(EXAMPLES / "slurm.toml"))
    parallel = spec.parallel
    assert 16 % (parallel.tp * parallel.cp * parallel.pp) == 0
    (script,) = re.findall(r"sbatch --nodes=2 (\S+)", (EXAMPLES / "slurm.toml").read_text("utf-8"))
    assert "--gpus-per-node=8" in (ROOT / script).read_text("utf-8")
    toml = str(EXAMPLES / "slurm.toml")
    keys = [f"data.store={store}", "parallel.dp=1"]
    said = run(tmp_path, "wlb", "train", toml, "--dry-run", "--set", *keys, COLUMNS="200")
    assert "80 documents" in said


@pytest.mark.dist
def test_the_toml_of_a_cluster_trains_as_srun_starts_it(tmp_path: Path) -> None:
    """Two tasks with srun's variables, and a small model on CPU in the layout's place."""
    store = write_store(tmp_path / "mine", [200, 90, 30, 12] * 20)
    small = {
        "data.store": store, "data.context_window": 256, "data.row_multiple": 1,
        "model.hidden_size": 32, "model.num_layers": 2, "model.num_heads": 4,
        "model.num_kv_heads": 2, "model.ffn_hidden_size": 64, "model.vocab_size": 320,
        "parallel.tp": 1, "parallel.cp": 2, "parallel.pp": 1, "pp.virtual_stages": 1,
        "training.dtype": "float32", "training.steps": 3, "training.warmup_steps": 1,
        "cost.profile": "cpu", "eval.interval": 0, "run.device": "cpu",
        "run.output_dir": str(tmp_path / "runs"),
    }  # fmt: skip
    words = [f"{key}={value}" for key, value in small.items()]
    command = ["wlb", "train", str(EXAMPLES / "slurm.toml"), "--resume", "auto", "--set", *words]
    tasks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=shell(tmp_path) | srun_variables(rank, 2),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [task.communicate()[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said[0][-3000:] + said[1][-3000:]
    lines = (tmp_path / "runs" / "mine" / "metrics.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["kind"] for line in lines].count("step") == 3


def srun_variables(rank: int, num: int) -> dict[str, str]:
    """Returns what Slurm sets for a task of a job on one node."""
    return {
        "SLURM_JOB_ID": str(40000 + os.getpid() % 20000),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": str(num),
        "SLURM_STEP_NUM_TASKS": str(num),
        "SLURM_NODEID": "0",
        "SLURM_NNODES": "1",
        "SLURM_NTASKS_PER_NODE": str(num),
        "SLURM_STEP_TASKS_PER_NODE": str(num),
        "SLURM_TASKS_PER_NODE": str(num),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_STEP_ID": "0",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURM_SRUN_COMM_HOST": "127.0.0.1",
    }

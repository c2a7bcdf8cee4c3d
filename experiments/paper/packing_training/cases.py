"""Defines the data, the base model and the runs, and trains them.

Each run is its own process `wlb train` with one thread. So its CPU time and peak memory can be
measured, and two runs can be made at the same time. A finished run has a file `result.json` and is
not repeated. An interrupted run starts from the beginning.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.harness.pages import commit
from experiments.paper.packing_methods.counting import Method
from wlb.data import TokenStore
from wlb.planner import open_planner
from wlb.prepare import PrepareOptions, prepare_docstrings, prepare_store
from wlb.spec import RunSpec, load

MSL = 1024  # maximum sequence length in tokens
BS = 4  # examples of an online micro-batch
VOCABULARY = 4096
HELDOUT_FRACTION = 0.1
BASE_PACKAGES = ("numpy", "scipy")
"""Packages whose Python sources the base model is trained on.

The standard library is not among them, because the model is fine-tuned on its docstrings.
"""
BASE_STEPS, BASE_BATCHES = 200, 16
"""Steps of the base model's training, and windows of each step."""
MODEL = {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 4}
MODEL |= {"ffn_hidden_size": 704, "vocab_size": VOCABULARY}
LEARNING_RATES = (1e-3, 2e-3, 4e-3, 8e-3)

NAMES = {
    "random_padding": Method.RANDOM_PADDING,
    "group_by_length_padding": Method.GROUPED_PADDING,
    "mini_batch_posid": Method.MINI_BATCH,
    "fixed_length": Method.FIXED_LENGTH,
    "fixed_length_posid": Method.FIXED_LENGTH_POSID,
    "multipack_posid": Method.MULTIPACK,
    "multipack_bfd_posid": Method.BEST_FIT_DECREASING,
    "sorted_posid": Method.SORTED,
    "random_posid": Method.RANDOM,
}
"""Values of `packing.method`, and the paper's name of each method.

The paper's Multipack packs by first fit decreasing.
"""
ONLINE = ("random_padding", "group_by_length_padding", "mini_batch_posid")
"""Methods that form micro-batches while training; all others pack the data set before."""
GASES = (8, 2)
"""Values of gas, the micro-batches of an optimiser step.

Offline packing takes few steps with the first value. With the second it takes about as many steps
as online methods with the first, like the paper's layouts (2, 4096, 32) and (1, 8192, 4).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run: one epoch with a method."""

    method: str  # value of `packing.method`
    gas: int  # micro-batches of an optimiser step
    seed: int
    learning_rate: float

    @property
    def name(self) -> str:
        return f"{self.method}-gas{self.gas}-lr{self.learning_rate:g}-seed{self.seed}"

    @property
    def title(self) -> str:
        return str(NAMES[self.method])

    @property
    def is_fixed(self) -> bool:
        return self.method.startswith("fixed")

    @property
    def layout(self) -> str:
        """Returns "bs, msl, gas" as in the paper's tables.

        Offline methods other than fixed length have one row of bs * msl tokens.
        """
        if self.method in ONLINE or self.is_fixed:
            return f"{BS}, {MSL}, {self.gas}"
        return f"1, {BS * MSL}, {self.gas}"

    @property
    def keys(self) -> dict[str, Any]:
        """Returns the run's configuration keys.

        With fixed length, wlb makes a micro-batch of each row. So BS of them correspond to a
        micro-batch of the paper.
        """
        return {
            "packing.method": self.method,
            "packing.examples": BS,
            "packing.bin_windows": BS,
            # More global batches than an epoch has, so that offline methods pack all of it at once.
            "packing.window_batches": 100_000,
            "data.num_windows": self.gas * (BS if self.is_fixed else 1),
            "training.learning_rate": self.learning_rate,
            "training.min_learning_rate": self.learning_rate / 10,
            "run.seed": self.seed,
        }


def all_cases(seeds: range, learning_rate: float) -> list[Case]:
    """Returns all runs, ordered by seed, so that an interrupted study has complete seeds."""
    pairs = [(method, GASES[0]) for method in ONLINE]
    pairs += [(method, gas) for gas in GASES for method in NAMES if method not in ONLINE]
    return [
        Case(method=method, gas=gas, seed=seed, learning_rate=learning_rate)
        for seed in seeds
        for method, gas in pairs
    ]


def rate_cases() -> list[Case]:
    """Returns runs at each learning rate, with many small steps and with few large ones."""
    return [
        Case(method=method, gas=GASES[0], seed=0, learning_rate=rate)
        for method in ("mini_batch_posid", "multipack_bfd_posid")
        for rate in LEARNING_RATES
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Results of a run. Losses are in nats per target."""

    steps: int  # optimiser steps
    tokens: int  # tokens of the examples
    targets: int  # tokens whose prediction counts in the loss
    positions: int  # positions that the model computed, including padding
    train_loss: float  # training loss, mean over the epoch
    heldout_before: float | None  # held-out loss before training; None without evaluation
    heldout_after: float | None  # held-out loss after training; None without evaluation
    compute_s: float  # CPU time of the model's passes
    peak_mib: float  # largest resident memory of the process
    commit: str  # commit of the code that trained

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.compute_s

    @property
    def padding(self) -> float:
        return 1 - self.tokens / self.positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The folder of all runs, and the data that they read."""

    folder: Path
    train: str  # prefix of the training store
    heldout: str  # prefix of the held-out store
    tokenizer: str  # path of the tokenizer

    @classmethod
    def open(cls, folder: Path) -> "Study":
        """Opens the study in a folder, and prepares the conversations if they are missing."""
        made = prepare_docstrings(
            folder / "stores",
            vocab_size=VOCABULARY,
            limit=MSL,
            heldout_fraction=HELDOUT_FRACTION,
            seed=0,
        )
        info = TokenStore(made.prefix).info
        assert info is not None
        tokenizer = str(Path(made.prefix).parent / str(info.tokenizer))
        return cls(folder=folder, train=made.prefix, heldout=made.heldout, tokenizer=tokenizer)

    @property
    def base(self) -> Path:
        return self.folder / "base"

    def train_base(self) -> None:
        """Trains the base model, with which every run starts, unless it exists."""
        if (self.base / "result.json").exists():
            return
        site = Path(sysconfig.get_paths()["purelib"])
        prefix = str(self.folder / "stores" / "base")
        prepare_store(
            PrepareOptions(
                inputs=tuple(f"{site / name}/**/*.py" for name in BASE_PACKAGES),
                out=prefix,
                tokenizer=self.tokenizer,
                eos="<|endoftext|>",
            )
        )
        keys: dict[str, Any] = {
            "packing.method": "fixed_length_posid",
            "data.num_windows": BASE_BATCHES,
            "data.store": prefix,
            "data.heldout_store": self.heldout,
            "training.steps": BASE_STEPS,
            "training.warmup_steps": BASE_STEPS // 20,
        }
        self._train("base", keys, threads=2)

    def spec_of(self, case: Case, **more: Any) -> RunSpec:
        return load("sft_demo", _set(self._shared() | case.keys | more))

    def run(self, case: Case) -> Result:
        """Trains a run and returns its result; a finished run is not repeated."""
        if (found := self.result(case)) is not None:
            return found
        # Plan the epoch first, because the learning rate schedule needs its number of steps.
        spec = self.spec_of(case, **{"training.steps": 1_000_000})
        steps = sum(1 for _ in open_planner(spec, self.train, "cpu").steps())
        keys = case.keys | {
            "training.steps": steps,
            "training.warmup_steps": max(1, steps // 10),
            "checkpoint.init_from": self.base,
        }
        made = self._train(case.name, keys, threads=1)
        shutil.rmtree(self.folder / case.name / "checkpoints")
        return made

    def try_out(self, case: Case, *, steps: int) -> Result:
        """Trains a few steps from random weights, without evaluation."""
        keys = {"training.steps": steps, "training.warmup_steps": 0, "eval.steps": 0}
        return self._train(case.name, case.keys | keys, threads=1)

    def result(self, case: Case) -> Result | None:
        """Returns the result of a run, or None if it has not finished."""
        path = self.folder / case.name / "result.json"
        return Result(**json.loads(path.read_text("utf-8"))) if path.exists() else None

    def _shared(self) -> dict[str, Any]:
        return {
            **{f"model.{name}": value for name, value in MODEL.items()},
            "run.output_dir": self.folder,
            "run.device": "cpu",
            "data.store": self.train,
            "data.heldout_store": self.heldout,
            "data.context_window": MSL,
            "data.epochs": 1,
            # More steps than the held-out store has, so that all of it is evaluated.
            "eval.steps": 1_000,
        }

    def _train(self, name: str, keys: dict[str, Any], *, threads: int) -> Result:
        """Trains in one process, writes result.json and returns the result."""
        given = _set(self._shared() | keys | {"run.name": name})
        env = os.environ | {"OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "wlb", "train", "sft_demo", "--set", *given]
        log = self.folder / f"{name}.log"
        with log.open("w", encoding="utf-8") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=env)
            # Unlike Popen.wait, os.wait4 returns the peak memory of this process.
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if status:
            raise RuntimeError(f"{name} failed, exit status {process.returncode}; {log} says why")
        made = read_result(self.folder / name, peak_mib=usage.ru_maxrss / 1024)
        path = self.folder / name / "result.json"
        path.write_text(json.dumps(asdict(made), indent=1), "utf-8")
        return made


def read_result(folder: Path, *, peak_mib: float) -> Result:
    """Reads a result from the metrics of a finished run."""
    text = (folder / "metrics.jsonl").read_text("utf-8")
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    steps = [line["measured"] for line in lines if line["kind"] == "step"]
    trained = [m for m in steps if m["loss"] is not None]
    held = [line["heldout_loss"] for line in lines if line["kind"] == "evaluation"]
    targets = sum(m["num_targets"] for m in steps)
    return Result(
        steps=len(trained),
        tokens=sum(m["num_tokens"] for m in steps),
        targets=targets,
        positions=sum(m["num_tokens"] + m["num_filler_tokens"] for m in steps),
        train_loss=sum(m["loss"] * m["num_targets"] for m in trained) / targets,
        heldout_before=held[0] if held else None,
        heldout_after=held[-1] if held else None,
        compute_s=sum(m["telemetry"]["compute"]["mean_s"] for m in steps if m["telemetry"]),
        peak_mib=peak_mib,
        commit=commit(),
    )


def _set(keys: dict[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in keys.items()]

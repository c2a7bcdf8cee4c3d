"""Manages the folder of all runs: trains and resumes them, and stores their results.

A run is a process `wlb train` with one thread and with checkpoints. A finished run has a file
`result.json` and is not repeated. An interrupted run resumes from its newest checkpoint, with
bit-equal losses. A result contains a digest of its settings and corpus, so results of other
settings or corpora are refused.
"""

import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.harness.files import write_json
from experiments.paper.fig16.arms import ARMS, Arm, Scale, arm_of, settings, spec_of, write_profile
from experiments.paper.fig16.bookkeeping import Bookkeeping, bookkeeping, books_from_json
from experiments.paper.fig16.corpus import Stores, open_stores, source_versions, split_store
from experiments.paper.fig16.outcome import (
    Result,
    check_steps,
    class_losses,
    result_from_json,
    result_of,
)
from wlb.data import TokenStore
from wlb.plan import digest
from wlb.report.run.records import read_run
from wlb.spec import RunSpec
from wlb.spec.keys import RENAMED


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run: an arm with a seed."""

    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm.name}-seed{self.seed}"


def cases_of(seeds: Iterable[int], arms: Sequence[Arm] = ARMS) -> list[Case]:
    """Returns the runs of all arms and seeds, ordered by group and then by seed.

    So an interrupted study has complete seeds, which can be compared.
    """
    groups = list(dict.fromkeys(arm.group for arm in arms))
    order = sorted(
        itertools.product(seeds, arms), key=lambda of: (groups.index(of[1].group), of[0])
    )
    return [Case(arm=arm, seed=seed) for seed, arm in order]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study: its scale, its corpus, and the folder of its runs."""

    scale: Scale
    folder: Path  # folder of all runs and of the corpus
    stores: Stores  # token stores of the corpus

    @classmethod
    def open(cls, scale: Scale, folder: Path) -> "Study":
        """Opens the study in a folder, and makes the corpus and the profile if they are missing."""
        stores = open_stores(
            folder / "stores",
            scale.sources(),
            vocabulary=scale.vocabulary,
            heldout_fraction=scale.heldout_fraction,
        )
        made = cls(scale=scale, folder=folder, stores=stores)
        write_profile(scale, made.vocabulary, made.profile)
        return made

    @property
    def profile(self) -> Path:
        """Returns the path of the kernel profile by which policies decide."""
        return self.folder / "profile.json"

    @property
    def vocabulary(self) -> int:
        info = TokenStore(self.stores.train).info
        return info.vocab_size if info else self.scale.vocabulary

    def keys_of(self, case: Case) -> dict[str, Any]:
        """Returns all settings of a run except its number of steps."""
        return {
            **self.scale.keys,
            "model.vocab_size": self.vocabulary,
            "data.store": self.stores.train,
            "data.heldout_store": self.stores.heldout,
            "data.epochs": 1,
            # More steps than the held-out store has, so that all of it is evaluated.
            "eval.steps": 1_000_000,
            "eval.interval_tokens": self.scale.eval_tokens,
            "cost.profile": self.profile,
            "telemetry.ledger": True,
            "planner.baseline": False,
            "run.name": case.name,
            "run.output_dir": self.folder,
            "run.seed": case.seed,
            **case.arm.keys,
        }

    def scale_spec(self) -> RunSpec:
        """Returns the settings that all cases share."""
        return spec_of(self.scale, self.scale.keys | {"model.vocab_size": self.vocabulary})

    def spec_of(self, case: Case) -> RunSpec:
        return spec_of(self.scale, self.keys_of(case))

    def books(self, case: Case, *, anew: bool = False) -> Bookkeeping:
        """Returns the counts of a run's packing and seed.

        Counts are stored in the study's folder. They are computed if they are missing or lack a
        field.

        Args:
            case: The run.
            anew: Whether to compute them even if they are stored, because the code may have
                changed.
        """
        packing = Case(arm=arm_of(case.arm.packing), seed=case.seed)
        path = self.folder / "books" / f"{packing.name}-{self.digest(packing):x}.json"
        book = None
        if path.exists() and not anew:
            book = books_from_json(json.loads(path.read_text("utf-8")))
        if book is None:
            book = bookkeeping(self.spec_of(case), self.stores.train)
            write_json(path, asdict(book))
        return book

    def result(self, case: Case) -> Result | None:
        """Returns the result of a run, or None if it has not finished.

        Raises:
            ValueError: If the result was made with other settings or another corpus.
        """
        path = self.folder / case.name / "result.json"
        return self._fitting(case, path) if path.exists() else None

    def _fitting(self, case: Case, path: Path) -> Result:
        found = result_from_json(json.loads(path.read_text("utf-8")))
        if found.made_by != self.digest(case):
            raise ValueError(
                f"{path} is of other settings or another corpus than {case.name} has now (text of "
                f"{source_versions()}); use another --folder, or remove it to train the run again"
            )
        return found

    def take(self, folder: Path, cases: Iterable[Case]) -> list[Case]:
        """Imports results of runs that were trained elsewhere, and returns those runs.

        Args:
            folder: Folder of result files that `keep` wrote.
            cases: Runs to look for. Runs that already have a result are skipped.

        Raises:
            ValueError: If a result was made with other settings or another corpus.
        """
        if not folder.is_dir():
            raise ValueError(f"--take {folder}: there is no such folder")
        taken: list[Case] = []
        for case in cases:
            path = folder / f"{case.name}.json"
            if path.exists() and self.result(case) is None:
                found = self._fitting(case, path)
                write_json(self.folder / case.name / "result.json", asdict(found))
                taken.append(case)
        return taken

    def keep(self, folder: Path, cases: Iterable[Case]) -> None:
        """Writes the result of each finished run to `folder`, in files of a few kilobytes."""
        for case in cases:
            if (found := self.result(case)) is not None:
                write_json(folder / f"{case.name}.json", asdict(found))

    def command(self, case: Case) -> list[str]:
        """Returns the command that trains a run.

        This plans the whole run to learn its number of steps. Stored counts may come from older
        code, and a wrong number of steps could end the run before its data does.
        """
        keys = self.keys_of(case) | {"training.steps": self.books(case, anew=True).num_steps}
        train = [sys.executable, "-m", "wlb", "train", self.scale.preset, "--resume", "auto"]
        return [*train, "--set", *settings(keys)]

    def run(self, case: Case) -> Result:
        """Trains or resumes a run and returns its result; a finished run is not repeated."""
        if (found := self.result(case)) is not None:
            return found
        command = self.command(case)
        log = self.folder / f"{case.name}.log"
        with log.open("a", encoding="utf-8") as out:
            print(f"$ {shlex.join(command)}", file=out, flush=True)
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            status = subprocess.run(command, stdout=out, stderr=out, env=env, check=False)
        if status.returncode:
            raise RuntimeError(
                f"{case.name} failed, exit status {status.returncode}; {log} says why"
            )
        return self.collect(case)

    def collect(self, case: Case) -> Result:
        """Computes and stores the result of a finished run, then removes its checkpoints.

        Raises:
            ValueError: If the run has not finished.
        """
        run = self.folder / case.name
        found = read_run(run)
        lengths = TokenStore(self.stores.train).lengths
        check_steps(run, lengths)
        prefix = str(self.folder / "stores" / "heldout")
        stores = split_store(self.stores.heldout, prefix, window=found.spec.data.context_window)
        losses = class_losses(found, stores, run / "checkpoints")
        made = result_of(found, class_losses=losses, made_by=self.digest(case))
        write_json(run / "result.json", asdict(made))
        shutil.rmtree(run / "checkpoints")
        return made

    def digest(self, case: Case) -> int:
        """Returns a digest of a run's settings and corpus, which its result must have."""
        # Where files are does not matter.
        places = ("data.store", "data.heldout_store", "cost.profile", "run.output_dir")
        keys = {k: v for k, v in self.keys_of(case).items() if k not in places}
        # Stored results were made when some keys had other names, so use the old names.
        before = {new: old for old, new in RENAMED.items()}
        named = {before.get(name, name): value for name, value in keys.items()}
        return digest(self.stores.checksum, *settings(dict(sorted(named.items()))))

"""Keeps the folder of all runs: trains them, resumes after an interruption, and keeps their
results.

A run is one `wlb train` on one thread, with checkpoints. One that finished has left `result.json`
and is not repeated; one that was interrupted goes on from its newest checkpoint (to the same
losses, to the bit). Results are small and carry a digest of settings and corpus, so that results of
other settings or corpora are refused.
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
    """Describes one run."""

    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm.name}-seed{self.seed}"


def cases_of(seeds: Iterable[int], arms: Sequence[Arm] = ARMS) -> list[Case]:
    """Returns runs group by group, and seed by seed in a group.

    An interrupted study thus has whole seeds.
    """
    groups = list(dict.fromkeys(arm.group for arm in arms))
    order = sorted(
        itertools.product(seeds, arms), key=lambda of: (groups.index(of[1].group), of[0])
    )
    return [Case(arm=arm, seed=seed) for seed, arm in order]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Holds a scale, its folder and its stores."""

    scale: Scale
    folder: Path
    stores: Stores

    @classmethod
    def open(cls, scale: Scale, folder: Path) -> "Study":
        """Makes the scale's corpus in `folder` unless it is there."""
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
        """Returns the path of the kernel profile that packing decides with."""
        return self.folder / "profile.json"

    @property
    def vocabulary(self) -> int:
        info = TokenStore(self.stores.train).info
        return info.vocab_size if info else self.scale.vocabulary

    def keys_of(self, case: Case) -> dict[str, Any]:
        """Returns all settings of a run but its number of steps."""
        return {
            **self.scale.keys,
            "model.vocab_size": self.vocabulary,
            "data.store": self.stores.train,
            "data.heldout_store": self.stores.heldout,
            "data.epochs": 1,
            # This number covers the whole held-out store.
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
        """Returns the counts of the case's packing and seed, which are kept in the folder.

        They are planned again where kept counts lack a field of today's.

        anew: plans again in any case, as this code plans
        """
        packing = Case(arm=arm_of(case.arm.packing), seed=case.seed)
        path = self.folder / "books" / f"{packing.name}-{self.digest(packing):x}.json"
        kept = None
        if path.exists() and not anew:
            kept = books_from_json(json.loads(path.read_text("utf-8")))
        if kept is None:
            kept = bookkeeping(self.spec_of(case), self.stores.train)
            write_json(path, asdict(kept))
        return kept

    def result(self, case: Case) -> Result | None:
        """Returns the result of a run, None if it has not finished.

        Raises ValueError if it was made with other settings or another corpus.
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
        """Takes over runs trained elsewhere, as `keep` left them, and returns which ones.

        Raises ValueError for a run of other settings or another corpus.
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
        """Writes a file of a few kilobytes for each run that ended."""
        for case in cases:
            if (found := self.result(case)) is not None:
                write_json(folder / f"{case.name}.json", asdict(found))

    def command(self, case: Case) -> list[str]:
        """Returns the run as a command.

        The run is planned anew, since books may be older than the code that will train: a run of
        their number of steps could end before its data does.
        """
        keys = self.keys_of(case) | {"training.steps": self.books(case, anew=True).num_steps}
        train = [sys.executable, "-m", "wlb", "train", self.scale.preset, "--resume", "auto"]
        return [*train, "--set", *settings(keys)]

    def run(self, case: Case) -> Result:
        """Trains a run unless it was trained; goes on where it was interrupted."""
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
        """Reads the results of an ended run and keeps them; raises ValueError for one that has not
        ended. Its checkpoints are removed.
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
        """Returns a digest of all settings and of the corpus, which marks this case's results."""
        places = ("data.store", "data.heldout_store", "cost.profile", "run.output_dir")
        keys = {k: v for k, v in self.keys_of(case).items() if k not in places}
        # Runs that were kept earlier are marked with old names.
        before = {new: old for old, new in RENAMED.items()}
        named = {before.get(name, name): value for name, value in keys.items()}
        return digest(self.stores.checksum, *settings(dict(sorted(named.items()))))

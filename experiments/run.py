"""Runs experiments one after the other and resumes where it was stopped (README.md has commands).

Each experiment runs in its own process as `python -m MODULE ARGUMENTS`. The file
runs/experiments/state.json records each experiment's commit, arguments, seconds and whether it
finished.

With `all`, an experiment is skipped if it has finished with the same arguments on the same source:
the same commit and the same uncommitted changes, of which changes in results folders do not count.
`--again` runs it nevertheless. An experiment that is given by name always runs. If one fails, the
others still run.

Exit status: 0 if all succeeded, 1 if some failed, 2 for an unknown name, 130 after Ctrl-C.
"""

import argparse
import datetime
import difflib
import hashlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.harness.files import write_json
from experiments.harness.pages import ROOT, commit, source_differences

LONG_MINUTES = 10
"""Experiments of at least this many minutes are named before the runs start."""
BOTH = "--quick --lengths"


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment of the registry."""

    module: str  # module below `package`; its last part is the experiment's name
    paper: str  # figure or table of the paper that it reproduces; "" for none
    minutes: float  # rough duration on one core, of fig16 on two
    title: str
    takes: str = ""  # which of the options --quick and --lengths it accepts
    arguments: str = ""  # arguments that it is always started with
    package: str = "experiments"

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]

    def command(self, options: argparse.Namespace) -> list[str]:
        """Returns the module and its arguments for these options."""
        out = [f"{self.package}.{self.module}", *shlex.split(self.arguments)]
        if options.quick and "--quick" in self.takes:
            out.append("--quick")
        if options.lengths and "--lengths" in self.takes:
            out += ["--lengths", *(str(path.resolve()) for path in options.lengths)]
        return out


REGISTRY = (
    Experiment("paper.table1", "Table 1", 0.1, "configurations and memory of a GPU"),
    Experiment("paper.table2", "Table 2", 25, "balance and time of packers", BOTH),
    Experiment("paper.fig01", "Figure 1", 1, "computing of 8,192 GPUs, simulated", "--quick"),
    Experiment("paper.fig02", "Figure 2", 0.1, "who holds what in 4-D parallelism"),
    Experiment("paper.fig03", "Figure 3", 0.5, "how long documents are", "--lengths"),
    Experiment("paper.fig04", "Figure 4", 0.2, "attention of 8,192 GPUs, simulated", "--quick"),
    Experiment("paper.fig05", "Figure 5", 0.1, "one slow micro-batch in a pipeline"),
    Experiment("paper.fig06", "Figure 6", 0.3, "balance by packing window", "--quick"),
    Experiment("paper.fig07", "Figure 7", 0.1, "operations' time by document length"),
    Experiment("paper.fig08", "Figure 8", 0.2, "outliers wait and leave"),
    Experiment("paper.fig09", "Figure 9", 0.1, "which rank works on which tokens"),
    Experiment("paper.fig10", "Figure 10", 0.1, "attention kernel by query rows and keys"),
    Experiment("paper.fig11", "Figure 11", 0.1, "choosing a micro-batch's sharding"),
    Experiment("paper.fig12", "Figure 12", 5, "speed-up of the systems, simulated", "--quick"),
    Experiment("paper.fig13", "Figure 13", 1, "breakdown on 7B-128K, simulated", "--quick"),
    Experiment("paper.fig14", "Figure 14", 3, "speed-up by window, simulated", "--quick"),
    Experiment(
        "paper.fig15", "Figure 15", 0.1, "CP sharding, predicted", "--quick", "--device none"
    ),
    Experiment("paper.fig16", "Figure 16", 660, "loss by packing policy, measured", "--quick"),
    Experiment("paper.padding_waste", "", 0.5, "padding, packing, their costs", BOTH),
    Experiment("paper.packing_methods", "", 0.5, "rows, steps of methods", "--quick"),
    Experiment("paper.packing_training", "", 90, "the methods trained, measured", "--quick"),
    Experiment("beyond.overview", "", 0.5, "README's picture: a step of equal work"),
    Experiment("beyond.parts", "", 20, "parts of ours, schedules, tails", "--quick"),
    Experiment("beyond.system_defaults", "", 25, "defaults of system wlb", "--quick"),
    Experiment("beyond.published_runs", "", 1, "published H100 runs, simulated", "--quick"),
    Experiment("beyond.robust_packing", "", 20, "balance where prices are wrong", BOTH),
    Experiment("beyond.step_balance", "", 10, "one step, beside other frameworks", "--quick"),
    Experiment("beyond.hybrids", "", 3, "CP of models with linear layers", "--quick"),
    Experiment("beyond.models", "", 0.5, "what there is to balance, by model", "--quick"),
    Experiment("beyond.rehearsals", "", 50, "all presets rehearsed on fake GPUs", "--quick"),
    Experiment("beyond.validation", "", 20, "simulator against replays and training", "--quick"),
    Experiment("hosts", "", 12, "other loops' batches and ours", "--quick"),
)


class State:
    """The last run of each experiment, in a JSON file that is written after every run.

    A run with --quick has an entry of its own, besides the entry of the whole run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: dict[str, dict[str, Any]] = {}
        if path.exists():
            self.runs = json.loads(path.read_text("utf-8"))

    def finished(self, key: str, *, version: str, command: list[str]) -> bool:
        run = self.runs.get(key, {})
        same = run.get("commit") == version and run.get("arguments") == command
        return same and bool(run.get("finished"))

    def write(self, key: str, **run: Any) -> None:
        self.runs[key] = run
        write_json(self.path, self.runs, indent=1)


@dataclass(frozen=True, slots=True)
class Job:
    """An experiment with the command that this call runs it by."""

    experiment: Experiment
    command: list[str]

    @property
    def key(self) -> str:
        """Returns the key of the job's entry in `State`."""
        return self.experiment.name + " --quick" * ("--quick" in self.command)


def source_version() -> str:
    """Returns the commit, followed by a hash of the uncommitted changes if there are any."""
    differences = source_differences()
    digest = f"-{hashlib.sha256(differences.encode()).hexdigest()[:8]}" if differences else ""
    return commit() + digest


def choose(names: Sequence[str], registry: Sequence[Experiment]) -> list[Experiment]:
    """Returns the experiments of these names in the registry's order.

    Raises:
        ValueError: If the registry has no experiment of a name.
    """
    known = [e.name for e in registry]
    for name in names:
        if name not in ("all", *known):
            similar = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {similar[0]!r}?" if similar else ""
            raise ValueError(
                f"unknown experiment {name!r}{hint} Known: all, {', '.join(sorted(known))}"
            )
    return [e for e in registry if "all" in names or e.name in names]


def run_one(job: Job, *, state: State, version: str, root: Path) -> int:
    """Runs a job and returns its exit status.

    Ctrl-C ends the child process and is recorded in the state before it propagates.
    """
    began = time.perf_counter()
    status: int | None = None
    child = subprocess.Popen([sys.executable, "-m", *job.command], cwd=root)
    try:
        status = child.wait()
        return status
    finally:
        end(child)
        state.write(
            job.key,
            commit=version,
            arguments=job.command,
            seconds=round(time.perf_counter() - began, 1),
            finished=status == 0,
            status="interrupted" if status is None else status,
            date=datetime.datetime.now().isoformat(timespec="seconds"),
        )


def end(child: subprocess.Popen[bytes]) -> None:
    """Waits for the child, then terminates and finally kills it if it does not end.

    Ctrl-C goes to the child as well, so usually it ends without help.
    """
    for stop in (child.terminate, child.kill):
        try:
            child.wait(timeout=3)
        except subprocess.TimeoutExpired:
            stop()
    child.wait()


def run_all(
    jobs: Sequence[Job], *, state: State, version: str, root: Path, console: Console
) -> list[tuple[Job, int]]:
    """Runs the jobs and returns those that failed, with their exit status."""
    failed: list[tuple[Job, int]] = []
    for i, job in enumerate(jobs, 1):
        e = job.experiment
        about = ", ".join(filter(None, (e.paper, f"about {e.minutes:g} min")))
        console.rule(f"{i}/{len(jobs)} {job.key}: {e.title} ({about})", align="left")
        console.print(f"python -m {shlex.join(job.command)}", style="dim")
        status = run_one(job, state=state, version=version, root=root)
        console.print(f"{job.key}: {state.runs[job.key]['seconds']:.1f} s, exit status {status}")
        if status:
            failed.append((job, status))
    return failed


def announce(jobs: Sequence[Job], skipped: Sequence[Job], version: str, console: Console) -> None:
    """Prints the names of the jobs and their estimated duration."""
    timed = [job.experiment for job in jobs if "--quick" not in job.command]
    minutes = sum(e.minutes for e in timed)
    long = [f"{e.name} {e.minutes:g}" for e in timed if e.minutes >= LONG_MINUTES]
    console.print(
        f"{len(jobs)} to run, about {minutes:.0f} minutes"
        + (f" ({', '.join(long)})" if long else "")
        + (f" and {len(jobs) - len(timed)} quick ones" if len(timed) < len(jobs) else "")
    )
    if skipped:
        names = ", ".join(job.key for job in skipped)
        console.print(f"finished before at {version}: {names} (--again runs them too)")


def listing(registry: Sequence[Experiment], state: State) -> Table:
    table = Table("name", "paper", "what", "minutes", "options", "last run")
    table.columns[3].justify = "right"
    for e in registry:
        run = state.runs.get(e.name)
        last = f"{run['commit']} {'ok' if run['finished'] else 'failed'}" if run else ""
        table.add_row(e.name, e.paper, e.title, f"{e.minutes:g}", e.takes, last)
    return table


def main(
    arguments: Sequence[str] | None = None,
    *,
    registry: Sequence[Experiment] = REGISTRY,
    root: Path = ROOT,
) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.run", description=__doc__.splitlines()[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="all, or names that --list shows")
    parser.add_argument("--list", action="store_true", help="list experiments and their last runs")
    parser.add_argument(
        "--quick", action="store_true", help="pass --quick to the experiments that have it"
    )
    parser.add_argument("--again", action="store_true", help="also run what finished before")
    parser.add_argument(
        "--lengths",
        nargs="*",
        type=Path,
        default=[],
        help="files of document lengths, for the experiments that take them",
    )
    options = parser.parse_args(arguments)
    state = State(root / "runs" / "experiments" / "state.json")
    console = Console(width=120, highlight=False, markup=False)
    if options.list or not options.names:
        console.print(listing(registry, state))
        return 0
    try:
        chosen = choose(options.names, registry)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    version = source_version()
    jobs = [Job(e, e.command(options)) for e in chosen]
    skipped: list[Job] = []
    if "all" in options.names and not options.again:
        skipped = [j for j in jobs if state.finished(j.key, version=version, command=j.command)]
    jobs = [job for job in jobs if job not in skipped]
    announce(jobs, skipped, version, console)
    try:
        failed = run_all(jobs, state=state, version=version, root=root, console=console)
    except KeyboardInterrupt:
        given = sys.argv[1:] if arguments is None else arguments
        again = shlex.join(word for word in given if word != "--again")
        console.print(f"\nstopped; to resume: python -m experiments.run {again}")
        return 130
    for job, status in failed:
        console.print(f"failed: {job.key} (exit status {status}): {shlex.join(job.command)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

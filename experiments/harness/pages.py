"""Writes the results page of an experiment, `<folder>/results/README.md`, with its CSVs and PNGs.

`write_results` takes titles, texts, `Table`s and `Picture`s. All experiments keep to conventions:

- `--quick` only prints, because committed results come from whole runs.
- Paths given on the command line appear by file name only.
- Pictures come from `experiments.harness.drawing.new_figure`, which is as wide as a README.
"""

import contextlib
import csv
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich import table as rich_table
from rich.console import Console

from wlb.cost import KernelProfile
from wlb.cost.machine import program_version
from wlb.report.simulation import worth_of


def this_machine() -> str:
    """Returns "x86_64, 2 cores, Python 3.11.7", for pages of measured times."""
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


ROOT = Path(__file__).parents[2]
RESULTS_ONLY = ":(exclude,glob)experiments/**/results/**"


class How(StrEnum):
    """Origin of the numbers of a page."""

    COMPUTED = "computed"
    """The numbers are counted or calculated; there is no time in them."""
    PREDICTED = "predicted"
    """The numbers are times of single operations from a kernel profile."""
    SIMULATED = "simulated"
    """A training step is assembled from predicted times: pipeline, collectives, ranks that wait."""
    MEASURED = "measured"
    """The numbers are times of something that ran; `profile` is then words that name the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """Compares a number of the paper with ours.

    paper, ours: numbers, or words such as "over 75 %"
    """

    what: str
    paper: float | str
    ours: float | str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Describes a table of the page, which also goes to `<name>.csv`.

    rows: plain values in the order of columns; None is an empty cell
    formats: format specification by column, such as {"imbalance": ".3f", "tokens": ",d"}
    most_rows: rows shown on the page; with 0 the table goes to the CSV only
    page_columns: names on the page of the columns that stand there; empty: all by their own names
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    formats: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    most_rows: int = 60
    page_columns: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, name: str, title: str, records: Sequence[Mapping[str, Any]], **more: Any
    ) -> "Table":
        """Returns the table of these records, whose keys are the columns.

        Raises ValueError for records with different keys, or none at all.
        """
        columns = list(records[0]) if records else []
        if not columns or any(list(record) != columns for record in records):
            raise ValueError(f"{name}: rows need the same columns, got {list(map(list, records))}")
        rows = [list(record.values()) for record in records]
        return cls(name=name, title=title, columns=columns, rows=rows, **more)

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.name}: row {list(row)} has not {len(self.columns)} values")
        for what, names in (("formats", self.formats), ("page names", self.page_columns)):
            if unknown := set(names) - set(self.columns):
                raise ValueError(f"{self.name}: {what} of no column: {sorted(unknown)}")

    def shown(self) -> tuple[list[str], list[list[str]], list[bool]]:
        """Returns the page's columns, all rows as text, and which columns hold words."""
        names = self.page_columns or {column: column for column in self.columns}
        at = [self.columns.index(column) for column in names]
        specs = [self.formats.get(column, "") for column in names]
        rows = [[_text(row[i], s) for i, s in zip(at, specs, strict=True)] for row in self.rows]
        has_words = [any(isinstance(row[i], str) for row in self.rows) for i in at]
        return list(names.values()), rows, has_words

    def markdown(self) -> list[str]:
        lines = [f"## {self.title}", ""]
        columns, rows, has_words = self.shown()
        shown = rows[: self.most_rows]
        if shown:
            aligned = (":---" if words else "---:" for words in has_words)
            lines += [_row(columns), f"|{'|'.join(aligned)}|", *map(_row, shown), ""]
        what = "Unrounded" if len(shown) == len(self.rows) else f"All {len(self.rows)} rows"
        return [*lines, f"{self.note} {what}: [{self.name}.csv]({self.name}.csv).".strip(), ""]

    def rich(self) -> rich_table.Table:
        """Returns the table for the console."""
        out = rich_table.Table(title=self.title, title_justify="left")
        columns, rows, has_words = self.shown()
        for column, words in zip(columns, has_words, strict=True):
            out.add_column(column, justify="left" if words else "right")
        for row in rows[: self.most_rows]:
            out.add_row(*row)
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Describes a matplotlib Figure, written as `<name>.png`.

    caption: text below the picture, and its alternative text
    """

    name: str
    caption: str
    figure: Any


def write_results(
    folder: Path,
    *,
    title: str,
    how: How,
    profile: KernelProfile | str,
    text: str,
    seed: int | None = None,
    against: Sequence[Against] = (),
    tables: Sequence[Table] = (),
    figures: Sequence[Picture] = (),
    command: str = "",
) -> Path:
    """Writes `<folder>/results/` and returns that folder.

    The page says how its numbers came about (computed, predicted, simulated or measured), which
    kernel profile priced them and what each of its blocks is worth (published, measured, assumed),
    and gives the command, commit and seed. The paper's numbers beside ours, pictures and tables
    follow. A table goes to `<name>.csv` in full, with 6 significant digits, and to the page as its
    `formats` say, up to `most_rows` rows. Everything is written at the end, so an interrupted run
    leaves old results whole.

    profile: what priced the numbers, or words if no profile did
    text: Markdown of the page
    seed: seed of random draws, None if nothing is drawn
    command: command line of the run; if empty, that of this process
    """
    for names in ([table.name for table in tables], [picture.name for picture in figures]):
        if len(set(names)) < len(names):
            raise ValueError(f"tables and figures need names of their own, got {names}")
    results = folder / "results"
    results.mkdir(parents=True, exist_ok=True)
    seeded = "" if seed is None else f", seed {seed}"
    lines = [
        f"# {title}",
        "",
        f"`{command or command_of(folder)}` at commit {commit()}{seeded}.",
        "",
        f"**{how.capitalize()}**: {profile if isinstance(profile, str) else priced_with(profile)}",
        "",
        text.strip(),
        "",
        *_against(against),
    ]
    for picture in figures:
        picture.figure.savefig(results / f"{picture.name}.png", dpi=150)
        lines += [f"![{picture.caption}]({picture.name}.png)", "", f"*{picture.caption}*", ""]
    for table in tables:
        _write_csv(results / f"{table.name}.csv", table)
        lines += table.markdown()
    (results / "README.md").write_text("\n".join(lines).rstrip() + "\n", "utf-8")
    print(f"written to {os.path.relpath(results)}")
    return results


def read_table(
    folder: Path, name: str, *, title: str, formats: Mapping[str, str], note: str = ""
) -> Table:
    """Reads a table that `write_results` wrote, so that a page is written again from its figures.

    Numbers have the 6 significant digits of the CSV.
    """
    with (folder / "results" / f"{name}.csv").open(newline="") as file:
        columns, *rows = csv.reader(file)
    values = [[_number(cell) for cell in row] for row in rows]
    return Table(name=name, title=title, columns=columns, rows=values, formats=formats, note=note)


def commit_of(folder: Path) -> str:
    """Returns the commit whose figures are in an experiment's results page."""
    page = (folder / "results" / "README.md").read_text("utf-8")
    for said in (r"(?:is|figures|results,?) of commit ([\w-]+)", r"at commit ([\w-]+)"):
        if found := re.search(said, page):
            return found.group(1)
    raise ValueError(f"{folder.name}: the results page names no commit")


def _number(cell: str) -> int | float | str | None:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(cell)
    return cell or None


def show(*tables: Table, against: Sequence[Against] = (), width: int = 140) -> None:
    """Prints the contents of a page."""
    console = Console(width=width)
    for table in (*([_against_table(against)] if against else []), *tables):
        console.print(table.rich())


def priced_with(*profiles: KernelProfile) -> str:
    """Names the kernel profiles that priced a page, and the kind of each of their blocks."""
    return " ".join(_worth(profile) for profile in profiles)


def _worth(profile: KernelProfile) -> str:
    worth = "; ".join(f"**{kind}**: {blocks}" for kind, blocks in worth_of(profile))
    return (
        f"times from kernel profile `{profile.name}` ({profile.device}, {profile.dtype}; "
        f"{profile.provenance.kind}: {profile.provenance.source}). Its blocks are {worth}."
    )


def command_of(folder: Path, arguments: Iterable[str] | None = None) -> str:
    """Returns how this run was started.

    Absolute paths shrink to file names, so that pages name no machine.

    folder: that of the experiment, some folder below one named experiments
    arguments: command-line arguments; if None, those of sys.argv
    """
    given = sys.argv[1:] if arguments is None else arguments
    short = [re.sub(r"(^|=)/\S*/", r"\1", argument) for argument in given]
    parts = folder.resolve().parts
    begin = len(parts) - 1 - parts[::-1].index("experiments")
    module = ".".join(parts[begin:])
    return shlex.join(["python", "-m", module, *short])


def commit() -> str:
    """Returns `program_version`, without "-dirty" if only results of experiments differ.

    Otherwise the second experiment of a run would look changed because the first has written its
    page.
    """
    version = program_version()
    is_only_results = version.endswith("-dirty") and not source_differences()
    return version.removesuffix("-dirty") if is_only_results else version


def source_differences() -> str:
    """Returns how tracked files except results differ from the commit, "" outside a checkout."""
    command = ["git", "diff", "HEAD", "--", ".", RESULTS_ONLY]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def _against(against: Sequence[Against]) -> list[str]:
    return _against_table(against).markdown()[:-2] if against else []


def _against_table(against: Sequence[Against]) -> Table:
    has_notes = any(row.note for row in against)
    rows = [
        [row.what, _digits(row.paper), _digits(row.ours), *([row.note] if has_notes else [])]
        for row in against
    ]
    columns = ("what", "paper", "here", *(["note"] if has_notes else []))
    return Table(name="against", title="Beside the paper", columns=columns, rows=rows)


def _digits(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _text(value: Any, spec: str) -> str:
    if value is None:
        return ""
    # A column of numbers may hold words ("does not fit"), which have no digits to format.
    return value if isinstance(value, str) else format(value, spec)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _write_csv(path: Path, table: Table) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table.columns)
        for row in table.rows:
            writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in row])

"""Writes the results page of an experiment, `<folder>/results/README.md`, with its CSVs and PNGs.

`write_results` takes texts, `Table`s and `Picture`s. All experiments follow three conventions:

- `--quick` prints and writes nothing, because committed results come from whole runs.
- A path that was given on the command line appears by its file name only.
- Pictures are made by `experiments.harness.drawing.new_figure`, so all have the same width.
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
    """Names this machine on pages of measured times, as in "x86_64, 2 cores, Python 3.11.7"."""
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


ROOT = Path(__file__).parents[2]
RESULTS_ONLY = ":(exclude,glob)experiments/**/results/**"


class How(StrEnum):
    """How the numbers of a page were obtained."""

    COMPUTED = "computed"
    """Counts or calculations, without any times."""
    PREDICTED = "predicted"
    """Times of single operations, from a kernel profile."""
    SIMULATED = "simulated"
    """Times of whole training steps: pipeline, collectives and waiting ranks are simulated."""
    MEASURED = "measured"
    """Times of programs that ran. `write_results` then takes the device's name as `profile`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """A number of the paper beside ours."""

    what: str
    paper: float | str  # the paper's number, or words such as "over 75 %"
    ours: float | str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of the page, which is also written to `<name>.csv`."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]  # values in the order of columns; None is an empty cell
    # Format specification by column, such as {"imbalance": ".3f", "tokens": ",d"}.
    formats: Mapping[str, str] = field(default_factory=dict)
    note: str = ""  # Markdown below the table
    most_rows: int = 60  # rows shown on the page; with 0 the table goes to the CSV only
    # Columns shown on the page and their headings there. Empty: all columns, by their names.
    page_columns: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, name: str, title: str, records: Sequence[Mapping[str, Any]], **more: Any
    ) -> "Table":
        """Returns a table with a row for each record and a column for each key.

        Raises:
            ValueError: If there are no records, or their keys differ.
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
        """Returns the page's headings, all rows as text, and which columns contain words."""
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
        """Returns the table as the console shows it."""
        out = rich_table.Table(title=self.title, title_justify="left")
        columns, rows, has_words = self.shown()
        for column, words in zip(columns, has_words, strict=True):
            out.add_column(column, justify="left" if words else "right")
        for row in rows[: self.most_rows]:
            out.add_row(*row)
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture of the page, written to `<name>.png`."""

    name: str
    caption: str  # text below the picture, and its alternative text
    figure: Any  # matplotlib Figure


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

    The page starts with the command, commit and seed, how the numbers were obtained, and which
    kernel profile priced them. The text, the paper's numbers beside ours, the pictures and the
    tables follow. A CSV has all rows of a table with 6 significant digits. The page has up to
    `most_rows` rows, formatted by `formats`.

    Call it once at the end of an experiment, so that an interrupted run leaves old results whole.

    Args:
        folder: Folder of the experiment.
        title: Heading of the page.
        how: How the numbers were obtained.
        profile: Kernel profile that priced the numbers, or words if none did.
        text: Markdown between the heading and the results.
        seed: Seed of random draws. None if nothing is drawn.
        against: Numbers of the paper beside ours.
        tables: Tables with distinct names.
        figures: Pictures with distinct names.
        command: Command line that the page names. Defaults to this process's.

    Raises:
        ValueError: If two tables or two pictures have the same name.
    """
    for names in ([table.name for table in tables], [picture.name for picture in figures]):
        if len(set(names)) < len(names):
            raise ValueError(f"names of tables and of figures must be distinct, got {names}")
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
    """Reads a table from the CSV that `write_results` wrote, to write its page anew.

    Numbers have the 6 significant digits of the CSV.
    """
    with (folder / "results" / f"{name}.csv").open(newline="") as file:
        columns, *rows = csv.reader(file)
    values = [[_number(cell) for cell in row] for row in rows]
    return Table(name=name, title=title, columns=columns, rows=values, formats=formats, note=note)


def commit_of(folder: Path) -> str:
    """Returns the commit that produced the figures on an experiment's results page.

    Raises:
        ValueError: If the page names no commit.
    """
    page = (folder / "results" / "README.md").read_text("utf-8")
    # A page that was rewritten from its tables names the commit of its figures, and after
    # "at commit" the commit that rewrote it. So look for the former first.
    for pattern in (r"(?:is|figures|results,?) of commit ([\w-]+)", r"at commit ([\w-]+)"):
        if found := re.search(pattern, page):
            return found.group(1)
    raise ValueError(f"{folder.name}: the results page names no commit")


def _number(cell: str) -> int | float | str | None:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(cell)
    return cell or None


def show(*tables: Table, against: Sequence[Against] = (), width: int = 140) -> None:
    """Prints tables to the console, after the paper's numbers beside ours."""
    console = Console(width=width)
    for table in (*([_against_table(against)] if against else []), *tables):
        console.print(table.rich())


def priced_with(*profiles: KernelProfile) -> str:
    """Names kernel profiles and says which of their parts are measured, published or assumed."""
    return " ".join(_worth(profile) for profile in profiles)


def _worth(profile: KernelProfile) -> str:
    worth = "; ".join(f"**{kind}**: {blocks}" for kind, blocks in worth_of(profile))
    return (
        f"times from kernel profile `{profile.name}` ({profile.device}, {profile.dtype}; "
        f"{profile.provenance.kind}: {profile.provenance.source}). Its blocks are {worth}."
    )


def command_of(folder: Path, arguments: Iterable[str] | None = None) -> str:
    """Returns the command line that started this run, for its page.

    Absolute paths become file names, so that a page does not name folders of a machine.

    Args:
        folder: Folder of the experiment, below a folder named experiments.
        arguments: Command-line arguments. Defaults to those in sys.argv.
    """
    given = sys.argv[1:] if arguments is None else arguments
    short = [re.sub(r"(^|=)/\S*/", r"\1", argument) for argument in given]
    parts = folder.resolve().parts
    begin = len(parts) - 1 - parts[::-1].index("experiments")
    module = ".".join(parts[begin:])
    return shlex.join(["python", "-m", module, *short])


def commit() -> str:
    """Returns the commit, with "-dirty" if files other than results of experiments differ from it.

    Results do not count, because an experiment changes its results and so would make the commit of
    the next experiment look dirty.
    """
    version = program_version()
    is_only_results = version.endswith("-dirty") and not source_differences()
    return version.removesuffix("-dirty") if is_only_results else version


def source_differences() -> str:
    """Returns the diff of the working tree without results; "" if this is not a git checkout."""
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

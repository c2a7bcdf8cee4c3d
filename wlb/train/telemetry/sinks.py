"""Sinks, which write a run's records: metrics.jsonl and, if configured, TensorBoard and wandb.

A record is a dictionary, and its entry "kind" says what it is about. Every sink gets every record.
metrics.jsonl has one line per record. TensorBoard and Weights & Biases draw curves of all numbers
in records of steps and evaluations (`scalars_of`), so a new number in such a record appears in all
sinks without further code. Only rank 0 has sinks.
"""

import importlib
import importlib.util
import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from wlb.plan import Moments, UserError
from wlb.plan.read_file import read_text
from wlb.spec import RunSpec
from wlb.train.telemetry.appended import AppendedFile

CURVES = ("step", "evaluation")
"""Kinds of records whose numbers TensorBoard and wandb draw as curves."""
MOST_TABLE_BYTES = 64 * 2**20
"""Most bytes of tables of ranks and timelines that a start of a run writes to metrics.jsonl.

Later tables and timelines are left out, so that a long run does not fill the disk."""
_TABLES = ("ranks", "timeline")
# Names of the numbers for which no curve is drawn. `_SUMS` are sums from which other numbers of a
# record are computed. `_COUNTS` are counts of steps, which are the horizontal axis.
_SUMS = frozenset(f.name for f in fields(Moments))
_COUNTS = frozenset(("step", "steps_done"))


class Sink(Protocol):
    """A destination of a run's records, such as a file or TensorBoard."""

    def write(self, record: dict[str, Any]) -> None:
        """Write one record of the run, a dictionary that has its kind in the entry "kind"."""

    def close(self) -> None:
        """Release files and connections."""


def open_sinks(spec: RunSpec, folder: Path, *, steps_done: int) -> list[Sink]:
    """Open the files and services to which records are written, metrics.jsonl first.

    Args:
        spec: The run.
        folder: The run's folder.
        steps_done: Number of updates in the checkpoint that the run resumes from; 0 for a new run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl")]
    if spec.telemetry.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard", steps_done=steps_done))
    if spec.telemetry.wandb:
        sinks.append(WeightsAndBiases(spec, folder))
    return sinks


def refuse_missing(spec: RunSpec) -> None:
    """Raise UserError if TensorBoard or wandb is configured but its package is not installed."""
    for key, value, package in (
        ("telemetry.tensorboard", spec.telemetry.tensorboard, "tensorboard"),
        ("telemetry.wandb", spec.telemetry.wandb, "wandb"),
    ):
        if value and importlib.util.find_spec(package) is None:
            shown = json.dumps(value)
            raise UserError(
                f"{key} = {shown} needs the package {package}, which is not installed. "
                f"Install it with pip install 'wlb-llm[{package}]', or remove {key}, because "
                "metrics.jsonl has the same numbers anyway"
            )


def scalars_of(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a record that are drawn as curves, by their path in the record.

    A path is, for example, "measured/telemetry/imbalance". Two kinds of numbers are left out:
    counts of steps, which are the horizontal axis, and sums from which other numbers are computed.
    """
    return dict(_leaves(record, ""))


def _leaves(data: dict[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in data.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            is_sum = name in _SUMS and "/terms/" in prefix
            if not is_sum and name not in _COUNTS:
                yield f"{prefix}{name}", float(value)


class JsonLines:
    """Appends each record as a line of JSON to a file.

    If a killed process left an incomplete line at the end of the file, that line is ended first.
    """

    def __init__(self, path: Path) -> None:
        is_cut = path.exists() and not _ends_a_line(path)
        self._file = AppendedFile(path)
        self._tables_left = MOST_TABLE_BYTES
        if is_cut:
            self._file.write("\n")

    def write(self, record: dict[str, Any]) -> None:
        """Write a record as a line.

        A table or timeline of ranks is left out if it and all those written before it would exceed
        `MOST_TABLE_BYTES`.
        """
        text = json.dumps(record)
        if record["kind"] in _TABLES:
            if self._tables_left < len(text):
                return
            self._tables_left -= len(text)
        self._file.write(text + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


class TensorBoard:
    """Writes event files for TensorBoard.

    If a resumed run trains some steps a second time, TensorBoard hides the earlier values of these
    steps.
    """

    def __init__(self, folder: Path, *, steps_done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=steps_done + 1 if steps_done else None)

    def write(self, record: dict[str, Any]) -> None:
        """Draw the numbers of a record of a step or evaluation (`CURVES`) in TensorBoard."""
        if record["kind"] in CURVES:
            for name, value in scalars_of(record).items():
                self._writer.add_scalar(name, value, record["steps_done"])

    def close(self) -> None:
        """Close the files."""
        self._writer.close()


class WeightsAndBiases:
    """Logs records to a run of Weights & Biases, in the project `telemetry.wandb`.

    The id of the run in Weights & Biases is stored in the folder of the training run, so that
    resumed training continues the same run. The wandb library reads the account, and WANDB_MODE
    (online or offline), from the environment.
    """

    def __init__(self, spec: RunSpec, folder: Path) -> None:
        wandb: Any = importlib.import_module("wandb")
        id_file = folder / "wandb_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8], "utf-8")
        self._run = wandb.init(
            project=spec.telemetry.wandb,
            name=spec.run.name,
            id=read_text(id_file, remedy="remove it"),
            resume="allow",
            dir=str(folder),
            config=spec.to_dict(),
        )
        # Use "steps_done" as the horizontal axis. wandb's default axis can only increase, but a
        # resumed run may train steps a second time.
        self._run.define_metric("steps_done")
        self._run.define_metric("*", step_metric="steps_done")

    def write(self, record: dict[str, Any]) -> None:
        """Log the numbers of a record of a step or evaluation (`CURVES`) to wandb."""
        if record["kind"] in CURVES:
            self._run.log({"steps_done": record["steps_done"], **scalars_of(record)})

    def close(self) -> None:
        """End the run in Weights & Biases."""
        self._run.finish()

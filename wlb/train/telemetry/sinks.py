"""Sinks of a run's records: metrics.jsonl always, TensorBoard and Weights & Biases if configured.

A record is a line of metrics.jsonl: a dictionary with its `kind`. Every sink gets every record. The
two that draw curves take all numbers in it by their names (`scalars_of`), so a new field of a
record appears everywhere. On rank 0 only.
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
"""Kinds of records that are points of curves."""
MOST_TABLE_BYTES = 64 * 2**20
"""Limit of the tables of ranks and timelines that one start writes; later ones are left out."""
_TABLES = ("ranks", "timeline")
_SUMS = frozenset(f.name for f in fields(Moments))
_COUNTS = frozenset(("step", "steps_done"))


class Sink(Protocol):
    def write(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def open_sinks(spec: RunSpec, folder: Path, *, steps_done: int) -> list[Sink]:
    """The configured sinks, metrics.jsonl first. steps_done: executed steps of the checkpoint that
    a resumed run continues from.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl")]
    if spec.telemetry.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard", steps_done=steps_done))
    if spec.telemetry.wandb:
        sinks.append(WeightsAndBiases(spec, folder))
    return sinks


def refuse_missing(spec: RunSpec) -> None:
    """UserError with the remedy for a sink whose package is not installed."""
    for key, value, package in (
        ("telemetry.tensorboard", spec.telemetry.tensorboard, "tensorboard"),
        ("telemetry.wandb", spec.telemetry.wandb, "wandb"),
    ):
        if value and importlib.util.find_spec(package) is None:
            shown = json.dumps(value)
            raise UserError(
                f"{key} = {shown} needs {package}, which is not installed; pip install "
                f"'wlb-llm[{package}]', or leave it out (metrics.jsonl has the same numbers)"
            )


def scalars_of(record: dict[str, Any]) -> dict[str, float]:
    """Numbers of a record by path ("measured/telemetry/imbalance"), without axis and bare sums."""
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
    """A line for each record, written at once; ends a line that an earlier start left torn."""

    def __init__(self, path: Path) -> None:
        is_cut = path.exists() and not _ends_a_line(path)
        self._file = AppendedFile(path)
        self._tables_left = MOST_TABLE_BYTES
        if is_cut:
            self._file.write("\n")

    def write(self, record: dict[str, Any]) -> None:
        text = json.dumps(record)
        if record["kind"] in _TABLES:
            if self._tables_left < len(text):
                return
            self._tables_left -= len(text)
        self._file.write(text + "\n")

    def close(self) -> None:
        self._file.close()


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


class TensorBoard:
    """Event files; a resumed run hides an earlier start's values of the steps it trains again."""

    def __init__(self, folder: Path, *, steps_done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=steps_done + 1 if steps_done else None)

    def write(self, record: dict[str, Any]) -> None:
        if record["kind"] in CURVES:
            for name, value in scalars_of(record).items():
                self._writer.add_scalar(name, value, record["steps_done"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project telemetry.wandb; its id is kept in the run's folder, to resume it. The
    library itself reads WANDB_MODE (online or not) and the account.
    """

    def __init__(self, spec: RunSpec, folder: Path) -> None:
        wandb: Any = importlib.import_module("wandb")
        kept = folder / "wandb_id"
        if not kept.exists():
            kept.write_text(uuid.uuid4().hex[:8], "utf-8")
        self._run = wandb.init(
            project=spec.telemetry.wandb,
            name=spec.run.name,
            id=read_text(kept, remedy="remove it"),
            resume="allow",
            dir=str(folder),
            config=spec.to_dict(),
        )
        # wandb's own axis cannot return to steps that are trained again after a resume.
        self._run.define_metric("steps_done")
        self._run.define_metric("*", step_metric="steps_done")

    def write(self, record: dict[str, Any]) -> None:
        if record["kind"] in CURVES:
            self._run.log({"steps_done": record["steps_done"], **scalars_of(record)})

    def close(self) -> None:
        self._run.finish()

"""Reads published training runs from a CSV file with one run per line.

README.md of this folder describes the columns and units. A line with impossible values raises an
error that names the line.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

from wlb.plan import UserError

COLUMNS = (
    *("source", "model", "gpus", "seq", "mbs", "ga", "tp", "cp", "pp", "vp", "dp"),
    *("recompute", "precision", "tokens_per_s_gpu", "tflops_gpu", "peak_gib", "remark"),
)
UNKNOWN = "?"
"""Cell of a value that the source does not print."""
RECOMPUTES = ("none", "selective", "full", UNKNOWN)
PRECISIONS = ("bf16", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A training run as its source prints it."""

    line: int  # number of its line in the file
    source: str  # a key of `mapping.SOURCES`
    model: str  # the model's name in the source
    gpus: int
    seq: int  # tokens of a sequence
    mbs: int  # sequences of a micro-batch, on all CP ranks together
    ga: int  # micro-batches of a pipeline in a step
    tp: int
    cp: int
    pp: int
    vp: int | None  # virtual stages of a pipeline rank; None if they are not printed
    dp: int  # pipelines
    recompute: str  # one of RECOMPUTES
    precision: str  # precision of matrix products, one of PRECISIONS
    tokens_per_s_gpu: float | None  # measured tokens per second and GPU
    tflops_gpu: float | None  # measured TFLOP/s of a GPU; one of both throughputs is given
    peak_gib: float | None  # peak memory that torch reserved
    remark: str

    @property
    def name(self) -> str:
        """Returns a short name for tables, such as "7b, 32K x 1, 8 GPUs"."""
        degrees = "".join(
            f", {name.upper()} {degree}"
            for name, degree in (("tp", self.tp), ("cp", self.cp), ("pp", self.pp))
            if degree > 1
        )
        length = f"{self.seq / 1024:g}K"
        return f"{self.model}, {length} x {self.mbs}, {self.gpus} GPUs{degrees}"

    @property
    def is_compiled(self) -> bool:
        """Returns whether torch.compile fuses element-wise operators.

        A remark of asynchronous TP implies it, because in torch that requires torch.compile.
        """
        words = self.remark.replace("without compile", "")
        return "compile" in words or "async TP" in words


def read_runs(path: Path) -> list[PublishedRun]:
    """Reads all runs of a file.

    Raises:
        UserError: If a column is missing or a line has impossible values.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames is None or set(COLUMNS) - set(reader.fieldnames):
            missing = sorted(set(COLUMNS) - set(reader.fieldnames or ()))
            raise UserError(f"{path.name}: line 1 lacks the columns {', '.join(missing)}")
        return [
            _run(row, f"{path.name}: line {reader.line_num}", reader.line_num) for row in reader
        ]


def _run(row: dict[str, str | None], where: str, line: int) -> PublishedRun:
    cells = {name: (row[name] or "").strip() for name in COLUMNS}
    counts = {
        name: _count(cells[name], name, where)
        for name in ("gpus", "seq", "mbs", "ga", "tp", "cp", "pp", "dp")
    }
    vp = None if cells["vp"] == UNKNOWN else _count(cells["vp"], "vp", where)
    degrees = [counts[name] for name in ("tp", "cp", "pp", "dp")]
    tp, cp, pp, dp = degrees
    if tp * cp * pp * dp != counts["gpus"]:
        raise UserError(
            f"{where}: tp {tp} x cp {cp} x pp {pp} x dp {dp} = {tp * cp * pp * dp} ranks, but the "
            f"line says {counts['gpus']} GPUs; correct one of them"
        )
    for name, known in (("recompute", RECOMPUTES), ("precision", PRECISIONS)):
        if cells[name] not in known:
            raise UserError(f"{where}: {name} {cells[name]!r} is none of {', '.join(known)}")
    rates = {
        name: _number(cells[name], name, where)
        for name in ("tokens_per_s_gpu", "tflops_gpu", "peak_gib")
    }
    if rates["tokens_per_s_gpu"] is None and rates["tflops_gpu"] is None:
        raise UserError(
            f"{where}: both tokens_per_s_gpu and tflops_gpu are empty; a run needs one of them"
        )
    texts = {name: cells[name] for name in ("source", "model", "recompute", "precision", "remark")}
    return PublishedRun(line=line, vp=vp, **counts, **rates, **texts)


def _count(text: str, name: str, where: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{where}: {name} {text!r} must be a whole number of at least 1")
    return int(text)


def _number(text: str, name: str, where: str) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UserError(f"{where}: {name} {text!r} must be a number above 0, or empty")
    return value

"""Declare, set, check and list configuration keys.

A section is a frozen dataclass whose fields are made by `key(default, "what it does", unit=...)`;
`RunSpec` nests sections. `apply` sets keys from nested values and refuses unknown names and wrong
types with the value and the nearest known key.
"""

import difflib
import math
import types
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from wlb.plan import UserError, check_at_least, check_between
from wlb.plan.plain import plain

T = TypeVar("T")

RENAMED = {"data.num_micro_batches": "data.num_windows", "data.token_quantum": "data.row_multiple"}
"""Old names of keys, which still work with a RenamedKeyWarning."""


@dataclass(frozen=True, slots=True)
class RemovedKey:
    """A key that there was."""

    why: str  # completes "was removed, because", and says what to do instead if there is anything
    value: Any = None  # what wlb does as if it were set to; None = no value of it matters any more


_LEARNED = RemovedKey(
    "runs no longer learn prices while they train, and packing.price_range covers wrong ones"
)


def _constant(value: Any, name: str, file: str) -> RemovedKey:
    """A key that became the constant `name` of `file`, because all runs had its default."""
    return RemovedKey(f"all runs use {plain(value)} ({name} in wlb/{file})", value)


_TURNS = RemovedKey(
    "model.rope_scaling.turns has both bounds: [low_freq_factor, high_freq_factor] of llama3, "
    "[beta_slow, beta_fast] of yarn"
)


REMOVED: dict[str, RemovedKey] = {
    "checkpoint.asynchronous": RemovedKey(
        "checkpoints are always written in the background, because a copy in host memory is made "
        "either way",
        True,
    ),
    "checkpoint.fallback": RemovedKey(
        "--resume auto always passes over a damaged checkpoint, and says so; --resume alone "
        "refuses it",
        True,
    ),
    "checkpoint.interval_minutes": RemovedKey(
        "checkpoint.interval in steps is enough; a step's time is in the run's summary", 0.0
    ),
    "checkpoint.keep_every": RemovedKey(
        "the newest checkpoint.keep are kept; copy the folder of one that is to stay for good", 0
    ),
    "checkpoint.max_failed": _constant(3, "MOST_FAILED", "train/checkpoint/saves.py"),
    "cluster.allocator_gaps": _constant(0.06, "ALLOCATOR_GAPS", "memory/budget.py"),
    "cluster.communicator_gib": _constant(0.5625, "COMMUNICATOR_GIB", "memory/budget.py"),
    "cluster.context_gib": _constant(1.0, "CONTEXT_GIB", "memory/budget.py"),
    "cost.online": _LEARNED,
    "cost.online_interval": _LEARNED,
    "cost.online_max_change": _LEARNED,
    "cost.online_threshold": _LEARNED,
    "cp.gradient_dtype": RemovedKey(
        "gradients of keys and values are always added over CP ranks in float32, which rounds once "
        "however many ranks there are",
        "float32",
    ),
    "cp.keep_gathered_kv": RemovedKey(
        "backward always gathers keys and values again, while the MLP's backward runs, and "
        "training.recompute = full keeps what its second forward pass gathered",
        False,
    ),
    "cp.overlap": RemovedKey("cp.overlap_stages = 1 does it"),
    "cp.stages": RemovedKey("cp.overlap_stages says both that and how often"),
    "data.cache_dir": RemovedKey(
        "stores of data.corpus are in run.output_dir/stores; `wlb prepare` puts one anywhere",
        "runs/stores",
    ),
    "data.long_documents": RemovedKey(
        "documents longer than the context window are always split; PackerOptions of wlb.packing "
        "can refuse them",
        "split",
    ),
    "data.prefetch": _constant(1, "STEPS_LOADED", "train/prefetch.py"),
    "data.verify": RemovedKey(
        "every run reads its stores whole beside its first steps; `wlb prepare --verify PREFIX` "
        "reads one before",
        "background",
    ),
    "fsdp.prefetch": _constant(1, "LAYERS_AHEAD", "spec/machine.py"),
    "model.experts.bias_rate": _constant(1e-3, "BIAS_RATE", "model/expert_layer.py"),
    "model.rope_scaling.beta_fast": _TURNS,
    "model.rope_scaling.beta_slow": _TURNS,
    "model.rope_scaling.high_freq_factor": _TURNS,
    "model.rope_scaling.low_freq_factor": _TURNS,
    "packing.bin_method": RemovedKey(
        "packing.method, which records hold beside it, chooses how bins are filled; "
        "CapacityPacker(method=...) of wlb.packing takes any way",
        "best_fit_decreasing",
    ),
    "packing.by_length": RemovedKey("packing.method = group_by_length_padding does it", False),
    "packing.grouping": RemovedKey(
        "micro-batches of like load always share a step, which balances better", "by_load"
    ),
    "packing.literal": RemovedKey(
        "no run trained by it; VarLenPacker(literal=True) of wlb.packing has it", False
    ),
    "packing.open_bins": RemovedKey(
        "all runs use 32; CapacityPacker(open_bins=...) of wlb.packing has it", 32
    ),
    "planner.ahead": _constant(3, "STEPS_AHEAD", "train/feed.py"),
    "run.memory_gib": RemovedKey("cluster.memory_gib is for runs and estimates"),
    "run.over_memory": RemovedKey(
        "a run whose memory estimate exceeds the device is always refused; a larger "
        "cluster.memory_gib starts it anyway",
        "refuse",
    ),
    "sharding.stages": RemovedKey(
        "one number of stages for all micro-batches is at most 2.5% of a CP layer's time slower "
        "than one chosen for each; cp.overlap_stages sets it",
        "fixed",
    ),
    "telemetry.drift_threshold": _constant(0.15, "DRIFT_THRESHOLD", "train/telemetry/calibrate.py"),
    "telemetry.enabled": RemovedKey("every run times its micro-batches", True),
    "telemetry.interval": RemovedKey("every step is recorded", 1),
    "telemetry.peak_tflops": RemovedKey("cluster.peak_tflops is for runs and estimates", 0.0),
    "telemetry.ranks_interval": _constant(10, "RANKS_INTERVAL", "plan/ranks.py"),
    "telemetry.snapshot_oom": RemovedKey(
        "a run with telemetry.snapshot_steps also writes a snapshot where an allocation fails",
        False,
    ),
    "telemetry.straggler_records": _constant(3, "STRAGGLER_TABLES", "plan/ranks.py"),
    "telemetry.straggler_threshold": _constant(0.15, "STRAGGLER_THRESHOLD", "plan/ranks.py"),
    "telemetry.timeline_interval": _constant(100, "TIMELINE_INTERVAL", "plan/ranks.py"),
    "telemetry.trace_ranks": RemovedKey("rank 0 alone is traced", [0]),
    "tp.overlap": RemovedKey(
        "torch's fused products of symmetric memory were never run on GPUs; TP's collectives "
        "overlap with weight gradients in backward without them",
        False,
    ),
    "training.decay": RemovedKey("all weights except norms and biases decay", "matrices"),
    "training.decay_shape": RemovedKey("the decay of schedule = wsd is linear", "linear"),
    "training.gc_interval": _constant(50, "GARBAGE_INTERVAL", "train/warm_up.py"),
    "training.heartbeat_s": RemovedKey(
        "ranks no longer watch each other: a rank that stops or hangs ends the run after "
        "training.timeout_s"
    ),
    "training.skip_spikes": RemovedKey(
        "clipping alone bounds an update (training.clip_norm); no run skipped steps for their norm",
        0.0,
    ),
    "training.max_nonfinite": _constant(10, "MOST_SKIPPED", "train/faults/nonfinite.py"),
}
"""Keys that there were. They are refused where a user sets them. Where wlb wrote them they are left
out, with a RemovedKeyWarning if another value than the one that is left was written."""


@dataclass(frozen=True, slots=True)
class RemovedValue:
    """A value that a key could have."""

    why: str  # completes "was removed, because"
    instead: str  # the value of the key that comes closest


REMOVED_VALUES = {
    ("sharding.exchange", "relayed"): RemovedValue(
        "rows of other nodes no longer come by way of one rank of the own node", "needed"
    )
}
"""Values that keys could have. They are refused where a user gives them. Where wlb wrote them they
are read as the closest one, with a RemovedKeyWarning."""


class RenamedKeyWarning(FutureWarning):
    """A user's settings hold an old name of a key; the command line prints it as one line."""


class RemovedKeyWarning(FutureWarning):
    """A record of a run holds a key that was removed, with a value that no longer has an effect,
    or a value that was removed; the command line prints it as one line.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The numbers that a key takes; a list of numbers has them for each entry."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    @property
    def are_given(self) -> bool:
        """Whether there is a lower and an upper bound."""
        low, high = (self.at_least, self.above), (self.at_most, self.below)
        return low != (None, None) and high != (None, None)

    def check(self, name: str, value: float, unit: str = "") -> None:
        """UserError for a number that is not finite or out of bounds."""
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name} = {value} must be a finite number")
        if self.at_least is not None and self.below is not None:
            check_between(name, value, self.at_least, self.below)
        if self.at_least == 0 and self.at_most == 1:
            check_between(name, value, 0, 1, closed=True)
        if self.at_least is not None:
            check_at_least(name, value, self.at_least)
        if self.above is not None and value <= self.above:
            raise UserError(f"{name} = {value} must be above {self.above}")
        if self.at_most is not None and value > self.at_most:
            unit = f" {unit}" if unit else ""
            raise UserError(f"{name} = {value} must be at most {self.at_most}{unit}; lower it")


_LARGEST = 1e300
MOST_CHARACTERS = 4096
"""Most characters of a key that takes text."""
MOST_ENTRIES = 100_000
"""Most entries of a key that takes a list."""


def key(default: Any, doc: str, *, unit: str = "", **bounds: float) -> Any:
    """A configuration field with its help text and unit.

    bounds: keywords of `Bounds`, a lower and an upper one for every key that takes numbers.
    """
    limits = Bounds(**bounds)
    return field(default=default, metadata={"doc": doc, "unit": unit, "bounds": limits})


def check_declared(section: Any, *, entries: bool = False, prefix: str = "") -> None:
    """UserError for the first number below `section` that is out of the bounds of its declaration.

    entries: check entries of lists instead, for which `check` has more specific messages.
    """
    for f in fields(section):
        value, name = getattr(section, f.name), f"{prefix}{f.name}"
        if is_dataclass(value):
            check_declared(value, entries=entries, prefix=f"{name}.")
            continue
        limits, unit = cast(Bounds, f.metadata["bounds"]), cast(str, f.metadata["unit"])
        if isinstance(value, tuple):
            listed = cast("tuple[Any, ...]", value)
            if len(listed) > MOST_ENTRIES:
                raise UserError(
                    f"{name} has {len(listed)} entries, must have at most {MOST_ENTRIES}; leave "
                    f"some out"
                )
            if entries and limits.are_given:
                for i, entry in enumerate(listed):
                    limits.check(f"{name}[{i}]", entry, unit)
        elif limits.are_given and not entries:
            limits.check(name, value, unit)


@dataclass(frozen=True, slots=True)
class KeyHelp:
    """One key of `wlb train --help` and `--help-all`."""

    name: str
    type: str
    default: str
    unit: str
    doc: str


def list_keys(section: type[Any], prefix: str = "") -> list[KeyHelp]:
    """List every key below `section` by dotted name, in declaration order."""
    hints = get_type_hints(section)
    out: list[KeyHelp] = []
    for f in fields(section):
        name = f"{prefix}{f.name}"
        if is_dataclass(hints[f.name]):
            out += list_keys(hints[f.name], f"{name}.")
        else:
            unit, doc = f.metadata["unit"], f.metadata["doc"]
            out.append(
                KeyHelp(name, _type_name(hints[f.name]), _show(f.default), unit=unit, doc=doc)
            )
    return out


def apply(
    spec: T,
    values: dict[str, Any],
    *,
    source: str,
    prefix: str = "",
    is_stored: bool = False,
    whole: type[Any] | None = None,
) -> T:
    """Return `spec` with nested `values` set; UserError naming `source`, the key and the remedy.

    is_stored: wlb wrote the values (checkpoint, metrics.jsonl), so old names of keys are no reason
    for a warning, and removed keys none for a refusal (`REMOVED`). whole: type of the outermost
    section, in which a misplaced key is looked for.
    """
    section = cast("type[Any]", type(spec))
    whole = whole or section
    values = _carried_over(values, prefix, is_stored=is_stored)
    hints = get_type_hints(section)
    changes: dict[str, Any] = {}
    for name, value in values.items():
        dotted = f"{prefix}{name}"
        if dotted in RENAMED:
            new = RENAMED[dotted]
            if not is_stored:
                warnings.warn(f"{source}: {dotted} is now {new}", RenamedKeyWarning, stacklevel=2)
            dotted, name = new, new.removeprefix(prefix)
            if name in values:
                raise UserError(f"{source}: {new} is given twice; remove its old name")
        if _is_removed(dotted, value):
            _meet_removed(dotted, value, source=source, is_stored=is_stored)
            continue
        if name not in hints:
            raise UserError(
                f"{source}: unknown key {dotted!r}{_nearest(dotted, hints, prefix, whole)}"
            )
        kind = hints[name]
        if is_dataclass(kind):
            if not isinstance(value, dict):
                raise UserError(f"{source}: {dotted} is a section, got {value!r}")
            nested = cast("dict[str, Any]", value)
            changes[name] = apply(
                getattr(spec, name),
                nested,
                source=source,
                prefix=f"{dotted}.",
                is_stored=is_stored,
                whole=whole,
            )
        else:
            if isinstance(value, str) and (dotted, value) in REMOVED_VALUES:
                value = _meet_removed_value(dotted, value, source=source, is_stored=is_stored)
            changes[name] = _convert(value, kind, f"{source}: {dotted}")
    return cast(T, replace(cast(Any, spec), **changes))


_LEFT_SECTIONS = ("tp",)
"""Sections whose keys were all removed."""


def _is_removed(dotted: str, value: Any) -> bool:
    """Whether this is a removed key, or a section with nothing but removed keys."""
    if dotted in _LEFT_SECTIONS and isinstance(value, dict):
        return all(f"{dotted}.{name}" in REMOVED for name in cast("dict[str, Any]", value))
    return dotted in REMOVED


def _carried_over(values: dict[str, Any], prefix: str, *, is_stored: bool) -> dict[str, Any]:
    """Values that wlb wrote (is_stored), with merged keys of `REMOVED` as those that have their
    meaning.

    A section that holds an old key was written before they were merged, so that the new key is not
    in it or has its default.
    """
    if not is_stored:
        return values
    out = dict(values)
    if not prefix:
        for section, old, new in (
            ("run", "memory_gib", "memory_gib"),
            ("telemetry", "peak_tflops", "peak_tflops"),
        ):
            held = cast("dict[str, Any]", out.get(section, {}))
            if old in held:
                cluster = cast("dict[str, Any]", out.get("cluster", {}))
                out["cluster"] = {**cluster, new: held[old]}
                out[section] = {name: value for name, value in held.items() if name != old}
    if prefix == "packing." and out.get("method"):
        # The method of the record decided these keys, as it does without them.
        out.pop("bin_method", None)
        out.pop("by_length", None)
    if prefix == "cp." and "overlap" in out:
        stages = out.pop("stages", 1)
        out["overlap_stages"] = stages if out.pop("overlap") else 0
    if prefix == "model.rope_scaling.":
        pairs = {"llama3": ("low_freq_factor", "high_freq_factor")}
        pairs["yarn"] = ("beta_slow", "beta_fast")
        names = pairs.get(str(out.get("kind")))
        if names and all(name in out for name in names):
            out["turns"] = [float(out[name]) for name in names]
        for name in (name for pair in pairs.values() for name in pair):
            out.pop(name, None)
    return out


def _meet_removed(dotted: str, value: Any, *, source: str, is_stored: bool) -> None:
    """Refuse a removed key of a user; warn of one that wlb wrote, if its value was another one."""
    if dotted not in REMOVED:
        for name, each in value.items():
            _meet_removed(f"{dotted}.{name}", each, source=source, is_stored=is_stored)
        return
    removed = REMOVED[dotted]
    if not is_stored:
        raise UserError(f"{source}: {dotted} was removed, because {removed.why}; remove the key")
    if removed.value is None or value == removed.value:
        return
    warnings.warn(
        f"{source}: {dotted} = {value!r} has no effect any more, because {removed.why}",
        RemovedKeyWarning,
        stacklevel=3,
    )


def _meet_removed_value(dotted: str, value: str, *, source: str, is_stored: bool) -> str:
    """The value that a removed one that wlb wrote is read as, with a warning; a user's is
    refused.
    """
    removed = REMOVED_VALUES[dotted, value]
    if not is_stored:
        raise UserError(
            f"{source}: {dotted} = {value!r} was removed, because {removed.why}; give "
            f"{removed.instead!r}"
        )
    warnings.warn(
        f"{source}: {dotted} = {value!r} is read as {removed.instead!r}, because {removed.why}",
        RemovedKeyWarning,
        stacklevel=3,
    )
    return removed.instead


def nest(dotted: str, value: Any) -> dict[str, Any]:
    """Return `{"a": {"b": value}}` for "a.b"."""
    out = value
    for part in reversed(dotted.split(".")):
        out = {part: out}
    return cast("dict[str, Any]", out)


def to_dict(spec: Any) -> dict[str, Any]:
    """Return nested plain values (TOML and JSON types)."""
    return asdict(spec, dict_factory=lambda pairs: {name: plain(value) for name, value in pairs})


def _convert(value: Any, kind: Any, where: str) -> Any:
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise UserError(f"{where} must be a list, got {value!r}")
        inner = get_args(kind)[0]
        items = list(cast("list[Any]", value))
        return tuple(_convert(v, inner, f"{where}[{i}]") for i, v in enumerate(items))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        try:
            return kind(value)
        except ValueError:
            choices = ", ".join(repr(str(c)) for c in kind)
            raise UserError(f"{where} = {value!r}: choose one of {choices}") from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > _LARGEST:
            raise UserError(f"{where} = {value} must be at most {_LARGEST:g}; lower it")
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UserError(f"{where} must be {_type_name(kind)}, got {value!r}")
    if isinstance(value, str):
        _check_text(value, where)
    return value


def _check_text(value: str, where: str) -> None:
    """UserError for text that can be no path: paths end at a zero, and files hold UTF-8."""
    if "\0" in value or len(value) > MOST_CHARACTERS:
        raise UserError(
            f"{where} = {value!r} must be text of at most {MOST_CHARACTERS} characters without "
            f"zeros; shorten or correct it"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where} = {value!r} must be UTF-8; rename what it names") from None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" with the known name that is most like `name`, else ""."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _nearest(dotted: str, hints: dict[str, Any], prefix: str, whole: type[Any]) -> str:
    """The known key that was probably meant: of this section, or of the same name in another."""
    here = [prefix + name for name in hints]
    name = dotted.removeprefix(prefix)
    keys = [key.name for key in list_keys(whole)]
    elsewhere = [key for key in keys if key.rsplit(".", 1)[-1] == name]
    if elsewhere:
        return f"; did you mean {' or '.join(map(repr, elsewhere))}?"
    close = difflib.get_close_matches(name, hints, n=1)
    if close:
        return f"; did you mean {prefix + close[0]!r}?"
    anywhere = "" if prefix else did_you_mean(dotted, keys)
    return anywhere or f"; known here: {', '.join(here)}"


def _type_name(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"list of {_type_name(get_args(kind)[0])}"
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return "|".join(str(c) for c in kind)
    if isinstance(kind, types.UnionType):
        return str(kind)
    return cast(str, kind.__name__)


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(cast("tuple[Any, ...]", value)))
    return repr(str(value)) if isinstance(value, str) else str(value)

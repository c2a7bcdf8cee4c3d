"""Declare, set, check and list configuration keys.

A section is a frozen dataclass whose fields are declared with `key(default, "what it does", ...)`,
and `RunSpec` nests the sections. `apply` sets keys from nested values. It refuses unknown names and
wrong types with an error that names the value and the closest known key.

Stored specs, which wlb itself wrote into checkpoints and records, must stay readable. `RENAMED`,
`REMOVED` and `REMOVED_VALUES` say how to read keys and values that have changed since.
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
"""Old name -> new name of a key. Old names still work, with a RenamedKeyWarning."""


@dataclass(frozen=True, slots=True)
class RemovedKey:
    """A key that wlb had once."""

    why: str  # completes "was removed, because", with what to do instead if there is anything
    value: Any = None  # value that wlb now always behaves by; None = no value has an effect


_LEARNED = RemovedKey(
    "runs no longer learn prices while they train, and packing.price_range covers wrong ones"
)


def _constant(value: Any, name: str, file: str) -> RemovedKey:
    """Return the entry of a key that became the constant `name` in wlb/`file`."""
    return RemovedKey(f"all runs use {plain(value)} ({name} in wlb/{file})", value)


_TURNS = RemovedKey(
    "model.rope_scaling.turns replaces both: [low_freq_factor, high_freq_factor] of llama3, "
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
        "the newest checkpoint.keep checkpoints are kept; copy the folder of one that should stay",
        0,
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
        "backward always gathers keys and values a second time, hidden behind the MLP's backward, "
        "and with training.recompute = full it keeps those that the recomputed forward gathered",
        False,
    ),
    "cp.overlap": RemovedKey("cp.overlap_stages = 1 does the same"),
    "cp.stages": RemovedKey("cp.overlap_stages says whether to overlap and in how many stages"),
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
        "every run checks its whole stores in the background of its first steps; `wlb prepare "
        "--verify PREFIX` checks one before",
        "background",
    ),
    "fsdp.prefetch": _constant(1, "LAYERS_AHEAD", "spec/machine.py"),
    "model.experts.bias_rate": _constant(1e-3, "BIAS_RATE", "model/expert_layer.py"),
    "model.rope_scaling.beta_fast": _TURNS,
    "model.rope_scaling.beta_slow": _TURNS,
    "model.rope_scaling.high_freq_factor": _TURNS,
    "model.rope_scaling.low_freq_factor": _TURNS,
    "packing.bin_method": RemovedKey(
        "packing.method chooses how bins are filled; CapacityPacker(method=...) of wlb.packing "
        "takes any of the methods",
        "best_fit_decreasing",
    ),
    "packing.by_length": RemovedKey(
        "packing.method = group_by_length_padding does the same", False
    ),
    "packing.grouping": RemovedKey(
        "micro-batches of similar load always share a step, which balances better", "by_load"
    ),
    "packing.literal": RemovedKey(
        "no run used it; VarLenPacker(literal=True) of wlb.packing has it", False
    ),
    "packing.open_bins": RemovedKey(
        "all runs use 32; CapacityPacker(open_bins=...) of wlb.packing has it", 32
    ),
    "planner.ahead": _constant(3, "STEPS_AHEAD", "train/feed.py"),
    "run.memory_gib": RemovedKey("cluster.memory_gib now serves both runs and estimates"),
    "run.over_memory": RemovedKey(
        "a run whose memory estimate exceeds the device is always refused; a larger "
        "cluster.memory_gib starts it anyway",
        "refuse",
    ),
    "sharding.stages": RemovedKey(
        "choosing the number of stages for each micro-batch saved at most 2.5% of a CP layer's "
        "time; cp.overlap_stages sets one number for all",
        "fixed",
    ),
    "telemetry.drift_threshold": _constant(0.15, "DRIFT_THRESHOLD", "train/telemetry/calibrate.py"),
    "telemetry.enabled": RemovedKey("every run times its micro-batches", True),
    "telemetry.interval": RemovedKey("every step is recorded", 1),
    "telemetry.peak_tflops": RemovedKey(
        "cluster.peak_tflops now serves both runs and estimates", 0.0
    ),
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
        "torch's fused products over symmetric memory were never run on GPUs; TP's collectives "
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
"""Removed keys by dotted name.

A user who sets one gets an error. In stored specs the key is ignored, with a RemovedKeyWarning if
its value differs from the value that wlb now always behaves by."""


@dataclass(frozen=True, slots=True)
class RemovedValue:
    """A value that a key could have once."""

    why: str  # completes "was removed, because"
    instead: str  # the remaining value that comes closest


REMOVED_VALUES = {
    ("sharding.exchange", "relayed"): RemovedValue(
        "rows of other nodes are no longer relayed by one rank of the receiving node", "needed"
    )
}
"""Removed values by (dotted name, value).

A user who sets one gets an error. In stored specs it is read as `RemovedValue.instead`, with a
RemovedKeyWarning."""


class RenamedKeyWarning(FutureWarning):
    """Warning: a user's settings use an old name of a key. The CLI prints it as one line."""


class RemovedKeyWarning(FutureWarning):
    """Warning: a stored spec has a removed key or value that no longer has an effect.

    The command line prints it as one line.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of a number that a key takes. A key with a list applies them to each entry."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    @property
    def are_given(self) -> bool:
        """Whether there are both a lower and an upper bound."""
        low, high = (self.at_least, self.above), (self.at_most, self.below)
        return low != (None, None) and high != (None, None)

    def check(self, name: str, value: float, unit: str = "") -> None:
        """Raise UserError if `value` is not finite or out of bounds."""
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
"""Longest text that a key takes, in characters."""
MOST_ENTRIES = 100_000
"""Longest list that a key takes."""


def key(default: Any, doc: str, *, unit: str = "", **bounds: float) -> Any:
    """Return a dataclass field that declares a configuration key.

    Args:
        default: Value where the configuration does not set the key.
        doc: Help text: lower case, without a full stop.
        unit: Unit that help shows behind the value.
        **bounds: Keywords of `Bounds`. A key that takes numbers needs a lower and an upper bound.
    """
    limits = Bounds(**bounds)
    return field(default=default, metadata={"doc": doc, "unit": unit, "bounds": limits})


def check_declared(section: Any, *, entries: bool = False, prefix: str = "") -> None:
    """Raise UserError for the first value in `section` that is outside its declared bounds.

    Args:
        section: A section or a whole RunSpec, with nested sections.
        entries: Check the entries of lists instead of plain numbers. `check` does so last, because
            other checks have more specific messages for lists.
        prefix: Dotted name of `section` with a final dot, for messages.
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
    """A key as `wlb train --help` and `--help-all` print it."""

    name: str  # dotted, as in packing.s_max
    type: str  # int, list of float, or the choices of an enumeration: "a|b"
    default: str
    unit: str  # "" = no unit
    doc: str


def list_keys(section: type[Any], prefix: str = "") -> list[KeyHelp]:
    """List all keys of `section` and its nested sections, in order of declaration."""
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
    """Return `spec` with nested `values` set.

    Args:
        spec: A section or a whole RunSpec.
        values: Nested plain values, as parsed from TOML or JSON.
        source: File or option that the values come from, for messages.
        prefix: Dotted name of `spec` with a final dot; "" for a whole RunSpec.
        is_stored: Whether wlb wrote the values (in a checkpoint or metrics.jsonl). Then old names
            give no warning, and removed keys and values no error.
        whole: Type of the outermost section, in which a misplaced key is looked up for the error
            message. Defaults to the type of `spec`.

    Raises:
        UserError: If a key is unknown or removed, or a value has a wrong type.
    """
    section = cast("type[Any]", type(spec))
    whole = whole or section
    values = _with_merged_keys(values, prefix) if is_stored else values
    hints = get_type_hints(section)
    changes: dict[str, Any] = {}
    for name, value in values.items():
        dotted = f"{prefix}{name}"
        # An old name: continue with the new one.
        if dotted in RENAMED:
            new = RENAMED[dotted]
            if not is_stored:
                warnings.warn(f"{source}: {dotted} is now {new}", RenamedKeyWarning, stacklevel=2)
            dotted, name = new, new.removeprefix(prefix)
            if name in values:
                raise UserError(f"{source}: {new} is given twice; remove its old name")
        if _is_removed(dotted, value):
            _report_removed(dotted, value, source=source, is_stored=is_stored)
            continue
        if name not in hints:
            raise UserError(
                f"{source}: unknown key {dotted!r}{_nearest(dotted, hints, prefix, whole)}"
            )
        kind = hints[name]
        # A nested section is set by its own keys, a key by its converted value.
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
                value = _replace_removed(dotted, value, source=source, is_stored=is_stored)
            changes[name] = _convert(value, kind, f"{source}: {dotted}")
    return cast(T, replace(cast(Any, spec), **changes))


_REMOVED_SECTIONS = ("tp",)
"""Sections of which all keys were removed."""


def _is_removed(dotted: str, value: Any) -> bool:
    """Return whether `dotted` is a removed key, or a section with removed keys only."""
    if dotted in _REMOVED_SECTIONS and isinstance(value, dict):
        return all(f"{dotted}.{name}" in REMOVED for name in cast("dict[str, Any]", value))
    return dotted in REMOVED


def _with_merged_keys(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return stored values with keys that were merged into others replaced by those others.

    A section with an old key was written before the merge, so the new key is missing from it or has
    its default, and may be overwritten.
    """
    out = dict(values)
    if not prefix:
        for section, old, new in (
            ("run", "memory_gib", "memory_gib"),
            ("telemetry", "peak_tflops", "peak_tflops"),
        ):
            stored = cast("dict[str, Any]", out.get(section, {}))
            if old in stored:
                cluster = cast("dict[str, Any]", out.get("cluster", {}))
                out["cluster"] = {**cluster, new: stored[old]}
                out[section] = {name: value for name, value in stored.items() if name != old}
    if prefix == "packing." and out.get("method"):
        # The method already implied the values of these keys, so they carry no information.
        out.pop("bin_method", None)
        out.pop("by_length", None)
    # cp.overlap (whether) and cp.stages (how often) became cp.overlap_stages.
    if prefix == "cp." and "overlap" in out:
        stages = out.pop("stages", 1)
        out["overlap_stages"] = stages if out.pop("overlap") else 0
    # Two keys of each kind of scaling became model.rope_scaling.turns.
    if prefix == "model.rope_scaling.":
        pairs = {"llama3": ("low_freq_factor", "high_freq_factor")}
        pairs["yarn"] = ("beta_slow", "beta_fast")
        names = pairs.get(str(out.get("kind")))
        if names and all(name in out for name in names):
            out["turns"] = [float(out[name]) for name in names]
        for name in (name for pair in pairs.values() for name in pair):
            out.pop(name, None)
    return out


def _report_removed(dotted: str, value: Any, *, source: str, is_stored: bool) -> None:
    """Raise UserError for a removed key, or warn if a stored spec has it with another value."""
    if dotted not in REMOVED:
        # A section of which all keys were removed: report each key.
        for name, each in value.items():
            _report_removed(f"{dotted}.{name}", each, source=source, is_stored=is_stored)
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


def _replace_removed(dotted: str, value: str, *, source: str, is_stored: bool) -> str:
    """Return the value that replaces a removed one in a stored spec, with a warning.

    Raises:
        UserError: If the value is not from a stored spec.
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
    # TOML's 1 is an integer, but a key of type float takes it.
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
    """Raise UserError for text that cannot be a path or be stored as UTF-8."""
    if "\0" in value or len(value) > MOST_CHARACTERS:
        raise UserError(
            f"{where} = {value!r} must be text of at most {MOST_CHARACTERS} characters without "
            f"NUL bytes; shorten or correct it"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{where} = {value!r} cannot be encoded as UTF-8; rename the file that it names"
        ) from None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" with the known name closest to `name`, or "" if none is."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _nearest(dotted: str, hints: dict[str, Any], prefix: str, whole: type[Any]) -> str:
    """Return a hint for an unknown key: a key of this name elsewhere, or a similar one here."""
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

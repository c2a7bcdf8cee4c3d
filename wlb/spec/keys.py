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
    """Entry of `REMOVED`: why a key was removed, and the fixed value that runs now use."""

    why: str  # the reason, then what to do instead; messages add it after "was removed, because"
    value: Any = None  # fixed value that runs now use; None = no fixed value takes the key's place


_LEARNED = RemovedKey(
    "runs no longer correct predicted times while they train; with packing.price_range, "
    "micro-batches stay balanced if attention is slower or faster than predicted"
)


def _constant(value: Any, name: str, file: str) -> RemovedKey:
    """Return the entry of `REMOVED` for a key whose value became a constant in the code.

    Args:
        value: Value of the constant.
        name: Name of the constant.
        file: File that defines the constant, relative to wlb/.
    """
    return RemovedKey(f"all runs use {plain(value)} ({name} in wlb/{file})", value)


_TURNS = RemovedKey(
    "model.rope_scaling.turns replaces it; set turns = [low_freq_factor, high_freq_factor] for "
    "kind = llama3, or turns = [beta_slow, beta_fast] for kind = yarn"
)


REMOVED: dict[str, RemovedKey] = {
    "checkpoint.asynchronous": RemovedKey(
        "checkpoints are always written in the background, from a copy in host memory", True
    ),
    "checkpoint.fallback": RemovedKey(
        "--resume auto always skips a damaged checkpoint and prints a message, and --resume alone "
        "always refuses a damaged checkpoint",
        True,
    ),
    "checkpoint.interval_minutes": RemovedKey(
        "checkpoint.interval replaces it; set checkpoint.interval to a number of steps (a run's "
        "summary has the time of a step)",
        0.0,
    ),
    "checkpoint.keep_every": RemovedKey(
        "only the newest checkpoint.keep checkpoints are kept; copy the folder of a checkpoint "
        "that you want to keep longer",
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
        "gradients of keys and values are always summed over CP ranks in float32", "float32"
    ),
    "cp.keep_gathered_kv": RemovedKey(
        "gathered keys and values are never kept: backward gathers them again, at the same time as "
        "it computes the MLP (with training.recompute = full, the recomputed forward gathers them)",
        False,
    ),
    "cp.overlap": RemovedKey(
        "cp.overlap_stages replaces it; set cp.overlap_stages = 1 for overlap, or 0 for no overlap"
    ),
    "cp.stages": RemovedKey(
        "cp.overlap_stages replaces it; set cp.overlap_stages to the number of stages"
    ),
    "data.cache_dir": RemovedKey(
        "token stores built from data.corpus are always in run.output_dir/stores; use `wlb "
        "prepare` to build a token store in another folder",
        "runs/stores",
    ),
    "data.long_documents": RemovedKey(
        "documents longer than the context window are always split; from Python, "
        "wlb.packing.PackerOptions can refuse them",
        "split",
    ),
    "data.prefetch": _constant(1, "STEPS_LOADED", "train/prefetch.py"),
    "data.verify": RemovedKey(
        "every run checks its token stores in the background during its first steps; use `wlb "
        "prepare --verify PREFIX` to check a store before the run",
        "background",
    ),
    "fsdp.prefetch": _constant(1, "LAYERS_AHEAD", "spec/machine.py"),
    "model.experts.bias_rate": _constant(1e-3, "BIAS_RATE", "model/expert_layer.py"),
    "model.rope_scaling.beta_fast": _TURNS,
    "model.rope_scaling.beta_slow": _TURNS,
    "model.rope_scaling.high_freq_factor": _TURNS,
    "model.rope_scaling.low_freq_factor": _TURNS,
    "packing.bin_method": RemovedKey(
        "packing.method chooses the bin-packing algorithm; from Python, "
        "wlb.packing.CapacityPacker(method=...) takes any algorithm",
        "best_fit_decreasing",
    ),
    "packing.by_length": RemovedKey(
        "packing.method = group_by_length_padding has the same effect; set packing.method instead",
        False,
    ),
    "packing.grouping": RemovedKey(
        "a step always gets micro-batches with similar work, because the ranks then wait less for "
        "each other",
        "by_load",
    ),
    "packing.literal": RemovedKey(
        "no run used this key; from Python, use wlb.packing.VarLenPacker(literal=True)", False
    ),
    "packing.open_bins": RemovedKey(
        "all runs use 32; from Python, use wlb.packing.CapacityPacker(open_bins=...)", 32
    ),
    "planner.ahead": _constant(3, "STEPS_AHEAD", "train/feed.py"),
    "run.memory_gib": RemovedKey(
        "cluster.memory_gib replaces it for runs and estimates; set cluster.memory_gib"
    ),
    "run.over_memory": RemovedKey(
        "a run whose memory estimate exceeds the device's memory is always refused; set a larger "
        "cluster.memory_gib to start it anyway",
        "refuse",
    ),
    "sharding.stages": RemovedKey(
        "choosing the number of stages for each micro-batch saved at most 2.5% of a layer's time; "
        "set cp.overlap_stages, which is the number of stages for all micro-batches",
        "fixed",
    ),
    "telemetry.drift_threshold": _constant(0.15, "DRIFT_THRESHOLD", "train/telemetry/calibrate.py"),
    "telemetry.enabled": RemovedKey("every run times its micro-batches", True),
    "telemetry.interval": RemovedKey("every step is recorded", 1),
    "telemetry.peak_tflops": RemovedKey(
        "cluster.peak_tflops replaces it for runs and estimates; set cluster.peak_tflops", 0.0
    ),
    "telemetry.ranks_interval": _constant(10, "RANKS_INTERVAL", "plan/ranks.py"),
    "telemetry.snapshot_oom": RemovedKey(
        "a run with telemetry.snapshot_steps always writes a snapshot when an allocation fails",
        False,
    ),
    "telemetry.straggler_records": _constant(3, "STRAGGLER_TABLES", "plan/ranks.py"),
    "telemetry.straggler_threshold": _constant(0.15, "STRAGGLER_THRESHOLD", "plan/ranks.py"),
    "telemetry.timeline_interval": _constant(100, "TIMELINE_INTERVAL", "plan/ranks.py"),
    "telemetry.trace_ranks": RemovedKey("only rank 0 is traced", [0]),
    "tp.overlap": RemovedKey(
        "torch's fused matrix products over symmetric memory were never tested on GPUs; in "
        "backward, TP's collectives overlap with weight gradients anyway",
        False,
    ),
    "training.decay": RemovedKey(
        "training.weight_decay always applies to all weights except norms and biases", "matrices"
    ),
    "training.decay_shape": RemovedKey("the decay of schedule = wsd is always linear", "linear"),
    "training.gc_interval": _constant(50, "GARBAGE_INTERVAL", "train/warm_up.py"),
    "training.heartbeat_s": RemovedKey(
        "ranks no longer send heartbeats to each other; if a rank stops or hangs, the run ends "
        "after training.timeout_s seconds"
    ),
    "training.skip_spikes": RemovedKey(
        "training.clip_norm already limits the update of a step with large gradients, and no run "
        "ever skipped such a step",
        0.0,
    ),
    "training.max_nonfinite": _constant(10, "MOST_SKIPPED", "train/faults/nonfinite.py"),
}
"""Removed keys by dotted name.

A user who sets a removed key gets an error. A removed key in a stored spec is ignored. If the
stored value differs from `RemovedKey.value`, there is a RemovedKeyWarning."""


@dataclass(frozen=True, slots=True)
class RemovedValue:
    """Entry of `REMOVED_VALUES`: why a key no longer accepts a value, and what replaces it."""

    why: str  # the reason; messages add it after "was removed, because"
    instead: str  # the value to use now


REMOVED_VALUES = {
    ("sharding.exchange", "relayed"): RemovedValue(
        "wlb no longer sends rows between nodes through a relay rank on the receiving node",
        "needed",
    )
}
"""Removed values by (dotted name of the key, value).

A user who sets a removed value gets an error. A removed value in a stored spec is replaced by
`RemovedValue.instead`, with a RemovedKeyWarning."""


class RenamedKeyWarning(FutureWarning):
    """Warning that a user's settings have an old name of a key.

    The command line prints the warning as one line.
    """


class RemovedKeyWarning(FutureWarning):
    """Warning that a stored configuration has a removed key or value, which has no effect now.

    A stored configuration is one that wlb wrote into a checkpoint or into metrics.jsonl.
    The command line prints the warning as one line.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of a key's number, or of each number in a key's list. None means no limit."""

    at_least: float | None = None  # smallest value that is allowed
    above: float | None = None  # all allowed values are larger than this
    at_most: float | None = None  # largest value that is allowed
    below: float | None = None  # all allowed values are smaller than this

    @property
    def are_given(self) -> bool:
        """Whether there are both a lower and an upper bound."""
        low, high = (self.at_least, self.above), (self.at_most, self.below)
        return low != (None, None) and high != (None, None)

    def check(self, name: str, value: float, unit: str = "") -> None:
        """Raise UserError if `value` is not finite or is outside these limits.

        Args:
            name: Dotted name of the key, for the message.
            value: The number to check.
            unit: Unit of the number, for the message.
        """
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
"""Longest text that a key accepts, in characters."""
MOST_ENTRIES = 100_000
"""Most entries of a list that a key accepts."""


def key(default: Any, doc: str, *, unit: str = "", **bounds: float) -> Any:
    """Return a dataclass field that declares a configuration key.

    Args:
        default: Value of the key if the configuration does not set it.
        doc: Text for `--help`, in lower case and without a full stop.
        unit: Unit of the value, for `--help`; "" means no unit.
        **bounds: Limits of the value, as keyword arguments of `Bounds`. A key that takes numbers
            needs a lower and an upper limit.
    """
    limits = Bounds(**bounds)
    return field(default=default, metadata={"doc": doc, "unit": unit, "bounds": limits})


def check_declared(section: Any, *, entries: bool = False, prefix: str = "") -> None:
    """Raise UserError for the first value in `section` that is outside its declared bounds.

    Args:
        section: A section or a whole RunSpec, with nested sections.
        entries: Whether to check the entries of lists instead of plain numbers. `check` does so
            last, because other checks have more specific messages for lists.
        prefix: Dotted name of `section` with a final dot, for messages; "" for a whole RunSpec.
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
                    f"{name} has {len(listed)} entries, but at most {MOST_ENTRIES} are allowed; "
                    f"remove some"
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
    """Return all keys of a section and of its nested sections, in order of declaration.

    Args:
        section: Dataclass of the section, or RunSpec for all keys.
        prefix: Dotted name of the section with a final dot; "" for RunSpec.
    """
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
    """Return a copy of a section or RunSpec in which keys have the given values.

    Args:
        spec: A section or a whole RunSpec.
        values: Nested plain values, as parsed from TOML or JSON.
        source: File or option that the values come from, for messages.
        prefix: Dotted name of `spec` with a final dot; "" for a whole RunSpec.
        is_stored: Whether wlb wrote the values (in a checkpoint or metrics.jsonl). Then old names
            give no warning, and removed keys and values are not errors.
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
        # If the key was renamed, continue with its new name.
        if dotted in RENAMED:
            new = RENAMED[dotted]
            if not is_stored:
                warnings.warn(
                    f"{source}: {dotted} is now called {new}; use the new name",
                    RenamedKeyWarning,
                    stacklevel=2,
                )
            dotted, name = new, new.removeprefix(prefix)
            if name in values:
                raise UserError(
                    f"{source}: {new} is given twice, by its old and its new name; remove the old "
                    f"name"
                )
        if _is_removed(dotted, value):
            _report_removed(dotted, value, source=source, is_stored=is_stored)
            continue
        if name not in hints:
            raise UserError(
                f"{source}: unknown key {dotted!r}{_nearest(dotted, hints, prefix, whole)}"
            )
        kind = hints[name]
        # A nested section is set key by key. A key is set to its converted value.
        if is_dataclass(kind):
            if not isinstance(value, dict):
                raise UserError(
                    f"{source}: {dotted} is a section, so it cannot be set to {value!r}; set one "
                    "of its keys instead"
                )
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
"""Sections that no longer exist, because all their keys were removed."""


def _is_removed(dotted: str, value: Any) -> bool:
    """Return whether a setting has a removed key, or is a section with only removed keys.

    Args:
        dotted: Name of the key or section.
        value: Its value, which is a dictionary for a section.
    """
    if dotted in _REMOVED_SECTIONS and isinstance(value, dict):
        return all(f"{dotted}.{name}" in REMOVED for name in cast("dict[str, Any]", value))
    return dotted in REMOVED


def _with_merged_keys(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return stored values in which old keys are replaced by the key that they were merged into.

    A section with an old key was written before the merge. The new key is then missing or has its
    default value, so it may be overwritten.

    Args:
        values: Nested plain values of a section.
        prefix: Dotted name of the section with a final dot; "" for a whole RunSpec.
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
        # packing.method already determines what these two removed keys said, so drop them.
        out.pop("bin_method", None)
        out.pop("by_length", None)
    # cp.overlap (whether to overlap) and cp.stages (in how many stages) became cp.overlap_stages.
    if prefix == "cp." and "overlap" in out:
        stages = out.pop("stages", 1)
        out["overlap_stages"] = stages if out.pop("overlap") else 0
    # llama3 and yarn each had two keys, which model.rope_scaling.turns replaced.
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
    """Raise UserError for a removed key that a user set. Only warn if wlb itself wrote the key.

    wlb wrote keys into checkpoints and metrics.jsonl (`is_stored`). There is no warning if the
    stored value is the fixed value that runs now use.
    """
    if dotted not in REMOVED:
        # `dotted` names a section in which all keys were removed. Report each of its keys.
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
    """Warn that a checkpoint or metrics.jsonl has a removed value, and return its replacement.

    Raises:
        UserError: If the user set the value (`is_stored` is false).
    """
    removed = REMOVED_VALUES[dotted, value]
    if not is_stored:
        raise UserError(
            f"{source}: {dotted} = {value!r} was removed, because {removed.why}; set {dotted} = "
            f"{removed.instead!r}"
        )
    warnings.warn(
        f"{source}: {dotted} = {value!r} is read as {removed.instead!r}, because {removed.why}",
        RemovedKeyWarning,
        stacklevel=3,
    )
    return removed.instead


def nest(dotted: str, value: Any) -> dict[str, Any]:
    """Return `value` in nested dicts under a dotted name: `{"a": {"b": value}}` for "a.b"."""
    out = value
    for part in reversed(dotted.split(".")):
        out = {part: out}
    return cast("dict[str, Any]", out)


def to_dict(spec: Any) -> dict[str, Any]:
    """Return a section, or a whole RunSpec, as nested dicts of plain TOML and JSON values."""
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
    # Accept TOML's integer 1 for a key of type float, too.
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
            f"{where} = {value!r} cannot be encoded as UTF-8; rename the file or folder that has "
            f"this name"
        ) from None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" with the known name closest to `name`, or "" if none is."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _nearest(dotted: str, hints: dict[str, Any], prefix: str, whole: type[Any]) -> str:
    """Return a hint for an unknown key: the same name in another section, or a similar name.

    Args:
        dotted: The unknown key.
        hints: Keys of the section in which it was set.
        prefix: Dotted name of that section with a final dot.
        whole: Type of the outermost section.
    """
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
    return anywhere or f"; use one of {', '.join(here)}"


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

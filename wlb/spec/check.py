"""What is refused before any rank starts: each message has the value and the remedy."""

import math
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from wlb.spec.blend import parse_blend
from wlb.spec.packing import Policy
from wlb.spec.run import Remainder, RunSpec, Schedule, Strategy
from wlb.spec.schedule import DecayShape, RateSchedule


def check(spec: RunSpec) -> RunSpec:
    """`spec` itself, or a ValueError with the first thing that cannot work."""
    _check_finite(spec)
    spec.model.check()
    _check_ranges(spec)
    _check_rates(spec)
    _check_evaluation(spec)
    _check_layout(spec)
    _check_pipeline(spec)
    _check_compile(spec)
    _check_overlap(spec)
    _check_sharding(spec)
    spec.packing.check(spec.data.context_window)
    _check_number_packed(spec)
    return spec


def resolve_dp(spec: RunSpec, world_size: int) -> RunSpec:
    """`spec` with dp filled in for `world_size` ranks; ValueError where the layout does not fit."""
    parallel = spec.parallel
    need = parallel.model_ranks
    layout = f"tp {parallel.tp} x cp {parallel.cp} x pp {parallel.pp}"
    if world_size < need:
        raise ValueError(
            f"too few ranks: {layout} needs {need} ranks a pipeline, {world_size} are there; start "
            f"more ranks or lower parallel.tp, parallel.cp or parallel.pp"
        )
    if world_size % need:
        raise ValueError(
            f"{world_size} ranks are not a multiple of {layout} = {need}; use a multiple of {need}"
        )
    dp = world_size // need
    if parallel.dp not in (0, dp):
        raise ValueError(
            f"parallel.dp = {parallel.dp} needs {need * parallel.dp} ranks, {world_size} are "
            f"there; set parallel.dp = {dp} or 0"
        )
    return check(replace(spec, parallel=replace(parallel, dp=dp)))


def _check_evaluation(spec: RunSpec) -> None:
    if spec.eval.interval and spec.eval.interval_tokens:
        raise ValueError(
            f"eval.interval = {spec.eval.interval} and eval.interval_tokens = "
            f"{spec.eval.interval_tokens} both say when to evaluate; set one of them to 0"
        )


def _check_finite(section: Any, prefix: str = "") -> None:
    for f in fields(section):
        value = getattr(section, f.name)
        if is_dataclass(value):
            _check_finite(value, f"{prefix}{f.name}.")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{prefix}{f.name} = {value} must be a finite number")


def _check_least(spec: RunSpec) -> None:
    at_least = {
        "run.seed": (spec.run.seed, 0),
        "run.memory_gib": (spec.run.memory_gib, 0),
        "data.context_window": (spec.data.context_window, 2),
        "data.row_multiple": (spec.data.row_multiple, 1),
        "data.num_windows": (spec.data.num_windows, 0),
        "data.epochs": (spec.data.epochs, 0),
        "data.prefetch": (spec.data.prefetch, 0),
        "packing.num_micro_batches": (spec.packing.num_micro_batches, 0),
        "data.bpe_vocab_size": (spec.data.bpe_vocab_size, 300),
        "planner.ahead": (spec.planner.ahead, 2),
        "pp.virtual_stages": (spec.pp.virtual_stages, 1),
        "pp.weight_delay": (spec.pp.weight_delay, 1),
        "fsdp.shard_size": (spec.fsdp.shard_size, 0),
        "fsdp.prefetch": (spec.fsdp.prefetch, 0),
        "training.steps": (spec.training.steps, 1),
        "training.warmup_steps": (spec.training.warmup_steps, 0),
        "training.loss_chunk": (spec.training.loss_chunk, 1),
        "training.max_nonfinite": (spec.training.max_nonfinite, 1),
        "training.clip_norm": (spec.training.clip_norm, 0),
        "training.min_learning_rate": (spec.training.min_learning_rate, 0),
        "training.weight_decay": (spec.training.weight_decay, 0),
        "eval.interval": (spec.eval.interval, 0),
        "eval.interval_tokens": (spec.eval.interval_tokens, 0),
        "eval.steps": (spec.eval.steps, 0),
        "checkpoint.interval": (spec.checkpoint.interval, 0),
        "checkpoint.keep": (spec.checkpoint.keep, 1),
        "model.vocab_size": (spec.model.vocab_size, 0),
        "cluster.overhead": (spec.cluster.overhead, 0),
        "telemetry.interval": (spec.telemetry.interval, 1),
        "telemetry.warmup_steps": (spec.telemetry.warmup_steps, 0),
        "telemetry.peak_tflops": (spec.telemetry.peak_tflops, 0),
        "telemetry.ranks_interval": (spec.telemetry.ranks_interval, 0),
        "telemetry.straggler_records": (spec.telemetry.straggler_records, 1),
        "telemetry.timeline_interval": (spec.telemetry.timeline_interval, 0),
    }
    for name, (value, minimum) in at_least.items():
        if not value >= minimum:
            raise ValueError(f"{name} = {value} must be at least {minimum}")


def _check_ranges(spec: RunSpec) -> None:
    _check_least(spec)
    if spec.run.seed >= 2**64:
        raise ValueError(f"run.seed = {spec.run.seed} must be below 2**64")
    _check_name(spec)
    if parse_blend(spec.data.blend) and spec.data.store:
        raise ValueError(
            f"data.store = {spec.data.store} and data.blend = {list(spec.data.blend)} are both "
            f"set; use data.blend alone, with data.store in it if it is meant to be mixed in"
        )
    above_0 = {
        "training.learning_rate": spec.training.learning_rate,
        "training.adam_eps": spec.training.adam_eps,
        "training.timeout_s": spec.training.timeout_s,
        "telemetry.drift_threshold": spec.telemetry.drift_threshold,
        "telemetry.straggler_threshold": spec.telemetry.straggler_threshold,
        "cluster.memory_gib": spec.cluster.memory_gib,
        "cluster.peak_tflops": spec.cluster.peak_tflops,
    }
    for name, value in above_0.items():
        if not value > 0:
            raise ValueError(f"{name} = {value} must be above 0")
    _check_heartbeat(spec)
    _check_fractions(spec)
    if spec.training.loss_chunk > 8192:
        raise ValueError(
            f"training.loss_chunk = {spec.training.loss_chunk} is above 8192 rows of logits"
        )


def _check_rates(spec: RunSpec) -> None:
    """That rates fall, and that wsd has a decay that fits and others, which have none, no other."""
    t = spec.training
    if t.schedule != RateSchedule.CONSTANT and t.min_learning_rate > t.learning_rate:
        raise ValueError(
            f"training.min_learning_rate = {t.min_learning_rate} is above training.learning_rate = "
            f"{t.learning_rate}, and training.schedule = {t.schedule} would rise to it; a tenth of "
            f"the peak is usual, {t.learning_rate / 10:g}"
        )
    if t.schedule != RateSchedule.WSD:
        if t.decay_steps or t.decay_shape != DecayShape.LINEAR:
            raise ValueError(
                f"training.decay_steps = {t.decay_steps} and training.decay_shape = "
                f"{t.decay_shape} are of training.schedule = wsd; with {t.schedule} leave them out"
            )
        return
    after = t.steps - t.warmup_steps
    if t.decay_steps < 2:
        raise ValueError(
            f"training.decay_steps = {t.decay_steps} with training.schedule = wsd: the rate falls "
            f"from one step of the decay to the next, so it takes 2 or more; 10% to 20% of "
            f"training.steps are usual, such as {max(2, t.steps // 10)}"
        )
    if t.decay_steps > after:
        raise ValueError(
            f"training.decay_steps = {t.decay_steps} is longer than the {after} steps after the "
            f"warm-up (training.steps = {t.steps}, training.warmup_steps = {t.warmup_steps}); "
            f"lower it, or train more steps"
        )


def _check_heartbeat(spec: RunSpec) -> None:
    if 0 < spec.training.heartbeat_s < 1 or spec.training.heartbeat_s < 0:
        raise ValueError(
            f"training.heartbeat_s = {spec.training.heartbeat_s} must be at least 1 second, or 0 "
            f"for ranks that do not watch over each other"
        )


def _check_fractions(spec: RunSpec) -> None:
    if not 0 <= spec.cluster.tp_overlap <= 1:
        raise ValueError(f"cluster.tp_overlap = {spec.cluster.tp_overlap} must be in [0, 1]")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(spec.training, name) < 1:
            raise ValueError(f"training.{name} = {getattr(spec.training, name)} must be in [0, 1)")
    if not 0 <= spec.data.heldout_fraction < 0.5:
        raise ValueError(
            f"data.heldout_fraction = {spec.data.heldout_fraction} must be in [0, 0.5)"
        )


def _check_name(spec: RunSpec) -> None:
    """run.name is one folder below run.output_dir, and not the one that stores are kept in."""
    name = spec.run.name
    if name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"run.name = {name!r} must be the name of one folder, without slashes")
    folder, cache = Path(spec.run.output_dir, name).absolute(), Path(spec.data.cache_dir).absolute()
    if folder == cache or folder in cache.parents:
        raise ValueError(
            f"run.name = {name!r} is the folder that data.cache_dir = {spec.data.cache_dir} keeps "
            f"token stores in; use another name"
        )


def _check_layout(spec: RunSpec) -> None:
    parallel, model = spec.parallel, spec.model
    for axis in ("tp", "cp", "pp"):
        if getattr(parallel, axis) < 1:
            raise ValueError(f"parallel.{axis} = {getattr(parallel, axis)} must be at least 1")
    if parallel.dp < 0:
        raise ValueError(f"parallel.dp = {parallel.dp} must be at least 0 (0 = all ranks)")
    if parallel.tp > model.num_kv_heads:
        raise ValueError(
            f"parallel.tp = {parallel.tp} is more than model.num_kv_heads = {model.num_kv_heads}; "
            f"a rank would hold less than one KV head: set parallel.tp to at most "
            f"{model.num_kv_heads}"
        )
    divided = {
        "model.num_heads": model.num_heads,
        "model.num_kv_heads": model.num_kv_heads,
        "model.ffn_hidden_size": model.ffn_hidden_size,
        "the padded vocabulary": 256,
    }
    for name, value in divided.items():
        if value % parallel.tp:
            raise ValueError(f"{name} = {value} is not a multiple of parallel.tp = {parallel.tp}")
    shared, size = parallel.fsdp_size, spec.fsdp.shard_size
    # Without dp, it is not known yet over how many ranks there is to shard.
    if size and parallel.dp and shared % size:
        good = [n for n in range(1, shared + 1) if shared % n == 0]
        raise ValueError(
            f"fsdp.shard_size = {size} does not divide the dp {parallel.dp} x cp {parallel.cp} = "
            f"{shared} ranks that share parameters; use one of {good}, or 0 for all of them"
        )


def _check_overlap(spec: RunSpec) -> None:
    if spec.tp.overlap and spec.parallel.tp == 1:
        raise ValueError(
            "tp.overlap = true with parallel.tp = 1: there are no collectives to overlap; set "
            "tp.overlap = false"
        )


def _check_sharding(spec: RunSpec) -> None:
    cp, window, sharding = spec.parallel.cp, spec.data.context_window, spec.sharding
    if cp > window:
        raise ValueError(
            f"parallel.cp = {cp} exceeds data.context_window = {window}: some CP ranks would never "
            f"hold a token; lower parallel.cp"
        )
    cuts_documents = sharding.strategy in (Strategy.PER_DOCUMENT, Strategy.ADAPTIVE)
    if sharding.remainder != Remainder.MERGED and not cuts_documents:
        raise ValueError(
            f"sharding.remainder = {sharding.remainder} is for sharding.strategy = per_document or "
            f"adaptive; {sharding.strategy} merges tokens over"
        )


def _check_stage_layers(spec: RunSpec) -> None:
    layers, stages, given = spec.model.num_layers, spec.num_stages, spec.pp.stage_layers
    named = f"pp {spec.parallel.pp} x virtual stages {spec.pp.virtual_stages} = {stages} stages"
    if not given and layers < stages:
        raise ValueError(f"model.num_layers = {layers} is fewer than {named}")
    if not given and layers % stages:
        raise ValueError(
            f"model.num_layers = {layers} is not a multiple of {named}; say in pp.stage_layers how "
            f"many each has"
        )
    if not given:
        return
    said = f"pp.stage_layers = {list(given)}"
    if len(given) != stages:
        raise ValueError(f"{said} has {len(given)} numbers; there are {named}")
    if sum(given) != layers:
        raise ValueError(f"{said} adds up to {sum(given)}; model.num_layers is {layers}")
    if min(given) < 0 or 0 in given[1:-1]:
        raise ValueError(
            f"{said}: only the first stage and the last, with embedding and head, can be without "
            f"layers"
        )


def _check_pipeline(spec: RunSpec) -> None:
    pp, v = spec.parallel.pp, spec.pp.virtual_stages
    if pp == 1 and v != 1:
        raise ValueError(
            f"pp.virtual_stages = {v} with parallel.pp = 1: there is no pipeline to interleave; "
            f"set pp.virtual_stages = 1"
        )
    if pp > 1 and spec.pp.schedule == Schedule.ONE_F_ONE_B and v != 1:
        raise ValueError(
            f"pp.schedule = '1f1b' takes one stage a rank, got pp.virtual_stages = {v}; set it to "
            f"1 or use pp.schedule = 'interleaved_1f1b'"
        )
    if spec.pp.weight_delay != 1 and spec.pp.schedule != Schedule.INTERLEAVED_ZERO_BUBBLE:
        raise ValueError(
            f"pp.weight_delay = {spec.pp.weight_delay} with pp.schedule = {spec.pp.schedule}: only "
            f"interleaved_zero_bubble has weights' passes that could wait; leave it 1"
        )
    _check_stage_layers(spec)
    _check_schedulable(spec, spec.num_windows, "data.num_windows")
    _check_schedulable(spec, spec.num_micro_batches, "packing.num_micro_batches")


def _check_compile(spec: RunSpec) -> None:
    training, default = spec.training, type(spec.training)().compile_backend
    if not training.compile and training.compile_backend != default:
        raise ValueError(
            f"training.compile_backend = {training.compile_backend!r} without training.compile: "
            f"set training.compile = true, or leave the backend out"
        )
    if training.compile and spec.splits_backward:
        raise ValueError(
            f"training.compile = true with pp.schedule = {spec.pp.schedule}: weights' gradients, "
            f"computed later, need tensors whose memory compiled code gives away; use pp.schedule "
            f"= interleaved_1f1b or training.compile = false"
        )


def _check_schedulable(spec: RunSpec, num: int, name: str) -> None:
    """For steps of packed micro-batches and those of windows, which the held-out loss takes."""
    dp, pp = max(1, spec.parallel.dp), spec.parallel.pp
    if num % dp:
        raise ValueError(
            f"{num} micro-batches a step are not a multiple of parallel.dp = {dp}; set {name} to a "
            f"multiple of {dp}"
        )
    each, schedule = num // dp, spec.pp.schedule
    if pp == 1 or schedule.takes(each, pp):
        return
    if schedule == Schedule.ONE_F_ONE_B:
        raise ValueError(
            f"{each} micro-batches a pipeline are fewer than pp = {pp}, which pp.schedule = 1f1b "
            f"cannot order; set {name} to at least {pp * dp}, or pp.schedule = interleaved_1f1b"
        )
    good = [m for m in range(max(1, each - pp), each + pp + 1) if schedule.takes(m, pp)]
    raise ValueError(
        f"{each} micro-batches a pipeline cannot be scheduled in {each // pp} equal rounds over "
        f"pp = {pp}; numbers that can: {good} ({name} = that x dp {dp})"
    )


def _check_number_packed(spec: RunSpec) -> None:
    """That as many micro-batches as packing is to make can hold a global batch."""
    packing, m, n = spec.packing, spec.num_micro_batches, spec.num_windows
    if m != n and not packing.varies_lengths:
        raise ValueError(
            f"packing.num_micro_batches = {m} with packing.policy = {packing.policy}: its "
            f"micro-batches are windows, {n} a global batch; use var_len or bounded, or set it to 0"
        )
    if packing.takes_s_max_from_memory:
        return  # checked again when it is filled in
    most = m * spec.s_max
    is_bounded = packing.policy == Policy.BOUNDED
    if packing.varies_lengths and (most < spec.tokens_per_step + is_bounded):
        raise ValueError(
            f"{m} micro-batches of at most packing.s_max = {packing.s_max} context windows leave "
            f"{packing.policy} no room "
            + ("to catch up what it holds back of" if is_bounded else "for")
            + f" global batches of {n} windows; raise packing.s_max or packing.num_micro_batches"
        )

"""Check a whole RunSpec before any rank starts.

`check` looks at combinations of keys, and `wlb.spec.keys` checks the bounds of each key. Every
error message names the wrong values and says what to do.
"""

from dataclasses import replace
from pathlib import Path

from wlb.plan import UserError
from wlb.spec.blend import parse_blend
from wlb.spec.keys import check_declared
from wlb.spec.packing import Policy
from wlb.spec.run import RunSpec, Schedule
from wlb.spec.sharding import Remainder, Strategy
from wlb.spec.training import RateSchedule

_MOST_RANKS = 2**20
_MOST_STEP_TOKENS = 2**40


def check(spec: RunSpec) -> RunSpec:
    """Return `spec` unchanged, or raise UserError for the first setting that cannot work."""
    check_declared(spec)
    spec.model.check()
    _check_ranges(spec)
    _check_rates(spec)
    _check_evaluation(spec)
    _check_layout(spec)
    _check_pipeline(spec)
    _check_compile(spec)
    _check_experts(spec)
    _check_sharding(spec)
    spec.packing.check(spec.data.context_window)
    _check_number_packed(spec)
    check_declared(spec, entries=True)
    return spec


def resolve_dp(spec: RunSpec, world_size: int) -> RunSpec:
    """Return `spec` with parallel.dp set for `world_size` ranks, after checking all settings.

    Raises:
        UserError: If the layout does not fit the number of ranks.
    """
    parallel = spec.parallel
    need = parallel.model_ranks
    layout = f"tp {parallel.tp} x cp {parallel.cp} x pp {parallel.pp}"
    if world_size < need:
        raise UserError(
            f"too few ranks: {layout} needs {need} ranks per pipeline, but there are "
            f"{world_size}; start more ranks or lower parallel.tp, parallel.cp or parallel.pp"
        )
    if world_size % need:
        raise UserError(
            f"{world_size} ranks are not a multiple of {layout} = {need}; start a multiple of "
            f"{need} ranks"
        )
    dp = world_size // need
    if parallel.dp not in (0, dp):
        raise UserError(
            f"parallel.dp = {parallel.dp} needs {need * parallel.dp} ranks, but there are "
            f"{world_size}; set parallel.dp = {dp}, or 0 to follow the number of ranks"
        )
    return check(replace(spec, parallel=replace(parallel, dp=dp)))


def _check_evaluation(spec: RunSpec) -> None:
    if spec.eval.interval and spec.eval.interval_tokens:
        raise UserError(
            f"eval.interval = {spec.eval.interval} and eval.interval_tokens = "
            f"{spec.eval.interval_tokens} are both set, but a run can use only one of them; set "
            "one to 0"
        )


def _check_ranges(spec: RunSpec) -> None:
    for name in ("trace_steps", "snapshot_steps"):
        steps = getattr(spec.telemetry, name)
        if min(steps, default=1) < 1:
            raise UserError(
                f"telemetry.{name} = {list(steps)} has a number below 1, but steps are counted "
                f"from 1; remove this number"
            )
    if spec.tokens_per_step > _MOST_STEP_TOKENS:
        raise UserError(
            f"data.num_windows = {spec.num_windows} times data.context_window = "
            f"{spec.data.context_window} is {spec.tokens_per_step} tokens per step, but must be at "
            f"most {_MOST_STEP_TOKENS}; lower one of them"
        )
    _check_name(spec)
    if parse_blend(spec.data.blend) and spec.data.store:
        raise UserError(
            f"data.store = {spec.data.store} and data.blend = {list(spec.data.blend)} are both "
            f"set, but a run reads only one of them; remove one (to train both, add the store to "
            f"data.blend and remove data.store)"
        )


def _check_rates(spec: RunSpec) -> None:
    """Refuse a learning rate that would rise after warm-up.

    Also refuse a training.decay_steps that has no effect or does not fit into the run.
    """
    t = spec.training
    if t.schedule != RateSchedule.CONSTANT and t.min_learning_rate > t.learning_rate:
        raise UserError(
            f"training.min_learning_rate = {t.min_learning_rate} is above training.learning_rate = "
            f"{t.learning_rate}, so that training.schedule = {t.schedule} would raise the rate "
            f"after warm-up; lower training.min_learning_rate, usually to a tenth of "
            f"training.learning_rate ({t.learning_rate / 10:g})"
        )
    if t.schedule != RateSchedule.WSD:
        if t.decay_steps:
            raise UserError(
                f"training.decay_steps = {t.decay_steps} has an effect only with training.schedule "
                f"= wsd, but training.schedule = {t.schedule}; remove training.decay_steps, or set "
                f"training.schedule = wsd"
            )
        return
    # The decay of wsd must fit into the steps after the warm-up.
    after = t.steps - t.warmup_steps
    if t.decay_steps < 2:
        raise UserError(
            f"training.decay_steps = {t.decay_steps} must be at least 2 with training.schedule = "
            f"wsd; set it to 10% to 20% of training.steps, such as {max(2, t.steps // 10)}"
        )
    if t.decay_steps > after:
        raise UserError(
            f"training.decay_steps = {t.decay_steps} is longer than the {after} steps after the "
            f"warm-up (training.steps = {t.steps}, training.warmup_steps = {t.warmup_steps}); "
            f"lower training.decay_steps, or raise training.steps"
        )


def _check_name(spec: RunSpec) -> None:
    """Refuse a run name that cannot be a folder's name or is that of the folder of token stores."""
    name = spec.run.name
    if name in ("", ".", "..") or Path(name).name != name or not name.isprintable():
        raise UserError(
            f"run.name = {name!r} must be the name of one folder, without slashes or control "
            f"characters (such as line ends)"
        )
    if Path(spec.run.output_dir, name) == spec.run.stores_dir:
        raise UserError(
            f"run.name = {name!r} is the name of the folder in run.output_dir = "
            f"{spec.run.output_dir} that keeps token stores; set another name"
        )


def _check_layout(spec: RunSpec) -> None:
    parallel, model = spec.parallel, spec.model
    if parallel.world_size > _MOST_RANKS:
        raise UserError(
            f"parallel.tp = {parallel.tp} x cp = {parallel.cp} x pp = {parallel.pp} x dp = "
            f"{parallel.dp} are {parallel.world_size} ranks, but must be at most {_MOST_RANKS}; "
            f"lower one of them"
        )
    if parallel.tp > model.num_kv_heads and parallel.tp % model.num_kv_heads:
        raise UserError(
            f"parallel.tp = {parallel.tp} is above model.num_kv_heads = {model.num_kv_heads} and "
            f"not a multiple of it, so TP ranks cannot have equal numbers of copies of each KV "
            f"head; set parallel.tp to at most {model.num_kv_heads}, or to a multiple of it"
        )
    # TP divides heads, MLPs and vocabulary, so each must be a multiple of the TP degree.
    divided = {
        "model.num_heads": model.num_heads,
        "model.num_kv_heads": model.with_kv_copies(parallel.tp).num_kv_heads,
        **_divided_mlp(spec),
        **_divided_linear(spec),
        "the padded vocabulary": 256,
    }
    for name, value in divided.items():
        if value % parallel.tp:
            raise UserError(
                f"{name} = {value} is not a multiple of parallel.tp = {parallel.tp}, so TP ranks "
                f"cannot share it equally; lower parallel.tp, or change the model"
            )
    if model.qk_norm_rows and parallel.tp > 1:
        raise UserError(
            f"parallel.tp = {parallel.tp} with model.qk_norm_rows = true is not supported: the "
            f"norm needs all heads of a token, but a TP rank has only some; set parallel.tp = 1"
        )
    shared, size = parallel.fsdp_size, spec.fsdp.shard_size
    # With parallel.dp = 0, the number of ranks that share parameters is not known yet.
    if size and parallel.dp and shared % size:
        good = [n for n in range(1, shared + 1) if shared % n == 0]
        raise UserError(
            f"fsdp.shard_size = {size} does not divide the dp {parallel.dp} x cp {parallel.cp} = "
            f"{shared} ranks that share parameters; use one of {good}, or 0 for all of them"
        )


def _divided_linear(spec: RunSpec) -> dict[str, int]:
    """Return what TP divides in linear-attention layers: their number of key heads.

    It is returned under its configuration key, for messages. {} if the model has no such layers.
    """
    linear = spec.model.linear
    return {"model.linear.num_key_heads": linear.num_key_heads} if linear.num_value_heads else {}


def _divided_mlp(spec: RunSpec) -> dict[str, int]:
    """Return what TP divides in MLPs and shared experts: their hidden sizes, by configuration key.

    Routed experts are left out, because EP (parallel.ep) divides them instead.
    """
    experts = spec.model.experts
    dense = {"model.ffn_hidden_size": spec.model.ffn_hidden_size}
    shared = {"model.experts.shared x hidden_size": experts.shared_hidden_size}
    with_experts = spec.model.num_expert_layers
    return (dense if with_experts < spec.model.num_layers else {}) | (
        shared if with_experts else {}
    )


MOST_EXPERTS_OF_RANK = 1023
"""Most experts of a rank: on CUDA, `torch.nn.functional.grouped_mm` accepts no more groups."""


def _check_experts(spec: RunSpec) -> None:
    parallel, num = spec.parallel, spec.model.experts.num
    # Refuse only to train a model whose router never learns. ModelSpec.check accepts the model, so
    # that it can still be imported and exported.
    if spec.model.experts.never_learns:
        raise UserError(
            "model.experts.per_token = 1 with model.experts.normalised = true: every normalised "
            "score is 1, so the router gets no gradient and never learns; set "
            "model.experts.normalised = false"
        )
    if spec.cost.expert_load > (parallel.ep if num else 1):
        raise UserError(
            f"cost.expert_load = {spec.cost.expert_load} with parallel.ep = {parallel.ep} and "
            f"model.experts.num = {num} must be at most {parallel.ep if num else 1}, because the "
            f"busiest rank has at most parallel.ep times the mean load; lower cost.expert_load"
        )
    if not num:
        if parallel.ep > 1:
            raise UserError(
                f"parallel.ep = {parallel.ep} with model.experts.num = 0: the model has no experts "
                f"to divide; set parallel.ep = 1"
            )
        _check_expert_stages(spec, 0)
        return
    if num % parallel.ep:
        raise UserError(
            f"parallel.ep = {parallel.ep} does not divide model.experts.num = {num}; set "
            f"parallel.ep to a divisor of {num}"
        )
    if num // parallel.ep > MOST_EXPERTS_OF_RANK:
        raise UserError(
            f"model.experts.num / parallel.ep = {num // parallel.ep} experts per rank is above "
            f"{MOST_EXPERTS_OF_RANK}, the limit of torch's grouped_mm on a GPU; raise parallel.ep"
        )
    _check_expert_stages(spec, num // parallel.ep)
    if parallel.dp and parallel.expert_ranks % parallel.ep:
        raise UserError(
            f"parallel.ep = {parallel.ep} does not divide dp {parallel.dp} x cp {parallel.cp} x tp "
            f"{parallel.tp} = {parallel.expert_ranks} ranks; set parallel.ep to a divisor of "
            f"{parallel.expert_ranks}"
        )
    copy_ranks = spec.fsdp.shard_size * parallel.tp
    if copy_ranks % parallel.ep:
        raise UserError(
            f"parallel.ep = {parallel.ep} does not divide the {copy_ranks} ranks of one copy of "
            f"the parameters (fsdp.shard_size {spec.fsdp.shard_size} x tp {parallel.tp}); lower "
            "parallel.ep or raise fsdp.shard_size"
        )


def _check_expert_stages(spec: RunSpec, experts_per_rank: int) -> None:
    stages = spec.ep.stages
    if stages > 1 and spec.parallel.ep == 1:
        raise UserError(
            f"ep.stages = {stages} with parallel.ep = 1: no rows travel between ranks, so there is "
            f"nothing to overlap; set ep.stages = 1"
        )
    if experts_per_rank % stages:
        good = [n for n in range(1, experts_per_rank + 1) if experts_per_rank % n == 0]
        raise UserError(
            f"ep.stages = {stages} does not divide the {experts_per_rank} experts of a rank "
            f"(model.experts.num / parallel.ep); set ep.stages to one of {good}"
        )


def _check_sharding(spec: RunSpec) -> None:
    cp, window, sharding = spec.parallel.cp, spec.data.context_window, spec.sharding
    if cp > window:
        raise UserError(
            f"parallel.cp = {cp} exceeds data.context_window = {window}, so some CP ranks would "
            f"never have a token; lower parallel.cp"
        )
    cuts_documents = sharding.strategy in (Strategy.PER_DOCUMENT, Strategy.ADAPTIVE)
    if sharding.remainder != Remainder.MERGED and not cuts_documents:
        raise UserError(
            f"sharding.remainder = {sharding.remainder} needs sharding.strategy = per_document or "
            f"adaptive, but sharding.strategy = {sharding.strategy}; set sharding.remainder = "
            f"merged"
        )


def _check_stage_layers(spec: RunSpec) -> None:
    layers, stages, given = spec.model.num_layers, spec.num_stages, spec.pp.stage_layers
    named = f"pp {spec.parallel.pp} x virtual stages {spec.pp.virtual_stages} = {stages} stages"
    if not given and layers < stages:
        raise UserError(
            f"model.num_layers = {layers} must be at least {named}; lower parallel.pp or "
            f"pp.virtual_stages"
        )
    if not given and layers % stages:
        raise UserError(
            f"model.num_layers = {layers} is not a multiple of {named}; set pp.stage_layers to the "
            f"number of layers of each stage"
        )
    if not given:
        return
    setting = f"pp.stage_layers = {list(given)}"
    if len(given) != stages:
        raise UserError(
            f"{setting} has {len(given)} entries, but there are {named}; give one entry for each "
            f"stage"
        )
    if sum(given) != layers:
        raise UserError(
            f"{setting} adds up to {sum(given)}, but model.num_layers = {layers}; change one of "
            f"them"
        )
    if min(given) < 0 or 0 in given[1:-1]:
        raise UserError(
            f"{setting}: only the first and the last stage may have 0 layers, because they have "
            f"the embedding and the head; give every other stage at least 1 layer"
        )


def _check_pipeline(spec: RunSpec) -> None:
    pp, v = spec.parallel.pp, spec.pp.virtual_stages
    if pp == 1 and v != 1:
        raise UserError(
            f"pp.virtual_stages = {v} with parallel.pp = 1: virtual stages need more than one "
            f"pipeline rank; set pp.virtual_stages = 1"
        )
    if pp > 1 and spec.pp.schedule == Schedule.ONE_F_ONE_B and v != 1:
        raise UserError(
            f"pp.schedule = 1f1b has one stage per pipeline rank, but pp.virtual_stages = {v}; set "
            f"pp.virtual_stages = 1 or pp.schedule = interleaved_1f1b"
        )
    if spec.pp.weight_delay != 1 and spec.pp.schedule != Schedule.INTERLEAVED_ZERO_BUBBLE:
        raise UserError(
            f"pp.weight_delay = {spec.pp.weight_delay} with pp.schedule = {spec.pp.schedule}: only "
            f"interleaved_zero_bubble has separate weight-gradient passes; set pp.weight_delay = 1"
        )
    _check_stage_layers(spec)
    _check_schedulable(spec, spec.num_windows, "data.num_windows")
    _check_schedulable(spec, spec.num_micro_batches, "packing.num_micro_batches")


def _check_compile(spec: RunSpec) -> None:
    training, default = spec.training, type(spec.training)().compile_backend
    if not training.compile and training.compile_backend != default:
        raise UserError(
            f"training.compile_backend = {training.compile_backend!r} has no effect with "
            f"training.compile = false; set training.compile = true, or remove "
            f"training.compile_backend"
        )
    if training.compile and spec.splits_backward:
        raise UserError(
            f"training.compile = true with pp.schedule = {spec.pp.schedule}: delayed weight "
            f"gradients need tensors that compiled code frees; use pp.schedule = interleaved_1f1b "
            f"or training.compile = false"
        )


def _check_schedulable(spec: RunSpec, num: int, name: str) -> None:
    """Refuse a number of micro-batches per step that the pipeline schedule cannot process.

    Args:
        spec: Configuration of the run.
        num: Micro-batches per step over all pipelines. Training has the number that packing makes,
            and evaluation has one micro-batch for each window.
        name: Key that sets `num`, for messages.
    """
    dp, pp = max(1, spec.parallel.dp), spec.parallel.pp
    if num % dp:
        raise UserError(
            f"{num} micro-batches per step are not a multiple of parallel.dp = {dp}; set {name} to "
            f"a multiple of {dp}"
        )
    each, schedule = num // dp, spec.pp.schedule
    if pp == 1 or schedule.takes(each, pp):
        return
    if schedule == Schedule.ONE_F_ONE_B:
        raise UserError(
            f"pp.schedule = 1f1b needs at least parallel.pp = {pp} micro-batches per pipeline, but "
            f"there are {each}; set {name} to at least {pp * dp}, or pp.schedule = interleaved_1f1b"
        )
    good = [m for m in range(max(1, each - pp), each + pp + 1) if schedule.takes(m, pp)]
    raise UserError(
        f"each pipeline has {each} micro-batches per step, but pp.schedule = {schedule} with "
        f"parallel.pp = {pp} processes them in {each // pp} rounds, which must "
        f"have equal numbers of micro-batches; set {name} to one of {[dp * m for m in good]}"
    )


def _check_number_packed(spec: RunSpec) -> None:
    """Refuse a number of micro-batches that the policy does not support or that is too small."""
    packing, m, n = spec.packing, spec.num_micro_batches, spec.num_windows
    if m != n and not packing.varies_lengths:
        raise UserError(
            f"packing.num_micro_batches = {m} is not supported by packing.policy = "
            f"{packing.policy}, which makes one micro-batch of each of the {n} windows; set "
            f"packing.num_micro_batches = 0, or packing.policy to var_len or bounded"
        )
    if packing.takes_s_max_from_memory:
        # S_max is not known yet. `with_s_max` fills it in and repeats this check.
        return
    most = m * spec.s_max
    # `bounded` delays documents, so it needs room beyond a global batch to train them later.
    is_bounded = packing.policy == Policy.BOUNDED
    if packing.varies_lengths and (most < spec.tokens_per_step + is_bounded):
        raise UserError(
            f"{m} micro-batches of at most packing.s_max = {packing.s_max} context windows have no "
            f"room for a global batch of {n} windows"
            + (" and for delayed documents" if is_bounded else "")
            + "; raise packing.s_max or packing.num_micro_batches"
        )

"""List the layouts that are possible on a number of devices, and why the others are not.

A layout is a choice of degrees of TP, CP, PP, DP and EP, a schedule, a number of virtual stages and
a kind of recompute. The product of the first four degrees is the number of devices. Each
combination that `wlb.spec.check`, the schedule and memory allow becomes a candidate. A candidate
must have memory for a step whose micro-batches are all one window long; `Candidate.caps` says how
much longer they may be. If one kind of recompute leaves as much memory as packing can use, kinds
with more recompute are not tried.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from wlb.memory import TokenCaps, gpu_budget, planned_gib, token_caps
from wlb.memory.estimate import GIB, held_bytes
from wlb.plan import UserError
from wlb.simulate.peak_memory import rest_bytes
from wlb.spec import Policy, Recompute, RunSpec, Schedule, check

MOST_S_MAX, MOST_STEP_TOKENS = 2.0, 1.5
"""Values of S_max (in windows) and T (in global batches) above which packing gains nothing."""
AXES = ("tp", "cp", "pp", "dp")
EP = "ep"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoices:
    """Values from which a layout search may choose; an empty tuple allows all possible degrees."""

    tp: tuple[int, ...] = ()  # degrees of tensor parallelism
    cp: tuple[int, ...] = ()  # degrees of context parallelism
    pp: tuple[int, ...] = ()  # degrees of pipeline parallelism
    dp: tuple[int, ...] = ()  # degrees of data parallelism
    ep: tuple[int, ...] = ()  # degrees of expert parallelism, only for models with experts
    virtual_stages: tuple[int, ...] = ()  # numbers of virtual stages of a pipeline rank
    schedules: tuple[Schedule, ...] = tuple(Schedule)
    recompute: tuple[Recompute, ...] = tuple(Recompute)  # kinds of recompute

    def check(self, gpus: int) -> None:
        """Raise UserError if a degree of parallelism does not divide the number of devices.

        A number of virtual stages below 1 is an error too.
        """
        for axis in (*AXES, EP):
            for degree in getattr(self, axis):
                if degree < 1 or gpus % degree:
                    raise UserError(
                        f"{axis} = {degree} must be a divisor of the number of devices, {gpus}; "
                        f"choose from {', '.join(map(str, divisors(gpus)))}"
                    )
        bad = [v for v in self.virtual_stages if v < 1]
        if bad:
            raise UserError(
                f"virtual_stages = {bad[0]} must be at least 1; remove it or give a larger number"
            )
        for name in ("schedules", "recompute"):
            if not getattr(self, name):
                raise UserError(f"{name} is empty; give at least one value for the search to try")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout that fits into memory."""

    spec: RunSpec  # the run with this layout
    need_bytes: int  # memory of the fullest rank if all micro-batches are one window long
    # S_max and T that fit into memory; None if micro-batches longer than a window do not fit
    caps: TokenCaps | None

    @property
    def name(self) -> str:
        """Name of the layout (`name_of`)."""
        return name_of(self.spec)

    @property
    def has_all_room(self) -> bool:
        """Whether memory permits S_max and T so large that packing gains nothing from more."""
        if self.caps is None or self.caps.s_max < MOST_S_MAX * self.spec.data.context_window:
            return False
        most = MOST_STEP_TOKENS * self.spec.tokens_per_step
        return self.caps.step_tokens is None or self.caps.step_tokens >= most


@dataclass(slots=True, kw_only=True)
class Refusal:
    """How many layouts are impossible for one reason, with one of them as an example."""

    reason: str
    name: str  # name of the first of these layouts
    message: str  # error message about the first of these layouts
    count: int = 0  # number of these layouts


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLarge:
    """A layout that needs more memory than plans may use."""

    spec: RunSpec  # the run with this layout
    missing_bytes: int  # bytes that are missing on the fullest rank
    rank: int  # the fullest pipeline rank

    @property
    def message(self) -> str:
        """Text that says which rank lacks how many bytes."""
        stages = self.spec.stages_of(self.rank)
        return (
            f"{name_of(self.spec)}: pipeline rank {self.rank} (stages "
            f"{', '.join(map(str, stages))}) needs {self.missing_bytes:,} bytes "
            f"({self.missing_bytes / GIB:.1f} GiB) more than the "
            f"{planned_bytes(self.spec) / GIB:.1f} GiB that plans may use"
        )


@dataclass(slots=True, kw_only=True)
class Layouts:
    """The layouts that are possible, and why the others are not."""

    # possible layouts, in a fixed order
    candidates: list[Candidate] = field(default_factory=list[Candidate])
    # impossible layouts by reason
    refusals: dict[str, Refusal] = field(default_factory=dict[str, Refusal])
    # layouts that are impossible because they need too much memory
    too_large: list[TooLarge] = field(default_factory=list[TooLarge])

    def refuse(self, reason: str, spec: RunSpec, message: str) -> None:
        """Count a layout that is impossible.

        Args:
            reason: The reason, by which layouts are counted.
            spec: The run with this layout.
            message: Error message about this layout.
        """
        known = self.refusals.setdefault(
            reason, Refusal(reason=reason, name=name_of(spec), message=message)
        )
        known.count += 1


def name_of(spec: RunSpec) -> str:
    """Return a layout's name: "tp 8 cp 8 pp 4 dp 1 interleaved_1f1b v 5 recompute none".

    v is the number of virtual stages of a pipeline rank. If the model has experts, the name also
    has ep.
    """
    return f"{degrees_of(spec)} {pipeline_of(spec)} recompute {spec.training.recompute}"


def degrees_of(spec: RunSpec) -> str:
    """Return the degrees of parallelism as text: "tp 8 cp 8 pp 4 dp 1"."""
    axes = (*AXES, EP) if spec.model.experts.num else AXES
    return " ".join(f"{axis} {getattr(spec.parallel, axis)}" for axis in axes)


def pipeline_of(spec: RunSpec) -> str:
    """Return the schedule and virtual stages as text: "interleaved_1f1b v 5", or "no pipeline"."""
    if spec.parallel.pp == 1:
        return "no pipeline"
    return f"{spec.pp.schedule} v {spec.pp.virtual_stages}"


def planned_bytes(spec: RunSpec) -> int:
    """Return the limit, in bytes, of the memory that a plan may use on each device."""
    return int(planned_gib(spec) * GIB)


def layouts_of(spec: RunSpec, *, gpus: int, choices: LayoutChoices) -> Layouts:
    """Return the possible layouts of a run on a number of devices.

    All of them train equally many windows in a step.

    Args:
        spec: The run.
        gpus: Number of devices.
        choices: Values among which to choose.

    Raises:
        UserError: No layout is possible. The message has the reasons, or the layout that lacks the
            least memory.
    """
    choices.check(gpus)
    if spec.fsdp.shard_size:
        raise UserError(
            f"fsdp.shard_size = {spec.fsdp.shard_size} must be 0 in a search for layouts, because "
            "its possible values depend on the layout. Set fsdp.shard_size = 0 for the search, "
            "and set it again for the layout that you choose"
        )
    _check_expert_degrees(spec, choices)
    out = Layouts()
    for degrees in _degrees(gpus, choices):
        tp, cp, pp, dp = degrees
        parallel = replace(spec.parallel, tp=tp, cp=cp, pp=pp, dp=dp)
        # Check degrees before schedules and EP, so that a refusal names the degree that is not
        # possible.
        shaped = _with_experts(replace(spec, parallel=parallel), 1, asked=spec)
        if _is_refused(shaped, out):
            continue
        divided = _expert_degrees(shaped, choices)
        if not divided:
            message = (
                f"ep must divide the number of ranks of a stage, {parallel.expert_ranks}, but only "
                f"the values {', '.join(map(str, choices.ep))} are allowed"
            )
            out.refuse("ep does not divide the number of ranks of a stage", shaped, message)
        for piped in _pipelines(shaped, choices):
            try:
                check(piped)
            except UserError as error:
                out.refuse(
                    "the schedule does not fit the numbers of layers, stages or micro-batches",
                    piped,
                    str(error),
                )
                continue
            for ep in divided:
                _add_fitting(_with_experts(piped, ep, asked=spec), choices, out)
    if not out.candidates:
        raise UserError(_nothing(gpus, out))
    return out


def _with_experts(spec: RunSpec, ep: int, *, asked: RunSpec) -> RunSpec:
    """Return a run with degree `ep` of EP, and with settings of experts that this degree allows.

    Args:
        spec: The run with the other degrees of the layout.
        ep: The degree of EP.
        asked: The user's run. Its `ep.stages` is lowered to a divisor that also divides the experts
            of a rank. Its `cost.expert_load` is lowered to `ep`, the largest possible load.
    """
    stages = 1 if ep == 1 else math.gcd(asked.ep.stages, spec.model.experts.num // ep)
    return replace(
        spec,
        parallel=replace(spec.parallel, ep=ep),
        ep=replace(spec.ep, stages=stages),
        cost=replace(spec.cost, expert_load=min(asked.cost.expert_load, float(ep))),
    )


def _degrees(gpus: int, choices: LayoutChoices) -> Iterator[tuple[int, int, int, int]]:
    """Yield the allowed degrees (tp, cp, pp, dp) whose product is the number of devices."""
    for tp in choices.tp or divisors(gpus):
        for cp in choices.cp or divisors(gpus // tp):
            for pp in choices.pp or divisors(gpus // tp // cp if gpus % (tp * cp) == 0 else 1):
                dp, rest = divmod(gpus, tp * cp * pp)
                if not rest and (not choices.dp or dp in choices.dp):
                    yield tp, cp, pp, dp


def _check_expert_degrees(spec: RunSpec, choices: LayoutChoices) -> None:
    """Raise UserError if there are no experts, or a degree of EP does not divide their number."""
    num = spec.model.experts.num
    for ep in choices.ep:
        if not num:
            raise UserError(
                f"ep = {ep} is given, but the model has no experts (model.experts.num = 0); leave "
                "out ep"
            )
        if num % ep:
            raise UserError(
                f"ep = {ep} must be a divisor of model.experts.num = {num}; choose from "
                f"{', '.join(map(str, divisors(num)))}"
            )


def _expert_degrees(spec: RunSpec, choices: LayoutChoices) -> tuple[int, ...]:
    """Return the allowed degrees of EP of a layout; (1,) without experts.

    A degree must divide the number of experts and the number of ranks of a stage.
    """
    if not spec.model.experts.num:
        return (1,)
    possible = divisors(math.gcd(spec.model.experts.num, spec.parallel.expert_ranks))
    return tuple(ep for ep in possible if not choices.ep or ep in choices.ep)


def divisors(n: int) -> tuple[int, ...]:
    """Return all divisors of n."""
    return tuple(d for d in range(1, n + 1) if n % d == 0)


def _is_refused(spec: RunSpec, out: Layouts) -> bool:
    """Return whether these degrees are impossible with any schedule, and count the reason in `out`.

    The degrees tp, cp and dp are each checked with all other degrees at 1, so that the reason names
    the degree at fault.
    """
    one = replace(spec.parallel, tp=1, cp=1, pp=1, dp=1)
    for reason, axis in (
        ("tp does not divide the model", "tp"),
        ("cp is too large for the window", "cp"),
        ("dp does not divide the micro-batches of a step", "dp"),
        ("pp does not divide the layers", "pp"),
    ):
        alone = replace(one, **{axis: getattr(spec.parallel, axis)})
        # The last check has all degrees. If it fails, the reason is pp, because the other degrees
        # passed their checks.
        if axis == "pp":
            alone = spec.parallel
        if message := _refusal_of(replace(spec, parallel=alone)):
            out.refuse(reason, spec, message)
            return True
    if spec.parallel.cp * spec.row_multiple > spec.data.context_window:
        message = (
            f"{spec.parallel.cp} CP ranks need at least {spec.row_multiple} rows each, and "
            f"data.context_window = {spec.data.context_window} has fewer rows in all"
        )
        out.refuse("cp is too large for the window", spec, message)
        return True
    return False


def _refusal_of(spec: RunSpec) -> str:
    """Return why a run is refused with every schedule; "" if it is possible with one of them."""
    message = ""
    for schedule in (Schedule.INTERLEAVED_1F1B, *Schedule):
        try:
            check(replace(spec, pp=replace(spec.pp, schedule=schedule, virtual_stages=1)))
        except UserError as error:
            # The message of interleaved_1f1b names the numbers of micro-batches that are possible.
            message = message or str(error)
        else:
            return ""
    return message


def _pipelines(spec: RunSpec, choices: LayoutChoices) -> Iterator[RunSpec]:
    """Yield `spec` with each allowed combination of schedule and number of virtual stages."""
    pp = spec.parallel.pp
    if pp == 1:
        if not choices.virtual_stages or 1 in choices.virtual_stages:
            schedule = choices.schedules[0]
            yield replace(spec, pp=replace(spec.pp, schedule=schedule, virtual_stages=1))
        return
    for schedule in choices.schedules:
        possible = divisors(spec.model.num_layers // pp)
        for v in (1,) if schedule == Schedule.ONE_F_ONE_B else possible:
            if not choices.virtual_stages or v in choices.virtual_stages:
                yield replace(spec, pp=replace(spec.pp, schedule=schedule, virtual_stages=v))


def _add_fitting(spec: RunSpec, choices: LayoutChoices, out: Layouts) -> None:
    """Add a layout to `out` once for each kind of recompute with which it fits into memory.

    The kind that recomputes least is tried first. Kinds that recompute more are refused as soon as
    one leaves enough memory for the largest S_max and T that packing can use.
    """
    has_all_room = False
    for recompute in (r for r in Recompute if r in choices.recompute):
        made = replace(spec, training=replace(spec.training, recompute=recompute))
        if has_all_room:
            out.refuse("less recompute already leaves enough memory for packing", made, "")
            continue
        need, rank = need_of(made)
        if need > planned_bytes(made):
            lacking = TooLarge(spec=made, missing_bytes=need - planned_bytes(made), rank=rank)
            out.too_large.append(lacking)
            out.refuse("not enough memory", made, lacking.message)
            continue
        candidate = Candidate(spec=made, need_bytes=need, caps=caps_of_layout(made))
        out.candidates.append(candidate)
        has_all_room = candidate.has_all_room


def caps_of_layout(spec: RunSpec) -> TokenCaps | None:
    """Return the S_max and T that fit into memory; None if only micro-batches of one window fit."""
    # Only policies with micro-batches of variable lengths have S_max and T.
    packing = replace(spec.packing, policy=Policy.BOUNDED, s_max=MOST_S_MAX)
    try:
        caps = token_caps(replace(spec, packing=packing), memory_bytes=planned_bytes(spec))
    except UserError:
        return None
    is_too_short = caps.s_max <= spec.data.context_window
    if is_too_short or (caps.step_tokens or spec.tokens_per_step + 1) <= spec.tokens_per_step:
        return None
    return caps


def need_of(spec: RunSpec) -> tuple[int, int]:
    """Return the memory of the fullest pipeline rank if all micro-batches are equally long.

    The micro-batches are one window long, or shorter if a step has more micro-batches than windows.

    Returns:
        (bytes, index of the pipeline rank).
    """
    tokens = -(-spec.tokens_per_step // spec.num_micro_batches)
    needs: list[tuple[int, int]] = []
    for rank in range(spec.parallel.pp):
        held = held_bytes(spec, pp_rank=rank, micro_batch_tokens=tokens)
        fixed = rest_bytes(spec, pp_rank=rank, longest=spec.data.context_window)
        needs.append((fixed + sum(held), -rank))
    # Ranks are negated, so that the first of several ranks with equal memory is returned.
    need, rank = max(needs)
    return need, -rank


def _nothing(gpus: int, out: Layouts) -> str:
    """Return the text of the error that no layout is possible, with the reasons.

    Args:
        gpus: Number of devices.
        out: The layouts that were refused.
    """
    if out.too_large:
        closest = min(out.too_large, key=lambda t: (t.missing_bytes, name_of(t.spec)))
        return (
            f"no layout of {gpus} devices fits into the {gpu_budget(closest.spec).explanation}. "
            f"The layout that lacks the least memory is {closest.message}; use more devices, allow "
            f"more recompute, or lower data.context_window"
        )
    if not out.refusals:
        return (
            f"no layout of {gpus} devices satisfies all restrictions on degrees of parallelism, "
            "schedules, virtual stages and recompute; allow more values"
        )
    listed = "; ".join(f"{r.reason} ({r.count}): {r.message}" for r in out.refusals.values())
    return f"no layout of {gpus} devices is possible. Reasons (numbers of layouts): {listed}"

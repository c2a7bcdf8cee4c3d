"""Durations of every pass of a step, by micro-batch, stage and context-parallel rank.

Attention is the predicted time of each CP rank's own spans (`wlb.cost.kernels_ns`); a pass takes
its slowest CP rank's, because the CP group meets in every layer. All other work of a layer is
linear in a micro-batch's rows (padding included) plus a constant, and equal on all TP ranks. The
first stage adds the embedding; the last adds head and loss, both passes of it in its forward pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from wlb.cost import Collective, ProfiledWorkload, Scope, StageLayers, kernels_ns, over_gather_ns
from wlb.cost.flops import LINEAR_BACKWARD_FACTOR
from wlb.cost.profile import DTYPE_BYTES
from wlb.cost.workload import LinearCost
from wlb.plan import FloatArray, IntArray, PipelinePlan, StepPlan
from wlb.simulate.order import PassKind
from wlb.spec import ParallelSpec, RunSpec

CALLS = "calls"
"""Term of kernel launches and of the latency of collectives."""
KEYS = "cp_comm"
"""Term of the exchange of keys, without latency where it is an all-gather."""

_LAYER_FIELDS = (
    *("attention_forward_ns", "attention_backward_ns"),
    *("exchange_forward_ns", "exchange_backward_ns"),
)
_STEP_FIELDS = ("tokens", *_LAYER_FIELDS)
"""Fields of `StepPrices` whose first axis is the step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardedStep:
    """A step's plan with the spans of all its pipelines."""

    plan: StepPlan
    pipelines: tuple[PipelinePlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TermPrices:
    """Prices by term: ns for each token of a micro-batch, and ns for each micro-batch."""

    per_token: dict[str, float] = field(default_factory=dict[str, float])
    per_call: dict[str, float] = field(default_factory=dict[str, float])

    def times(self, layers: int) -> "TermPrices":
        """Prices of `layers` layers from those of one."""
        return TermPrices(
            per_token={name: ns * layers for name, ns in self.per_token.items()},
            per_call={name: ns * layers for name, ns in self.per_call.items()},
        )

    @property
    def token_ns(self) -> float:
        return sum(self.per_token.values())

    @property
    def call_ns(self) -> float:
        return sum(self.per_call.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTimes:
    """Times of one layer as in `StepPrices`, [steps, dp, n, cp] and [steps, dp, n]."""

    attention_forward_ns: IntArray
    attention_backward_ns: IntArray
    exchange_forward_ns: IntArray
    exchange_backward_ns: IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPrices:
    """Prices of the passes of some steps.

    Attention and exchanges are those of the model's mean layer, unless `others` says more.
    """

    tokens: IntArray  # rows of all CP ranks, padding included, [steps, dp, n]
    attention_forward_ns: IntArray  # kernels of one layer on each CP rank, [steps, dp, n, cp]
    attention_backward_ns: IntArray  # the same, backward
    # How much longer one layer's exchange of keys takes than an all-gather, mostly negative, with
    # the exchanges of linear layers, [steps, dp, n].
    exchange_forward_ns: IntArray
    exchange_backward_ns: IntArray
    # All other work of one layer, with an all-gather, of each of `ModelSpec.layer_kinds`.
    linear: tuple[dict[PassKind, TermPrices], ...]
    ends: dict[tuple[PassKind, bool], TermPrices]  # embedding and head; (kind, is last stage)
    message: dict[Scope, TermPrices]
    kind_layers: tuple[tuple[int, ...], ...]  # of each of the kinds of layers, by stage
    meets: int = 1  # neighbouring pipelines whose ranks meet in every layer with experts
    expert_layers: tuple[int, ...] = ()  # layers with experts, by stage
    # What pipelines that meet compute together of a token in a layer with experts.
    pooled: dict[PassKind, float] = field(default_factory=dict[PassKind, float])
    # Of a layer that does not see all keys, where stages have unequal shares of such layers.
    others: LayerTimes | None = None
    more_others: tuple[float, ...] = ()  # by stage, as in `StageLayers`

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(steps, dp, n, cp)."""
        steps, dp, n, cp = self.attention_forward_ns.shape
        return steps, dp, n, cp

    def stage_key(self, stage: int) -> tuple[float, ...]:
        """Stages with equal keys have equal prices: layers of each kind, `more_others`, whether it
        is the first and the last.
        """
        more = self.more_others[stage] if self.more_others else 0.0
        ends = (stage == 0, stage == self.num_stages - 1)
        return *(of_kind[stage] for of_kind in self.kind_layers), more, *ends

    @property
    def num_stages(self) -> int:
        return len(self.kind_layers[0])

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers by stage."""
        return tuple(map(sum, zip(*self.kind_layers, strict=True)))

    @property
    def meeting_stages(self) -> frozenset[int]:
        """Stages in whose passes pipelines wait for each other: those with experts."""
        if self.meets == 1:
            return frozenset()
        return frozenset(stage for stage, layers in enumerate(self.expert_layers) if layers)

    def attention_ns(self, kind: PassKind, stage: int) -> IntArray:
        """[steps, dp, n, cp]; the weights' pass has none."""
        match kind:
            case PassKind.FORWARD:
                return self._of_layers("attention_forward_ns", stage)
            case PassKind.BACKWARD_WEIGHT:
                return np.zeros_like(self.attention_forward_ns)
            case _:
                return self._of_layers("attention_backward_ns", stage)

    def exchange_ns(self, kind: PassKind, stage: int) -> IntArray:
        """Time of a pass beyond that with all-gathers of keys, [steps, dp, n]."""
        match kind:
            case PassKind.FORWARD:
                return self._of_layers("exchange_forward_ns", stage)
            case PassKind.BACKWARD_WEIGHT:
                return np.zeros_like(self.exchange_forward_ns)
            case _:
                return self._of_layers("exchange_backward_ns", stage)

    def _of_layers(self, name: str, stage: int) -> IntArray:
        """Times of a stage's layers, of which some may not see all keys."""
        mean: IntArray = getattr(self, name)
        whole = mean * self.layers[stage]
        if self.others is None:
            return whole
        # Each further layer that does not see all keys replaces one that does, whose time follows
        # from the means of all layers and of those that do not.
        more = (getattr(self.others, name) - mean) * self.more_others[stage]
        return whole + np.rint(more).astype(np.int64)

    def terms(self, stage: int, kind: PassKind | None = None) -> list[TermPrices]:
        """Prices of a stage's passes without attention's kernels, of one kind (None: of all), with
        all-gathers of keys.
        """
        is_first, is_last = stage == 0, stage == self.num_stages - 1
        kinds = list(self.linear[0]) if kind is None else [kind]
        keys = [(k, False) for k in kinds if is_first] + [(k, True) for k in kinds if is_last]
        of_layers = [
            of_kind[k].times(layers[stage])
            for of_kind, layers in zip(self.linear, self.kind_layers, strict=True)
            for k in kinds
            if layers[stage]
        ]
        return of_layers + [self.ends[k] for k in keys if k in self.ends]

    def linear_ns(self, kind: PassKind, stage: int) -> FloatArray:
        """Time of a pass without attention's kernels, [steps, dp, n]."""
        out = self.exchange_ns(kind, stage).astype(np.float64)
        for terms in self.terms(stage, kind):
            out += _pass_ns(terms, self.tokens)
        return out

    def pass_ns(self, kind: PassKind, stage: int) -> IntArray:
        """Time of a pass on its slowest CP rank, [steps, dp, n]."""
        linear = self.linear_ns(kind, stage)
        alone = self.attention_ns(kind, stage).max(axis=3) + linear
        return np.rint(self._met(alone, kind, stage)).astype(np.int64)

    def _met(self, alone_ns: FloatArray, kind: PassKind, stage: int) -> FloatArray:
        """Passes of pipelines that wait for each other in every layer with experts: the longest,
        with experts that compute the mean of their tokens. The weights' pass meets nobody, nor does
        a stage without experts. A single pipeline stands for equal ones.
        """
        if stage not in self.meeting_stages or kind == PassKind.BACKWARD_WEIGHT:
            return alone_ns
        steps, dp, n = alone_ns.shape
        meets = min(self.meets, dp)
        grouped = (steps, dp // meets, meets, n)
        pooled = self.pooled[kind] * self.expert_layers[stage] * self.tokens
        own = (alone_ns - pooled).reshape(grouped).max(axis=2, keepdims=True)
        together = own + pooled.reshape(grouped).mean(axis=2, keepdims=True)
        return np.broadcast_to(together, grouped).reshape(alone_ns.shape)

    @property
    def layer_wait(self) -> float:
        """What ranks that meet in every layer compute between meetings: the sum of the slowest
        rank's over the sum of the mean's, of all micro-batches' layers; 1 = nobody waits. With
        experts in some layers only, of the mean layer.

        Attention and what is proportional to a rank's own tokens, forward and backward without the
        weights' pass. CP ranks of a pipeline meet too, in the exchange of keys.
        """
        steps, dp, n, cp = self.shape
        slowest = mean = 0.0
        layers = [sum(of_kind) for of_kind in self.kind_layers]
        for kind in self.linear[0]:
            if kind == PassKind.BACKWARD_WEIGHT:
                continue
            is_forward = kind == PassKind.FORWARD
            attention = self.attention_forward_ns if is_forward else self.attention_backward_ns
            both = zip(self.linear, layers, strict=True)
            of_all = sum(terms[kind].token_ns * count for terms, count in both)
            of_all -= self.pooled.get(kind, 0.0) * sum(self.expert_layers)
            token_ns = of_all / sum(layers)
            dense = self.tokens * token_ns
            own = (attention + dense[..., None]).reshape(steps, dp // self.meets, self.meets, n, cp)
            slowest += float(own.max(axis=(2, 4)).sum())
            mean += float(own.mean(axis=(2, 4)).sum())
        return slowest / mean if mean else 1.0

    def message_ns(self, scope: Scope) -> IntArray:
        """[steps, dp, n]."""
        return np.rint(_pass_ns(self.message[scope], self.tokens)).astype(np.int64)

    def balanced(self) -> "StepPrices":
        """Equal work with every micro-batch and CP rank at its step's mean: the bound of perfect
        balance. Schedule, collectives and constant costs stay.
        """
        return self.evened((1, 2, 3))

    def evened(self, axes: tuple[int, ...]) -> "StepPrices":
        """Every value at its mean over these of the axes [steps, dp, n, cp]."""

        def mean(x: IntArray) -> IntArray:
            # `tokens` and the exchange have no axis of CP ranks.
            own = tuple(axis for axis in axes if axis < x.ndim)
            means = np.rint(x.mean(axis=own, keepdims=True))
            return np.broadcast_to(means, x.shape).astype(np.int64)

        return self.changed(mean)

    def changed(self, change: Callable[[IntArray], IntArray]) -> "StepPrices":
        """Return these prices with `change` applied to every array whose first axis is the step."""
        arrays: dict[str, Any] = {name: change(getattr(self, name)) for name in _STEP_FIELDS}
        if self.others is not None:
            times = {name: change(getattr(self.others, name)) for name in _LAYER_FIELDS}
            arrays["others"] = LayerTimes(**times)
        return replace(self, **arrays)

    def select(self, steps: slice) -> "StepPrices":
        """Prices of some of the steps."""
        return self.changed(lambda x: x[steps])


def joined(prices: Sequence[StepPrices]) -> StepPrices:
    """Concatenates the steps of several prices of one layout."""

    def of_all(records: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
        return {name: np.concatenate([getattr(r, name) for r in records]) for name in names}

    changed = of_all(prices, _STEP_FIELDS)
    if prices[0].others is not None:
        changed["others"] = LayerTimes(**of_all([p.others for p in prices], _LAYER_FIELDS))
    return replace(prices[0], **changed)


def step_prices(steps: Sequence[ShardedStep], spec: RunSpec, cost: ProfiledWorkload) -> StepPrices:
    """Prices of all passes of `steps`, at least one."""
    dp, n, cp = spec.parallel.dp, spec.micro_batches_per_pipeline, spec.parallel.cp
    shape = (len(steps), dp, n)
    plans = [s for step in steps for pipeline in step.pipelines for s in pipeline.shardings]
    for step in steps:
        found = [len(pipeline.shardings) for pipeline in step.pipelines]
        if found != [n] * dp or step.plan.cp != cp:
            raise ValueError(
                f"step {step.plan.step} has pipelines of {found} micro-batches over cp = "
                f"{step.plan.cp}; this layout has {dp} of {n} over cp = {cp}"
            )
    rows = [p.local_tokens for step in steps for p in step.pipelines]
    tokens = np.array(rows, np.int64).reshape(shape) * cp

    def times(cost: ProfiledWorkload) -> LayerTimes:
        forward, backward = kernels_ns(plans, cost, cp=cp)
        over = [
            over_gather_ns(plan, cost, num_rows=num_rows)
            for plan, num_rows in zip(plans, tokens.ravel().tolist(), strict=True)
        ]
        return layer_times(
            cost,
            forward_ns=forward.reshape(*shape, cp),
            backward_ns=backward.reshape(*shape, cp),
            exchange_ns=np.array(over, np.int64).reshape(*shape, 2),
        )

    return prices_of(spec, cost, tokens=tokens, times=times)


def layer_times(
    cost: ProfiledWorkload,
    *,
    forward_ns: IntArray,
    backward_ns: IntArray,
    exchange_ns: IntArray | None = None,
) -> LayerTimes:
    """Times of one layer from attention of all of `cost`'s layers, [..., cp].

    exchange_ns: of both passes beside all-gathers (`over_gather_ns`), [..., 2]; None: as those.
    """
    layers = cost.num_layers_per_rank
    over = np.zeros((*forward_ns.shape[:-1], 2), np.int64)
    if exchange_ns is not None:
        over = np.rint(exchange_ns / layers).astype(np.int64)
    return LayerTimes(
        attention_forward_ns=forward_ns // layers,
        attention_backward_ns=backward_ns // layers,
        exchange_forward_ns=over[..., 0],
        exchange_backward_ns=over[..., 1],
    )


def prices_of(
    spec: RunSpec,
    cost: ProfiledWorkload,
    *,
    tokens: IntArray,
    times: Callable[[ProfiledWorkload], LayerTimes],
) -> StepPrices:
    """Prices from tokens [steps, dp, n]. times: of one layer of a workload, of `cost`, and where
    stages have unequal shares of layers that see all keys, of `cost.of_other_layers`.
    """
    own = times(cost)
    linear = [replace(cost.linear, model=kind.model) for kind in spec.model.layer_kinds]
    stages = [StageLayers.of(spec, stage) for stage in range(spec.num_stages)]
    return StepPrices(
        tokens=tokens,
        **{name: getattr(own, name) for name in _LAYER_FIELDS},
        linear=tuple(linear_terms(spec, of_kind) for of_kind in linear),
        ends=end_terms(cost),
        message=message_terms(spec, cost),
        kind_layers=spec.stage_kind_layers,
        meets=spec.parallel.meeting_pipelines,
        expert_layers=spec.stage_expert_layers,
        # Layers with experts come first.
        pooled=_pooled(linear[0]),
        others=times(cost.of_other_layers) if spec.has_uneven_attention else None,
        more_others=tuple(s.more_others for s in stages) if spec.has_uneven_attention else (),
    )


def _pooled(linear: LinearCost) -> dict[PassKind, float]:
    """What EP ranks compute together of a token in one layer; a split backward has one of the two
    products in each pass.
    """
    layers = linear.num_layers
    forward, backward, recomputed = (ns / layers for ns in linear.routed_ns_per_token)
    half = backward / LINEAR_BACKWARD_FACTOR
    return {
        PassKind.FORWARD: forward,
        PassKind.BACKWARD: backward + recomputed,
        PassKind.BACKWARD_INPUT: half + recomputed,
        PassKind.BACKWARD_WEIGHT: half,
    }


WEIGHT_GATHERS, SAVED_GATHERS = 4, 2
"""Under TP the weights' pass gathers all four [tokens, hidden] tensors of a layer again
(`wlb.parallel.deferred`), and the inputs' pass keeps the gathers of gradients: two more in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBackward:
    """Weights' gradients computed apart from inputs' gradients (zero-bubble): times of a pipeline
    rank's layers. weight_*: of the weights' pass, which has one of the two products of each
    linear layer's backward. saved_*: time by which the inputs' pass is shorter than a whole
    backward. product_ns_per_token: of those products, part of both. *_call_ns: a micro-batch.
    """

    product_ns_per_token: float
    weight_ns_per_token: float
    weight_call_ns: float
    saved_ns_per_token: float
    saved_call_ns: float


def split_backward(linear: LinearCost) -> SplitBackward:
    """Divides the linear part of backward: inputs' pass = backward - saved, and weights' pass."""
    tp, layers = linear.parallel.tp, linear.num_layers
    alpha = linear.profile.collective(Collective.ALL_GATHER, span_ranks=tp).alpha_ns * (tp > 1)
    product = linear.weight_products_ns_per_token
    exposed = 1 - linear.tp_overlap
    return SplitBackward(
        product_ns_per_token=product,
        weight_ns_per_token=product + linear.tp_wire_ns(WEIGHT_GATHERS, 0) * layers * exposed,
        weight_call_ns=WEIGHT_GATHERS * alpha * layers,
        saved_ns_per_token=product + linear.tp_wire_ns(SAVED_GATHERS, 0) * layers * exposed,
        saved_call_ns=SAVED_GATHERS * alpha * layers,
    )


def linear_terms(spec: RunSpec, linear: LinearCost) -> dict[PassKind, TermPrices]:
    """The linear part of one layer, by the kinds of passes that the schedule has."""
    layers, ns_per_token = linear.num_layers, linear.ns_per_token

    def of_pass(suffix: str, call_ns: float) -> TermPrices:
        names = [name for name in ns_per_token if name.endswith(suffix)]
        return TermPrices(
            per_token={n.removesuffix(suffix): ns_per_token[n] / layers for n in names},
            per_call={CALLS: call_ns / layers},
        )

    forward = of_pass("_forward", linear.call_ns[0])
    backward = of_pass("_backward", linear.call_ns[1])
    if not spec.splits_backward:
        return {PassKind.FORWARD: forward, PassKind.BACKWARD: backward}
    split = split_backward(linear)
    gathers = split.saved_ns_per_token - split.product_ns_per_token
    inputs = dict(backward.per_token)
    inputs["gemm"] -= split.product_ns_per_token / layers
    inputs["tp_comm"] -= gathers / layers
    weights = {
        "gemm": split.product_ns_per_token / layers,
        "tp_comm": (split.weight_ns_per_token - split.product_ns_per_token) / layers,
    }
    return {
        PassKind.FORWARD: forward,
        PassKind.BACKWARD_INPUT: TermPrices(
            per_token=inputs, per_call={CALLS: backward.call_ns - split.saved_call_ns / layers}
        ),
        PassKind.BACKWARD_WEIGHT: TermPrices(
            per_token=weights, per_call={CALLS: split.weight_call_ns / layers}
        ),
    }


def end_terms(cost: ProfiledWorkload) -> dict[tuple[PassKind, bool], TermPrices]:
    """Embedding on the first stage, head and loss on the last; by (kind, is last stage).

    TP sums the embedding's rows (a reduce-scatter; its adjoint gathers) and gathers the head's,
    whose gradients it scatters in the same pass. The loss's few numbers a token are left out.
    """
    forward, backward = cost.linear.embedding_ns_per_token
    head = {"head": cost.linear.head_ns_per_token}
    first = _end(cost, {"embedding": backward}, gathers=1, scatters=0)
    scaled = TermPrices(per_call={"head": cost.linear.head_backward_ns})
    return {
        (PassKind.FORWARD, False): _end(cost, {"embedding": forward}, gathers=0, scatters=1),
        (PassKind.BACKWARD, False): first,
        (PassKind.BACKWARD_INPUT, False): first,
        (PassKind.FORWARD, True): _end(cost, head, gathers=1, scatters=1),
        (PassKind.BACKWARD, True): scaled,
        (PassKind.BACKWARD_INPUT, True): scaled,
    }


def _end(
    cost: ProfiledWorkload, per_token: dict[str, float], *, gathers: int, scatters: int
) -> TermPrices:
    """Adds TP's collectives, which nothing hides at the ends of the model."""
    tp = cost.parallel.tp
    if tp == 1:
        return TermPrices(per_token=per_token)
    calls = ((Collective.ALL_GATHER, gathers), (Collective.REDUCE_SCATTER, scatters))
    alphas = (cost.profile.collective(op, span_ranks=tp).alpha_ns * n for op, n in calls)
    return TermPrices(
        per_token={**per_token, "tp_comm": cost.linear.tp_wire_ns(gathers, scatters)},
        per_call={CALLS: float(sum(alphas))},
    )


def message_terms(spec: RunSpec, cost: ProfiledWorkload) -> dict[Scope, TermPrices]:
    """Prices of sending activations or their gradients to a neighbour; TP ranks send their rows."""
    parallel, profile = spec.parallel, cost.profile
    size = spec.model.hidden_size * DTYPE_BYTES[profile.dtype] / (parallel.tp * parallel.cp)
    out: dict[Scope, TermPrices] = {}
    for p2p in profile.collectives:
        if p2p.op == Collective.P2P:
            out[p2p.scope] = TermPrices(
                per_token={"p2p": p2p.wire_ns(size, num_ranks=2)},
                per_call={CALLS: float(p2p.alpha_ns)},
            )
    return out


def message_scope(parallel: ParallelSpec, sender: int, receiver: int, *, node: int) -> Scope:
    """Scope of a message between two pipeline ranks; node: ranks of a node."""
    first, last = sorted((sender, receiver))
    group = parallel.tp * parallel.cp
    is_inside = first * group // node == ((last + 1) * group - 1) // node
    return Scope.INTRA_NODE if is_inside else Scope.INTER_NODE


def _pass_ns(terms: TermPrices, tokens: IntArray) -> FloatArray:
    return tokens.astype(np.float64) * terms.token_ns + terms.call_ns

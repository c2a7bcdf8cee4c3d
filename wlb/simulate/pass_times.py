"""The duration of every pass of a step, by micro-batch, stage and context-parallel rank.

The attention time of each CP rank is the predicted time of its spans (`wlb.cost.kernels_ns`). A
pass takes as long as its slowest CP rank, because CP ranks wait for each other in every layer. The
price of all other work of a layer is proportional to the rows of the micro-batch (padding
included), plus a constant. The first stage also has the embedding. The last stage also has the head
and the loss, whose gradients are computed in its forward pass.
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
"""Name of the part of a time that is kernel launches and latency of collectives."""
KEYS = "cp_comm"
"""Name of the part of a time that is the exchange of keys and values, without latency."""

_LAYER_FIELDS = (
    *("attention_forward_ns", "attention_backward_ns"),
    *("exchange_forward_ns", "exchange_backward_ns"),
)
"""Names of the fields of `LayerTimes`; `StepPrices` has fields with the same names."""
_STEP_FIELDS = ("tokens", *_LAYER_FIELDS)
"""Names of the fields of `StepPrices` that are arrays whose first axis is the step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardedStep:
    """A step's plan with the sharding of all its micro-batches."""

    plan: StepPlan  # the packed micro-batches and their assignment to pipelines
    pipelines: tuple[PipelinePlan, ...]  # for each pipeline, the spans of its micro-batches


@dataclass(frozen=True, slots=True, kw_only=True)
class TermPrices:
    """The time of a pass without attention, by kind of work ("term"): "gemm", "tp_comm", ..."""

    # ns for each token of a micro-batch, by term
    per_token: dict[str, float] = field(default_factory=dict[str, float])
    # ns for each micro-batch, however many tokens it has, by term
    per_call: dict[str, float] = field(default_factory=dict[str, float])

    def times(self, layers: int) -> "TermPrices":
        """Return the prices of `layers` layers, each of which has these prices."""
        return TermPrices(
            per_token={name: ns * layers for name, ns in self.per_token.items()},
            per_call={name: ns * layers for name, ns in self.per_call.items()},
        )

    @property
    def token_ns(self) -> float:
        """Time of a pass for each token in ns, of all kinds of work together."""
        return sum(self.per_token.values())

    @property
    def call_ns(self) -> float:
        """Time of a pass that does not depend on tokens, in ns, of all kinds of work together."""
        return sum(self.per_call.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTimes:
    """Times of one layer that depend on the documents of each micro-batch, in ns.

    The time of an all-gather of keys is not included, because only the number of tokens affects it.
    Axes: `dp` pipelines, `n` micro-batches of each, `cp` ranks.
    """

    attention_forward_ns: IntArray  # forward attention of each CP rank, [steps, dp, n, cp]
    attention_backward_ns: IntArray  # backward attention of each CP rank, [steps, dp, n, cp]
    # How much longer the exchange of keys takes in forward than an all-gather, [steps, dp, n].
    exchange_forward_ns: IntArray
    # How much longer the exchange of keys takes in backward than an all-gather, [steps, dp, n].
    exchange_backward_ns: IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPrices:
    """Everything from which the durations of the passes of some steps are computed.

    Axes: `dp` pipelines, `n` micro-batches of each, `cp` ranks. Times of attention and exchanges
    are those of one layer, averaged over all layers of the model. If the layers differ in
    attention, `others` corrects these times for each stage.
    """

    tokens: IntArray  # rows of all CP ranks together, padding included, [steps, dp, n]
    # Forward attention kernels of one layer on each CP rank, [steps, dp, n, cp].
    attention_forward_ns: IntArray
    # Backward attention kernels of one layer on each CP rank, [steps, dp, n, cp].
    attention_backward_ns: IntArray
    # In forward of one layer: how much longer the exchange of keys takes than an all-gather (mostly
    # negative), plus the time of linear attention's summaries, [steps, dp, n].
    exchange_forward_ns: IntArray
    exchange_backward_ns: IntArray  # the same sum in backward, [steps, dp, n]
    # All other work of one layer by kind of pass, for each kind in `ModelSpec.layer_kinds`. It
    # includes the time of an all-gather of keys and values, to which `exchange_*_ns` are added.
    linear: tuple[dict[PassKind, TermPrices], ...]
    # Prices of embedding and head, by (kind of pass, whether it is the last stage).
    ends: dict[tuple[PassKind, bool], TermPrices]
    # Time of a message to a neighbouring stage, inside a node and between nodes.
    message: dict[Scope, TermPrices]
    kind_layers: tuple[tuple[int, ...], ...]  # number of layers by [kind of layer][stage]
    pipelines_per_ep_group: int = 1  # number of neighbouring pipelines that share an EP group
    expert_layers: tuple[int, ...] = ()  # number of layers with experts of each stage
    # Time of the experts' products for one token in one layer with experts, in ns by kind of pass.
    # The pipelines of an EP group share this work.
    pooled: dict[PassKind, float] = field(default_factory=dict[PassKind, float])
    # Times of a layer without full attention (with a window or linear attention). None if all
    # stages have the same fraction of such layers, because then the average over all layers is
    # right for every stage.
    others: LayerTimes | None = None
    # For each stage, how many layers with the times of the model's average layer are replaced by
    # layers with the times of `others`, or if negative the reverse (`StageLayers.more_others`).
    more_others: tuple[float, ...] = ()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The sizes (steps, dp, n, cp): steps, pipelines, micro-batches of each, CP ranks."""
        steps, dp, n, cp = self.attention_forward_ns.shape
        return steps, dp, n, cp

    def stage_key(self, stage: int) -> tuple[float, ...]:
        """Return a key that is equal for stages whose passes take equal times.

        It consists of the number of layers of each kind, of the stage's `more_others`, and of
        whether the stage is the first or the last.
        """
        more = self.more_others[stage] if self.more_others else 0.0
        ends = (stage == 0, stage == self.num_stages - 1)
        return *(of_kind[stage] for of_kind in self.kind_layers), more, *ends

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.kind_layers[0])

    @property
    def layers(self) -> tuple[int, ...]:
        """Number of decoder layers of each stage."""
        return tuple(map(sum, zip(*self.kind_layers, strict=True)))

    @property
    def stages_with_experts(self) -> frozenset[int]:
        """Stages with experts, in which the pipelines of an EP group wait for each other.

        The set is empty if each pipeline has an EP group of its own.
        """
        if self.pipelines_per_ep_group == 1:
            return frozenset()
        return frozenset(stage for stage, layers in enumerate(self.expert_layers) if layers)

    def attention_ns(self, kind: PassKind, stage: int) -> IntArray:
        """Return the ns of a stage's attention kernels on each CP rank.

        The shape is [steps, dp, micro-batches of a pipeline, cp]. Weight-gradient passes have no
        attention kernels, so their times are 0.

        Args:
            kind: Kind of pass.
            stage: The stage.
        """
        match kind:
            case PassKind.FORWARD:
                return self._of_layers("attention_forward_ns", stage)
            case PassKind.BACKWARD_WEIGHT:
                return np.zeros_like(self.attention_forward_ns)
            case _:
                return self._of_layers("attention_backward_ns", stage)

    def exchange_ns(self, kind: PassKind, stage: int) -> IntArray:
        """Return how many ns longer a stage's exchanges of keys take than all-gathers would take.

        Args:
            kind: Kind of pass.
            stage: The stage.

        Returns:
            Differences, mostly negative, shape [steps, dp, micro-batches of a pipeline].
        """
        match kind:
            case PassKind.FORWARD:
                return self._of_layers("exchange_forward_ns", stage)
            case PassKind.BACKWARD_WEIGHT:
                return np.zeros_like(self.exchange_forward_ns)
            case _:
                return self._of_layers("exchange_backward_ns", stage)

    def _of_layers(self, name: str, stage: int) -> IntArray:
        """Return one of the times in `LayerTimes`, added up over the layers of a stage, in ns.

        Args:
            name: Name of a field of `LayerTimes`. The result has the same shape as the field.
            stage: The stage.
        """
        mean: IntArray = getattr(self, name)
        whole = mean * self.layers[stage]
        if self.others is None:
            return whole
        # `mean` is the time of an average layer of the model, some of which have no full attention.
        # If more of this stage's layers have none than in the average, replace `more_others`
        # average layers by layers without full attention.
        more = (getattr(self.others, name) - mean) * self.more_others[stage]
        return whole + np.rint(more).astype(np.int64)

    def terms(self, stage: int, kind: PassKind | None = None) -> list[TermPrices]:
        """Return the prices of everything in a stage but attention kernels, to be added up.

        There is an entry for each kind of layer and pass, and for the embedding and the head. The
        exchange of keys is priced as an all-gather.

        Args:
            stage: The stage.
            kind: Kind of pass; None means all kinds of passes together.
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
        """Return the ns of a stage's passes without attention kernels.

        The shape is [steps, dp, micro-batches of a pipeline].

        Args:
            kind: Kind of pass.
            stage: The stage.
        """
        out = self.exchange_ns(kind, stage).astype(np.float64)
        for terms in self.terms(stage, kind):
            out += _pass_ns(terms, self.tokens)
        return out

    def pass_ns(self, kind: PassKind, stage: int) -> IntArray:
        """Return the ns of a stage's passes, shape [steps, dp, micro-batches of a pipeline].

        A pass takes as long as its slowest CP rank.

        Args:
            kind: Kind of pass.
            stage: The stage.
        """
        linear = self.linear_ns(kind, stage)
        alone = self.attention_ns(kind, stage).max(axis=3) + linear
        return np.rint(self._with_ep_group(alone, kind, stage)).astype(np.int64)

    def _with_ep_group(self, alone_ns: FloatArray, kind: PassKind, stage: int) -> FloatArray:
        """Add the times for which pipelines that share an EP group wait for each other.

        In a stage with experts, all pipelines of an EP group take equally long. The time outside of
        experts is that of the group's slowest pipeline. The time in experts is the mean of the
        group's pipelines, because each EP rank computes tokens of all of them. Weight-gradient
        passes and stages without experts do not wait. If only one pipeline is simulated, the others
        of its EP group are assumed to be equal to it.

        Args:
            alone_ns: Times without waiting in ns, shape [steps, dp, n] with n micro-batches per
                pipeline.
            kind: Kind of pass.
            stage: The stage.
        """
        if stage not in self.stages_with_experts or kind == PassKind.BACKWARD_WEIGHT:
            return alone_ns
        steps, dp, n = alone_ns.shape
        group = min(self.pipelines_per_ep_group, dp)
        # Pipelines of an EP group are neighbours on the dp axis.
        grouped = (steps, dp // group, group, n)
        pooled = self.pooled[kind] * self.expert_layers[stage] * self.tokens
        # The slowest pipeline sets the time of work that is not shared.
        own = (alone_ns - pooled).reshape(grouped).max(axis=2, keepdims=True)
        together = own + pooled.reshape(grouped).mean(axis=2, keepdims=True)
        return np.broadcast_to(together, grouped).reshape(alone_ns.shape)

    @property
    def layer_wait(self) -> float:
        """Time of the slowest rank of an EP group over the mean of its ranks; 1: no rank waits.

        The ranks of a group belong to several pipelines and CP ranks, and wait for each other at
        each all-to-all of the experts. For each group, micro-batch and pass, the longest and the
        mean time of a rank are computed. The result is the sum of all longest times divided by the
        sum of all mean times. The time of a rank is that of one layer (averaged over all layers of
        the model). It includes attention and all work that is proportional to the rank's tokens,
        except the products of experts. Weight-gradient passes do not count.
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
            # EP ranks share the experts' products, so these make no rank slower than the others.
            of_all -= self.pooled.get(kind, 0.0) * sum(self.expert_layers)
            token_ns = of_all / sum(layers)
            dense = self.tokens * token_ns
            own = (attention + dense[..., None]).reshape(
                steps, dp // self.pipelines_per_ep_group, self.pipelines_per_ep_group, n, cp
            )
            slowest += float(own.max(axis=(2, 4)).sum())
            mean += float(own.mean(axis=(2, 4)).sum())
        return slowest / mean if mean else 1.0

    def message_ns(self, scope: Scope) -> IntArray:
        """Return the ns of sending each micro-batch's output to the next stage.

        The shape is [steps, dp, micro-batches of a pipeline].

        Args:
            scope: Whether both stages are in one node.
        """
        return np.rint(_pass_ns(self.message[scope], self.tokens)).astype(np.int64)

    def balanced(self) -> "StepPrices":
        """Return the prices of perfect balance: all micro-batches and CP ranks of a step are equal.

        Schedule, collectives and constant costs do not change.
        """
        return self.evened((1, 2, 3))

    def evened(self, axes: tuple[int, ...]) -> "StepPrices":
        """Return prices in which each value is replaced by its mean over some axes.

        Args:
            axes: Some of the axes 0 (steps), 1 (dp), 2 (micro-batches of a pipeline) and 3 (cp).
        """

        def mean(x: IntArray) -> IntArray:
            # Arrays of tokens and exchanges have no axis of CP ranks.
            own = tuple(axis for axis in axes if axis < x.ndim)
            means = np.rint(x.mean(axis=own, keepdims=True))
            return np.broadcast_to(means, x.shape).astype(np.int64)

        return self.changed(mean)

    def changed(self, change: Callable[[IntArray], IntArray]) -> "StepPrices":
        """Return a copy in which `change` was applied to every array that has an axis of steps.

        Args:
            change: For example, a function that selects some steps. The first axis of the arrays is
                the step.
        """
        arrays: dict[str, Any] = {name: change(getattr(self, name)) for name in _STEP_FIELDS}
        if self.others is not None:
            times = {name: change(getattr(self.others, name)) for name in _LAYER_FIELDS}
            arrays["others"] = LayerTimes(**times)
        return replace(self, **arrays)

    def select(self, steps: slice) -> "StepPrices":
        """Return the prices of a slice of the steps."""
        return self.changed(lambda x: x[steps])


def joined(prices: Sequence[StepPrices]) -> StepPrices:
    """Join the prices of several groups of steps into one record with all steps, in order.

    All of them must be prices of the same layout.
    """

    def of_all(records: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
        return {name: np.concatenate([getattr(r, name) for r in records]) for name in names}

    changed = of_all(prices, _STEP_FIELDS)
    if prices[0].others is not None:
        changed["others"] = LayerTimes(**of_all([p.others for p in prices], _LAYER_FIELDS))
    return replace(prices[0], **changed)


def step_prices(steps: Sequence[ShardedStep], spec: RunSpec, cost: ProfiledWorkload) -> StepPrices:
    """Return the prices of all passes of some sharded steps.

    Args:
        steps: The steps, at least one.
        spec: The run.
        cost: Prices.
    """
    dp, n, cp = spec.parallel.dp, spec.micro_batches_per_pipeline, spec.parallel.cp
    shape = (len(steps), dp, n)
    plans = [s for step in steps for pipeline in step.pipelines for s in pipeline.shardings]
    for step in steps:
        found = [len(pipeline.shardings) for pipeline in step.pipelines]
        if found != [n] * dp or step.plan.cp != cp:
            raise ValueError(
                f"the pipelines of step {step.plan.step} have {found} micro-batches with cp = "
                f"{step.plan.cp}, but the run has {dp} pipelines of {n} micro-batches each with cp "
                f"= {cp}; plan the step for this run"
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
    """Return the times of one layer from the times of all layers of a pipeline rank.

    Args:
        cost: Prices, with the number of layers of a pipeline rank.
        forward_ns: Forward attention of all layers on each CP rank, [..., cp].
        backward_ns: Backward attention of all layers on each CP rank, [..., cp].
        exchange_ns: By how much the exchanges of keys in all layers take longer than all-gathers
            would (`over_gather_ns`), in (forward, backward), [..., 2]. None means 0.
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
    """Return the prices of steps with these micro-batches.

    Args:
        spec: The run.
        cost: Prices.
        tokens: Rows of each micro-batch on all CP ranks together, padding included, shape
            [steps, dp, micro-batches of a pipeline].
        times: Returns the times of one layer under given prices. It is called with `cost`, and also
            with `cost.of_other_layers` if stages differ in their fraction of layers with full
            attention.
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
        pipelines_per_ep_group=spec.parallel.pipelines_per_ep_group,
        expert_layers=spec.stage_expert_layers,
        # If the model has experts, the first kind of layers has them.
        pooled=_pooled(linear[0]),
        others=times(cost.of_other_layers) if spec.has_uneven_attention else None,
        more_others=tuple(s.more_others for s in stages) if spec.has_uneven_attention else (),
    )


def _pooled(linear: LinearCost) -> dict[PassKind, float]:
    """Return the time of experts' products for one token in one layer, in ns by kind of pass.

    If backward is split, the input-gradient pass has one of backward's two products, and the
    weight-gradient pass has the other.
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
"""Numbers of TP's all-gathers in one layer, if backward is split into two passes.

The weight-gradient pass gathers all four [tokens, hidden] tensors of a layer
(`wlb.parallel.deferred`): WEIGHT_GATHERS. The input-gradient pass gathers only the gradients, so it
has SAVED_GATHERS fewer than a whole backward. Together they have two more than a whole backward.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBackward:
    """Times of the two passes of a split backward (zero-bubble) in a pipeline rank's layers, in ns.

    The weight-gradient pass computes the weight gradients of all linear layers. The input-gradient
    pass is shorter than a whole backward by the times in the two fields `saved_*`.
    """

    product_ns_per_token: float  # time of the matrix products of weight gradients, for one token
    weight_ns_per_token: float  # time of the whole weight-gradient pass, for one token
    weight_call_ns: float  # constant time of the weight-gradient pass of a micro-batch
    # Time of a whole backward minus the time of the input-gradient pass, for one token.
    saved_ns_per_token: float
    # Constant time of a whole backward minus that of the input-gradient pass, for one micro-batch.
    saved_call_ns: float


def split_backward(linear: LinearCost) -> SplitBackward:
    """Return the times of the input-gradient and the weight-gradient pass of a split backward."""
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
    """Return the prices of everything but attention kernels in one layer, by kind of pass.

    Args:
        spec: The run, whose schedule decides which kinds of passes there are.
        linear: Prices for one kind of layer, as if the model had only layers of this kind.
    """
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
    # The input-gradient pass is backward without the weight-gradient products, and without TP's
    # all-gathers of inputs, which only these products need.
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
    """Return the prices of the embedding (first stage) and of head and loss (last stage).

    Under TP the embedding reduce-scatters its output in forward, and all-gathers its gradient in
    backward. The head all-gathers its input, and reduce-scatters the gradient in the same pass. The
    loss also exchanges a few values per token, which are not priced.

    Returns:
        Prices by (kind of pass, whether it is the last stage).
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
    """Return the prices of embedding or head, with their TP collectives added.

    No computation hides these collectives.

    Args:
        cost: Prices.
        per_token: ns for each token without collectives, by kind of work.
        gathers: Number of all-gathers of [tokens, hidden].
        scatters: Number of reduce-scatters of [tokens, hidden].
    """
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
    """Return the price of sending activations or gradients to a neighbouring stage.

    Each TP rank sends its part of the rows.

    Returns:
        Prices of a message inside a node and between nodes.
    """
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
    """Return whether a message between two pipeline ranks stays inside a node.

    Args:
        parallel: Degrees of parallelism.
        sender: Pipeline rank of the sender.
        receiver: Pipeline rank of the receiver.
        node: Number of ranks of a node.
    """
    first, last = sorted((sender, receiver))
    group = parallel.tp * parallel.cp
    is_inside = first * group // node == ((last + 1) * group - 1) // node
    return Scope.INTRA_NODE if is_inside else Scope.INTER_NODE


def _pass_ns(terms: TermPrices, tokens: IntArray) -> FloatArray:
    return tokens.astype(np.float64) * terms.token_ns + terms.call_ns

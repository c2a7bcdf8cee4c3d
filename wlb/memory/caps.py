"""Caps of packing, in tokens, that keep every rank within a device's memory."""

from dataclasses import dataclass

from wlb.memory.budget import GIB
from wlb.memory.estimate import (
    DEALT_MARGIN,
    MemoryEstimate,
    in_flight,
    loss_bytes,
    memory_of_rank,
    most_activation_bytes,
    most_in_layer,
    stage_gradient_bytes,
    stage_output_bytes,
)
from wlb.memory.expert_sizes import sums_by_stage
from wlb.plan import UserError
from wlb.spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCaps:
    """Tokens that fit a GPU: of a micro-batch, and of a step over all pipelines (None: no
    limit).
    """

    s_max: int
    step_tokens: int | None


def token_caps(spec: RunSpec, *, memory_bytes: int) -> TokenCaps:
    """Caps of packing under which `memory_estimate` stays within `memory_bytes` on every rank.

    S_max fits with one longest micro-batch in flight; T is the step's tokens that fit beside it,
    for one pipeline, times dp, times DEALT_MARGIN at dp > 1, because the planner's `deal` evens out
    work first (up to 12% more tokens on a pipeline were measured). Where only `in_flight` of many
    micro-batches are held (1F1B) and T would be too small, S_max fits that many and there is no T.
    Raises UserError if the weights alone do not fit.
    """
    caps = [_caps_of_rank(spec, pp_rank, memory_bytes) for pp_rank in range(spec.parallel.pp)]
    step_tokens = min((tokens for _, tokens in caps if tokens is not None), default=None)
    if step_tokens is not None and spec.parallel.dp > 1:
        step_tokens = int(step_tokens * spec.parallel.dp * DEALT_MARGIN)
    return TokenCaps(s_max=min(s_max for s_max, _ in caps), step_tokens=step_tokens)


def _caps_of_rank(spec: RunSpec, pp_rank: int, memory_bytes: int) -> tuple[int, int | None]:
    """(longest micro-batch, tokens of a pipeline's step or None) of one pipeline rank."""

    def estimate(tokens: int) -> MemoryEstimate:
        return memory_of_rank(spec, pp_rank=pp_rank, micro_batch_tokens=tokens)

    window, passes = spec.data.context_window, in_flight(spec, pp_rank=pp_rank)
    # All gradients are counted beside all activations in flight, which is a little too much.
    gradients = sum(stage_gradient_bytes(spec, stage=s) for s in spec.stages_of(pp_rank))
    flowing = most_activation_bytes(spec, pp_rank=pp_rank, micro_batch_tokens=window)
    one = estimate(window)
    fixed = one.parameters_bytes + one.optimizer_bytes + one.inputs_bytes
    fixed += gradients + one.fresh_gradients_bytes
    longest_one = estimate(spec.s_max)
    # The loss's tensors grow with the micro-batch; those of the longest are counted.
    logits = loss_bytes(spec, pp_rank, spec.s_max)
    room = memory_bytes - fixed
    if room <= logits:
        raise UserError(
            f"pipeline rank {pp_rank} needs {(fixed + logits) / GIB:.1f} GiB for weights, "
            f"gradients, optimiser and logits, more than the {memory_bytes / GIB:.1f} GiB of "
            f"packing.memory_gib; use more ranks (parallel.tp, pp, dp)"
        )
    # Bytes per token, rounded up: of a micro-batch in its passes in flight (longest) and in all of
    # its passes (whole), of all passes in flight (under_way), of the running layer (at_work).
    in_layers = sums_by_stage(spec, lambda kind: most_in_layer(kind, window))
    in_stage = sorted((in_layers[s] for s in spec.stages_of(pp_rank)), reverse=True)
    resident = min(passes, len(in_stage))
    of_stage = stage_output_bytes(spec, micro_batch_tokens=window) + 1
    longest, whole = (
        (sum(in_stage[:stages]) + stages * of_stage) / window
        for stages in (resident, len(in_stage))
    )
    under_way = (flowing + passes) / window
    # Bytes per token vary a little, because kernels pad each segment. The longest micro-batch
    # counts; the difference is within the tolerance of comparisons with the budget.
    at_work = (longest_one.workspace_bytes + longest_one.kernel_bytes) / spec.s_max + 1

    def most_tokens(per_token: float) -> int:
        """Longest micro-batch that fits with so many bytes a token besides what is at work."""
        return int(min(room / (per_token + at_work), (room - logits) / per_token))

    s_max = min(spec.s_max, most_tokens(longest))
    rest = room - max(at_work * s_max, logits)
    if under_way * s_max <= rest:
        return s_max, None
    step_tokens = int(rest / whole)
    all_under_way = most_tokens(under_way)
    own_tokens = spec.tokens_per_step // max(1, spec.parallel.dp)
    # `token_caps` applies the same margin.
    margin = 1.0 if spec.parallel.dp <= 1 else DEALT_MARGIN
    if step_tokens * margin <= own_tokens and all_under_way >= window:
        # Only `passes` micro-batches are in flight at once, so the step needs no cap.
        return min(s_max, all_under_way), None
    return s_max, step_tokens

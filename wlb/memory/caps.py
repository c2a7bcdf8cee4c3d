"""Caps of packing, in tokens, that keep every rank within a device's memory.

The memory estimate grows linearly with tokens, so it is solved for the longest micro-batch (S_max)
and the longest step (T).
"""

from dataclasses import dataclass

from wlb.memory.budget import GIB
from wlb.memory.estimate import (
    UNEVEN_TOKENS,
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
    """Tokens that fit into a GPU's memory."""

    s_max: int  # most tokens of a micro-batch
    step_tokens: int | None  # most tokens of a step over all pipelines; None: no limit


def token_caps(spec: RunSpec, *, memory_bytes: int) -> TokenCaps:
    """Return the caps of packing with which `memory_estimate` stays within `memory_bytes`.

    S_max fits with one longest micro-batch in flight. T is the tokens of a step that fit beside it,
    times dp. At dp > 1 T is multiplied by UNEVEN_TOKENS, because pipelines get equal work rather
    than equal tokens; up to 12% more tokens on one pipeline were measured.

    With many micro-batches only `in_flight` of them are stored at the same time (1F1B). If T would
    then be too small for a global batch, S_max is chosen so that so many longest micro-batches fit,
    and there is no T.

    Raises:
        UserError: The weights alone do not fit.
    """
    caps = [_caps_of_rank(spec, pp_rank, memory_bytes) for pp_rank in range(spec.parallel.pp)]
    step_tokens = min((tokens for _, tokens in caps if tokens is not None), default=None)
    if step_tokens is not None and spec.parallel.dp > 1:
        step_tokens = int(step_tokens * spec.parallel.dp * UNEVEN_TOKENS)
    return TokenCaps(s_max=min(s_max for s_max, _ in caps), step_tokens=step_tokens)


def _caps_of_rank(spec: RunSpec, pp_rank: int, memory_bytes: int) -> tuple[int, int | None]:
    """Return one pipeline rank's longest micro-batch, and its pipeline's longest step or None."""

    def estimate(tokens: int) -> MemoryEstimate:
        return memory_of_rank(spec, pp_rank=pp_rank, micro_batch_tokens=tokens)

    window, passes = spec.data.context_window, in_flight(spec, pp_rank=pp_rank)
    # All gradients are counted together with all activations in flight, which is a little too much.
    gradients = sum(stage_gradient_bytes(spec, stage=s) for s in spec.stages_of(pp_rank))
    flowing = most_activation_bytes(spec, pp_rank=pp_rank, micro_batch_tokens=window)
    one = estimate(window)
    fixed = one.parameters_bytes + one.optimizer_bytes + one.inputs_bytes
    fixed += gradients + one.fresh_gradients_bytes
    longest_one = estimate(spec.s_max)
    # Tensors of the loss grow with the micro-batch, so the longest one counts.
    logits = loss_bytes(spec, pp_rank, spec.s_max)
    available = memory_bytes - fixed
    if available <= logits:
        raise UserError(
            f"pipeline rank {pp_rank} needs {(fixed + logits) / GIB:.1f} GiB for weights, "
            f"gradients, optimiser and logits, more than the {memory_bytes / GIB:.1f} GiB of "
            f"packing.memory_gib; use more ranks (parallel.tp, pp, dp)"
        )
    # Bytes per token, rounded up:
    # - longest: a micro-batch in as many stages as can be in flight
    # - whole: a micro-batch in all stages of the rank
    # - under_way: all passes in flight
    # - at_work: workspace of the running layer
    in_layers = sums_by_stage(spec, lambda kind: most_in_layer(kind, window))
    in_stage = sorted((in_layers[s] for s in spec.stages_of(pp_rank)), reverse=True)
    resident = min(passes, len(in_stage))
    of_stage = stage_output_bytes(spec, micro_batch_tokens=window) + 1
    longest, whole = (
        (sum(in_stage[:stages]) + stages * of_stage) / window
        for stages in (resident, len(in_stage))
    )
    under_way = (flowing + passes) / window
    # Kernels pad each segment, so bytes per token vary a little. The longest micro-batch is used;
    # the difference is within the tolerance of comparisons with the budget.
    at_work = (longest_one.workspace_bytes + longest_one.kernel_bytes) / spec.s_max + 1

    def most_tokens(per_token: float) -> int:
        """Return the longest micro-batch that fits if it stores so many bytes per token."""
        return int(min(available / (per_token + at_work), (available - logits) / per_token))

    s_max = min(spec.s_max, most_tokens(longest))
    rest = available - max(at_work * s_max, logits)
    if under_way * s_max <= rest:
        return s_max, None
    step_tokens = int(rest / whole)
    all_under_way = most_tokens(under_way)
    tokens_per_pipeline = spec.tokens_per_step // max(1, spec.parallel.dp)
    # `token_caps` applies the same margin.
    margin = 1.0 if spec.parallel.dp <= 1 else UNEVEN_TOKENS
    if step_tokens * margin <= tokens_per_pipeline and all_under_way >= window:
        # Only `passes` micro-batches are in flight at once, so the step needs no cap.
        return min(s_max, all_under_way), None
    return s_max, step_tokens

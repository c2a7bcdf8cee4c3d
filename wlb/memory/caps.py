"""The most tokens of a micro-batch (S_max) and of a step (T) that fit into a device's memory.

The memory estimate is a linear function of tokens. Solving it for tokens gives the numbers of
tokens at which the estimate equals the memory that plans may use.
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
    """Upper limits on packing that keep a run within a GPU's memory."""

    s_max: int  # most tokens of a micro-batch
    step_tokens: int | None  # most tokens of a step over all pipelines; None: no limit


def token_caps(spec: RunSpec, *, memory_bytes: int) -> TokenCaps:
    """Return S_max and T with which the memory estimate stays within `memory_bytes`.

    S_max is the longest micro-batch that fits if all others are short. T limits the tokens of all
    micro-batches of a step, so that their activations fit together with the workspace of the
    longest micro-batch. With several pipelines T is lowered by the factor UNEVEN_TOKENS, because
    one pipeline may get more tokens than its share.

    T counts the tokens of all micro-batches, although a pipeline stores at most `in_flight` of them
    at the same time. So if T would be smaller than a global batch, there is no T. Instead S_max is
    lowered until `in_flight` micro-batches of that length fit.

    Args:
        spec: The run.
        memory_bytes: Memory that plans may use on each rank.

    Raises:
        UserError: Weights, gradients, optimizer states and logits alone do not fit.
    """
    caps = [_caps_of_rank(spec, pp_rank, memory_bytes) for pp_rank in range(spec.parallel.pp)]
    step_tokens = min((tokens for _, tokens in caps if tokens is not None), default=None)
    if step_tokens is not None and spec.parallel.dp > 1:
        step_tokens = int(step_tokens * spec.parallel.dp * UNEVEN_TOKENS)
    return TokenCaps(s_max=min(s_max for s_max, _ in caps), step_tokens=step_tokens)


def _caps_of_rank(spec: RunSpec, pp_rank: int, memory_bytes: int) -> tuple[int, int | None]:
    """Return the most tokens of a micro-batch and of a step that fit on one pipeline rank.

    Args:
        spec: The run.
        pp_rank: The pipeline rank.
        memory_bytes: Memory that plans may use on the rank.

    Returns:
        (most tokens of a micro-batch, most tokens of a step). The second number counts only the
        tokens of one pipeline. It is None if all micro-batches in flight fit without this limit.
    """

    def estimate(tokens: int) -> MemoryEstimate:
        return memory_of_rank(spec, pp_rank=pp_rank, micro_batch_tokens=tokens)

    window, passes = spec.data.context_window, in_flight(spec, pp_rank=pp_rank)
    # All gradients are counted together with all activations in flight, although they never all
    # exist at the same time. So the limits are a little too low rather than too high.
    gradients = sum(stage_gradient_bytes(spec, stage=s) for s in spec.stages_of(pp_rank))
    flowing = most_activation_bytes(spec, pp_rank=pp_rank, micro_batch_tokens=window)
    one = estimate(window)
    fixed = one.parameters_bytes + one.optimizer_bytes + one.inputs_bytes
    fixed += gradients + one.fresh_gradients_bytes
    longest_one = estimate(spec.s_max)
    # The loss needs the most memory for the longest micro-batch, so its bytes are counted for this
    # micro-batch.
    logits = loss_bytes(spec, pp_rank, spec.s_max)
    available = memory_bytes - fixed
    if available <= logits:
        raise UserError(
            f"pipeline rank {pp_rank} needs {(fixed + logits) / GIB:.1f} GiB for weights, "
            "gradients, optimizer states and logits, but packing.memory_gib allows only "
            f"{memory_bytes / GIB:.1f} GiB; raise parallel.tp, parallel.pp or parallel.dp, or "
            "raise packing.memory_gib"
        )
    # Bytes for each token of a micro-batch, rounded up:
    # - longest: bytes that one micro-batch stores in `resident` stages of the rank, which is the
    #   largest number of stages in which it can be in flight at the same time
    # - whole: bytes that one micro-batch would store in all stages of the rank
    # - under_way: bytes that all passes in flight store if all micro-batches are equally long
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
    # Kernels pad each segment, so the workspace per token depends a little on the length of the
    # micro-batch. Here the longest micro-batch is used. The error is smaller than `budget.ROUNDING`
    # allows.
    at_work = (longest_one.workspace_bytes + longest_one.kernel_bytes) / spec.s_max + 1

    def most_tokens(per_token: float) -> int:
        """Return the longest micro-batch that fits if each of its tokens stores this many bytes."""
        return int(min(available / (per_token + at_work), (available - logits) / per_token))

    s_max = min(spec.s_max, most_tokens(longest))
    rest = available - max(at_work * s_max, logits)
    if under_way * s_max <= rest:
        return s_max, None
    step_tokens = int(rest / whole)
    all_under_way = most_tokens(under_way)
    tokens_per_pipeline = spec.tokens_per_step // max(1, spec.parallel.dp)
    # `token_caps` multiplies T by this margin, so the comparison uses it too.
    margin = 1.0 if spec.parallel.dp <= 1 else UNEVEN_TOKENS
    if step_tokens * margin <= tokens_per_pipeline and all_under_way >= window:
        # At most `passes` micro-batches are in flight at the same time, and they fit. So the step
        # needs no limit.
        return min(s_max, all_under_way), None
    return s_max, step_tokens

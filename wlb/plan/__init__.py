"""Records of the whole project: what a step trains, where, and how long it is predicted to take."""

from wlb.plan.arrays import (
    DIGEST_BITS,
    BoolArray,
    IntArray,
    IntLike,
    check_at_least,
    check_minimum,
    digest,
    int_array,
    offsets_of,
)
from wlb.plan.documents import IGNORE, Documents, GlobalBatch, Piece, Pieces, cut_at, split_long
from wlb.plan.errors import UserError
from wlb.plan.metrics import StepMetrics, imbalance, merge, predict, token_delay
from wlb.plan.packing import Carry, Layout, MicroBatch, PackingPlan, segment_lengths
from wlb.plan.ranks import (
    MeasuredTimeline,
    Place,
    RankTable,
    Straggler,
    TimedPass,
    places_from_json,
    places_to_json,
)
from wlb.plan.sharding import RankSpans, ShardingPlan, Span, local_tokens, ranges, row_multiple
from wlb.plan.step import PipelinePlan, PlannerState, StepPlan
from wlb.plan.telemetry import TERMS, Moments, Spread, Telemetry, Work

__all__ = [
    "DIGEST_BITS",
    "IGNORE",
    "TERMS",
    "BoolArray",
    "Carry",
    "Documents",
    "GlobalBatch",
    "IntArray",
    "IntLike",
    "Layout",
    "MeasuredTimeline",
    "MicroBatch",
    "Moments",
    "PackingPlan",
    "Piece",
    "Pieces",
    "PipelinePlan",
    "Place",
    "PlannerState",
    "RankSpans",
    "RankTable",
    "ShardingPlan",
    "Span",
    "Spread",
    "StepMetrics",
    "StepPlan",
    "Straggler",
    "Telemetry",
    "TimedPass",
    "UserError",
    "Work",
    "check_at_least",
    "check_minimum",
    "cut_at",
    "digest",
    "imbalance",
    "int_array",
    "local_tokens",
    "merge",
    "offsets_of",
    "places_from_json",
    "places_to_json",
    "predict",
    "ranges",
    "row_multiple",
    "segment_lengths",
    "split_long",
    "token_delay",
]
